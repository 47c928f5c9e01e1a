"""What one rank has of a bucket: the whole parameters in a row, and the piece that it owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import increment_version

from varcomm.data_parallel.sharded.pending import hide, show
from varcomm.data_parallel.sharded.split import Split
from varcomm.ops import packing
from varcomm.transport.engine import Work, wait_for
from varcomm.transport.failure import explained
from varcomm.transport.group import Group
from varcomm.transport.trace import span

__all__ = ["Piece", "Shard"]


@dataclass(frozen=True)
class Piece:
    """What one rank owns of a parameter.

    Attributes
    ----------
    name : str
        Of the parameter.
    shape : torch.Size
        Of the whole parameter.
    start, stop : int
        Which elements of it, in row-major order.
    value : torch.nn.Parameter
        What the optimizer works on, and its ``grad``: of one dimension, or of the whole's shape
        where parameters have one owner, as scalars always do.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    value: torch.nn.Parameter


class Shard:
    """A bucket on one rank.

    Parameters
    ----------
    split : Split
        Of the bucket.
    parameters : mapping
        From index to parameter; they become views of one row.
    rank : int
    """

    def __init__(
        self, split: Split, parameters: Mapping[int, torch.nn.Parameter], rank: int
    ) -> None:
        self.split = split
        self.parameters = [parameters[index] for index in split.members]
        example = self.parameters[0].detach()
        self.row = example.new_empty(split.sizes.total)
        self._views = []
        for place, parameter in zip(split.places, self.parameters, strict=True):
            shape = parameter.shape
            view = self.row[place : place + parameter.numel()].view(shape)
            view.copy_(parameter.detach())
            parameter.data = view
            self._views.append(view)
        start = split.sizes.offsets[rank]
        self._own = self.row[start : start + split.sizes[rank]]
        self._segments = split.segments[rank]
        self._nothing = example.new_full((1,), torch.nan)
        self._masters = self._own
        self._gathers: Sequence[Work] | None = None
        self._arriving: list[tuple[torch.Tensor, list[bool], torch.cuda.Event]] = []
        self.pieces: list[Piece] = []

    def cut_pieces(
        self, names: Sequence[str], whole: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Make what the optimizer works on, of `dtype` on `device`."""
        if (dtype, device) != (self._own.dtype, self._own.device):
            pinned = device.type == "cpu" and self._own.is_cuda
            self._masters = torch.empty(
                len(self._own), dtype=dtype, device=device, pin_memory=pinned
            ).copy_(self._own)
        first = 0
        by_index = dict(zip(self.split.members, self.parameters, strict=True))
        for segment in self._segments:
            values = self._masters[first : first + len(segment)]
            shape = by_index[segment.index].shape
            # a scalar has one owner in any case, and states like those of one process
            value = torch.nn.Parameter(values.view(shape) if whole or not shape else values)
            piece = Piece(names[segment.index], shape, segment.start, segment.stop, value)
            self.pieces.append(piece)
            first += len(segment)

    def add(self, total: torch.Tensor, used: list[bool]) -> None:
        """Add sums to the gradients of the pieces of parameters that were `used`.

        Those that go to the CPU are added by :meth:`settle`.
        """
        total = total.to(self._masters.dtype)
        if self._masters.device == total.device:
            self._add(total, used)
            return
        host = torch.empty(total.shape, dtype=total.dtype, device="cpu", pin_memory=True)
        host.copy_(total, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._arriving.append((host, used, event))

    def settle(self) -> None:
        """Wait for what is on its way to the CPU, and add it; at the end of backward.

        Later, nobody could tell whether the optimizer's own ``zero_grad`` was to drop it.
        """
        for host, used, event in self._arriving:
            event.synchronize()
            self._add(host, used)
        self._arriving = []

    def _add(self, total: torch.Tensor, used: list[bool]) -> None:
        # Whether there is a gradient, the pieces tell: so the optimizer's own zero_grad works too.
        parts = total.split([len(segment) for segment in self._segments])
        fresh = all(piece.value.grad is None for piece in self.pieces)
        for piece, part, is_used in zip(self.pieces, parts, used, strict=True):
            value = piece.value
            if not is_used:
                continue
            part = part.view(value.shape)
            if value.grad is not None:
                value.grad.add_(part)
            elif fresh:
                value.grad = part.data  # no view, which could not be detached in place
            else:
                value.grad = part.clone()  # which keeps nothing of the others in memory

    def drop_gradients(self, set_to_none: bool) -> None:
        """Forget the gradients, of the whole parameters too."""
        for value in [*self.parameters, *(piece.value for piece in self.pieces)]:
            if set_to_none:
                value.grad = None
            elif value.grad is not None:
                value.grad.zero_()

    def take_over(self) -> None:
        """Take over what somebody has written into the parameters since the last step.

        A master that would be rounded to what is there stays as precise as it is. All are looked
        at, since torch keeps no account of what is written by way of ``.data``.
        """
        if self.has_masters:
            own = self._own.to(self._masters.device)
            self._masters.copy_(own.where(self._masters.to(own.dtype) != own, self._masters))

    def start_gather(self, group: Group, hidden: bool) -> None:
        """Begin to send this rank's piece to all others; `hidden` until it is waited for."""
        if self.has_masters:
            self._own.copy_(self._masters, non_blocking=True)
        # who has saved a parameter for backward must not find other values there
        increment_version(self.parameters)
        self._explained = explained("all_gather_v", group)
        with span("all_gather_v"), self._explained:
            self._gathers, _ = packing.all_gather(
                "all_gather_v", group, self._own, self.split.sizes, self.row
            )
        if hidden:
            for parameter in self.parameters:
                hide(parameter, self._nothing)

    def wait(self) -> None:
        """Wait for the pieces of all ranks, which are on their way."""
        if self._gathers:
            with self._explained:
                wait_for(self._gathers)
        self._gathers = None
        for parameter, view in zip(self.parameters, self._views, strict=True):
            show(parameter, view)

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer works on values of their own."""
        return self._masters is not self._own

    @property
    def waiting(self) -> bool:
        """Whether pieces are on their way."""
        return self._gathers is not None

    def moved(self) -> int | None:
        """Return the index of a parameter that is elsewhere than in the row now, if there is one.

        While pieces are on their way nobody can tell.
        """
        if self.waiting:
            return None
        for index, parameter, view in zip(
            self.split.members, self.parameters, self._views, strict=True
        ):
            same = (parameter.dtype, parameter.shape) == (view.dtype, view.shape)
            if not same or not parameter.is_set_to(view):
                return index
        return None
