"""Sums of gradients, started during backward, bucket by bucket, in one order on all ranks."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from varcomm.data_parallel.buckets import dense, gradient_dtype
from varcomm.data_parallel.owner import Owner
from varcomm.data_parallel.sharded.reduction import Reduction, Scaling, SideStream
from varcomm.data_parallel.sharded.shard import Shard
from varcomm.errors import ArgumentError
from varcomm.ops.operator import checking
from varcomm.transport.agreement import debugging
from varcomm.transport.auxiliary_group import Lane, weakly
from varcomm.transport.group import Group

__all__ = ["NAME", "Reducer", "Traffic"]

NAME = "ShardedGradients"


class Traffic:
    """Group on which messages of shards travel, and their number in flight.

    On a lane of its own, calls that start during backward have the same order on all ranks, beside
    the exchanges of the model. Without a lane nothing may start during backward.
    """

    def __init__(self, group: Group, lane: Lane | None) -> None:
        self.lane, self._group = lane, weakly(group)
        self._in_flight = 0
        if lane is not None:
            weakref.finalize(self, lane.give_back).atexit = False

    def group(self) -> Group:
        """Return the group of the lane, or the group itself."""
        return self._group() if self.lane is None else self.lane.group()

    def note(self, more: int) -> None:
        """Count calls that start (1) or end (-1): a lane in use is not given to another."""
        self._in_flight += more
        if self.lane is not None:
            self.lane.under_way = self._in_flight > 0


class Reducer:
    """Takes gradients from parameters, and adds their sums over ranks to the shards.

    Rounds over all buckets follow each other: the next bucket of a round starts as soon as each of
    its parameters has a gradient. Ranks may be in different rounds: the total is the same, because
    each gradient is in one sum.
    :meth:`finish` brings all ranks to the end of one round, so nothing depends on the end of
    backward.

    `names` and `parameters` are in the order of their indices, `shards` in that of backward.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        shards: Sequence[Shard],
        group: Group,
        traffic: Traffic,
        scaling: Scaling,
    ) -> None:
        self._names, self._parameters, self._shards = names, parameters, shards
        self._group, self._traffic, self._scaling = weakly(group), traffic, scaling
        self.syncing = True
        self._side = SideStream(shards[0].row.device)
        self._bucket_of = {i: n for n, shard in enumerate(shards) for i in shard.split.members}
        self._held: dict[int, torch.Tensor] = {}  # gradients whose sums have not started
        self._in_flight: deque[tuple[Shard, Reduction]] = deque()
        self._begin()
        # parameters keep their hooks, and must not keep this
        me, owner = weakref.ref(self), Owner(self)
        removals: list[Callable[[], object]] = [owner.leave]
        for index, parameter in enumerate(parameters):
            owner.take(parameter)
            hook = partial(_arrived, me, index)
            removals.append(parameter.register_post_accumulate_grad_hook(hook).remove)
        self._end = weakref.finalize(self, _call_all, removals)
        self._end.atexit = False

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        self._end()

    def _begin(self) -> None:
        self._started = 0  # buckets, in all rounds
        self._arrived: set[int] = set()
        self._missing = [self._learning(shard) for shard in self._shards]

    def _learning(self, shard: Shard) -> int:
        return sum(parameter.requires_grad for parameter in shard.parameters)

    def arrived(self, index: int) -> None:
        """Start the buckets that are complete with the gradient of a parameter."""
        parameter = self._parameters[index]
        if parameter.grad is None:
            return  # another hook has taken it
        if torch.is_grad_enabled():
            self._refuse(
                "backward(create_graph=True) would need derivatives of sums over ranks. Use "
                "torch.autograd.grad(..., create_graph=True) for forces and penalties, and "
                "backward() from the loss that is made of them."
            )
        dtype = gradient_dtype(parameter)
        if parameter.grad.dtype != dtype:
            self._refuse(
                f"the gradient of parameter {self._names[index]!r} is of {parameter.grad.dtype}, "
                f"and not of {dtype} as on the other ranks. Set its grad_dtype before {NAME}."
            )
        self._hold(index)
        # inside debug() nothing overlaps: ranks compare calls in the order of their programs
        if not self.syncing or self._traffic.lane is None or debugging():
            return
        if index not in self._arrived:
            self._arrived.add(index)
            self._missing[self._bucket_of[index]] -= 1
        while self._missing[self._started % len(self._shards)] == 0:
            self._start()

    def _hold(self, index: int) -> None:
        """Take a gradient, so that no other hook of the parameter sums it as well."""
        parameter = self._parameters[index]
        if parameter.grad is not None:
            gradient, before = dense(parameter.grad), self._held.get(index)
            self._held[index] = gradient if before is None else before + gradient
            parameter.grad = None

    def _refuse(self, reason: str) -> None:
        with checking(NAME, self._group()) as where:
            raise ArgumentError(where + reason)

    def _start(self) -> None:
        place = self._started % len(self._shards)
        shard, held = self._shards[place], self._held
        gradients = {i: held.pop(i) for i in shard.split.members if i in held}
        example = shard.row.new_empty(0, dtype=gradient_dtype(shard.parameters[0]))
        self._traffic.note(1)
        with self._side.after_current():
            self._side.reads(gradients.values())
            group = self._traffic.group()
            started = Reduction(shard.split, group, gradients, example, self._scaling)
        self._in_flight.append((shard, started))
        self._started += 1
        self._arrived.difference_update(shard.split.members)
        self._missing[place] = self._learning(shard)
        while self._in_flight and self._in_flight[0][1].done():  # never wait during backward
            self._add_next()

    def _add_next(self) -> None:
        shard, reduction = self._in_flight.popleft()
        with self._side.after_current():
            reduction.wait()
            self._traffic.note(-1)
            shard.add(reduction.total(), reduction.used())

    def drop_unstarted(self) -> None:
        """Forget the gradients whose sums have not started."""
        self._held.clear()
        for parameter in self._parameters:
            parameter.grad = None

    def needed_rounds(self) -> int:
        """Return the rounds that bring all gradients of this rank to the shards."""
        for index in range(len(self._parameters)):
            self._hold(index)  # one that was not computed by backward
        rounds, place = divmod(self._started, len(self._shards))
        left = {self._bucket_of[index] for index in self._held}
        return rounds + (place > 0 or bool(left)) + any(bucket < place for bucket in left)

    def finish(self, rounds: int) -> None:
        """Start and add all sums up to the end of a round; collective."""
        while self._started < rounds * len(self._shards):
            self._start()
        while self._in_flight:
            self._add_next()
        self._side.join()
        self._begin()


def _arrived(me: weakref.ref[Reducer], index: int, parameter: torch.Tensor) -> None:
    reducer = me()
    if reducer is not None:
        reducer.arrived(index)


def _call_all(removals: Sequence[Callable[[], object]]) -> None:
    for remove in removals:
        remove()
