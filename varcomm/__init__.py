"""Variable-size collectives with exact adjoints on PyTorch, and partitioned graph networks on them.

Every collective is an exact linear operator: its backward is its adjoint, for the inner product
summed over ranks, and can itself be differentiated. Wrong use is an error. Nothing is padded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from varcomm.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import torch with the first public name, so that ``varcomm --help`` does without."""
    api = importlib.import_module("varcomm.api")  # which also makes subpackages attributes
    if name not in globals():
        globals()[name] = api.look_up(name)
    return globals()[name]


def __dir__() -> list[str]:
    api = importlib.import_module("varcomm.api")
    return sorted({*globals(), *api.__all__, *api.ROOMS})
