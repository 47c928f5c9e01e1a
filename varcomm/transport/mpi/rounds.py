"""Collectives as rounds of messages: generators that start a round and are resumed when it is done.

Messages go straight from where tensors lie to where they belong; large MPI collectives do not
(measured: ``engine.py``). Each checks its tensors before it sends anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI

from varcomm.transport.mpi.buffers import (
    COLLECTIVE,
    cut,
    messages,
    readable,
    view_of,
    whole,
    writable,
)
from varcomm.transport.mpi.reductions import checked, combine
from varcomm.transport.mpi.work import Steps

__all__ = [
    "all_gather",
    "all_gather_single",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "receive",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]

# Bytes of a tensor up to which each rank reduces all of it, in one round of messages. Beyond, each
# reduces a piece for all, in two rounds.
_ONE_ROUND = 16 * 1024

Tensors = Sequence[torch.Tensor]


def broadcast(comm: MPI.Intracomm, tensor: torch.Tensor, root: int) -> Steps:
    """Overwrite by what the root has."""
    data = readable(tensor) if comm.rank == root else writable(tensor)
    if data.numel():
        yield [comm.Ibcast(view_of(whole(root, data)), root)]
    if comm.rank != root:
        _arrived(tensor, data)


def all_gather(comm: MPI.Intracomm, places: Tensors, tensor: torch.Tensor) -> Steps:
    """Fill the places, which may differ in size, by what each rank has."""
    data, rooms = readable(tensor), [writable(place) for place in places]
    _one_each(comm, places)
    _copy(rooms[comm.rank], data)
    others = _others(comm)
    yield messages(
        comm,
        [whole(rank, rooms[rank]) for rank in others],
        [whole(rank, data) for rank in others],
        COLLECTIVE,
    )
    for place, room in zip(places, rooms, strict=True):
        _arrived(place, room)


def all_gather_single(comm: MPI.Intracomm, out: torch.Tensor, tensor: torch.Tensor) -> Steps:
    """Fill `out` by what each rank has, of one size."""
    data, room = readable(tensor), writable(out)
    if out.numel() != comm.size * data.numel():
        raise RuntimeError(
            f"{comm.size} times {data.numel()} elements do not fill an output of {out.numel()}."
        )
    _copy(room.view(-1).narrow(0, comm.rank * data.numel(), data.numel()), data)
    bytes_each = data.numel() * data.element_size()
    others = _others(comm)
    places = cut(room.data_ptr(), [bytes_each] * comm.size)
    yield messages(
        comm, [places[rank] for rank in others], [whole(rank, data) for rank in others], COLLECTIVE
    )
    _arrived(out, room)


def gather(comm: MPI.Intracomm, places: Tensors, tensor: torch.Tensor, root: int) -> Steps:
    """Fill the root's places by what each rank has."""
    data = readable(tensor)
    if comm.rank != root:
        yield messages(comm, (), [whole(root, data)], COLLECTIVE)
        return
    _one_each(comm, places)
    rooms = [writable(place) for place in places]
    _copy(rooms[root], data)
    yield messages(comm, [whole(rank, rooms[rank]) for rank in _others(comm)], (), COLLECTIVE)
    for place, room in zip(places, rooms, strict=True):
        _arrived(place, room)


def scatter(comm: MPI.Intracomm, out: torch.Tensor, parts: Tensors, root: int) -> Steps:
    """Fill `out` by what the root has for this rank."""
    room = writable(out)
    if comm.rank == root:
        _one_each(comm, parts)
        data = [readable(part) for part in parts]
        _copy(room, data[root])
        yield messages(comm, (), [whole(rank, data[rank]) for rank in _others(comm)], COLLECTIVE)
    else:
        yield messages(comm, [whole(root, room)], (), COLLECTIVE)
    _arrived(out, room)


def all_to_all(comm: MPI.Intracomm, places: Tensors, parts: Tensors) -> Steps:
    """Send a part to each rank, and fill a place by what each sends."""
    _one_each(comm, places)
    _one_each(comm, parts)
    data, rooms = [readable(part) for part in parts], [writable(place) for place in places]
    _copy(rooms[comm.rank], data[comm.rank])
    others = _others(comm)
    yield messages(
        comm,
        [whole(rank, rooms[rank]) for rank in others],
        [whole(rank, data[rank]) for rank in others],
        COLLECTIVE,
    )
    for place, room in zip(places, rooms, strict=True):
        _arrived(place, room)


def all_to_all_single(
    comm: MPI.Intracomm,
    out: torch.Tensor,
    tensor: torch.Tensor,
    recv: Sequence[int],
    send: Sequence[int],
) -> Steps:
    """Send ``send[r]`` rows to rank r, and fill `out` by ``recv[r]`` rows; none given: even."""
    data, room = readable(tensor), writable(out)
    sent = list(data.split(_splits(comm, data, send, "input")))
    places = list(room.split(_splits(comm, room, recv, "output")))
    _copy(places[comm.rank], sent[comm.rank])
    others = _others(comm)
    yield messages(
        comm,
        [whole(rank, places[rank]) for rank in others],
        [whole(rank, sent[rank]) for rank in others],
        COLLECTIVE,
    )
    _arrived(out, room)


