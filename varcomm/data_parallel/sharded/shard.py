"""One rank's part of a bucket: the parameters in a row, and the piece that the rank owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import increment_version

from varcomm.data_parallel.buckets import Message
from varcomm.data_parallel.sharded.partition import Split
from varcomm.ops import packing
from varcomm.transport.auxiliary_group import Lane, weakly
from varcomm.transport.group import Group

__all__ = ["Piece", "Shard", "Traffic"]


class Traffic:
    """Group on which messages of shards travel, and their number in flight.

    On a lane of its own, calls that start during backward have the same order on all ranks, beside
    the exchanges of the model. Without a lane nothing may start during backward.
    """

    def __init__(self, group: Group, lane: Lane | None) -> None:
        self.lane = lane
        self.group = weakly(group) if lane is None else lane.group
        self._in_flight = 0

    def note(self, more: int) -> None:
        """Count calls that start (1) or end (-1): a lane in use is not given to another."""
        self._in_flight += more
        if self.lane is not None:
            self.lane.under_way = self._in_flight > 0

    def end(self) -> None:
        """Leave the lane to others."""
        if self.lane is not None:
            self.lane.give_back()


@dataclass(frozen=True)
class Piece:
    """One rank's part of a parameter.

    Attributes
    ----------
    name : str
        Of the parameter.
    shape : torch.Size
        Of the full parameter.
    start, stop : int
        Range of its elements, in row-major order.
    value : torch.nn.Parameter
        Values that the optimizer updates, and their ``grad``: of one dimension, or of the
        parameter's shape if parameters have one owner. A scalar always has its own shape.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    value: torch.nn.Parameter


class Shard:
    """A bucket on one rank; its parameters, by index, become views of one row."""

    def __init__(
        self, split: Split, parameters: Mapping[int, torch.nn.Parameter], rank: int
    ) -> None:
        self.split = split
        self.parameters = [parameters[index] for index in split.members]
        example = self.parameters[0].detach()
        self.row = example.new_empty(split.sizes.total)
        self._nothing = example.new_full((), torch.nan)
        self._views: list[torch.Tensor] = []
        for place, parameter in zip(split.places, self.parameters, strict=True):
            view = self.row[place : place + parameter.numel()].view(parameter.shape)
            parameter.data = view.copy_(parameter.detach())
            self._views.append(view)
        self._hidden = [self._nothing.expand(view.shape) for view in self._views]
        self._own = self._masters = self.row.narrow(0, split.sizes.offsets[rank], split.sizes[rank])
        self._segments = split.segments[rank]
        self._lengths = [len(segment) for segment in self._segments]
        self._gather: Message | None = None
        self._total: torch.Tensor | None = None
        self._used: list[bool] = []
        self._arriving: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self.pieces: list[Piece] = []

    def cut_pieces(
        self, names: Sequence[str], whole: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Make the values that the optimizer updates, of `dtype` on `device`."""
        own = self._own
        if (dtype, device) != (own.dtype, own.device):
            pinned = device.type == "cpu" and own.is_cuda
            empty = torch.empty(len(own), dtype=dtype, device=device, pin_memory=pinned)
            self._masters = empty.copy_(own)
        shapes = dict(zip(self.split.members, (p.shape for p in self.parameters), strict=True))
        for segment, part in zip(self._segments, self._masters.split(self._lengths), strict=True):
            shape = shapes[segment.index]
            # a scalar has one owner in any case, and states like those of one process
            value = torch.nn.Parameter(part.view(shape) if whole or not shape else part)
            name = names[segment.index]
            self.pieces.append(Piece(name, shape, segment.start, segment.stop, value))

    def add(self, total: torch.Tensor, used: list[bool]) -> None:
        """Add a sum of this rank's piece to the sums since the last :meth:`settle`."""
        self._used = [a or b for a, b in zip(self._used, used, strict=True)] if self._used else used
        if self._masters.device != total.device:
            host = torch.empty(total.shape, dtype=total.dtype, device="cpu", pin_memory=True)
            host.copy_(total, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._arriving.append((host, event))
        else:
            self._total = total if self._total is None else self._total.add_(total)

    def settle(self, divisor: float | None) -> None:
        """Divide the sums and add them to the gradients of the pieces; None drops them."""
        for host, event in self._arriving:
            event.synchronize()
            self._total = host if self._total is None else self._total.add_(host)
        total, used = self._total, self._used
        self._total, self._used, self._arriving = None, [], []
        if total is None or divisor is None:
            return
        if divisor != 1:
            total /= divisor
        parts = total.to(self._masters.dtype).split(self._lengths)
        # The pieces say whether there is a gradient: so the optimizer's own zero_grad works too.
        fresh = all(piece.value.grad is None for piece in self.pieces)
        for piece, part, is_used in zip(self.pieces, parts, used, strict=True):
            value, part = piece.value, part.view(piece.value.shape)
            if is_used and value.grad is not None:
                value.grad.add_(part)
            elif is_used:
                # no view, which could not be detached in place; alone, it keeps no other in memory
                value.grad = part.data if fresh else part.clone()

    def take_over(self) -> None:
        """Copy values that were written into the parameters since the last step to the masters.

        A master that rounds to the parameter's value keeps its precision. All elements are
        compared, because torch does not count writes to ``.data``.
        """
        if self.has_masters:
            own = self._own.to(self._masters.device)
            self._masters.copy_(own.where(self._masters.to(own.dtype) != own, self._masters))

    def start_gather(self, traffic: Traffic, hidden: bool) -> None:
        """Begin to send this rank's piece to all; `hidden` parameters are NaN until `wait`."""
        if self.has_masters:
            self._own.copy_(self._masters, non_blocking=True)
        # a graph that has saved a parameter for backward must not find other values there
        increment_version(self.parameters)
        arguments = traffic.group(), self._own, self.split.sizes, self.row
        traffic.note(1)
        self._gather = Message(packing.all_gather, "all_gather_v", *arguments)
        if hidden:
            for parameter, nothing in zip(self.parameters, self._hidden, strict=True):
                parameter.data = nothing

    def wait(self, traffic: Traffic) -> None:
        """Wait for the pieces of all ranks, and show the parameters again."""
        if self._gather is None:
            return
        self._gather.wait()
        self._gather = None
        for place, parameter in enumerate(self.parameters):
            if _is_same(parameter, self._hidden[place]):  # one that was moved meanwhile stays so
                parameter.data = self._views[place]
        traffic.note(-1)

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates other values than the parameters' own."""
        return self._masters is not self._own

    def moved(self) -> int | None:
        """Return the index of a parameter that is not in the row any more; after `wait`.

        A parameter that was filled while it was hidden has lost these values.
        """
        lost = not self._nothing.isnan()
        for index, *pair in zip(self.split.members, self.parameters, self._views, strict=True):
            if lost or not _is_same(*pair):
                return index
        return None


def _is_same(parameter: torch.Tensor, view: torch.Tensor) -> bool:
    same = (parameter.dtype, parameter.device) == (view.dtype, view.device)
    return same and parameter.is_set_to(view)
