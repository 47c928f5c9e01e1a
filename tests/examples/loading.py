"""Modules of the examples, which are folders of scripts and no packages."""

import importlib
import sys
from functools import cache
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


@cache
def example(folder, name):
    """Import a module of an example as its script would, also in ranks of the pool.

    Examples have modules of the same names, so none of these stays known under its own. Others do:
    where a layer is defined, PyTorch Geometric looks its module up.
    """
    before, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(EXAMPLES / folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path[:] = path
        for known in set(sys.modules) - before:
            file = getattr(sys.modules[known], "__file__", None)
            shared = len(list(EXAMPLES.glob(f"*/{known}.py"))) > 1
            if shared and file and Path(file).parent == EXAMPLES / folder:
                del sys.modules[known]
