"""Optimizer of this rank's pieces; the norm of its gradients; its states by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any
from zlib import crc32

import torch

from varcomm.data_parallel.sharded.arguments import ANOTHER, NAME, Given
from varcomm.data_parallel.sharded.shard import Piece, Shard
from varcomm.errors import ArgumentError
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.digest import digest
from varcomm.sharding import Box, Sharded, ShardSpec, shard_spec
from varcomm.sharding.optimizer_state import OptimizerStates, Part
from varcomm.sharding.optimizers import OF_A_TENSOR, OF_ALL, names_of
from varcomm.transport.group import Group

Factory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

_WHOLE = 'Pass sizes="whole-parameters", which gives each parameter one owner'


def made(
    factory: Factory, given: Given, pieces: Mapping[str, Piece], whole: bool
) -> torch.optim.Optimizer:
    """Return the optimizer that `factory` makes of the pieces, in the groups that were given.

    Raises ArgumentError if it has other groups, or cannot update pieces as one process would.
    """
    groups = [
        {**kept, "params": [pieces[name].value for name in names if name in pieces]}
        for names, kept in given.groups
    ]
    wanted = [[id(value) for value in group["params"]] for group in groups]
    try:
        optimizer = factory(groups)
    except ValueError as error:
        if whole or "2D" not in str(error):  # as Muon has it
            raise
        raise ArgumentError(
            f"optimizer_factory: {error}. It got pieces of one dimension. {_WHOLE}, and the "
            f"parameters that are not matrices to another {NAME}."
        ) from error
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer) or held(optimizer) != wanted:
        raise ArgumentError(
            "optimizer_factory must return a torch.optim.Optimizer of the groups that it is called "
            "with, in their order and each with its tensors. Make it of all groups, and of nothing "
            f"else; got {kind}."
        )
    names = names_of(optimizer)
    if names & OF_ALL:
        raise ArgumentError(f"{kind} needs products of full gradients, and a rank has pieces.")
    if names & OF_A_TENSOR:
        if not whole:
            raise ArgumentError(f"{kind} needs full tensors. {_WHOLE}.")
        if any(shard_spec(given.trained[name]) is not None for name in pieces):
            raise ArgumentError(f"{kind} needs full tensors, and a parameter is sharded.")
    return optimizer


class Options(MutableMapping[str, Any]):
    """A group of an optimizer of pieces, with the parameters in place of their pieces."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, number: int, params: list[torch.nn.Parameter]
    ) -> None:
        self._optimizer, self._number, self._params = optimizer, number, params

    @property
    def _options(self) -> dict[str, Any]:
        return self._optimizer.param_groups[self._number]

    def __getitem__(self, key: str) -> Any:
        return self._params if key == "params" else self._options[key]

    def __setitem__(self, key: str, value: Any) -> None:
        _refuse_params(key)
        self._options[key] = value

    def __delitem__(self, key: str) -> None:
        _refuse_params(key)
        del self._options[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def __repr__(self) -> str:
        return repr(dict(self))


def _refuse_params(key: str) -> None:
    if key == "params":
        raise ArgumentError(f"{NAME}: a group keeps its parameters. {ANOTHER}")


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


def numbers(optimizer: torch.optim.Optimizer) -> str:
    """Return the numbers in the options of each group, which need no look at a tensor."""
    kinds = float, int, bool
    found = [
        {key: value for key, value in group.items() if type(value) in kinds}
        for group in optimizer.param_groups
    ]
    lrs = [group.get("lr") for group in found]
    return f"{crc32(repr(found).encode()):x}, with lr {lrs[:4]}"


@torch.no_grad()
def norms(
    pieces: Sequence[Piece],
    groups: Mapping[str, Group | None],
    order: float,
    group: Group,
    like: torch.Tensor,
) -> torch.Tensor:
    """Return norms of gradients over all ranks, in float64 on the device of `like`; collective.

    `pieces` are those of this rank. `groups` has, by name, the other group over which a parameter
    is sharded, if any: there is a norm for None, and for each of these.
    """
    zero = like.new_zeros((), dtype=torch.float64)
    parts = {other: [zero] for other in (None, *groups.values())}
    for piece in pieces:
        if piece.value.grad is not None and piece.value.grad.numel():
            norm = torch.linalg.vector_norm(piece.value.grad, order)
            parts[groups[piece.name]].append(norm.to(zero))
    own = torch.stack([torch.nn.utils.get_total_norm(some, order) for some in parts.values()])
    totals = _over_ranks(own, order, group).split(1)
    # each rank of another group has other rows of these parameters
    pairs = zip(parts, totals, strict=True)
    return torch.cat([t if other is None else _over_ranks(t, order, other) for other, t in pairs])


def _over_ranks(own: torch.Tensor, order: float, group: Group) -> torch.Tensor:
    """Return the norms over ranks of several numbers; collective."""
    parts = all_gather_v(own, [len(own)] * group.size, group=group.process_group)
    total: torch.Tensor = torch.linalg.vector_norm(parts.view(group.size, -1), order, dim=0)
    return total


def states_of(
    optimizer: torch.optim.Optimizer, given: Given, shards: Sequence[Shard], whole: bool
) -> OptimizerStates:
    """Return states of this rank's pieces, and masters; `whole` if parameters have one owner."""
    parts: dict[torch.Tensor, Part] = {
        piece.value: _part_of(piece, whole, shard_spec(given.trained[piece.name]))
        for shard in shards
        for piece in shard.pieces
    }
    masters = {name for shard in shards if shard.has_masters for name in shard.parameters}
    return OptimizerStates(optimizer, parts, [names for names, _ in given.groups], masters)


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
