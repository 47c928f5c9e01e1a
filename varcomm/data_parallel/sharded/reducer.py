"""Sums of gradients, started during backward, bucket by bucket, in one order on all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from varcomm.data_parallel.buckets import Owner, as_ordinary, gradient_dtype, started, with_flags
from varcomm.data_parallel.sharded.arguments import NAME
from varcomm.data_parallel.sharded.gradient import SummedGradient, Unscale
from varcomm.data_parallel.sharded.shard import Shard
from varcomm.errors import ArgumentError
from varcomm.ops import levels, packing
from varcomm.ops.checks import checking
from varcomm.ops.reduction import accumulated, accumulation_dtype
from varcomm.transport.agreement import debugging
from varcomm.transport.auxiliary_group import Lane
from varcomm.transport.engine import Pending, is_capturing
from varcomm.transport.group import MANY, Group, weakly


class Reducer:
    """Takes gradients from parameters, and adds their sums over ranks to the shards.

    Rounds over all buckets, in the order of backward, follow each other: a bucket starts as soon as
    each of its parameters has a gradient. Ranks may be in different rounds, because each gradient
    is in one sum; :meth:`finish` brings all ranks to the end of one round. Without a lane, on which
    calls have one order on all ranks beside the exchanges of the model, nothing starts in backward.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        group: Group,
        lane: Lane | None,
        find_unscale: Callable[[], Unscale | None],
    ) -> None:
        self._shards, self._group, self._lane = shards, weakly(group), lane
        self.syncing, self.stepping = True, False
        self._parameters = {n: p for shard in shards for n, p in shard.parameters.items()}
        self._held: dict[str, torch.Tensor] = {}  # gradients whose sums have not started
        self._in_flight: deque[tuple[Shard, list[bool], Pending]] = deque()
        self._started, self._arrived = 0, set[str]()  # buckets in all rounds; gradients in one
        self.added = set[str]()  # gradients of this rank since the last zero_grad
        self._replaced = set[str]()  # of these, those whose grad was replaced before a backward
        self._nodes: list[torch.autograd.graph.Node] = []  # which parameters do not keep
        owner = Owner(self._parameters.values())
        self._removals: list[Callable[[], None]] = [owner.close]
        self._summed = {
            name: SummedGradient.of(name, p, find_unscale, gradient_dtype(p), p.device)
            for name, p in self._parameters.items()
        }
        for name, parameter in self._parameters.items():
            after = parameter.register_post_accumulate_grad_hook(partial(self._arrive, name))
            # only before backward adds to grad, while torch.autograd.grad leaves it alone
            # as an ordinary tensor, because a subclass would add a node
            node = as_ordinary(torch.autograd.graph.get_gradient_edge, parameter).node
            before = node.register_prehook(partial(self._make_way, name))
            self._removals += [after.remove, before.remove, partial(self._make_way, name)]
            self._nodes.append(node)
            if parameter.grad is None:
                parameter.grad = self._summed[name]

    def close(self) -> None:
        """Leave the parameters alone, and the lane to others; not one with calls in flight."""
        for remove in self._removals:
            remove()
        if self._lane is not None:
            self._lane.under_way = bool(self._in_flight)
            self._lane.give_back()

    def refuse_alone(self, *_: object) -> None:
        """Raise if the inner optimizer steps by itself."""
        if not self.stepping:
            raise ArgumentError(
                f"{NAME}: the inner optimizer updates pieces, and would not gather them. Call "
                f"step() of the {NAME}."
            )

    def traffic(self) -> Group:
        """Return the group on which messages travel."""
        return self._group() if self._lane is None else self._lane.group()

    def refuse_replaced(self) -> None:
        """Raise if the ``grad`` of a parameter was replaced, and its gradient not dropped."""
        if replaced := self._replaced.union(filter(self._is_replaced, self.added)):
            raise ArgumentError(
                f"the grad of parameter {min(replaced)!r} was set to None, as by "
                "model.zero_grad(), or to another tensor, which leaves its sums over ranks. Call "
                f"zero_grad() of the {NAME} before."
            )

    def _is_replaced(self, name: str) -> bool:
        return _gradient(self._parameters[name]) is not self._summed[name]

    def refuse_absent(self) -> None:
        """Raise unless each parameter has the ``grad`` that stands for its sum."""
        for name in filter(self._is_replaced, self._parameters):
            raise ArgumentError(
                f"the grad of parameter {name!r} was replaced, as by model.zero_grad(). Call "
                f"zero_grad() of the {NAME} before backward."
            )

    def _make_way(self, name: str, _: object = None) -> None:
        """Let backward, or another user, set ``grad``."""
        if not self._is_replaced(name):
            self._parameters[name].grad = None
        elif name in self.added:
            self._replaced.add(name)

    def _arrive(self, name: str, parameter: torch.Tensor) -> None:
        """Start the buckets that are complete with the gradient of a parameter."""
        if parameter.grad is None:
            parameter.grad = self._summed[name]
            return  # another hook has taken it
        dtype, wrong = gradient_dtype(parameter), ""
        if torch.is_grad_enabled():
            wrong = (
                "backward(create_graph=True) would need derivatives of sums over ranks. Use "
                "torch.autograd.grad(..., create_graph=True) for forces and penalties, and "
                "backward() from the loss that is made of them."
            )
        elif parameter.grad.dtype != dtype:
            wrong = (
                f"the gradient of parameter {name!r} is of {parameter.grad.dtype}, and not of "
                f"{dtype} as on the other ranks. Set its grad_dtype before {NAME}."
            )
        if wrong:
            with checking(NAME, self._group()) as where:
                raise ArgumentError(where + wrong)
        self._hold(name)
        # inside debug() nothing overlaps: ranks compare calls in the order of their programs
        if not self.syncing or self._lane is None or debugging():
            return
        self._arrived.add(name)
        for _ in self._shards:
            last = reversed(self._next.parameters.items())  # which are missing longest
            if not all(name in self._arrived or not p.requires_grad for name, p in last):
                break
            self._start()

    @property
    def _next(self) -> Shard:
        return self._shards[self._started % len(self._shards)]

    def _hold(self, name: str) -> None:
        """Keep a gradient here, so that no other hook of the parameter sums it as well."""
        parameter, summed = self._parameters[name], self._summed[name]
        gradient = _gradient(parameter)
        if gradient is not None and gradient is not summed:
            gradient, before = gradient.to_dense(), self._held.get(name)
            self._held[name] = gradient if before is None else before + gradient
            self.added.add(name)
        parameter.grad = summed

    def _start(self) -> None:
        """Begin the sum of the next bucket, and add those that have arrived."""
        shard, held, group = self._next, self._held, self.traffic()
        gradients = {name: held.pop(name) for name in shard.parameters if name in held}
        here = [name in gradients for name, _ in shard.segments]
        ranks = list(range(group.size))
        if group.size < MANY:  # this rank's part is not sent, and stands behind the others
            ranks.append(ranks.pop(group.rank))
        flat, rows = _packed(shard, gradients, ranks)
        message = started("reduce_scatter_v", group, _begun, flat, rows)
        self._in_flight.append((shard, here, message))
        self._started += 1
        self._arrived.difference_update(shard.parameters)
        # without waiting
        while self._in_flight and _may_ask(group, flat) and self._in_flight[0][2].is_done():
            self._add_next()

    def _add_next(self) -> None:
        """Add the sum over ranks of a bucket."""
        shard, here, message = self._in_flight[0]
        shard.add(message.wait(), here)
        self._in_flight.popleft()

    def drop_unstarted(self) -> None:
        """Forget the gradients whose sums have not started."""
        self._held.clear()
        self.added.clear()
        self._replaced.clear()
        for name, parameter in self._parameters.items():
            parameter.grad = self._summed[name]

    def needed_rounds(self) -> int:
        """Return the rounds that bring all gradients of this rank to the shards."""
        for name in self._parameters:
            self._hold(name)  # one that was not computed by backward
        rounds, place = divmod(self._started, len(self._shards))
        left = [
            n for n, s in enumerate(self._shards) if not self._held.keys().isdisjoint(s.parameters)
        ]
        return rounds + (place > 0 or bool(left)) + any(bucket < place for bucket in left)

    def finish(self, rounds: int) -> None:
        """Start and add all sums up to the end of a round; collective."""
        while self._started < rounds * len(self._shards):
            self._start()
        while self._in_flight:
            self._add_next()
        self._started = 0
        self._arrived.clear()


