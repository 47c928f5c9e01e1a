"""Tensors as the engines send them: flat, in an order that does not depend on strides.

Rows travel in the logical (row-major) order of their block, whatever their memory format. For a
dimension that is outermost in memory, packing and unpacking are views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from varcomm.transport.engine import Move, Schedule, Works, begin, broadcast_of, keep, recorders
from varcomm.transport.group import Group

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def exchange(
    name: str,
    group: Group,
    values: torch.Tensor,
    send: Sequence[int],
    recv: Sequence[int],
    schedule: Schedule = "all",
    out: torch.Tensor | None = None,
) -> tuple[Works, torch.Tensor]:
    """Start to send ``send[r]`` of the flat `values` to each rank r; return the received values.

    They arrive in the flat `out`, if it is given.
    """
    out = values.new_empty(sum(recv)) if out is None else out
    return exchanger(name, group, send, recv, values.element_size(), schedule)(values, out), out


def exchanger(
    name: str,
    group: Group,
    send: Sequence[int],
    recv: Sequence[int],
    width: int,
    schedule: Schedule = "all",
) -> Callable[[torch.Tensor, torch.Tensor], Works]:
    """Return the function that starts to move contiguous values of `width` bytes into others."""
    counts = [n * width for n in recv], [n * width for n in send]

    def start(values: torch.Tensor, out: torch.Tensor) -> Works:
        if group.size == 1 and not recorders:
            return keep(group, out, values)
        return _begun(name, Move(schedule, group, as_bytes(out), as_bytes(values), *counts))

    return start


def all_gather(
    name: str,
    group: Group,
    values: torch.Tensor,
    counts: Sequence[int],
    out: torch.Tensor | None = None,
    root: int | None = None,
) -> tuple[Works, torch.Tensor]:
    """Start to gather the flat `values`, ``counts[r]`` of rank r, on every rank or at `root`.

    They arrive in the flat `out`, if it is given; `values` may be this rank's place in it.
    """
    if root is not None:
        send = [values.numel() if rank == root else 0 for rank in range(group.size)]
        recv = counts if group.rank == root else [0] * group.size
        return exchange(name, group, values, send, recv, "one")
    send = [counts[group.rank]] * group.size
    return exchange(name, group, values, send, counts, "all_gather", out)


def broadcast(name: str, group: Group, values: torch.Tensor, src: int) -> Works:
    """Start to overwrite the flat `values` on every rank by those of `src`."""
    return _begun(name, broadcast_of(group, as_bytes(values), src))


def _begun(name: str, move: Move) -> Works:
    for record in recorders:
        record(name, move)
    return begin(move)


def plain(x: torch.Tensor) -> torch.Tensor:
    """Return `x` with its elements in logical order in memory; itself if possible."""
    if x.is_complex() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    return x.contiguous()


def flat(x: torch.Tensor) -> torch.Tensor:
    """Return the elements in logical order, as one dimension; a view if possible."""
    return plain(x).view(-1)


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return a flat view of contiguous values as bytes."""
    if values.numel() <= 1:  # contiguous at any stride, but seen as bytes only at stride 1
        values = values.as_strided((values.numel(),), (1,))
    return (values if values.dim() == 1 else values.view(-1)).view(torch.uint8)


def pack(x: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
    """Return the blocks of `sizes` rows along `dim`, each in logical order, one after the other."""
    if prod(x.shape[:dim]) == 1:
        return flat(x)
    out = x.new_empty(x.numel())
    for place, block in _blocks(out, x, sizes, dim):
        place.copy_(block)
    return out


def unpack(
    values: torch.Tensor, shape: Sequence[int], sizes: Sequence[int], dim: int
) -> torch.Tensor:
    """Return the tensor of `shape` whose blocks along `dim` are in `values`."""
    if dim == 0 or prod(shape[:dim]) == 1:
        return values if values.shape == shape else values.view(shape)
    out = values.new_empty(shape)
    for block, place in _blocks(values, out, sizes, dim):
        place.copy_(block)
    return out


def _blocks(
    values: torch.Tensor, x: torch.Tensor, sizes: Sequence[int], dim: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the blocks of `x` along `dim`, each behind its place among flat values."""
    blocks = x.split(list(sizes), dim)
    parts = values.split([block.numel() for block in blocks])
    return [(part.view(block.shape), block) for part, block in zip(parts, blocks, strict=True)]


def back(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a view of `x` with its first dimension moved to `dim`."""
    return x.movedim(0, dim) if dim else x


def rest(shape: Sequence[int], dim: int) -> list[int]:
    """Return `shape` without `dim`: the shape of a row."""
    return [*shape[:dim], *shape[dim + 1 :]]


def signed(rows: torch.Tensor) -> torch.Tensor:
    """Return a view with signed integers for unsigned ones, which torch can neither set nor sum."""
    return rows.view(_SIGNED.get(rows.dtype, rows.dtype))


def taken(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return some rows, of any dtype."""
    if rows.dim() == 1:  # torch refuses to select unsigned integers of one dimension
        return rows.unsqueeze(1).index_select(0, index).squeeze(1)
    return rows.index_select(0, index)


def like(shape: Sequence[int], dim: int, rows: int) -> tuple[int, ...]:
    """Return `shape` with `rows` along `dim`."""
    return (*shape[:dim], rows, *shape[dim + 1 :])
