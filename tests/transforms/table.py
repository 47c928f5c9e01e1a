"""Every operation under every transform: it works, or is refused with a reason."""

import re

import torch

import varcomm
from tests.transforms.operations import OPERATIONS
from tests.transforms.transforms import TRANSFORMS, NothingToDo
from varcomm.ops.autograd import REASON

WORKS, NOTHING = "works", ""


def verdicts(rank, ranks, column, name):
    """Tell of each transform that it works, or by which reason it is refused; collective.

    Whatever else goes wrong is raised.
    """
    torch.set_num_threads(1)
    found = {}
    for title, check in TRANSFORMS.items():
        if ranks == 1 or "one rank" not in title:
            found[title] = verdict(check, OPERATIONS[column][name](rank, ranks), title)
    return found


def verdict(check, op, title):
    try:
        check(op)
    except NothingToDo:
        return NOTHING
    except varcomm.VarcommError as error:
        return re.sub(r"(in a refusal: )?\w+ on rank \d+ of \d+: ", "", str(error))
    except Exception as error:
        if REASON in str(error):
            return REASON.removeprefix("varcomm: ")
        error.add_note(f"under {title}")
        if op.alone is None:
            raise
        return refused_in_one_process(check, op, error)
    return WORKS


def refused_in_one_process(check, op, error):
    """Return the reason if torch or PyG refuses the same of a model on no graph of ours."""
    try:
        check(op.alone())
    except Exception as alone:
        if type(alone) is type(error):
            return f"in one process it is refused as well: {type(error).__name__}"
    raise error
