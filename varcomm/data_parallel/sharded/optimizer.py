"""Optimizer of this rank's pieces; the norm of its gradients; its states by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from varcomm.data_parallel.sharded.arguments import Given
from varcomm.data_parallel.sharded.shard import Piece, Shard
from varcomm.errors import ArgumentError
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.digest import digest
from varcomm.sharding import Box, Sharded, ShardSpec, shard_spec
from varcomm.sharding.optimizer_state import OptimizerStates, Part
from varcomm.transport.group import Group

__all__ = ["Factory", "clip_", "held", "made", "options", "states_of"]

Factory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

# Optimizers that cannot update pieces as one process would, and do not check for it, as Muon does.
_NOT_OF_PIECES = {
    "LBFGS": "needs products of full gradients, and a rank has pieces",
    "Adafactor": 'needs full matrices. Pass sizes="whole-parameters"',
}


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
    optimizer = factory(groups)
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer) or held(optimizer) != wanted:
        raise ArgumentError(
            "optimizer_factory must return a torch.optim.Optimizer of the groups that it is called "
            "with, in their order and each with its tensors. Make it of all groups, and of nothing "
            f"else; got {kind}."
        )
    if kind in _NOT_OF_PIECES and not (whole and kind == "Adafactor"):
        raise ArgumentError(f"{kind} {_NOT_OF_PIECES[kind]}.")
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


@torch.no_grad()
def clip_(
    pieces: Sequence[Piece],
    specs: Mapping[str, ShardSpec | None],
    max_norm: float,
    order: float,
    group: Group,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Scale gradients so that the norm of those of all ranks is at most `max_norm`; return it.

    `pieces` are those of this rank; `specs` say how each parameter of any rank is sharded besides.
    """
    # one norm for each way in which parameters are sharded besides
    over = {name: None if spec is None else spec.group for name, spec in specs.items()}
    zero = torch.zeros((), dtype=torch.float64, device=group.device())
    norms = {kind: [zero] for kind in (None, *over.values())}
    for piece in pieces:
        if piece.value.grad is not None and piece.value.grad.numel():
            norm = torch.linalg.vector_norm(piece.value.grad, order)
            norms[over[piece.name]].append(norm)
    own = [
        torch.nn.utils.get_total_norm([n.double() for n in some], order) for some in norms.values()
    ]
    totals = list(_norms(torch.stack(own), order, group))
    for place, kind in enumerate(norms):
        if kind is not None:  # each of its ranks has other rows of these
            totals[place] = _norms(totals[place].view(1), order, kind)[0]
    total: torch.Tensor = torch.nn.utils.get_total_norm(totals, order, error_if_nonfinite)
    torch.nn.utils.clip_grads_with_norm_([piece.value for piece in pieces], max_norm, total)
    return total


def _norms(own: torch.Tensor, order: float, group: Group) -> torch.Tensor:
    """Return the norms over ranks of several numbers; collective."""
    parts = all_gather_v(own, [len(own)] * group.size, group=group.process_group)
    norms: torch.Tensor = torch.linalg.vector_norm(parts.view(group.size, -1), order, dim=0)
    return norms


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
