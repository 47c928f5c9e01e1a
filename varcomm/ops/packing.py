"""Tensors as the engines send them: flat, in an order that does not depend on strides.

Rows travel in the logical (row-major) order of their block, for any memory format. For a
dimension that is outermost in memory, packing and unpacking are views.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from varcomm.transport.engine import Route, Schedule, Start, Works, broadcast_route
from varcomm.transport.engines.choose import prepared
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
    return exchanger(name, group, values, send, recv, schedule)(out, values), out


def exchanger(
    name: str,
    group: Group,
    x: torch.Tensor,
    send: Sequence[int],
    recv: Sequence[int],
    schedule: Schedule = "all",
) -> Start:
    """Return the function ``start(out, values)`` for contiguous tensors of the dtype of `x`."""
    width = x.element_size()
    counts = [n * width for n in recv], [n * width for n in send]
    return prepared(Route(schedule, group, *counts, min(width, 8)), x.device, name)


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
    return prepared(broadcast_route(group, values.nbytes, src), values.device, name)(values, values)


def plain(x: torch.Tensor) -> torch.Tensor:
    """Return `x` with its elements in logical order in memory; itself if possible."""
    if type(x) is not torch.Tensor and hasattr(x, "trigger_wait"):
        x = x.trigger_wait()  # of a functional collective, whose memory is another tensor's
    if x.is_complex() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    return x.contiguous()


def flat(x: torch.Tensor) -> torch.Tensor:
    """Return the elements in logical order, as one dimension; a view if possible."""
    return plain(x).view(-1)


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
    """Return a view with signed integers for unsigned ones, which torch cannot set or sum."""
    return rows.view(_SIGNED.get(rows.dtype, rows.dtype))


def taken(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return some rows, of any dtype."""
    if rows.dim() == 1:  # torch refuses to select unsigned integers of one dimension
        return rows.unsqueeze(1).index_select(0, index).squeeze(1)
    return rows.index_select(0, index)


def counted_from(first: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return ``first[i], first[i] + 1, ...``, `count[i]` numbers for each i, one after another."""
    before = count.cumsum(0) - count
    numbers = (first - before).repeat_interleave(count)
    return numbers.add_(torch.arange(len(numbers), device=count.device))


def like(shape: Sequence[int], dim: int, rows: int) -> tuple[int, ...]:
    """Return `shape` with `rows` along `dim`."""
    return (*shape[:dim], rows, *shape[dim + 1 :])
