"""Every operation under every transform: works, or is refused with a reason."""

import re
import traceback

import torch

import varcomm
from tests.ops.primitives import PRIMITIVES  # noqa: F401
from tests.transforms.operations import OPERATIONS
from tests.transforms.transforms import TRANSFORMS

WORKS = "works"


def verdicts(rank, ranks, column, name):
    """Return, for each transform, that it works, why it is refused, or what is wrong; collective."""
    torch.set_num_threads(1)
    found = {}
    for title, check in TRANSFORMS.items():
        if "one rank" in title and ranks > 1:
            continue
        op = OPERATIONS[column][name](rank, ranks)
        try:
            check(op)
            found[title] = WORKS
        except varcomm.VarcommError as error:
            found[title] = re.sub(r"\w+ on rank \d+ of \d+: ", "", str(error))
        except Exception:
            found[title] = traceback.format_exc()[-1500:]
    return found
