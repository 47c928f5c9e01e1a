"""States of the optimizers of all ranks by names of parameters, to be saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from varcomm.data_parallel.sharded.inputs import Given
from varcomm.data_parallel.sharded.shard import Piece, Shard
from varcomm.errors import ArgumentError
from varcomm.sharding import Box, Sharded, ShardSpec, shard_spec
from varcomm.sharding.optimizer_state import (
    Part,
    check_optimizer_state,
    check_part,
    load_optimizer_state,
    optimizer_state,
    optimizer_state_for,
)

__all__ = ["States"]


class States:
    """States of the optimizer of this rank's pieces; `whole` if parameters have one owner."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        given: Given,
        shards: Sequence[Shard],
        whole: bool,
    ) -> None:
        self._optimizer, self._shards = optimizer, shards
        self._names = [names for names, _ in given.groups]
        self._dtypes = {name: value.dtype for name, value in given.parameters.items()}
        names = list(given.parameters)
        # parameters with masters, on any rank
        self._kept = {names[i] for s in shards if s.has_masters for i in s.split.members}
        self._parts: dict[torch.Tensor, Part] = {
            piece.value: _part_of(piece, whole, shard_spec(given.parameters[piece.name]))
            for shard in shards
            for piece in shard.pieces
        }

    def get(self) -> dict[str, Any]:
        """Return the states, and the masters."""
        found = optimizer_state(self._optimizer, self._parts, self._names)
        return found | ({"masters": self._masters()} if self._kept else {})

    def get_for(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return tensors to load `saved` into.

        Saved masters without a master here are not read: the model has them, rounded.
        """
        found = optimizer_state_for(self._optimizer, self._parts, self._names, saved)
        there, own = saved.get("masters", {}), self._masters()
        for name, value in there.items():
            if name in self._dtypes and name not in self._kept:
                own[name] = Sharded(value.shape, [], value.dtype)
        if own:
            found["masters"] = {name: value for name, value in own.items() if name in there}
        for value, part in self._otherwise(saved):
            if part.name in found["state"]:
                like = saved["state"][part.name]
                found["state"][part.name] = {
                    key: _converted(one, part, like[key].dtype) if _is_like(one, value) else one
                    for key, one in found["state"][part.name].items()
                }
        return found

    def check(self, state: Any) -> None:
        """Raise ArgumentError unless it can be loaded."""
        check_optimizer_state(self._optimizer, self._parts, self._names, state)
        own = {piece.name: piece.value for piece in self._with_masters()}
        for name, value in state.get("masters", {}).items():
            if name in own:
                what = f"the master of parameter {name!r}"
                check_part(value, own[name], self._parts[own[name]], what, own[name])
            elif name in self._kept:
                raise ArgumentError(
                    f"the state holds a part of the master of parameter {name!r}, of which this "
                    "rank has none. Load it by varcomm.checkpoint."
                )

    def load(self, state: Mapping[str, Any]) -> None:
        """Use the result of `get`, or of `get_for` after loading."""
        states = dict(state["state"])
        for value, part in self._otherwise(state):
            if part.name in states:
                states[part.name] = {
                    key: _converted(one, part, value.dtype)
                    if key != "step" and _is_like(one, value)
                    else one
                    for key, one in states[part.name].items()
                }
        known = {**state, "state": states}
        load_optimizer_state(self._optimizer, self._parts, self._names, known)
        masters = state.get("masters", {})
        for piece in self._with_masters():
            value = masters.get(piece.name)
            local = value.local if isinstance(value, Sharded) else value
            if local is not None:
                piece.value.detach().copy_(local.view(piece.value.shape))

    def _otherwise(self, saved: Mapping[str, Any]) -> list[tuple[torch.Tensor, Part]]:
        """Return the pieces saved with masters that have none now, or the other way round."""
        dtypes = {name: value.dtype for name, value in saved.get("masters", {}).items()}
        return [
            (value, part)
            for value, part in self._parts.items()
            if dtypes.get(part.name, self._dtypes[part.name]) != value.dtype
        ]

    def _with_masters(self) -> list[Piece]:
        return [piece for shard in self._shards if shard.has_masters for piece in shard.pieces]

    def _masters(self) -> dict[str, torch.Tensor]:
        return {
            piece.name: self._parts[piece.value].wrap(piece.value.detach())
            for piece in self._with_masters()
        }


def _is_like(one: object, value: torch.Tensor) -> bool:
    """Return whether a state has one number for each of a piece's."""
    if not isinstance(one, torch.Tensor) or not one.is_floating_point():
        return False
    return isinstance(one, Sharded) or one.shape == value.shape


def _converted(one: torch.Tensor, part: Part, dtype: torch.dtype) -> torch.Tensor:
    if not isinstance(one, Sharded):
        return one.to(dtype)
    assert one.local is not None
    return part.wrap(one.local.to(dtype))


def _part_of(piece: Piece, whole: bool, spec: ShardSpec | None) -> Part:

    def wrap(value: torch.Tensor) -> torch.Tensor:
        if not piece.shape:
            return value
        if not whole:
            return Sharded.elements(value, piece.shape, piece.start, spec)
        if spec is not None:
            return Sharded.of(value, spec)
        return Sharded(piece.shape, [Box((0,) * value.dim(), value)], local=value)

    return Part(piece.name, wrap)
