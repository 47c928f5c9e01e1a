"""One rank's part of a bucket: the parameters in a row, and the piece that the rank owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import increment_version

from varcomm.data_parallel.sharded.split import Split
from varcomm.ops import packing
from varcomm.transport.engine import Work, span, wait_for
from varcomm.transport.failure import explained
from varcomm.transport.group import Group

__all__ = ["Piece", "Shard"]


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
        self._views, self._hidden = [], []
        self._nothing = example.new_full((1,), torch.nan)
        for place, parameter in zip(split.places, self.parameters, strict=True):
            shape = parameter.shape
            view = self.row[place : place + parameter.numel()].view(shape)
            view.copy_(parameter.detach())
            parameter.data = view
            self._views.append(view)
            self._hidden.append(self._nothing.as_strided(shape, (0,) * len(shape)))
        start = split.sizes.offsets[rank]
        self._own = self.row[start : start + split.sizes[rank]]
        self._segments = split.segments[rank]
        self._masters = self._own
        self._gathers: Sequence[Work] | None = None
        self._total: torch.Tensor | None = None
        self._used: list[bool] = []
        self._arriving: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self.pieces: list[Piece] = []

    def cut_pieces(
        self, names: Sequence[str], whole: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Make the values that the optimizer updates, of `dtype` on `device`."""
        if (dtype, device) != (self._own.dtype, self._own.device):
            pinned = device.type == "cpu" and self._own.is_cuda
            self._masters = torch.empty(
                len(self._own), dtype=dtype, device=device, pin_memory=pinned
            ).copy_(self._own)
        by_index = dict(zip(self.split.members, self.parameters, strict=True))
        values = self._masters.split([len(segment) for segment in self._segments])
        for segment, part in zip(self._segments, values, strict=True):
            shape = by_index[segment.index].shape
            # a scalar has one owner in any case, and states like those of one process
            value = torch.nn.Parameter(part.view(shape) if whole or not shape else part)
            piece = Piece(names[segment.index], shape, segment.start, segment.stop, value)
            self.pieces.append(piece)

    def add(self, total: torch.Tensor, used: list[bool]) -> None:
        """Add a sum of this rank's piece to the sums since the last :meth:`settle`."""
        self._used = [a or b for a, b in zip(self._used, used, strict=True)] if self._used else used
        if self._masters.device != total.device:
            host = torch.empty(total.shape, dtype=total.dtype, device="cpu", pin_memory=True)
            host.copy_(total, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._arriving.append((host, event))
        elif self._total is None:
            self._total = total
        else:
            self._total.add_(total)

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
        total = total.to(self._masters.dtype)
        parts = total.split([len(segment) for segment in self._segments])
        # The pieces say whether there is a gradient: so the optimizer's own zero_grad works too.
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
                value.grad = part.clone()  # keeps no other part in memory

    def drop_gradients(self, set_to_none: bool) -> None:
        """Forget the gradients of the pieces."""
        for piece in self.pieces:
            if set_to_none:
                piece.value.grad = None
            elif piece.value.grad is not None:
                piece.value.grad.zero_()

    def take_over(self) -> None:
        """Copy values that were written into the parameters since the last step to the masters.

        A master that rounds to the parameter's value keeps its precision. All elements are
        compared, because torch does not count writes to ``.data``.
        """
        if self.has_masters:
            own = self._own.to(self._masters.device)
            self._masters.copy_(own.where(self._masters.to(own.dtype) != own, self._masters))

    def start_gather(self, group: Group, hidden: bool) -> None:
        """Begin to send this rank's piece to all; `hidden` parameters are NaN until `wait`."""
        if self.has_masters:
            self._own.copy_(self._masters, non_blocking=True)
        # a graph that has saved a parameter for backward must not find other values there
        increment_version(self.parameters)
        self._explained = explained("all_gather_v", group)
        with span("all_gather_v"), self._explained:
            self._gathers, _ = packing.all_gather(
                "all_gather_v", group, self._own, self.split.sizes, self.row
            )
        if hidden:
            for parameter, nothing in zip(self.parameters, self._hidden, strict=True):
                parameter.data = nothing

    def wait(self) -> None:
        """Wait for the pieces of all ranks, and show the parameters again."""
        if self._gathers:
            with self._explained:
                wait_for(self._gathers)
        self._gathers = None
        for parameter, view, nothing in zip(
            self.parameters, self._views, self._hidden, strict=True
        ):
            if _is_same(parameter, nothing):  # a parameter that was moved meanwhile stays so
                parameter.data = view

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates other values than the parameters' own."""
        return self._masters is not self._own

    @property
    def waiting(self) -> bool:
        """Whether pieces are in flight."""
        return self._gathers is not None

    def moved(self) -> int | None:
        """Return the index of a parameter that is not in the row any more; after `wait`.

        A parameter that was filled while it was hidden has lost these values.
        """
        if not self._nothing.isnan():
            return self.split.members[0]
        for index, parameter, view in zip(
            self.split.members, self.parameters, self._views, strict=True
        ):
            if not _is_same(parameter, view):
                return index
        return None


def _is_same(parameter: torch.Tensor, view: torch.Tensor) -> bool:
    same = (parameter.dtype, parameter.device) == (view.dtype, view.device)
    return same and parameter.is_set_to(view)
