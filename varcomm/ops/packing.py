"""Tensors as the engines send them: flat, in an order that does not depend on strides.

Rows travel in the logical (row-major) order of their block, whatever their memory format, so that
ranks with empty or oddly strided shards read the same order. For a dimension that is outermost in
memory, packing and unpacking are views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from varcomm.transport.engine import EngineFailure, Peers, Work, engine_for, note
from varcomm.transport.group import Group

__all__ = [
    "all_gather",
    "as_bytes",
    "back",
    "broadcast",
    "exchange",
    "flat",
    "like",
    "memory_format",
    "new",
    "pack",
    "rest",
    "taken",
    "unpack",
]

Works = Sequence[Work]

_IMAGES = {4: torch.channels_last, 5: torch.channels_last_3d}


def exchange(
    name: str,
    group: Group,
    values: torch.Tensor,
    send: Sequence[int],
    recv: Sequence[int],
    peers: Peers = "all",
    out: torch.Tensor | None = None,
) -> tuple[Works, torch.Tensor]:
    """Start to send ``send[r]`` of the flat `values` to each rank r; return what will arrive.

    It arrives in the flat `out`, if there is one. `peers` says who has something for whom.
    """
    out = values.new_empty(sum(recv)) if out is None else out
    engine = engine_for(group, values.device)
    if group.size == 1:
        return _own(name, group, values, out)
    width = values.element_size()
    sends, receives = [n * width for n in send], [n * width for n in recv]
    note(name, group, sends, receives)
    messages = as_bytes(out), as_bytes(values), receives, sends, peers
    return _begun(engine.exchange, group, *messages), out


def all_gather(
    name: str,
    group: Group,
    values: torch.Tensor,
    counts: Sequence[int],
    out: torch.Tensor | None = None,
) -> tuple[Works, torch.Tensor]:
    """Start to gather the flat `values` of every rank, ``counts[r]`` of rank r, on every rank.

    They arrive in the flat `out`, if there is one; `values` may be this rank's place in it.
    """
    out = values.new_empty(sum(counts)) if out is None else out
    engine = engine_for(group, values.device)
    if group.size == 1:
        return _own(name, group, values, out)
    width = values.element_size()
    receives = [n * width for n in counts]
    note(name, group, [receives[group.rank]] * group.size, receives)
    return _begun(engine.all_gather, group, as_bytes(out), as_bytes(values), receives), out


def broadcast(name: str, group: Group, values: torch.Tensor, src: int) -> Works:
    """Start to overwrite the flat `values` on every rank by those of `src`."""
    size = values.numel() * values.element_size()
    at_src = group.rank == src
    sends = [size if at_src else 0] * group.size
    note(name, group, sends, [0 if at_src else size * (r == src) for r in range(group.size)])
    if size == 0 or group.size == 1:
        return []
    return _begun(engine_for(group, values.device).broadcast, group, as_bytes(values), src)


def _own(
    name: str, group: Group, values: torch.Tensor, out: torch.Tensor
) -> tuple[Works, torch.Tensor]:
    """Copy the values of a rank that has no peers."""
    note(name, group, (), ())
    if values.data_ptr() != out.data_ptr():
        out.copy_(values)
    return (), out


def _begun(start: Callable[..., Works], *arguments: Any) -> Works:
    try:
        return start(*arguments)
    except RuntimeError as error:
        raise EngineFailure(str(error)) from error


def flat(x: torch.Tensor) -> torch.Tensor:
    """Return the elements of `x` in logical order, as one dimension; a view where that is possible.

    Never of `x` itself if that is to be received into.
    """
    if x.is_complex() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    return x.contiguous().view(-1)


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return a view of flat values as bytes."""
    if values.numel() <= 1:  # contiguous at any stride, but seen as bytes only at stride 1
        values = values.as_strided((values.numel(),), (1,))
    return values.view(torch.uint8)


def pack(x: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
    """Return the blocks of `sizes` rows along `dim`, each in logical order, one after the other.

    A view where `dim` is outermost and `x` contiguous, else one copy.
    """
    if dim == 0 or _is_outermost(x.shape, dim):
        return flat(x)
    out = x.new_empty(x.numel())
    for place, block in zip(
        _blocks(out, x.shape, sizes, dim), x.split(list(sizes), dim), strict=True
    ):
        place.copy_(block)
    return out


def unpack(
    values: torch.Tensor,
    shape: Sequence[int],
    sizes: Sequence[int],
    dim: int,
    into: torch.memory_format,
) -> torch.Tensor:
    """Undo :func:`pack`: return the tensor of `shape` whose blocks along `dim` are in `values`."""
    if dim == 0 or _is_outermost(shape, dim):
        rows = values.view(shape)
        return rows if into == torch.contiguous_format else rows.contiguous(memory_format=into)
    out = torch.empty(shape, dtype=values.dtype, device=values.device, memory_format=into)
    for block, place in zip(
        _blocks(values, shape, sizes, dim), out.split(list(sizes), dim), strict=True
    ):
        place.copy_(block)
    return out


def back(x: torch.Tensor, dim: int, into: torch.memory_format) -> torch.Tensor:
    """Return `x` with its first dimension moved to `dim`.

    A view, except into the formats of images: strides that are not row-major cost less than a
    second copy.
    """
    moved = x.movedim(0, dim) if dim else x
    return moved if into == torch.contiguous_format else moved.contiguous(memory_format=into)


def memory_format(x: torch.Tensor) -> torch.memory_format:
    """Return which of torch's formats `x` is in, so that the result can be in the same."""
    if x.is_contiguous() or x.dim() not in _IMAGES:
        return torch.contiguous_format
    images = _IMAGES[x.dim()]
    return images if x.is_contiguous(memory_format=images) else torch.contiguous_format


def new(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return an uninitialised tensor of `shape`, in the memory format of `x`."""
    return x.new_empty(tuple(shape)).contiguous(memory_format=memory_format(x))


def rest(shape: Sequence[int], dim: int) -> list[int]:
    """Return `shape` without `dim`: what one row is."""
    return [*shape[:dim], *shape[dim + 1 :]]


def taken(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return some rows, of any dtype."""
    # index_select is the faster one, but of one dimension it does not take unsigned integers
    return rows[index] if rows.dim() == 1 else rows.index_select(0, index)


def like(shape: Sequence[int], dim: int, rows: int) -> tuple[int, ...]:
    """Return `shape` with `rows` along `dim`.

    >>> like((4, 3), 1, 7)
    (4, 7)
    """
    return (*shape[:dim], rows, *shape[dim + 1 :])


def _is_outermost(shape: Sequence[int], dim: int) -> bool:
    return prod(shape[:dim]) == 1


def _blocks(
    values: torch.Tensor, shape: Sequence[int], sizes: Sequence[int], dim: int
) -> list[torch.Tensor]:
    shapes = [like(shape, dim, rows) for rows in sizes]
    parts = values.split([prod(block) for block in shapes])
    return [part.view(block) for part, block in zip(parts, shapes, strict=True)]
