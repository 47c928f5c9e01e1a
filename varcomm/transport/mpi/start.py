"""Start MPI in each rank, so that all are in one ``MPI.COMM_WORLD``, whoever started them.

Under ``mpirun``, ``mpiexec`` and most ``srun`` a process manager of MPI has started the ranks, and
the library finds the others by itself. Under torchrun, in ``varcomm.launch`` and under a ``srun``
without such a plugin each process would be a job of its own; there varcomm is the process manager
(:mod:`varcomm.transport.mpi.pmi`). MPICH and what derives from it can be started so, Open MPI not.

mpi4py's wheels work with MPICH, Intel MPI and Open MPI, and load at import the first ``libmpi``
that they find: beside the interpreter, where ``pip install mpich`` puts it, then where the system's
loader looks. ``MPI4PY_LIBMPI=<path>`` names another one, ``MPI4PY_MPIABI=openmpi`` one of the
kinds. It must be that of the ``mpiexec`` in use. [1]_

.. [1] https://mpi4py.readthedocs.io/en/stable/install.html
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from varcomm.errors import LaunchError, MissingModuleError
from varcomm.transport.environment import Place
from varcomm.transport.fresh_store import meeting_store
from varcomm.transport.mpi import pmi

try:
    from mpi4py import MPI

    from varcomm.transport.mpi.progress import move_on
except (ImportError, RuntimeError) as error:  # a RuntimeError where no libmpi can be loaded
    raise MissingModuleError(
        'backend "mpi" needs mpi4py and an MPI library: pip install "varcomm[mpi]". '
        f"The import of mpi4py.MPI says: {error}"
    ) from error

__all__ = ["start"]

logger = logging.getLogger("varcomm")

_PAUSE = 0.005  # seconds between two looks at who else has come to the end


def start(place: Place, limit: timedelta) -> Store:
    """Start MPI unless it is started, and check that it knows the ranks of `place`; collective.

    MPI that is started here is ended at exit, when all ranks have come there; not after an uncaught
    exception, so that the launcher sees a rank that has failed and ends the others.

    Parameters
    ----------
    place : Place
        Of this rank, read with ``mpi=True``.
    limit : timedelta
        How long to wait for the others. If MPI itself still waits for them then, the process ends
        with code 1 and writes where it stands: nothing else interrupts that.

    Returns
    -------
    torch.distributed.Store
        Common to the ranks of this start.

    Raises
    ------
    LaunchError
        If MPI has other ranks than the launcher, cannot be started under this launcher, or does
        not allow calls from several threads.
    RuntimeError
        If the ranks do not find each other: of torch, or of MPI.
    """
    store: Store | None = None
    if not MPI.Is_initialized():
        _refuse_launcher(place)
        if place.managed:
            _initialize(limit)
        elif place.size == 1:
            with _variables({}):
                _initialize(limit)
        else:
            store = meeting_store(place, limit)
            with _variables(_process_manager(place, store, limit)):
                _initialize(limit)
        atexit.register(_finish, os.getpid(), limit)
    _check(place)
    if store is None:
        store = HashStore() if place.size == 1 else _store(limit)
    return store


def _initialize(limit: timedelta) -> None:
    # A rank that waits in here for another one holds the lock of the interpreter, and some
    # libraries wait without an end. This thread needs no lock.
    faulthandler.dump_traceback_later(limit.total_seconds(), exit=True, file=2)
    try:
        # autograd runs backward in threads of its own
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    finally:
        faulthandler.cancel_dump_traceback_later()
    _forget_shared_memory()


def _forget_shared_memory() -> None:
    """Remove the name of MPICH's shared memory, once all ranks have it; collective.

    It would stay until the next boot if the ranks were killed, a megabyte a rank.
    """
    mapped = Path("/proc/self/maps")
    names = re.findall(r"/dev/shm/mpich_shm_\S+", mapped.read_text()) if mapped.exists() else []
    MPI.COMM_WORLD.Barrier()
    for name in set(names):
        with suppress(FileNotFoundError):
            os.unlink(name)


def _check(place: Place) -> None:
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (place.rank, place.size):
        library = MPI.Get_library_version().splitlines()[0]
        raise LaunchError(
            f"this is rank {place.rank} of {place.size} to {place.launcher}, but rank {world.rank} "
            f"of {world.size} to MPI ({library}). Start it by the mpiexec of that library, or have "
            "mpi4py load another one (MPI4PY_LIBMPI); and unless a launcher of MPI has started the "
            "ranks, let nobody start MPI before varcomm.init, as `from mpi4py import MPI` does."
        )
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise LaunchError(
            f"rank {place.rank}: MPI was started without support for threads, but backward passes "
            "communicate from threads of their own. Let varcomm.init start it, or ask for "
            "MPI.THREAD_MULTIPLE."
        )


def _store(limit: timedelta) -> Store:
    """Open a store on the first rank's host, and tell the others where, by MPI."""
    world = MPI.COMM_WORLD
    neighbours = world.Split_type(MPI.COMM_TYPE_SHARED)
    one_host = neighbours.size == world.size
    neighbours.Free()
    host = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if one_host else socket.gethostname())
    store, trouble = None, None
    if world.rank == 0:
        try:
            store = TCPStore(host, 0, world.size, True, limit, wait_for_workers=False)
        except RuntimeError as error:
            trouble = str(error)
    host, port, trouble = world.bcast((host, store and store.port, trouble))
    if trouble is not None:
        raise LaunchError(f"rank 0 cannot open a store for the others at {host!r}: {trouble}")
    return store or TCPStore(host, port, world.size, False, limit, wait_for_workers=False)


