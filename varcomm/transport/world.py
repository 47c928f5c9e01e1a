"""The world of all ranks that a launcher started: :func:`init` and how its ranks meet."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import re
import socket
import sys
import time
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

# imported after `join`, its functions would keep the world as a default argument
import torch.distributed.nn.functional
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
    rendezvous,
)

from varcomm.errors import ArgumentError, LaunchError, MissingPackageError, VarcommError
from varcomm.transport import environment
from varcomm.transport.debug import checked_seconds, is_on
from varcomm.transport.environment import Place
from varcomm.transport.group import MANY, compare_calls, forget_destroyed, resolve
from varcomm.transport.notes import note_exceptions

logger = logging.getLogger("varcomm")


@dataclass(frozen=True)
class World:
    """Place of this process among all ranks of the job.

    Attributes
    ----------
    rank : int
        The index of this rank.
    size : int
        The number of ranks.
    local_rank : int
        The index of this rank on its host.
    device : torch.device
        Device of this rank's tensors: its GPU with NCCL, otherwise the CPU.

    See Also
    --------
    init, launch

    Examples
    --------
    >>> import varcomm
    >>> varcomm.launch(lambda rank: varcomm.init().device, 2)
    [device(type='cpu'), device(type='cpu')]
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device


def init(
    backend: str | None = None, timeout: float | timedelta = 600.0, *, agreement: bool | None = None
) -> World:
    """Join the ranks of the job.

    The call reads the variables of torchrun, ``mpirun`` (Open MPI, MPICH) or ``srun``. Without a
    launcher, this process is the only rank. If ``torch.distributed`` is initialised already, the
    call only describes the world.

    Parameters
    ----------
    backend : str, optional
        As in :func:`torch.distributed.init_process_group`. The default is NCCL and Gloo if there
        are GPUs. Without GPUs it is ``"mpi"`` if ``mpiexec`` or ``mpirun`` started ranks that
        mpi4py serves, and otherwise Gloo. ``"mpi"`` uses Gloo for groups and objects, and MPI with
        mpi4py for varcomm's collectives and plans. It also works under ``srun``; ``MPI4PY_LIBMPI``
        names its library.
    timeout : float or timedelta
        Timeout in seconds of joining and of each collective; at most 24 days.
    agreement : bool, optional
        Whether sums over ranks compare the calls that ranks have made, and entries of parameters;
        the same on all ranks. None leaves it as it is, at first True.

    Returns
    -------
    World
        This rank, the number of ranks, and this rank's device.

    Raises
    ------
    ArgumentError
        If `timeout` is not a positive number or timedelta, or backend combines MPI with another
        backend.
    LaunchError
        If the launcher's variables are wrong, the host has fewer GPUs than ranks, ranks cannot
        connect to each other, or MPI has different ranks.
    MissingPackageError
        If `backend` is MPI, and mpi4py or an MPI library is not installed.

    See Also
    --------
    launch, World

    Notes
    -----
    For tests, ``VARCOMM_SHARE_GPU=1`` lets NCCL ranks of one host share its GPUs. Ranks on one GPU
    get different values of ``NCCL_HOSTID``, and their messages go through sockets. NVIDIA does not
    support this.

    Examples
    --------
    >>> import varcomm
    >>> varcomm.launch(lambda rank: varcomm.init().size, 2)
    [2, 2]
    """
    if not dist.is_initialized():
        if backend is None and _has_mpi(timeout):
            backend = "mpi"
        join(environment.read(os.environ, uses_mpi(backend)), backend, timeout)
    if agreement not in (None, True, False):
        raise ArgumentError(f"agreement must be True, False or None; got {agreement!r}.")
    if agreement is not None:
        resolve(None)  # whose log those of other groups follow
        compare_calls(agreement)
    rank = local_rank = dist.get_rank()
    with suppress(LaunchError):  # without a launcher, all ranks are on one host
        place = environment.read(os.environ, mpi=True)  # needs no meeting point
        local_rank = place.local_rank if place.rank == rank else rank
    on_gpu = "nccl" in dist.get_backend_config()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return World(rank, dist.get_world_size(), local_rank, device)


def _has_mpi(timeout: float | timedelta) -> bool:
    """Return whether a launcher of MPI started ranks on CPUs that mpi4py serves; starts MPI."""
    place = environment.read(os.environ, mpi=True)
    if place.launcher not in ("Open MPI", "MPICH") or torch.cuda.is_available():
        return False
    try:
        from varcomm.transport.engines import mpi  # mpi4py is an optional package

        mpi.start(place, timedelta(seconds=checked_seconds(timeout)))
    except (MissingPackageError, LaunchError) as error:
        if place.rank == 0:
            logger.warning("varcomm runs over Gloo under %s: %s", place.launcher, error)
        return False
    return True


def uses_mpi(backend: str | None) -> bool:
    """Return whether a backend is MPI; ArgumentError if it combines MPI with another."""
    if backend is None or re.search(r"\bmpi\b", backend.lower()) is None:
        return False
    if backend.lower() != "mpi":
        raise ArgumentError(f'backend "mpi" serves every device: pass it alone; got {backend!r}.')
    return True


