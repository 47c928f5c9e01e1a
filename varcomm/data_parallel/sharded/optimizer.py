"""Optimizer of this rank's pieces; the norm of its gradients; its states by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from varcomm.data_parallel.sharded.arguments import NAME, Given, checked_number
from varcomm.data_parallel.sharded.shard import Piece, Shard
from varcomm.errors import ArgumentError
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.digest import digest
from varcomm.ops.operator import checking
from varcomm.ops.reduction import accumulation_dtype
from varcomm.sharding import Box, Sharded, ShardSpec, shard_spec
from varcomm.sharding.optimizer_state import (
    Part,
    check_optimizer_state,
    check_part,
    load_optimizer_state,
    optimizer_state,
    optimizer_state_for,
)
from varcomm.transport.agreement import compare, debugging
from varcomm.transport.group import Group

__all__ = ["Factory", "States", "clip_", "held", "made", "options"]

Factory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

# Optimizers of torch that need full matrices and do not check for them, as Muon does.
_OF_MATRICES = ("Adafactor",)


def made(
    factory: Factory, given: Given, pieces: Mapping[str, Piece], whole: bool
) -> torch.optim.Optimizer:
    """Return the optimizer that `factory` makes of the pieces, in the groups that were given.

    Raises ArgumentError if it has other groups, or cannot update pieces as one process would.
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


@torch.no_grad()
def clip_(
    pieces: Sequence[Piece],
    specs: Mapping[str, ShardSpec | None],
    max_norm: float,
    norm_type: float,
    group: Group,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Scale gradients so that the norm of those of all ranks is at most `max_norm`; return it.

    `pieces` are those of this rank; `specs` say how each parameter of any rank is sharded besides.
    """
    what = f"{NAME}.clip_grad_norm_"
    with checking(what, group, error_if_nonfinite=error_if_nonfinite) as where:
        not_negative, positive = "a number that is not negative", "a number that is positive"
        most = checked_number(max_norm, "max_norm", not_negative, lambda x: x >= 0, where)
        order = checked_number(norm_type, "norm_type", positive, lambda x: x > 0, where)
    if debugging():
        told = {"max_norm": most, "norm_type": order, "error_if_nonfinite": error_if_nonfinite}
        compare(group, {"operation": what, **told})
    # one norm for each way in which parameters are sharded besides
    over = {name: None if spec is None else spec.group for name, spec in specs.items()}
    kinds = list(dict.fromkeys([None, *over.values()]))
    device = group.device()
    norms = [[torch.zeros((), dtype=torch.float64, device=device)] for _ in kinds]
    for piece in pieces:
        gradient = piece.value.grad
        if gradient is not None and gradient.numel():
            dtype = accumulation_dtype(gradient.dtype, use_fp32=True)
            norm = torch.linalg.vector_norm(gradient, order, dtype=dtype)
            norms[kinds.index(over[piece.name])].append(norm.to(device, torch.float64))
    own = torch.stack([torch.linalg.vector_norm(torch.stack(some), order) for some in norms])
    parts = all_gather_v(own, [len(kinds)] * group.size, group=group.process_group)
    totals = list(torch.linalg.vector_norm(parts.view(group.size, -1), order, dim=0))
    for place, kind in enumerate(kinds):
        if kind is not None:  # each of its ranks has other rows of these
            parts = all_gather_v(totals[place].view(1), [1] * kind.size, group=kind.process_group)
            totals[place] = torch.linalg.vector_norm(parts, order)
    total: torch.Tensor = torch.nn.utils.get_total_norm(totals, order, error_if_nonfinite)
    torch.nn.utils.clip_grads_with_norm_([piece.value for piece in pieces], most, total)
    return total


class States:
    """States of the optimizer of this rank's pieces; `whole` if parameters have one owner."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, given: Given, shards: Sequence[Shard], whole: bool
    ) -> None:
        trained = given.of("trained")
        pieces = [piece for shard in shards for piece in shard.pieces]
        self._parts: dict[torch.Tensor, Part] = {
            piece.value: _part_of(piece, whole, shard_spec(trained[piece.name])) for piece in pieces
        }
        self._optimizer = optimizer, self._parts, [names for names, _ in given.groups]
        self._dtypes = {name: value.dtype for name, value in trained.items()}
        # parameters with masters, on any rank; and the masters here
        self._kept = {name for shard in shards if shard.has_masters for name in shard.parameters}
        kept = (piece for piece in pieces if piece.name in self._kept)
        self._masters = {piece.name: (piece.value, self._parts[piece.value]) for piece in kept}

    def get(self) -> dict[str, Any]:
        """Return the states, and the masters."""
        found = optimizer_state(*self._optimizer)
        return found | ({"masters": self._wrapped_masters()} if self._kept else {})

    def get_for(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return tensors to load `saved` into.

        Saved masters without a master here are not read: the model has them, rounded.
        """
        found = optimizer_state_for(*self._optimizer, saved)
        there, own = saved.get("masters", {}), self._wrapped_masters()
        for name, value in there.items():
            if name in self._dtypes and name not in self._kept:
                own[name] = Sharded(value.shape, [], value.dtype)
        if own:
            found["masters"] = {name: value for name, value in own.items() if name in there}
        states, like = found["state"], saved.get("state", {})
        return found | {"state": self._converted(saved, states, lambda n, k, _: like[n][k].dtype)}

    def check(self, state: Any) -> None:
        """Raise ArgumentError unless it can be loaded."""
        check_optimizer_state(*self._optimizer, state)
        for name, value in state.get("masters", {}).items():
            if name in self._masters:
                own, part = self._masters[name]
                check_part(value, own, part, f"the master of parameter {name!r}", own)
            elif name in self._kept:
                raise ArgumentError(
                    f"the state holds a part of the master of parameter {name!r}, of which this "
                    "rank has none. Load it by varcomm.checkpoint."
                )

    def load(self, state: Mapping[str, Any]) -> None:
        """Use the result of `get`, or of `get_for` after loading."""

        def dtype(_: str, key: str, value: torch.Tensor) -> torch.dtype | None:
            return None if key == "step" else value.dtype

        states = self._converted(state, state["state"], dtype)
        load_optimizer_state(*self._optimizer, {**state, "state": states})
        saved = state.get("masters", {})
        for name, (own, _) in self._masters.items():
            value = saved.get(name)
            local = value.local if isinstance(value, Sharded) else value
            if local is not None:
                own.detach().copy_(local.view(own.shape))

    def _converted(
        self,
        saved: Mapping[str, Any],
        states: Mapping[str, Any],
        to: Callable[[str, str, torch.Tensor], torch.dtype | None],
    ) -> dict[str, Any]:
        """Return states of pieces saved with masters that have none now, or the other way round.

        Those with a number for each of a piece's are converted, unless `to` returns no dtype.
        """
        found = dict(states)
        masters = {name: value.dtype for name, value in saved.get("masters", {}).items()}
        for value, part in self._parts.items():
            name = part.name
            if name not in states or masters.get(name, self._dtypes[name]) == value.dtype:
                continue
            own = found[name] = dict(states[name])
            for key, one in own.items():
                if not isinstance(one, torch.Tensor) or not one.is_floating_point():
                    continue
                dtype = to(name, key, value)
                if dtype is not None and isinstance(one, Sharded):
                    own[key] = part.wrap(one.local.to(dtype))  # type: ignore[union-attr]
                elif dtype is not None and one.shape == value.shape:
                    own[key] = one.to(dtype)
        return found

    def _wrapped_masters(self) -> dict[str, torch.Tensor]:
        return {name: part.wrap(own.detach()) for name, (own, part) in self._masters.items()}


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