def _refuse_launcher(place: Place) -> None:
    """Refuse one under which the library would end the process, or be alone."""
    library = MPI.get_vendor()[0]
    this = f"rank {place.rank} of {place.size}, started by {place.launcher}"
    if library == "Open MPI" and place.size > 1 and not place.managed:
        raise LaunchError(
            f"Open MPI can only be started by its mpirun, or by srun --mpi=pmix; this is {this}. "
            "Use one of these, or MPICH, which any launcher may start: pip install mpich."
        )
    if library != "Open MPI" and place.launcher == "Open MPI":
        raise LaunchError(
            f"this is {this}, but mpi4py has loaded {library}. Start it by its mpiexec, or "
            "have mpi4py load Open MPI: MPI4PY_MPIABI=openmpi."
        )


def _process_manager(place: Place, store: Store, limit: timedelta) -> dict[str, str]:
    """Meet the others at a process manager of our own, and return what MPI must know of it."""
    point = urlsplit(str(place.meeting_point))
    host = point.hostname or ("127.0.0.1" if point.scheme == "file" else os.environ["MASTER_ADDR"])
    seconds = limit.total_seconds()
    if place.rank == 0:
        name = uuid.uuid4().hex
        with _listener(host) as listener:
            subprocess.run(
                [sys.executable, "-I", "-S", pmi.__file__, str(place.size), str(seconds)],
                stdin=listener.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "VARCOMM_PMI_NAME": name},
                check=True,
            )
            store.set("varcomm/pmi", f"{listener.getsockname()[1]} {name}")
    port, name = store.get("varcomm/pmi").decode().split()
    this = f"rank {place.rank} of {place.size}"
    try:
        connection = socket.create_connection((host, int(port)), seconds)
    except OSError as error:
        raise LaunchError(
            f"{this} cannot reach {host}:{port}, where rank 0 runs a process manager for MPI: "
            f"{error}."
        ) from error
    all_there = b""
    with suppress(OSError):
        connection.sendall(f"{name}\n".encode())
        all_there = connection.recv(1)
    if not all_there:
        connection.close()
        raise LaunchError(
            f"{this} cannot start MPI: another rank has ended before that, or has not come within "
            f"{seconds:g} s."
        )
    connection.settimeout(None)  # MPI knows nothing of limits
    # MPI talks to it until its end, so that this object must not close it.
    return {
        "PMI_FD": str(connection.detach()),
        "PMI_RANK": str(place.rank),
        "PMI_SIZE": str(place.size),
    }


def _listener(host: str) -> socket.socket:
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server((str(address[0]), 0), family=family)
    except OSError:  # the others' address of this host may be one that it does not know
        return socket.create_server(("", 0))


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Let MPI see these variables of a process manager, instead of those of another job."""
    others = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("PMI")}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(others)


def _finish(owner: int, limit: timedelta) -> None:
    """End MPI, when all ranks have come to their end.

    Where one of them is gone, or takes longer than `limit`, this rank leaves without: whoever has
    started the ranks then sees one that has failed.
    """
    # a child that a rank has forked has no part in MPI
    forked, failed = os.getpid() != owner, getattr(sys, "last_value", None) is not None
    if forked or failed or MPI.Is_finalized():
        return
    # MPI would wait as well, but with all of a processor, and without any other thread.
    all_here, end = MPI.COMM_WORLD.Ibarrier(), time.monotonic() + limit.total_seconds()
    while not all_here.Test():
        if time.monotonic() > end:
            logger.error(
                "rank %d of %d: after %g s not all ranks have come to their end; it leaves MPI "
                "without them.",
                MPI.COMM_WORLD.rank,
                MPI.COMM_WORLD.size,
                limit.total_seconds(),
            )
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # an exit handler has no other way to tell
        move_on()  # others may wait for what this rank has under way
        time.sleep(_PAUSE)
    MPI.Finalize()
