"""Join the ranks that a launcher started: :func:`init` and the record it returns."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

# Its functions have the world at the time of this import as a default argument. Where PyG imports
# it after `join`, they keep the group, and `_leave` could not end its threads.
import torch.distributed.nn.functional

from varcomm.errors import ArgumentError, LaunchError, VarcommError
from varcomm.transport import environment
from varcomm.transport.environment import Place
from varcomm.transport.fresh_store import meeting_store
from varcomm.transport.timeout import seconds
from varcomm.transport.whereabouts import tell_of_exceptions

__all__ = ["World", "init", "join"]

logger = logging.getLogger("varcomm")


@dataclass(frozen=True)
class World:
    """Where this process stands among all ranks of the job.

    Attributes
    ----------
    rank : int
        This rank, ``0 <= rank < size``.
    size : int
        How many ranks there are.
    local_rank : int
        This rank among those on the same host.
    device : torch.device
        Where this rank's tensors belong: its GPU under NCCL, else the CPU.

    Examples
    --------
    >>> import varcomm
    >>> def fn(rank):
    ...     world = varcomm.init()
    ...     return world.rank, world.size, world.device.type
    >>> varcomm.launch(fn, 2)
    [(0, 2, 'cpu'), (1, 2, 'cpu')]
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def world_size(self) -> int:
        """``size``, by torch's name."""
        return self.size


def init(backend: str | None = None, timeout: float | timedelta = 600.0) -> World:
    """Join the other ranks of the job, whoever started them.

    Reads the variables of torchrun, ``mpirun`` (Open MPI, MPICH, MVAPICH2) or ``srun``; without a
    launcher this process is the only rank. Where ``torch.distributed`` is initialised already, by
    an earlier call or by the caller's own code, nothing is done but to describe it.

    Parameters
    ----------
    backend : str, optional
        As in :func:`torch.distributed.init_process_group`. By default NCCL for tensors on GPUs,
        beside Gloo for those on the CPU, where there are GPUs; else Gloo. ``"mpi"`` is MPI by
        mpi4py, which needs no PyTorch that was built with it: the extra ``varcomm[mpi]``, or
        mpi4py and an MPI of the system.
    timeout : float or timedelta
        Seconds after which joining, and each collective, gives up; ``inf`` and whatever exceeds 24
        days count as 24 days.

    Returns
    -------
    World
        Rank, size, local rank and device.

    Raises
    ------
    ArgumentError
        If `timeout` is not a positive number or timedelta, or MPI is to be combined with another
        backend.
    LaunchError
        If the launcher's variables are incomplete or contradict each other, if the host has fewer
        GPUs than ranks, or if the ranks do not find each other.
    MissingPackageError
        If `backend` is MPI, and mpi4py or an MPI library is not installed.

    Notes
    -----
    Ranks of MPI may be started by any launcher, with MPICH and what derives from it; Open MPI needs
    its ``mpirun`` or ``srun --mpi=pmix``. They find each other without ``MASTER_ADDR`` where MPI
    itself knows them. mpi4py chooses the library, by ``MPI4PY_LIBMPI`` if that is set. MPI that is
    started already is used as it is, with ``MPI.THREAD_MULTIPLE``.

    Examples
    --------
    >>> import varcomm
    >>> varcomm.launch(lambda rank: varcomm.init().size, 2)
    [2, 2]
    """
    if not dist.is_initialized():
        join(environment.read(os.environ, _asks_for_mpi(backend)), backend, timeout)
    # Derived anew at each call rather than kept: torch.distributed is the one place that holds this
    # state.
    on_gpu = "nccl" in dist.get_backend_config()
    rank = dist.get_rank()
    return World(
        rank=rank,
        size=dist.get_world_size(),
        local_rank=_local_rank(rank),
        device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),
    )


def join(place: Place, backend: str | None, timeout: float | timedelta) -> None:
    """Create the process group of all ranks, and bind this rank's device."""
    limit = timedelta(seconds=seconds(timeout))
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if _asks_for_mpi(backend) and backend.lower() != "mpi":
        # a group that is written in Python takes the place of all that torch would combine
        raise ArgumentError(
            'backend "mpi" serves tensors on every device and cannot be combined with others; '
            f'got {backend!r}. Take "mpi" alone.'
        )
    device = None
    if "nccl" in backend:
        device = torch.device("cuda", _gpu(place, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    try:
        engine = backend
        if _asks_for_mpi(backend):
            from varcomm.transport import mpi
            from varcomm.transport.mpi.start import start  # needs mpi4py, an optional package

            store = start(place, limit)
            mpi.register()
            engine = mpi.BACKEND
        else:
            store = meeting_store(place, limit)
        dist.init_process_group(
            engine,
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=limit,
            device_id=device,
        )
    except VarcommError:
        raise
    except (RuntimeError, ValueError) as error:
        where = "" if place.meeting_point is None else f" at {place.meeting_point}"
        raise LaunchError(
            f"rank {place.rank} of {place.size} (started by {place.launcher}) could not join "
            f"the others{where} with backend {backend!r}: {error}"
        ) from error
    tell_of_exceptions()
    atexit.register(_leave, weakref.ref(dist.group.WORLD), os.getpid())
    logger.debug(
        "rank %d of %d joined by %s, backend %s", place.rank, place.size, place.launcher, backend
    )


def _asks_for_mpi(backend: str | None) -> bool:
    return backend is not None and re.search(r"\bmpi\b", backend.lower()) is not None


def _gpu(place: Place, visible: int) -> int:
    """Return the index of this rank's GPU among the `visible` ones."""
    if place.local_rank < visible:
        return place.local_rank
    # These can bind a GPU to each rank, which then sees no other. NCCL refuses one that is shared.
    if visible == 1 and place.launcher in {"SLURM", "Open MPI", "MPICH", "MVAPICH2"}:
        return 0
    raise LaunchError(
        f"rank {place.rank} is local rank {place.local_rank} on a host where it sees "
        f"{visible} GPUs. Start at most one rank per GPU, or run on the CPU: "
        'varcomm.init(backend="gloo").'
    )


def _local_rank(rank: int) -> int:
    """Read it from the launcher; ranks that none started are taken to be on one host."""
    try:
        place = environment.read(os.environ, mpi=True)  # where the ranks meet is no matter
    except LaunchError:
        return rank
    return place.local_rank if place.rank == rank else rank


def _leave(group: Callable[[], object], owner: int) -> None:
    """Destroy the process group at exit, if it is still the one that `join` created.

    `group` refers to it weakly, so that nothing keeps it once it is destroyed and its threads are
    joined. One that still released a tensor while the interpreter ends would abort the process.
    """
    # After an uncaught exception the peers may wait in a collective: leave without a farewell that
    # needs them.
    failed = getattr(sys, "last_value", None) is not None
    forked = os.getpid() != owner  # a child of a rank has its memory, and no part in the group
    if forked or failed or not dist.is_initialized():
        return
    if dist.group.WORLD is group():
        dist.destroy_process_group()
        gc.collect()  # cycles, as of a model and its hooks, hold the group too
