"""Which suites there are."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from varcomm.cli.bench.suites import debug, graph, ops, plan, tensor_parallel
from varcomm.errors import ArgumentError

__all__ = ["SUITES", "checked_operations"]

# A module has OPERATIONS, their names; and build(case, effort, device), which prepares a case on a
# rank.
SUITES: dict[str, ModuleType] = {
    "ops": ops,
    "plan": plan,
    "graph": graph,
    "tensor-parallel": tensor_parallel,
    "debug": debug,
}


def checked_operations(
    suites: Sequence[str], chosen: Sequence[str] | None
) -> list[tuple[str, str]]:
    """Return suites and operations to measure: all, or those chosen.

    Raises
    ------
    ArgumentError
        If a name is in none of the suites.
    """
    there = [(suite, name) for suite in suites for name in SUITES[suite].OPERATIONS]
    names = [name for _, name in there]
    for name in chosen or ():
        if name not in names:
            raise ArgumentError(
                f"{name!r} is no operation of {' and '.join(suites)}: write {', '.join(names)}"
            )
    return [pair for pair in there if chosen is None or pair[1] in chosen]
