"""The optimizer of this rank's pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from varcomm.data_parallel.sharded.given import Given
from varcomm.data_parallel.sharded.shard import Piece
from varcomm.errors import ArgumentError
from varcomm.ops.digest import digest

__all__ = ["Factory", "Held", "made", "options"]

Factory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

# Updates that depend on more of a parameter than the element itself, of those in torch that would
# not notice. Muon notices: it takes nothing but matrices.
_OF_MATRICES = tuple(
    kind for name in ("Adafactor",) if (kind := getattr(torch.optim, name, None)) is not None
)


def made(
    factory: Factory, given: Given, pieces: Mapping[str, Piece], whole: bool
) -> torch.optim.Optimizer:
    """Return the optimizer that `factory` makes of the pieces, in the groups that were given.

    Raises
    ------
    ArgumentError
        If it is no optimizer, or not one of all pieces and nothing else, or its updates are not
        those of one process.
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
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            "optimizer_factory must return a torch.optim.Optimizer; got "
            f"{type(optimizer).__name__}."
        )
    _check_parameters(optimizer, pieces)
    if len(optimizer.param_groups) != len(groups):
        raise ArgumentError(
            f"the optimizer has {len(optimizer.param_groups)} groups of parameters, and the "
            f"factory was given {len(groups)}. Pass the groups as they are; ranks have pieces of "
            "other parameters in each, or none."
        )
    for number, (group, own) in enumerate(zip(optimizer.param_groups, wanted, strict=True)):
        if {id(value) for value in group["params"]} != own:
            raise ArgumentError(
                f"group {number} of the optimizer holds other tensors than group {number} that the "
                "factory was given. Keep the groups in their order, each with its own: states and "
                "options are saved by it."
            )
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentError(f"{kind} needs products of whole gradients, and a rank has pieces.")
    if not whole and isinstance(optimizer, _OF_MATRICES):
        raise ArgumentError(f'{kind} needs whole matrices. Pass sizes="whole-parameters".')
    return optimizer


def _check_parameters(optimizer: torch.optim.Optimizer, pieces: Mapping[str, Piece]) -> None:
    own = {id(piece.value): name for name, piece in pieces.items()}
    has = [value for group in optimizer.param_groups for value in group["params"]]
    foreign = [tuple(value.shape) for value in has if id(value) not in own]
    if foreign:
        raise ArgumentError(
            f"the optimizer holds {len(foreign)} tensors that it was not given, the first of shape "
            f"{foreign[0]}. Make it of the groups that the factory is called with, and of nothing "
            "else: parameters of the model are not what it updates."
        )
    lacks = set(own) - {id(value) for value in has}
    if lacks:
        names = [name for number, name in own.items() if number in lacks]
        raise ArgumentError(
            f"the optimizer lacks {len(names)} of the tensors that it was given: pieces of "
            f"{names[:3]}. Make it of all groups that the factory is called with."
        )


class Held:
    """What an optimizer holds in each of its groups, by which it is seen if that changes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._groups = optimizer, _held(optimizer)

    def what_is_wrong(self) -> str | None:
        """Return what somebody has done to the groups, if anything."""
        if _held(self._optimizer) == self._groups:
            return None
        return (
            "the optimizer has other groups or tensors than it was made with, as by "
            "add_param_group(), and nobody would sum gradients for them. Make another, on all "
            "ranks, of all parameters."
        )


def _held(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(value) for value in group["params"]] for group in optimizer.param_groups]


def options(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return what ranks compare: the options of each group."""
    return {
        f"{key} of group {number}": (
            [digest(part) for part in value] if isinstance(value, list | tuple) else digest(value)
        )
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }
