"""The modules of the ocean example, which is a folder of scripts and not a package."""

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples" / "ocean"


def example(name):
    """Import a module of the example; also in the ranks, which import what they need by name."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)
