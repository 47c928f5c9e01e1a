"""States of the optimizers of all ranks by the names of parameters, to be saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from varcomm.data_parallel.sharded.given import Given
from varcomm.data_parallel.sharded.shard import Piece, Shard
from varcomm.sharding import Box, Sharded, ShardSpec, shard_spec
from varcomm.sharding.optimizer_state import (
    Part,
    load_optimizer_state,
    optimizer_state,
    optimizer_state_for,
)

__all__ = ["States"]


class States:
    """The states of the optimizer of this rank's pieces.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
    given : Given
    shards : sequence of Shard
    whole : bool
        Whether parameters have one owner.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        given: Given,
        shards: Sequence[Shard],
        whole: bool,
    ) -> None:
        self._optimizer, self._shards = optimizer, shards
        self._names = [names for names, _ in given.groups]
        self._parts: dict[torch.Tensor, Part] = {
            piece.value: _part_of(piece, whole, shard_spec(given.parameters[piece.name]))
            for shard in shards
            for piece in shard.pieces
        }

    def get(self) -> dict[str, Any]:
        """Return what there is."""
        return optimizer_state(self._optimizer, self._parts, self._names) | self._masters()

    def get_for(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return what to load `saved` into."""
        found = optimizer_state_for(self._optimizer, self._parts, self._names, saved)
        there = saved.get("masters", {})
        for word, masters in self._masters().items():
            found[word] = {name: value for name, value in masters.items() if name in there}
        return found

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what was got, or made, and loaded into."""
        load_optimizer_state(self._optimizer, self._parts, self._names, state)
        masters = state.get("masters", {})
        for shard in self._shards:
            for piece in shard.pieces:
                value = masters.get(piece.name)
                local = value.local if isinstance(value, Sharded) else value
                if local is not None and shard.has_masters:
                    piece.value.detach().copy_(local.view(piece.value.shape))

    def _masters(self) -> dict[str, dict[str, torch.Tensor]]:
        with_masters = [shard for shard in self._shards if shard.has_masters]
        own = {
            piece.name: self._parts[piece.value].wrap(piece.value.detach())
            for shard in with_masters
            for piece in shard.pieces
        }
        return {"masters": own} if with_masters else {}


def _part_of(piece: Piece, whole: bool, spec: ShardSpec | None) -> Part:
    """Return how a tensor like a piece belongs to the whole."""

    def wrap(value: torch.Tensor) -> torch.Tensor:
        if not piece.shape:
            return value
        if not whole:
            return Sharded.elements(value, piece.shape, piece.start, spec)
        if spec is not None:
            return Sharded.of(value, spec)
        return Sharded(piece.shape, [Box((0,) * value.dim(), value)], local=value)

    return Part(piece.name, wrap)
