"""Gradients as backward brings them: hooks that take them, and start the sums of full buckets."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NoReturn

import torch
from torch.autograd.graph import Node

from varcomm.data_parallel.buckets import dense, gradient_dtype
from varcomm.data_parallel.ending import LOCK, End, Ending, is_reached
from varcomm.data_parallel.global_count import GlobalCount, User, missing
from varcomm.data_parallel.leaf import accumulator, accumulators, notes
from varcomm.data_parallel.sharded.reduction import Reduction, Scaling
from varcomm.data_parallel.sharded.shard import Shard
from varcomm.data_parallel.sharded.side_stream import SideStream
from varcomm.data_parallel.sharded.traffic import Traffic
from varcomm.data_parallel.taken import MARK
from varcomm.data_parallel.unsummed import Unsummed
from varcomm.data_parallel.values import check_backward, check_dtype, check_entry
from varcomm.errors import ArgumentError, DisagreementError
from varcomm.ops.operator import checking
from varcomm.transport.agreement import compare, debugging, fail
from varcomm.transport.group import Group

__all__ = ["NAME", "Arrivals", "moved"]

NAME = "ShardedGradients"

# The same order on all ranks, as all make each together.
_numbers = itertools.count()


class Arrivals:
    """Takes the gradients of parameters, and adds their sums over ranks to the shards.

    A hook before the node that adds to a parameter's ``grad`` takes the increment away, so ``grad``
    holds only what ``no_sync`` has left there.

    Parameters
    ----------
    names, parameters : sequence
        Of all that are trained, in the order of their indices.
    shards : sequence of Shard
        In the order in which backward fills them.
    traffic : Traffic
    scaling : Scaling
    count : GlobalCount, optional
        What sums are divided by.
    token : int
        By which all ranks know it.
    has_module : bool
        Whether there is a module whose output is tied to the sums.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        shards: Sequence[Shard],
        traffic: Traffic,
        scaling: Scaling,
        count: GlobalCount | None,
        token: int,
        has_module: bool,
    ) -> None:
        self.names, self.parameters, self.shards = names, parameters, shards
        self.group, self.traffic = traffic.group, traffic
        self.scaling, self.count = scaling, count
        self.number, self.token, self._has_module = next(_numbers), token, has_module
        # which are in grad, each whole
        self.unsummed = Unsummed(parameters, partial(_refuse_gradient, weakref.ref(self)))
        if count is not None:
            count.users.add(self)
        self.summing = True
        self.anchor = torch.empty(0, requires_grad=True)
        self.side = SideStream(shards[0].row.device)
        self._running: weakref.ref[_Backward] | None = None
        self._failed = False
        self._removals: list[Callable[[], object]] = []
        # autograd itself keeps neither the nodes nor, with them, their hooks
        self._nodes = [self._watch(self.anchor, None)]
        self._nodes += [self._watch(value, index) for index, value in enumerate(parameters)]
        self._end = weakref.finalize(self, _call_all, self._removals)
        self._end.atexit = False

    def _watch(self, leaf: torch.Tensor, index: int | None) -> Node:
        # weakly: a node is nothing that the garbage collector could see through
        me = weakref.ref(self)
        node = accumulator(leaf)
        notes(node)[MARK] = me
        hook = node.register_prehook(partial(_arrived, me, index))
        self._removals += [hook.remove, partial(notes(node).pop, MARK)]
        return node

    def on_close(self, remove: Callable[[], object]) -> None:
        """Call `remove` when this is closed, or gone."""
        self._removals.append(remove)

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        if self.count is not None:
            self.count.users.discard(self)
        self._end()

    def has_unsummed(self) -> bool:
        """Return whether backwards in no_sync have left gradients."""
        return self.unsummed.any()

    @property
    def label(self) -> str:
        """What it is called among ranks."""
        first = ", ".join(self.names[:2])
        return f"{NAME} {self.token}, of {len(self.names)} parameters: {first}"

    def converted(self) -> int | None:
        """Return the index of a parameter to which torch has given another node, if there is one.

        Nobody watches that.
        """
        if not any(parameter.requires_grad for parameter in self.parameters):
            return None
        with torch.enable_grad():
            now = accumulators(self.parameters)
        # the first one is the anchor's
        for index, (node, own) in enumerate(zip(now, self._nodes[1:], strict=True)):
            if node is not None and node is not own:
                return index
        return None

    def arrived(self, index: int | None, gradient: torch.Tensor | None) -> tuple[None] | None:
        """Take what backward brings to a parameter, or its coming by the anchor."""
        if index is not None and not self.parameters[index].requires_grad:
            return None  # frozen since forward; torch leaves its gradient alone
        with LOCK:
            task = torch._C._current_graph_task_id()
            backward = self._running() if self._running is not None else None
            if backward is None or self._failed:
                self.check_sound()
                self._check_backward()
                self._check_entry(index)
                backward = _Backward(self, task)
                self._running = weakref.ref(backward)
            if index is not None and gradient is not None:
                try:
                    self._check_gradient(index, gradient)
                    if not backward.sums:
                        backward.left.add(index)
                        return None
                    backward.add(index, gradient, nested=task != backward.task)
                except BaseException:
                    self._failed = True
                    raise
        return (None,)

    def ended(self, failed: bool) -> None:
        """Be ready for the next backward, or refuse it."""
        self._running, self._failed = None, failed

    def refuse(self, reason: str) -> NoReturn:
        """Raise ArgumentError; inside :func:`varcomm.debug` on all ranks."""
        with checking(NAME, self.group()) as where:
            raise ArgumentError(where + reason)

    def check_sound(self) -> None:
        """Raise if an earlier backward has failed, or is not done."""
        died = self._running is not None and self._running() is None
        if self._failed or died:
            error = DisagreementError(
                f"{NAME} on {self.group()}: an earlier backward ended in an error on this rank, "
                "and what other ranks have summed since is not known. Call close() and make "
                "another, on all ranks; state_dict() has what the optimizer knows."
            )
            if debugging():
                fail(self.group(), NAME, error)
            raise error

    def _check_entry(self, index: int | None) -> None:
        """Raise if a gradient arrives in a backward to which other ranks may not come."""
        if index is None or not self._has_module or not self.summing:
            return
        check_entry(is_reached(self._nodes[0]), self.names[index], self.refuse)

    def _check_backward(self) -> None:
        for shard in self.shards:
            if (index := shard.moved()) is not None:
                self.refuse(moved(self.names[index]))
        check_backward(zip(self.names, self.parameters, strict=True), self.refuse)

    def _check_gradient(self, index: int, gradient: torch.Tensor) -> None:
        if gradient.requires_grad:
            self.refuse(
                f"the gradient of parameter {self.names[index]!r} requires a gradient itself, "
                "which its sum over ranks would not. Take torch.autograd.grad for it."
            )
        check_dtype(gradient, self.parameters[index], self.names[index], NAME, self.refuse)


