"""The one exchange of grids: each rank gets the rows that it reads, in one contiguous buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from varcomm.grid.layout import Split
from varcomm.ops import packing
from varcomm.ops.digest import digest
from varcomm.ops.graph_operator import torch_operator
from varcomm.ops.handle import Handle, TensorOrHandle, collective
from varcomm.ops.reduction import sum_in_rank_order
from varcomm.ops.rule import Operator
from varcomm.transport.engine import Pending
from varcomm.transport.group import Group

Block = tuple[int, int, int]  # the place of its first row here, the same there, and its rows


@dataclass(frozen=True)
class _Rows(Operator):
    """The fields of the pair. Rows of a span outside of the field are zeros."""

    group: Group
    dim: int
    sizes: tuple[int, ...]
    reads: tuple[int, ...]  # of each rank: its number of spans, and the ends of each
    use_fp32: bool

    def spans(self) -> list[list[tuple[int, int]]]:
        """Return the spans that each rank reads."""
        left, found = iter(self.reads), []
        for count in left:
            found.append([(next(left), next(left)) for _ in range(count)])
        return found

    def blocks(self) -> tuple[list[list[Block]], list[list[Block]], int]:
        """Return the blocks that each rank reads of this one, and this one of each; the rows read.

        A block begins at an own row, and at a row of the reader's buffer.
        """
        owned = [*pairwise((0, *accumulate(self.sizes)))]
        spans, rank = self.spans(), self.group.rank

        def between(reader: int, owner: int) -> list[Block]:
            first, last = owned[owner]
            found, place = [], 0
            for low, high in spans[reader]:
                start, stop = max(low, first), min(high, last)
                if start < stop:
                    found.append((start - first, place + start - low, stop - start))
                place += high - low
            return found

        ranks = range(len(self.sizes))
        length = sum(high - low for low, high in spans[rank])
        return [between(r, rank) for r in ranks], [between(rank, r) for r in ranks], length

    def describe(self, x: Tensor) -> dict[str, Any]:
        """Compare the spans by a number: there are as many as ranks."""
        return {
            "dim": self.dim,
            "sizes": list(self.sizes),
            "rows read": digest(torch.tensor(self.reads)),
            "shape of a row": packing.rest(x.shape, self.dim),
        }


def _elements(blocks: Sequence[Sequence[Block]], but: int, row: int) -> list[int]:
    """Return the elements in the blocks of each other rank."""
    return [0 if r == but else row * sum(b[2] for b in own) for r, own in enumerate(blocks)]


@torch_operator
@dataclass(frozen=True)
class ReadRows(_Rows):
    """From own rows to the rows that each rank reads; only those of other ranks travel."""

    name: ClassVar[str] = "read_rows"

    def prepared(self, x: Tensor) -> Callable[[Tensor], Pending]:
        given, taken, length = self.blocks()
        rank, dim = self.group.rank, self.dim
        shape, row = packing.like(x.shape, dim, length), prod(packing.rest(x.shape, dim))
        send, recv = _elements(given, rank, row), _elements(taken, rank, row)
        begin = packing.exchanger(self.name, self.group, x, send, recv, "neighbours")
        sent = [block for r, own in enumerate(given) if r != rank for block in own]
        got = [block for r, own in enumerate(taken) if r != rank for block in own]
        outside = _gaps([(place, place + n) for own in taken for _, place, n in own], length)

        def start(x: Tensor) -> Pending:
            values, received = x.new_empty(sum(send)), x.new_empty(sum(recv))
            for block, (first, _, n) in zip(_parts(values, x, dim, sent), sent, strict=True):
                block.copy_(x.narrow(dim, first, n))
            works = begin(received, values)
            out = x.new_empty(shape)
            for first, place, n in taken[rank]:
                out.narrow(dim, place, n).copy_(x.narrow(dim, first, n))
            for first, last in outside:
                out.narrow(dim, first, last - first).zero_()

            def finish() -> Tensor:
                for block, (_, place, n) in zip(_parts(received, x, dim, got), got, strict=True):
                    out.narrow(dim, place, n).copy_(block)
                return out

            return Pending(works, finish)

        return start

    def result(self, x: Tensor) -> Tensor:
        length = sum(high - low for low, high in self.spans()[self.group.rank])
        return x.new_empty(packing.like(x.shape, self.dim, length))

    @property
    def adjoint(self) -> ReturnRows:
        return ReturnRows(self.group, self.dim, self.sizes, self.reads, self.use_fp32)


@torch_operator
@dataclass(frozen=True)
class ReturnRows(_Rows):
    """From rows that were read to own rows: each goes back and is added to the one it copies."""

    name: ClassVar[str] = "return_rows"

    def prepared(self, x: Tensor) -> Callable[[Tensor], Pending]:
        given, taken, _ = self.blocks()
        rank, dim = self.group.rank, self.dim
        row, shape = prod(packing.rest(x.shape, dim)), self._shape(x)
        send, recv = _elements(taken, rank, row), _elements(given, rank, row)
        begin = packing.exchanger(self.name, self.group, x, send, recv, "neighbours")
        sent = [block for r, own in enumerate(taken) if r != rank for block in own]
        got = [block for r, own in enumerate(given) if r != rank for block in own]
        # copies of own rows, rank by rank, and the runs of rows with the same copies
        copies = [block for own in given for block in own]
        ends = sorted({0, shape[dim], *(e for at, _, n in copies for e in (at, at + n))})
        before = sum(len(own) for own in given[:rank])

        def start(x: Tensor) -> Pending:
            values, received = x.new_empty(sum(send)), x.new_empty(sum(recv))
            for block, (_, place, n) in zip(_parts(values, x, dim, sent), sent, strict=True):
                block.copy_(x.narrow(dim, place, n))
            works = begin(received, values)

            def finish() -> Tensor:
                out = x.new_empty(shape)
                rows = _parts(received, x, dim, got)
                rows[before:before] = [x.narrow(dim, place, n) for _, place, n in given[rank]]
                for first, last in pairwise(ends):
                    parts = [
                        block.narrow(dim, first - at, last - first)
                        for block, (at, _, n) in zip(rows, copies, strict=True)
                        if at <= first and last <= at + n
                    ]
                    place = out.narrow(dim, first, last - first)
                    if len(parts) > 1:
                        place.copy_(sum_in_rank_order(parts, self.use_fp32))
                    elif parts:
                        place.copy_(parts[0])
                    else:
                        place.zero_()
                return out

            return Pending(works, finish)

        return start

    def _shape(self, x: Tensor) -> tuple[int, ...]:
        return packing.like(x.shape, self.dim, self.sizes[self.group.rank])

    def result(self, x: Tensor) -> Tensor:
        return x.new_empty(self._shape(x))

    @property
    def adjoint(self) -> ReadRows:
        return ReadRows(self.group, self.dim, self.sizes, self.reads, self.use_fp32)


def _parts(values: Tensor, x: Tensor, dim: int, blocks: Sequence[Block]) -> list[Tensor]:
    """Return the blocks of flat values, whose other dimensions are those of `x`."""
    shapes = [packing.like(x.shape, dim, n) for _, _, n in blocks]
    parts = values.split([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _gaps(spans: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """Return what spans leave out of 0...length."""
    found, end = [], 0
    for first, last in (*sorted(spans), (length, length)):
        if first > end:
            found.append((end, first))
        end = max(end, last)
    return found


def rows(x: Tensor, split: Split, spans: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """Return the rows of this rank's spans, in their order; outside of the field they are zeros.

    `spans` has those of all ranks. `x` is the local tensor of a field with this split.
    """
    if all(_are(these, own) for these, own in zip(spans, split.spans, strict=True)):
        return x
    return _read(x, split, spans, async_op=False)


def start_rows(x: Tensor, split: Split, spans: Sequence[Sequence[tuple[int, int]]]) -> Handle:
    """Start :func:`rows`."""
    return _read(x, split, spans, async_op=True)


def _read(
    x: Tensor, split: Split, spans: Sequence[Sequence[tuple[int, int]]], async_op: bool
) -> TensorOrHandle:
    reads = [n for these in spans for n in (len(these), *(e for s in these for e in s))]
    how = (x.dim() + split.dim, *reads)
    return collective(_operator, split.group, x, split.sizes, how, async_op)


def _operator(group: Group, x: Tensor, sizes: tuple[int, ...], dim: int, *reads: int) -> ReadRows:
    return ReadRows(group, dim, sizes, reads, use_fp32=True)


def _are(spans: Sequence[tuple[int, int]], own: tuple[int, int]) -> bool:
    first, last = own
    return [*spans] == [own] or (first == last and all(a == b for a, b in spans))


def span(x: Tensor, split: Split, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return the rows of one span per rank, as :func:`rows` does."""
    return rows(x, split, [[one] for one in spans])