def join(place: Place, backend: str | None, timeout: float | timedelta) -> None:
    """Create the process group of all ranks, and bind this rank's device."""
    limit = timedelta(seconds=checked_seconds(timeout))
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    over_mpi, device = uses_mpi(backend), None
    if "nccl" in backend:
        visible = torch.cuda.device_count()
        device = torch.device("cuda", _gpu(place, visible))
        torch.cuda.set_device(device)
        if is_on("VARCOMM_SHARE_GPU"):  # NCCL refuses two ranks of one host on one GPU
            host = f"{socket.gethostname()}.{place.local_rank // visible}"
            os.environ.setdefault("NCCL_HOSTID", host)
    node_size = 0
    try:
        if over_mpi:
            from varcomm.transport.engines import mpi  # mpi4py is an optional package

            mpi.start(place, limit)
            store = mpi.store_of(limit)
        else:
            store = meeting_store(place, limit)
        dist.init_process_group(
            "gloo" if over_mpi else backend,
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=limit,
            device_id=device,
        )
        if place.size >= MANY:
            node_size = _node_size(store, place)
    except VarcommError:
        raise
    except (RuntimeError, ValueError) as error:
        where = "" if place.meeting_point is None else f" at {place.meeting_point}"
        raise LaunchError(
            f"rank {place.rank} of {place.size} (started by {place.launcher}) could not join "
            f"the others{where} with backend {backend!r}: {error}"
        ) from error
    resolve(None).over_mpi, resolve(None).node_size = over_mpi, node_size
    note_exceptions()
    atexit.register(_leave, weakref.ref(dist.group.WORLD), os.getpid())
    logger.debug(
        "rank %d of %d joined by %s, backend %s", place.rank, place.size, place.launcher, backend
    )


def _node_size(store: Store, place: Place) -> int:
    """Return the ranks on each host, if all have as many consecutive ranks, else 0; collective."""
    size = place.local_size
    if not size or place.rank % size != place.local_rank:
        size = 0
    store.add(f"varcomm/hosts of {size}", 1)
    if store.add("varcomm/hosts", 1) == place.size:
        store.set("varcomm/hosts known", "yes")
    store.get("varcomm/hosts known")  # waits until all have counted
    return size if store.add(f"varcomm/hosts of {size}", 0) == place.size else 0


def _gpu(place: Place, visible: int) -> int:
    """Return the index of this rank's GPU, among those that it sees."""
    if place.local_rank < visible:
        return place.local_rank
    # launchers of MPI and SLURM can bind one GPU to each rank, which then sees no other
    if visible == 1 and place.launcher in {"Open MPI", "MPICH", "SLURM"}:
        return 0
    if visible and is_on("VARCOMM_SHARE_GPU"):
        return place.local_rank % visible
    raise LaunchError(
        f"rank {place.rank} is local rank {place.local_rank} on a host where it sees {visible} "
        'GPUs. Start one rank per GPU, or run on the CPU: varcomm.init(backend="gloo"). For a '
        "test, VARCOMM_SHARE_GPU=1 lets ranks share GPUs."
    )


def _leave(group: Callable[[], object], owner: int) -> None:
    """Destroy the process group at exit: its threads could abort the ending interpreter."""
    # after an uncaught exception the peers may wait in a collective; a forked child is not a member
    failed, forked = getattr(sys, "last_value", None) is not None, os.getpid() != owner
    if forked or failed:
        return
    if dist.is_initialized() and dist.group.WORLD is group():
        for step in resolve(None).captured:
            step.reset()  # NCCL waits for the end of each graph with its messages
        dist.destroy_process_group()
    forget_destroyed()  # those that the program has destroyed, too
    gc.collect()  # cycles of a model and its hooks hold the group


def meeting_store(place: Place, limit: timedelta) -> Store:
    """Return a store common to the ranks of this start, and to them alone; collective.

    torchrun's agent serves one store for all its starts. After a failure the store still holds the
    addresses of the ended ranks (pytorch issue 135712), and no variable identifies the start. So
    each rank writes a new name. Rank 0 answers every name, those of ended ranks as well, until all
    ranks have come to the part of the store in its answer, or raises RuntimeError after `limit`.
    """
    if place.size == 1:
        return HashStore()
    met = rendezvous(str(place.meeting_point), place.rank, place.size, timeout=limit)
    store: Store = next(met)[0]
    store.set_timeout(limit)
    if not place.lasting_store:
        return store
    name = uuid.uuid4().hex
    if place.rank == 0:
        here = f"varcomm/start/{name}"
        _gather(store, here, place.size, limit)
    else:
        store.set(f"varcomm/rank/{place.rank}", name)
        here = store.get(f"varcomm/answer/{name}").decode()
        store.delete_key(f"varcomm/answer/{name}")
        store.add(f"{here}/come", 1)
    return PrefixStore(here, store)


def _gather(store: Store, here: str, size: int, limit: timedelta) -> None:
    """Answer the other ranks with `here`, until all have come there."""
    deadline = time.monotonic() + limit.total_seconds()
    keys = [f"varcomm/rank/{rank}" for rank in range(1, size)]
    answered: set[bytes] = set()
    while (come := store.add(f"{here}/come", 0)) < size - 1:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"after {limit.total_seconds():g} s, {come + 1} of {size} ranks have come."
            )
        if store.check(keys):
            for name in set(store.multi_get(keys)) - answered:
                store.set(f"varcomm/answer/{name.decode()}", here)
                answered.add(name)
        time.sleep(0.02)
