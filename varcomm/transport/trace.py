"""What a call costs: a range in the profiler, and bytes counted where somebody asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = ["Call", "note", "span", "trace"]


@dataclass(frozen=True)
class Call:
    """What one rank put on the wire and took from it in one step of an operation.

    Attributes
    ----------
    name : str
        The operation, or, in a backward, its adjoint.
    sent, received : int
        Bytes to and from *other* ranks, as the algorithm needs them; an engine may forward data on
        behalf of others beyond that.
    """

    name: str
    sent: int
    received: int


# Lists that are being filled. Backward runs in threads of its own, so this is not thread-local.
_listening: list[list[Call]] = []


@contextmanager
def trace() -> Iterator[list[Call]]:
    """Record what each operation sends and receives, in forward and backward, on this rank.

    What ranks tell each other about calls is not counted: the 1 KiB by which the root of
    `broadcast` and `scatter_v` says what comes, the agreement of set-up work, and
    :func:`varcomm.debug`.

    Yields
    ------
    list of Call
        Filled while the ``with`` block runs.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     with varcomm.trace() as calls:
    ...         varcomm.all_gather_v(torch.zeros(rank + 1), [1, 2])
    ...     return calls
    >>> varcomm.launch(fn, 2)[0]
    [Call(name='all_gather_v', sent=4, received=8)]
    """
    calls: list[Call] = []
    _listening.append(calls)
    try:
        yield calls
    finally:
        # by identity: two empty lists are equal
        _listening[:] = [listener for listener in _listening if listener is not calls]


def note(name: str, rank: int, send: Sequence[int], recv: Sequence[int]) -> None:
    """Count bytes a peer for those who listen; what a rank keeps for itself costs nothing."""
    if _listening:
        call = Call(name, sum(send) - send[rank], sum(recv) - recv[rank])
        for calls in _listening:
            calls.append(call)


def span(name: str) -> torch.autograd.profiler.record_function:
    """Return a context that shows up in torch's profiler as ``varcomm::name``."""
    return torch.autograd.profiler.record_function(f"varcomm::{name}")
