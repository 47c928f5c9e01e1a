"""What mpi4py is given: the bytes of tensors, by their addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TypeAlias

import torch
from mpi4py import MPI

__all__ = [
    "COLLECTIVE",
    "Piece",
    "cut",
    "gpu_aware",
    "messages",
    "readable",
    "second_round",
    "users",
    "view_of",
    "whole",
    "writable",
]

# Tags of messages. Ranks call collectives in one order, by which first rounds find each other.
# Second rounds begin when the first ones happen to be done, so each has a tag of its own. Users'
# tags lie above.
COLLECTIVE = 0
_ROUNDS = 1024


def second_round(call: int) -> int:
    """Return the tag of a call's second round."""
    return 1 + call % (_ROUNDS - 1)


def users(tag: int) -> int:
    """Return what MPI is given for a tag of the user's."""
    return tag + _ROUNDS


# A rank, and the bytes that go to it or come from it: their address and number.
Piece: TypeAlias = tuple[int, int, int]

# 0.1 us. A tensor itself would be described by DLPack, which takes 5.
_at = MPI.buffer.fromaddress
_BYTE = MPI.BYTE


def messages(
    comm: MPI.Comm, receive: Iterable[Piece], send: Iterable[Piece], tag: int
) -> list[MPI.Request]:
    """Start to receive and to send; empty messages are left out."""
    requests = [comm.Irecv([_at(place, n), _BYTE], peer, tag) for peer, place, n in receive if n]
    requests += [comm.Isend([_at(place, n), _BYTE], peer, tag) for peer, place, n in send if n]
    return requests


def cut(address: int, counts: Sequence[int]) -> list[Piece]:
    """Return the pieces of what lies at an address, ``counts[r]`` bytes for each rank r.

    >>> cut(100, [2, 0, 1])
    [(0, 100, 2), (1, 102, 0), (2, 102, 1)]
    """
    pieces = []
    for rank, count in enumerate(counts):
        pieces.append((rank, address, count))
        address += count
    return pieces


def whole(rank: int, tensor: torch.Tensor) -> Piece:
    """Return a contiguous tensor as one piece."""
    return rank, tensor.data_ptr(), tensor.numel() * tensor.element_size()


def view_of(piece: Piece) -> list[object]:
    """Return a piece as mpi4py takes it."""
    _, address, count = piece
    return [_at(address, count), _BYTE]


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same values whose bytes lie where MPI can read them.

    It is `tensor` itself, where it may be.
    """
    if tensor.layout != torch.strided:
        raise RuntimeError(f"MPI moves dense tensors; got one of layout {tensor.layout}.")
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not plain.is_cuda:
        return plain
    if not gpu_aware():
        plain = torch.empty_like(plain, device="cpu", pin_memory=True).copy_(plain)
    torch.cuda.current_stream(tensor.device).synchronize()
    return plain


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape and dtype where MPI can write bytes, as the above."""
    if tensor.layout != torch.strided:
        raise RuntimeError(f"MPI moves dense tensors; got one of layout {tensor.layout}.")
    direct = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    if direct and (not tensor.is_cuda or gpu_aware()):
        if tensor.is_cuda:  # what it held may still be read there
            torch.cuda.current_stream(tensor.device).synchronize()
        return tensor.detach()
    staged = tensor.is_cuda and not gpu_aware()
    return torch.empty(
        tensor.shape,
        dtype=tensor.dtype,
        device="cpu" if staged else tensor.device,
        pin_memory=staged,
    )


@cache
def gpu_aware() -> bool:
    """Return whether this MPI reads and writes memory of CUDA devices, as it says of itself.

    Open MPI and MPICH each have a call of their own for that, which mpi4py does not offer. An MPI
    that has neither is taken not to.
    """
    library = ctypes.CDLL(MPI.__file__)
    if hasattr(library, "MPIX_Query_cuda_support"):
        return bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):
        answer, cuda = ctypes.c_int(0), 0
        library.MPIX_GPU_query_support(cuda, ctypes.byref(answer))
        return bool(answer.value)
    return False
