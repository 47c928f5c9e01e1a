"""Optimizer of this rank's pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from varcomm.data_parallel.sharded.inputs import Given
from varcomm.data_parallel.sharded.shard import Piece
from varcomm.errors import ArgumentError
from varcomm.ops.digest import digest

__all__ = ["Factory", "held", "made", "options"]

Factory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

# Optimizers of torch that need full matrices and do not check for them, as Muon does.
_OF_MATRICES = ("Adafactor",)


def made(
    factory: Factory, given: Given, pieces: Mapping[str, Piece], whole: bool
) -> torch.optim.Optimizer:
    """Return the optimizer that `factory` makes of the pieces, in the groups that were given.

    Raises
    ------
    ArgumentError
        If it is not an optimizer of these groups, or cannot update pieces as one process would.
    """
    if not callable(factory):
        raise ArgumentError(
            "optimizer_factory must be callable as optimizer_factory(groups), as in lambda groups: "
            f"torch.optim.AdamW(groups, lr=1e-3); got {type(factory).__name__}."
        )
    groups = [
        {**kept, "params": [pieces[name].value for name in names if name in pieces]}
        for names, kept in given.groups
    ]
    wanted = [{id(value) for value in group["params"]} for group in groups]
    optimizer = factory(groups)
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"optimizer_factory must return a torch.optim.Optimizer; got {kind}.")
    found = [set(ids) for ids in held(optimizer)]
    if found != wanted:
        raise ArgumentError(
            "the optimizer must have the groups that optimizer_factory is called with, in their "
            f"order and each with its tensors; got groups of {list(map(len, found))} tensors in "
            f"place of {list(map(len, wanted))}. Make it of all groups, and of nothing else."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentError(f"{kind} needs products of full gradients, and a rank has pieces.")
    if not whole and kind in _OF_MATRICES:
        raise ArgumentError(f'{kind} needs full matrices. Pass sizes="whole-parameters".')
    return optimizer


def held(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """Return the identities of the tensors in each group."""
    return [[id(value) for value in group["params"]] for group in optimizer.param_groups]


def options(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return the options of each group, as words that ranks compare."""
    return {
        f"{key} of group {number}": (
            [digest(part) for part in value] if isinstance(value, list | tuple) else digest(value)
        )
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }
