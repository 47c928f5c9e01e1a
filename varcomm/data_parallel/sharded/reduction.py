"""Gradients of one bucket, on their way to the ranks that own their pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from varcomm.data_parallel.sharded.split import Split
from varcomm.ops import packing
from varcomm.ops.reduction import accumulated
from varcomm.transport.engine import span, wait_for
from varcomm.transport.failure import explained
from varcomm.transport.group import Group

__all__ = ["Reduction", "Scaling", "SideStream", "predivide_factor"]

_NAME = "reduce_scatter_v"


@dataclass(frozen=True)
class Scaling:
    """Division of sums.

    Attributes
    ----------
    in_fp32 : bool
        Divide and sum narrow floats in fp32. Otherwise the sent gradients are divided before, and
        the sum is rounded before it is divided by the rest.
    before : float
        Divisor of each part.
    divisor : float or None
        Divisor of a sum in total; None is a GlobalCount.
    """

    in_fp32: bool
    before: float
    divisor: float | None


def predivide_factor(ranks: int) -> float:
    """Return the power of two near ``sqrt(P)`` by which FSDP divides before it sums.

    It is as large as the rest of the divisor, so neither parts nor sums leave the range of fp16.

    >>> [predivide_factor(ranks) for ranks in (1, 2, 3, 4, 5, 8, 16, 64)]
    [1.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 8.0]
    """
    factor = 1
    while factor * factor < ranks:
        factor *= 2
    return float(factor)


class Reduction:
    """A sum over ranks, in flight, of which each rank gets its piece.

    Each rank receives its piece, and a 1 or 0 for each parameter in the piece: whether the sender
    has used the parameter.

    `gradients` are dense, by index; parameters without one count as zeros. `example` has their
    dtype and device.
    """

    def __init__(
        self,
        split: Split,
        group: Group,
        gradients: Mapping[int, torch.Tensor],
        example: torch.Tensor,
        scaling: Scaling,
    ) -> None:
        self._scaling, self._ranks = scaling, group.size
        self._own = split.segments[group.rank]
        self._here = set(gradients)
        rows = [
            size + len(segments) for size, segments in zip(split.sizes, split.segments, strict=True)
        ]
        self._explained = explained(_NAME, group)
        with span(_NAME), self._explained:
            sent = self._packed(split, gradients, example, rows)
            own = [rows[group.rank]] * group.size
            self._works, self._received = packing.exchange(_NAME, group, sent, rows, own)
        self._sent: torch.Tensor | None = sent

    def _packed(
        self,
        split: Split,
        gradients: Mapping[int, torch.Tensor],
        example: torch.Tensor,
        rows: list[int],
    ) -> torch.Tensor:
        flat = {index: gradient.reshape(-1) for index, gradient in gradients.items()}
        parts = [example.new_empty(0)]
        for segments in split.segments:
            used = example.new_ones(len(segments))
            for place, segment in enumerate(segments):
                if segment.index in flat:
                    parts.append(flat[segment.index][segment.start : segment.stop])
                else:
                    parts.append(example.new_zeros(len(segment)))
                    used[place] = 0
            parts.append(used)
        packed = torch.cat(parts)
        if not self._scaling.in_fp32 and self._scaling.before != 1:
            for row, size in zip(packed.split(rows), split.sizes, strict=True):
                row[:size] /= self._scaling.before
        return packed

    def done(self) -> bool:
        """Return whether everything has arrived."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait until everything has arrived, and free the sent message."""
        with self._explained:
            wait_for(self._works)
        self._works, self._sent = [], None

    def total(self) -> torch.Tensor:
        """Return this rank's piece of the sum of parts divided by ``before``; after `wait`."""
        size = sum(map(len, self._own))
        parts = [row[:size] for row in self._received.view(self._ranks, -1)]
        if self._scaling.in_fp32:
            return accumulated(parts, True, 1 / self._scaling.before)
        return accumulated(parts, True).to(self._received.dtype)

    def used(self) -> list[bool]:
        """Return for each segment of this rank's piece whether a rank has used the parameter."""
        used = [segment.index in self._here for segment in self._own]
        if all(used):
            return used  # without waiting for a GPU
        flags = self._received.view(self._ranks, -1)[:, sum(map(len, self._own)) :]
        anywhere: list[bool] = flags.ne(0).any(0).tolist()
        return anywhere


class SideStream:
    """Stream on which gradients are packed and summed while backward goes on; none on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """Run the block on the stream, after all that the current stream was given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def reads(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep the memory of tensors from being reused before this stream is done."""
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(self._stream)

    def join(self) -> None:
        """Let the current stream wait for this one."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