class _Backward(Ending):
    """One backward: what has arrived, and the sums that are under way."""

    kind = 1

    def __init__(self, arrivals: Arrivals, task: int) -> None:
        self.number, self._end = arrivals.number, End.of(task).join(self)
        self._end.begins(arrivals.count)
        self.arrivals, self.task, self.sums = arrivals, task, arrivals.summing
        self.left: set[int] = set()
        self._parameters, self._shards = arrivals.parameters, arrivals.shards
        self._over = arrivals.traffic.over()
        self._bucket_of = {
            index: n for n, shard in enumerate(self._shards) for index in shard.split.members
        }
        self._missing = [
            sum(parameter.requires_grad for parameter in shard.parameters) for shard in self._shards
        ]
        self._gradients: dict[int, torch.Tensor] = {}
        self._started = 0
        self._under_way: deque[Reduction] = deque()
        self._divisor = arrivals.scaling.divisor
        self._counted = self._over.size  # ranks that have counted, if only 0
        # Comparing blocks, and ranks are not at the same place of their backward. On a group that
        # is used for other things, they would not even make their calls in the same order.
        self._overlaps = arrivals.traffic.lane is not None and not debugging()

    def add(self, index: int, gradient: torch.Tensor, nested: bool) -> None:
        """Take an increment; start the sum of what is complete.

        A `nested` one comes from a backward that runs within this one (reentrant checkpoints), and
        may be followed by others of the same parameter.
        """
        bucket = self._bucket_of[index]
        if bucket < self._started:
            self.arrivals.refuse(
                f"parameter {self.arrivals.names[index]!r} gets another gradient, from within a "
                "checkpoint, after its sum was started. Use checkpoint(..., use_reentrant=False)."
            )
        held = self._gradients.get(index)
        gradient = dense(gradient)
        self._gradients[index] = gradient if held is None else held + gradient
        self._missing[bucket] -= not nested
        while self._overlaps and self._next_is_complete():
            self._start()
            self._sum_what_is_there()

    def _next_is_complete(self) -> bool:
        return self._started < len(self._shards) and self._missing[self._started] == 0

    def _start(self) -> None:
        arrivals, shard = self.arrivals, self._shards[self._started]
        split = shard.split
        count = None
        if self._started == 0 and arrivals.count is not None:
            count = self._end.told(arrivals.count)
        gradients = {}
        for index in split.members:
            # of backwards in no_sync
            arrivals.unsummed.drop_trace(index)
            before, now = self._parameters[index].grad, self._gradients.pop(index, None)
            self._parameters[index].grad = None
            arrivals.unsummed.drop(index)
            if before is not None:
                before = dense(before)
                now = before if now is None else before + now
            if now is not None:
                gradients[index] = now
        example = shard.row.new_empty(0, dtype=gradient_dtype(shard.parameters[0]))
        arrivals.traffic.begin()
        with arrivals.side.after_current():
            arrivals.side.reads(gradients.values())
            self._under_way.append(
                Reduction(split, self._over, gradients, example, arrivals.scaling, count)
            )
        self._started += 1

    def _sum_what_is_there(self) -> None:
        """Sum what has arrived, and so free it; never wait, since others may wait for this rank."""
        while self._under_way and self._under_way[0].done():
            self._sum_next()

    def _sum_next(self) -> None:
        shard = self._shards[self._started - len(self._under_way)]
        reduction = self._under_way.popleft()
        with self.arrivals.side.after_current():
            reduction.wait()
            self.arrivals.traffic.end()
            if self._divisor is None:
                self._divisor, self._counted = reduction.count()
            if self._divisor and self._counted == self._over.size:
                shard.add(reduction.total(self._divisor), reduction.used())

    def labels(self) -> Sequence[tuple[Group, str]]:
        return [(self.arrivals.group(), self.arrivals.label)]

    def users(self) -> Mapping[User, bool]:
        return {self.arrivals: self.sums}

    def look(self) -> None:
        self.arrivals.unsummed.check()

    def compare(self) -> None:
        both = zip(self.arrivals.names, self._parameters, strict=True)
        frozen = [name for name, parameter in both if not parameter.requires_grad]
        call = {"operation": f"{NAME}, at the end of backward", "no_sync": not self.sums}
        compare(self.arrivals.group(), call | {"frozen parameters": frozen})

    def begin_rest(self) -> None:
        while self.sums and self._started < len(self._shards):
            self._start()
            self._sum_what_is_there()

    def end_sums(self) -> None:
        while self._under_way:
            self._sum_next()
        for shard in self._shards:
            shard.settle()
        self.arrivals.side.join()
        count = self.arrivals.count
        if self.sums:
            if count is not None:
                count.summed()
            return
        self.arrivals.unsummed.note(self.left)
        learning = [i for i, parameter in enumerate(self._parameters) if parameter.requires_grad]
        if learning:  # also where nothing has come: a step is to be refused there too
            least = min(learning, key=lambda index: self._parameters[index].numel())
            self.arrivals.unsummed.leave_trace(least)
        if count is not None:
            count.hold()

    def ended(self, failed: bool) -> None:
        self.arrivals.ended(failed)

    def check(self) -> None:
        """Raise on all ranks alike, where there is nothing to divide by."""
        if self._divisor is not None:
            wrong = missing(int(self._divisor), self._counted, self._over.size)
            if wrong is not None:
                raise ArgumentError(f"{NAME} on {self.arrivals.group()}: {wrong}")


def moved(name: str) -> str:
    """Return what is wrong with a parameter that is elsewhere now."""
    return (
        f"parameter {name!r} has been moved, converted or replaced since {NAME} was made, which "
        "holds its values. Do so before; or call close() and make another, on all ranks."
    )


def _arrived(
    me: weakref.ref[Arrivals], index: int | None, gradients: tuple[torch.Tensor | None, ...]
) -> tuple[None] | None:
    arrivals = me()
    return None if arrivals is None else arrivals.arrived(index, gradients[0])


def _refuse_gradient(me: weakref.ref[Arrivals], index: int, reason: str) -> NoReturn:
    arrivals = me()
    assert arrivals is not None
    arrivals.refuse(f"the gradient of parameter {arrivals.names[index]!r} {reason}")


def _call_all(removals: Sequence[Callable[[], object]]) -> None:
    for remove in removals:
        remove()