def reduce(
    comm: MPI.Intracomm, tensor: torch.Tensor, op: Any, second_round: int, root: int | None = None
) -> Steps:
    """Overwrite by what `op` makes of all ranks' tensors: on the root, or on every rank."""
    checked(op, tensor.dtype)
    data, others = readable(tensor), _others(comm)
    has_result = root in (None, comm.rank)
    receivers = [rank for rank in others if root in (None, rank)]
    out = writable(tensor) if has_result else torch.empty_like(data)
    size = data.numel() * data.element_size()
    if comm.size == 2 or size <= _ONE_ROUND:
        parts = _parts(comm, data if has_result else data.view(-1)[:0])
        yield messages(
            comm,
            [whole(rank, parts[rank]) for rank in others],
            [whole(rank, data) for rank in receivers],
            COLLECTIVE,
        )
        parts[comm.rank] = data
        if has_result:
            combine(op, parts, out)
            _arrived(tensor, out)
        return
    # each rank reduces its piece, and tells the receivers
    each, more = divmod(data.numel(), comm.size)
    counts = [each + (rank < more) for rank in range(comm.size)]
    pieces, results = data.view(-1).split(counts), out.view(-1).split(counts)
    parts = _parts(comm, pieces[comm.rank])
    yield messages(
        comm,
        [whole(rank, parts[rank]) for rank in others],
        [whole(rank, pieces[rank]) for rank in others],
        COLLECTIVE,
    )
    combine(op, parts, results[comm.rank])
    yield messages(
        comm,
        [whole(rank, results[rank]) for rank in others if has_result],
        [whole(rank, results[comm.rank]) for rank in receivers],
        second_round,
    )
    if has_result:
        _arrived(tensor, out)


def reduce_scatter(comm: MPI.Intracomm, out: torch.Tensor, parts: Tensors, op: Any) -> Steps:
    """Fill `out` by what `op` makes of the parts that all ranks have for this one."""
    checked(op, out.dtype)
    _one_each(comm, parts)
    data, others = [readable(part) for part in parts], _others(comm)
    arriving = _parts(comm, data[comm.rank])
    yield messages(
        comm,
        [whole(rank, arriving[rank]) for rank in others],
        [whole(rank, data[rank]) for rank in others],
        COLLECTIVE,
    )
    total = torch.empty_like(data[comm.rank])
    combine(op, arriving, total)
    _copy(out.detach(), total)


def barrier(comm: MPI.Intracomm) -> Steps:
    """Be done when all ranks have called."""
    yield [comm.Ibarrier()]


def send(comm: MPI.Intracomm, tensors: Tensors, peer: int, tag: int) -> Steps:
    """Send to one rank."""
    data = [readable(tensor) for tensor in tensors]
    yield [comm.Isend(view_of(whole(peer, part)), peer, tag) for part in data]


def receive(
    comm: MPI.Intracomm, tensors: Tensors, peer: int, tag: int, status: MPI.Status
) -> Steps:
    """Receive from one rank, or from any."""
    rooms = [writable(tensor) for tensor in tensors]
    pieces = [whole(peer, room) for room in rooms]
    requests = [comm.Irecv(view_of(piece), peer, tag) for piece in pieces]
    for piece, request in zip(pieces, requests, strict=True):
        while not request.Test(status):
            yield None
        if (got := status.Get_count(MPI.BYTE)) != piece[2]:
            raise RuntimeError(
                f"rank {status.Get_source()} sent {got} bytes, where rank {comm.rank} expects "
                f"{piece[2]}. Give a tensor of the same shape and dtype to both."
            )
    for tensor, room in zip(tensors, rooms, strict=True):
        _arrived(tensor, room)


def _others(comm: MPI.Intracomm) -> list[int]:
    """Return all ranks but this one, from the next one on: not all send to the same one first."""
    return [*range(comm.rank + 1, comm.size), *range(comm.rank)]


def _one_each(comm: MPI.Intracomm, tensors: Tensors) -> None:
    if len(tensors) != comm.size:
        raise RuntimeError(f"one tensor a rank is needed: {comm.size}; got {len(tensors)}.")


def _splits(
    comm: MPI.Intracomm, tensor: torch.Tensor, sizes: Sequence[int], what: str
) -> list[int]:
    rows = len(tensor) if tensor.dim() else 0
    sizes = list(sizes) or [rows // comm.size] * comm.size
    if len(sizes) != comm.size or sum(sizes) != rows:
        raise RuntimeError(
            f"{what} split sizes must be one a rank, {comm.size}, that sum to {rows} rows; "
            f"got {sizes}."
        )
    return sizes


def _parts(comm: MPI.Intracomm, own: torch.Tensor) -> list[torch.Tensor]:
    """Return room for tensors like `own` from the other ranks, with it in its place."""
    return [own if rank == comm.rank else torch.empty_like(own) for rank in range(comm.size)]


def _copy(out: torch.Tensor, data: torch.Tensor) -> None:
    if out.numel() != data.numel() or out.dtype != data.dtype:
        raise RuntimeError(
            f"{data.numel()} elements of {data.dtype} do not fill {out.numel()} of {out.dtype}."
        )
    if out.data_ptr() != data.data_ptr():
        out.copy_(data.view(out.shape))


def _arrived(tensor: torch.Tensor, room: torch.Tensor) -> None:
    """Bring what has arrived elsewhere to where it belongs."""
    if room.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(room)
