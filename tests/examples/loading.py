"""Modules of the examples, which are folders of scripts and no packages."""

import importlib
import sys
from functools import cache
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


@cache
def example(folder, name):
    """Import a module of an example as its script would, also in ranks of the pool.

    Examples have modules of the same names, so none stays known under its own.
    """
    before, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(EXAMPLES / folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path[:] = path
        for known in set(sys.modules) - before:
            file = getattr(sys.modules[known], "__file__", None)
            if file and Path(file).parent == EXAMPLES / folder:
                del sys.modules[known]
