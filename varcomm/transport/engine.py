"""Engines, which move bytes of uneven length between ranks: their interface and their choice.

An engine has no notion of rows, dtypes or gradients. All its tensors are flat, contiguous and of
uint8; all counts are bytes per rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from varcomm.errors import GroupError
from varcomm.transport.group import Group, resolve

__all__ = [
    "NO_LIMIT",
    "Engine",
    "EngineFailure",
    "Peers",
    "Pending",
    "Work",
    "engine_for",
    "is_simulated",
    "pieces",
    "wait_for",
]

# Backends of torch.distributed and kinds of device that have an engine.
_SERVED = {(b, d) for b in ("gloo", "fake") for d in ("cpu", "cuda")} | {("nccl", "cuda")}

NO_LIMIT = timedelta(0)  # the timeout of the group holds

# Pairs of ranks with a message, as all ranks know them: most pairs; few, as the neighbours of a
# plan; or one rank with all others.
Peers: TypeAlias = Literal["all", "neighbours", "one"]


class Work(Protocol):
    """Communication in flight, as torch.distributed's ``Work``."""

    def wait(self, timeout: timedelta = NO_LIMIT) -> object:
        """Return when it is done on this rank; on a GPU, let the current stream wait for it.

        Raises RuntimeError after `timeout`, or after the timeout of the group.
        """

    def is_completed(self) -> bool:
        """Return whether it is done, without waiting; False if that is unknown."""


class EngineFailure(RuntimeError):
    """The error of an engine in a call."""


@dataclass
class Pending:
    """Communication in flight, and the function that returns its result after the works."""

    works: Sequence[Work]
    finish: Callable[[], torch.Tensor]
    number: int | None = None  # of the call, if ranks compare calls
    failed: Callable[[EngineFailure], Exception] | None = None  # makes the error of the call

    def wait(self) -> torch.Tensor:
        """Wait until this rank's part is done, and return the result."""
        try:
            wait_for(self.works)
            return self.finish()
        except EngineFailure as error:
            raise self.failed(error) if self.failed else error from error.__cause__


def wait_for(works: Iterable[Work], timeout: timedelta = NO_LIMIT) -> None:
    """Wait for all works, or raise EngineFailure."""
    try:
        for work in works:
            work.wait(timeout)
    except RuntimeError as error:
        raise EngineFailure(str(error)) from error


class Engine(ABC):
    """Uneven collectives on bytes.

    Each call starts at once, and is done on this rank after its works; inputs must not change until
    then. Empty messages are not sent.

    A `simulated` engine answers in place of the other ranks, which do not exist: each repeats the
    metadata of this rank, and its data are zeros.
    """

    simulated: ClassVar[bool] = False

    @abstractmethod
    def all_gather(
        self, group: Group, out: torch.Tensor, data: torch.Tensor, counts: Sequence[int]
    ) -> Sequence[Work]:
        """Fill `out` on every rank with the ``counts[r]`` bytes of each rank r, in order.

        `data` may be this rank's place in `out`.
        """

    def all_gather_metadata(
        self,
        group: Group,
        out: torch.Tensor,
        data: torch.Tensor,
        counts: Sequence[int],
        timeout: timedelta,
    ) -> None:
        """Run :meth:`all_gather` to its end, for what ranks say of themselves."""
        wait_for(self.all_gather(group, out, data, counts), timeout)

    @abstractmethod
    def exchange(
        self,
        group: Group,
        out: torch.Tensor,
        data: torch.Tensor,
        recv: Sequence[int],
        send: Sequence[int],
        peers: Peers,
    ) -> Sequence[Work]:
        """Send ``send[r]`` bytes of `data` to rank r, and fill `out` sender by sender."""

    @abstractmethod
    def broadcast(self, group: Group, data: torch.Tensor, src: int) -> Sequence[Work]:
        """Overwrite `data` on every rank by that of `src`."""

    def broadcast_array(
        self, group: Group, data: np.ndarray[Any, np.dtype[np.uint8]], src: int
    ) -> Sequence[Work]:
        """Overwrite an array on every rank by that of `src`: torch.func may wrap new tensors."""
        return self.broadcast(group, torch.from_numpy(data), src)

    def leave(self, group: Group) -> None:  # noqa: B027, an engine may have no way to do it
        """End the waiting of other ranks for this one, after a failure."""


def pieces(
    data: torch.Tensor, counts: Sequence[int], start: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the piece of each rank that has bytes in `data`, from rank `start` on, cyclically.

    >>> list(pieces(torch.arange(3), [2, 0, 1], 1))
    [(2, tensor([2])), (0, tensor([0, 1]))]
    """
    ends = list(accumulate(counts))
    for rank in (*range(start, len(ends)), *range(start)):
        if counts[rank]:
            yield rank, data[ends[rank] - counts[rank] : ends[rank]]


def engine_for(group: Group, device: torch.device) -> Engine:
    """Return the engine that moves bytes on `device` among the ranks of `group`.

    Raises GroupError if the group has no engine for the device.
    """
    engine: Engine | None = group.engines.get(device)
    if engine is None:
        engine = group.engines[device] = _found(group, device)
    return engine


def is_simulated(group: Group) -> bool:
    """Return whether the engine of the group answers for ranks that do not exist."""
    return engine_for(group, group.device()).simulated


def _found(group: Group, device: torch.device) -> Engine:
    """Import and return the engine: a process imports only the engines that its groups use."""
    backends = group.backends()
    backend = backends.get(device.type, "")
    if (backend, device.type) not in _SERVED:
        served = [kind for kind, backend in backends.items() if (backend, kind) in _SERVED]
        raise GroupError(
            f"{group}: the tensor is on {device}, but this group has an engine for "
            f"{' and '.join(served) or 'no device'} only (torch.distributed's backends: "
            f"{dist.get_backend_config(group.process_group)}). Move the tensor, or call "
            "varcomm.init with a backend for its device: gloo or mpi for cpu, nccl for cuda."
        )
    if backend == "nccl":
        from varcomm.transport.nccl import NCCL

        return NCCL()
    if backend == "fake":
        from varcomm.transport.simulated import Simulated

        return Simulated()
    engine: Engine
    direct = device.type == "cpu"
    if resolve(None).over_mpi:
        from varcomm.transport.mpi import MPIEngine, gpu_aware  # mpi4py is an optional package

        engine, direct = MPIEngine(), direct or gpu_aware()
    else:
        from varcomm.transport.gloo import Gloo

        engine = Gloo()
    if direct:
        return engine
    from varcomm.transport.pinned import Pinned

    return Pinned(engine)
