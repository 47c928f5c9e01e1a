"""One backward: what has arrived on this rank, the sums that are under way, and its end."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from zlib import crc32

import torch

from varcomm.data_parallel.bucket_sum import BucketSum
from varcomm.data_parallel.buckets import dense
from varcomm.data_parallel.ending import End, Ending
from varcomm.data_parallel.global_count import CountSum, GlobalCount, User
from varcomm.data_parallel.routes import Route
from varcomm.data_parallel.values import check_dtype
from varcomm.errors import ArgumentError
from varcomm.transport.agreement import compare, debugging
from varcomm.transport.group import Group

if TYPE_CHECKING:
    from varcomm.data_parallel.replica import Replica

__all__ = ["Backward", "Part"]


class Backward(Ending):
    """What all replicated modules have to do in one backward."""

    kind = 0
    number = 0  # there is one

    def __init__(self, end: End, task: int) -> None:
        self._end, self._task = end.join(self), task
        self._parts: dict[int, Part] = {}
        self._refused: ArgumentError | None = None

    @classmethod
    def of(cls, task: int) -> Backward:
        """Return the one that runs, or a new one."""
        running = _running.get(task)
        if running is None:
            running = _running[task] = cls(End.of(task), task)
        return running

    def enter(self, replica: Replica) -> Part:
        """Let a replica take part, and all that sum parameters with it."""
        entering = [r for r in replica.connected() if r.part is None or r is replica]
        for each in entering:
            each.check_sound()
            each.check_backward()
        if len({each.paused > 0 for each in entering}) > 1:
            replica.refuse(
                "a parameter is summed over several groups, of which only some are in no_sync. "
                "Call no_sync with the module that holds all that were replicated."
            )
        for each in entering:
            self._end.begins(each.count)
        for each in entering:
            self._parts[each.number] = Part(each, self._end, self._task)
            each.started(self._parts[each.number])
        return self._parts[replica.number]

    def _in_order(self) -> list[Part]:
        return [self._parts[number] for number in sorted(self._parts)]

    def _summed(self) -> list[Part]:
        return [part for part in self._in_order() if part.sums]

    def labels(self) -> Sequence[tuple[Group, str]]:
        """Return the groups, and the modules that are replicated over them."""
        return [(part.replica.group(), part.replica.label) for part in self._in_order()]

    def users(self) -> Mapping[User, bool]:
        """Return the replicas that take part, and whether they sum."""
        return {part.replica: part.sums for part in self._in_order()}

    def look(self) -> None:
        """Raise if what has not been summed before cannot be summed."""
        for part in self._in_order():
            part.replica.unsummed.check()

    def compare(self) -> None:
        """Raise on every rank if modules that are replicated differ in what they sum."""
        for part in self._in_order():
            part.compare()

    def begin_rest(self) -> None:
        """Begin all sums that are not begun yet."""
        for part in self._summed():
            part.begin_rest()

    def end_sums(self) -> None:
        """Add the sums to the gradients, or find what keeps all ranks from it."""
        self._refused = _finish(self._summed())
        for part in self._in_order():
            part.replica.unsummed.backward_ended()
            if not part.sums:
                part.hold_count()
            if part.replica.lane is not None:
                part.replica.lane.under_way = False

    def ended(self, failed: bool) -> None:
        """Let modules be ready for the next backward, or refuse it."""
        for part in self._in_order():
            part.replica.ended(failed)

    def check(self) -> None:
        """Raise what that was."""
        if self._refused is not None:
            raise self._refused


# By autograd's number for them, as long as they run.
_running: weakref.WeakValueDictionary[int, Backward] = weakref.WeakValueDictionary()


class Part:
    """What one replica has in a backward: gradients, and the sums that it begins."""

    def __init__(self, replica: Replica, end: End, task: int) -> None:
        self.replica, self.task, self.thread = replica, task, threading.get_ident()
        self.sums = replica.paused == 0
        self.routes = replica.routes
        self.own: set[int] = set()
        self.replaced: set[int] = set()
        self.begun: list[BucketSum] = []
        self.count: CountSum | None = None
        self._end = end
        self._group = replica.group()
        self._route_of = {
            i: n for n, route in enumerate(self.routes) for i in route.bucket.parameters
        }
        self._missing = [len(route.bucket) for route in self.routes]
        self._gradients: dict[int, torch.Tensor] = {}
        # Comparing blocks, and ranks are not at the same place of their backward. On a group that
        # is used for other things, they would not even make their calls in the same order.
        self._overlaps = replica.lane is not None and not debugging()

    def takes(self, index: int) -> bool:
        """Return whether it is the first to sum a parameter."""
        return index in self._route_of

    def add(self, index: int, gradient: torch.Tensor, nested: bool) -> tuple[torch.Tensor | None]:
        """Take an increment; start the sum of what is complete.

        A `nested` one comes from a backward that runs within this one (reentrant checkpoints), and
        may be followed by others of the same parameter. Returns what goes on in its place.
        """
        route, replica = self._route_of[index], self.replica
        name, parameter = replica.names[index], replica.parameters[index]
        check_dtype(gradient, parameter, name, "replicate(module)", replica.refuse)
        if not self.sums:
            return (replica.unsummed.add(index, gradient),)
        if route < len(self.begun):
            replica.refuse(
                f"parameter {name!r} gets another gradient, from within a checkpoint, after "
                "its sum was started. Use checkpoint(..., use_reentrant=False)."
            )
        gradient, held = dense(gradient), self._gradients.get(index)
        self._gradients[index] = gradient if held is None else held + gradient
        self._missing[route] -= not nested
        while self._overlaps and self._next_is_complete():
            self._begin()
        return (None,)

    def _next_is_complete(self) -> bool:
        number = len(self.begun)
        return number < len(self.routes) and self._missing[number] == 0

    def _begin(self) -> None:
        """Begin the sum of the next bucket; before the first one, that of the count."""
        self._begin_count()
        bucket, unsummed = self.routes[len(self.begun)].bucket, self.replica.unsummed
        parts = {i: part for i in bucket.parameters if (part := unsummed.get(i)) is not None}
        self.replaced.update(i for i in parts if unsummed.is_grad(i))
        flat = bucket.flatten(self._gradients, parts)
        for index in bucket.parameters:
            if self._gradients.pop(index, None) is not None or index in parts:
                self.own.add(index)
        self.begun.append(begin(self.replica, flat))

    def _begin_count(self) -> None:
        reduce = self.replica.options.reduce
        if isinstance(reduce, GlobalCount) and self.count is None:
            first, *others = self.replica.counting()
            if first is self.replica:
                groups = [first.over(), *(other.over() for other in others)]
                if first.lane is not None:
                    first.lane.under_way = True
                self.count = CountSum(self._end.told(reduce), groups)

    def begin_rest(self) -> None:
        """Begin all sums that are not begun yet."""
        self._begin_count()
        while len(self.begun) < len(self.routes):
            self._begin()

    def hold_count(self) -> None:
        """Keep what was counted with the gradients that are not summed, or with a trace of them.

        So it is dropped on all ranks if they are, on one to which this backward brings none too.
        """
        counts = {replica.count for replica in self.replica.connected()} - {None}
        if counts and self._route_of:
            parameters = self.replica.parameters
            least = min(self._route_of, key=lambda index: parameters[index].numel())
            self.replica.unsummed.leave_trace(least)
        for count in counts:
            assert count is not None
            count.hold()

    def compare(self) -> None:
        """Raise on every rank, if they end different backwards."""
        names = [self.replica.names[i] for route in self.routes for i in route.bucket.parameters]
        others = [[len(r.ranks) for r in route.after()] for route in self.routes]
        call = {
            "operation": "replicate, at the end of backward",
            "frozen parameters": self.replica.frozen,
            "unmarked parameters": self.replica.unmarked,
            "names of what is summed": f"{len(names)}, crc32 {crc32(repr(names).encode()):08x}",
            "whether it sums": self.sums,
            "sizes of further groups": others,
        }
        compare(self._group, call)


@dataclass
class _Flow:
    """A bucket on its way over groups, and by what each of its sums is divided."""

    part: Part
    route: Route
    way: list[Replica]
    divisors: list[int]
    sum: BucketSum
    total: torch.Tensor | None = None


def _finish(parts: list[Part]) -> ArgumentError | None:
    """End all sums and deliver them, or return the error that all ranks of a group make.

    Whatever is waited for here, all ranks have begun before they wait for anything; so it is for
    each further group as well.
    """
    totals: dict[int, int] = {}
    refused = None
    for part in parts:
        if part.count is not None:
            try:
                where = f"replicate on {part.replica.group()}: "
                totals[part.replica.number] = part.count.wait(where)
            except ArgumentError as error:
                refused = error
    flows = []
    for part in parts:
        for route, pending in zip(part.routes, part.begun, strict=True):
            way = [part.replica, *route.after()]
            divisors = _divisors(way, totals)
            if divisors is None:
                pending.give_up()
            else:
                flows.append(_Flow(part, route, way, divisors, pending))
    step, going = 0, flows
    while going:
        for flow in going:
            flow.sum.begin_second_round(flow.divisors[step], len(flow.route.bucket))
        for flow in going:
            flow.total = flow.sum.wait()
        step += 1
        going = [flow for flow in going if step < len(flow.way)]
        for flow in going:
            assert flow.total is not None
            flow.sum = begin(flow.way[step], flow.total)
    for flow in flows:
        assert flow.total is not None
        for index in flow.route.bucket.parameters:
            flow.part.replica.unsummed.drop(index)
        flow.route.bucket.deliver(flow.total, flow.part.own, flow.part.replaced)
    for part in parts:
        if part.count is not None and part.replica.number in totals:
            assert part.replica.count is not None
            part.replica.count.summed()
    return refused


def _divisors(way: list[Replica], totals: dict[int, int]) -> list[int] | None:
    """Return by what the sum over each group is divided; None if nothing has been counted.

    A count that several of them have is of all their groups, and divides once.
    """
    divisors, counted = [], set()
    for replica in way:
        reduce, divisor = replica.options.reduce, 1
        if reduce == "mean":
            divisor = len(replica.ranks)
        elif isinstance(reduce, GlobalCount) and reduce not in counted:
            first = replica.counting()[0].number
            if first not in totals:
                return None
            counted.add(reduce)
            divisor = totals[first]
        divisors.append(divisor)
    return divisors


def begin(replica: Replica, flat: torch.Tensor) -> BucketSum:
    """Begin a sum over the group of a replica."""
    if replica.lane is not None:
        replica.lane.under_way = True
    return BucketSum(flat, replica.over(), replica.options.use_fp32)