def _may_ask(group: Group, flat: torch.Tensor) -> bool:
    """Return whether a message may be asked if it is done."""
    # on a GPU, further rounds begin in one order on all ranks, and a capture refuses the question
    return not flat.is_cuda or (group.size < MANY and not is_capturing())


def _begun(name: str, group: Group, flat: torch.Tensor, rows: Sequence[int]) -> Pending:
    """Begin the sum of pieces over ranks, which is not rounded."""
    if group.size >= MANY:
        rounds = levels.reduce_scatter(name, group, flat, rows, range(group.size), use_fp32=True)
        return levels.InRounds(rounds, (-1,), accumulation_dtype(flat.dtype, use_fp32=True))
    rank, mine = group.rank, rows[group.rank]
    others, own = flat.split([len(flat) - mine, mine])  # this rank's own part is the last
    send = [0 if r == rank else n for r, n in enumerate(rows)]
    recv = [0 if r == rank else mine for r in range(group.size)]
    works, values = packing.exchange(name, group, others, send, recv)

    def total() -> torch.Tensor:
        parts = list(values.view(group.size - 1, mine))
        parts.insert(rank, own)
        return accumulated(parts, use_fp32=True)

    return Pending(works, total)


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the ``grad`` itself, which a parameter of a subclass returns as its own class."""
    return as_ordinary(lambda: parameter.grad)


def _packed(
    shard: Shard, gradients: Mapping[str, torch.Tensor], order: Sequence[int]
) -> tuple[torch.Tensor, list[int]]:
    """Return the part of each rank, in `order`, and the lengths of parts, by rank.

    A part is a piece, and a flag per parameter in it: 0 if this rank has not used it.
    """
    split = shard.split
    dtype = gradient_dtype(next(iter(shard.parameters.values())))
    flat = {name: gradient.reshape(-1) for name, gradient in gradients.items()}
    parts = [shard.row.new_empty(0, dtype=dtype)]
    for segments in (split.segments[rank] for rank in order):
        own = [flat[name][s.start : s.stop] if name in flat else None for name, s in segments]
        parts += with_flags(own, [len(s) for _, s in segments], parts[0])
    rows = [n + len(found) for n, found in zip(split.sizes, split.segments, strict=True)]
    return torch.cat(parts), rows
