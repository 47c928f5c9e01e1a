"""Tensors as the engines send them: flat, in an order that does not depend on strides.

Rows travel in the logical (row-major) order of their block, whatever their memory format. For a
dimension that is outermost in memory, packing and unpacking are views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from varcomm.transport.engine import Counts, Engine, EngineFailure, Peers, Works, engine_for, note
from varcomm.transport.group import Group

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
    """Start to send ``send[r]`` of the flat `values` to each rank r; return the received values.

    They arrive in the flat `out`, if it is given. `peers` names the pairs of ranks with a message.
    """
    out = values.new_empty(sum(recv)) if out is None else out

    def begin(engine: Engine, to: torch.Tensor, data: torch.Tensor, *nbytes: Counts) -> Works:
        return engine.exchange(group, to, data, nbytes[0], nbytes[1], peers)

    return _begun(name, group, values, out, send, recv, begin), out


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
    out = values.new_empty(sum(counts)) if out is None else out

    def begin(engine: Engine, to: torch.Tensor, data: torch.Tensor, *nbytes: Counts) -> Works:
        return engine.all_gather(group, to, data, nbytes[0])

    send = [counts[group.rank]] * group.size
    return _begun(name, group, values, out, send, counts, begin), out


def broadcast(name: str, group: Group, values: torch.Tensor, src: int) -> Works:
    """Start to overwrite the flat `values` on every rank by those of `src`."""
    count, ranks = values.numel(), range(group.size)
    send = [count if group.rank == src else 0 for _ in ranks]
    recv = [count if group.rank != src == rank else 0 for rank in ranks]

    def begin(engine: Engine, to: torch.Tensor, data: torch.Tensor, *nbytes: Counts) -> Works:
        return engine.broadcast(group, data, src) if count else ()

    return _begun(name, group, values, values, send, recv, begin)


def _begun(
    name: str,
    group: Group,
    values: torch.Tensor,
    out: torch.Tensor,
    send: Sequence[int],
    recv: Sequence[int],
    begin: Callable[..., Works],
) -> Works:
    """Return ``begin(engine, out, values, recv, send)`` in bytes, as engines count."""
    engine = engine_for(group, values.device)
    if group.size == 1:
        note(name, group, (), ())
        if values.data_ptr() != out.data_ptr():
            out.copy_(values)
        return ()
    width = values.element_size()
    sends, receives = [n * width for n in send], [n * width for n in recv]
    note(name, group, sends, receives)
    try:
        return begin(engine, as_bytes(out), as_bytes(values), receives, sends)
    except RuntimeError as error:
        raise EngineFailure(str(error)) from error


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
    return values.view(-1).view(torch.uint8)


def pack(x: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
    """Return the blocks of `sizes` rows along `dim`, each in logical order, one after the other."""
    if prod(x.shape[:dim]) == 1:
        return flat(x)
    out = x.new_empty(x.numel())
    for place, block in _blocks(out, x, sizes, dim):
        place.copy_(block)
    return out


def unpack(
    values: torch.Tensor,
    shape: Sequence[int],
    sizes: Sequence[int],
    dim: int,
    into: torch.memory_format,
) -> torch.Tensor:
    """Return the tensor of `shape` whose blocks along `dim` are in `values`."""
    if dim == 0 or prod(shape[:dim]) == 1:
        rows = values if values.shape == shape else values.view(shape)
        return rows if into == torch.contiguous_format else rows.contiguous(memory_format=into)
    out = torch.empty(shape, dtype=values.dtype, device=values.device, memory_format=into)
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


def back(x: torch.Tensor, dim: int, into: torch.memory_format) -> torch.Tensor:
    """Return `x` with its first dimension moved to `dim`; a view, except into formats of images."""
    moved = x.movedim(0, dim) if dim else x
    return moved if into == torch.contiguous_format else moved.contiguous(memory_format=into)


def memory_format(x: torch.Tensor) -> torch.memory_format:
    """Return the memory format of `x`, which a result keeps."""
    if x.is_contiguous() or x.dim() not in _IMAGES:
        return torch.contiguous_format
    images = _IMAGES[x.dim()]
    return images if x.is_contiguous(memory_format=images) else torch.contiguous_format


def new(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return an uninitialised tensor of `shape`, in the memory format of `x`."""
    return x.new_empty(tuple(shape)).contiguous(memory_format=memory_format(x))


def rest(shape: Sequence[int], dim: int) -> list[int]:
    """Return `shape` without `dim`: the shape of a row."""
    return [*shape[:dim], *shape[dim + 1 :]]


def taken(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return some rows, of any dtype."""
    # index_select is faster, but refuses unsigned integers of one dimension
    return rows[index] if rows.dim() == 1 else rows.index_select(0, index)


def like(shape: Sequence[int], dim: int, rows: int) -> tuple[int, ...]:
    """Return `shape` with `rows` along `dim`."""
    return (*shape[:dim], rows, *shape[dim + 1 :])
