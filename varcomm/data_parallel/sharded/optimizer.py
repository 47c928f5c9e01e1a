"""Optimizer of this rank's pieces; the norm of its gradients; its states by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from varcomm.data_parallel.sharded.arguments import NAME, Given
from varcomm.data_parallel.sharded.shard import Piece, Shard
from varcomm.errors import ArgumentError
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.digest import digest
from varcomm.sharding import Box, Sharded, ShardSpec, shard_spec
from varcomm.sharding.optimizer_state import OptimizerStates, Part, part_of
from varcomm.transport.group import Group

__all__ = ["Factory", "States", "checked_norm", "clip_", "held", "made", "options"]

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


def checked_norm(max_norm: float, norm_type: float) -> dict[str, object]:
    """Return the arguments of a clipping, which ranks compare, or raise ArgumentError."""
    numbers = {"max_norm": max_norm, "norm_type": norm_type}
    for name, value in numbers.items():
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not (value > 0 or (value == 0 and name == "max_norm")):
            raise ArgumentError(f"{name} must be a positive number; got {value!r}.")
    return {name: float(value) for name, value in numbers.items()}


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


class States(OptimizerStates):
    """States of this rank's pieces, and fp32 masters; `whole` if parameters have one owner."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, given: Given, shards: Sequence[Shard], whole: bool
    ) -> None:
        parts: dict[torch.Tensor, Part] = {
            piece.value: _part_of(piece, whole, shard_spec(given.trained[piece.name]))
            for shard in shards
            for piece in shard.pieces
        }
        super().__init__(optimizer, parts, [names for names, _ in given.groups])
        # parameters with masters, on any rank; and the masters here
        self._kept = {name for shard in shards if shard.has_masters for name in shard.parameters}
        self._masters = {p.name: (own, p) for own, p in parts.items() if p.name in self._kept}

    def state_dict(self) -> dict[str, Any]:
        """Return the states, and the masters."""
        return self._with_masters(super().state_dict())

    def state_dict_for(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return tensors to load states and masters into."""
        found = super().state_dict_for(saved)
        self._check_masters(saved)
        return self._with_masters(found)

    def check(self, state: Any) -> None:
        """Raise ArgumentError unless states and masters can be loaded."""
        super().check(state)
        self._check_masters(state)
        for name, value in state.get("masters", {}).items():
            if name not in self._masters:
                raise ArgumentError(
                    f"the state holds a part of the master of parameter {name!r}, of which this "
                    "rank has none. Load it by varcomm.checkpoint."
                )
            own, part = self._masters[name]
            part_of(value, own, part, f"the master of parameter {name!r}", own)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load states and masters."""
        super().load_state_dict(state)
        for name, value in state.get("masters", {}).items():
            own, part = self._masters[name]
            own.detach().copy_(part_of(value, own, part, name).view(own.shape))

    def _check_masters(self, saved: Mapping[str, Any]) -> None:
        if ("masters" in saved) != bool(self._kept):
            here, there = ("", "no ") if self._kept else ("no ", "")
            raise ArgumentError(
                f"the saved optimizer has {there}fp32 masters of fp16 or bf16 parameters, and this "
                f"one has {here}masters. Load it into a {NAME} of a model of the saved dtypes."
            )

    def _with_masters(self, found: dict[str, Any]) -> dict[str, Any]:
        masters = {name: part.wrap(own.detach()) for name, (own, part) in self._masters.items()}
        return found | ({"masters": masters} if self._kept else {})


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
