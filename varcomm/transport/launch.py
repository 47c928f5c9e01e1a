"""Local ranks that run functions: :func:`launch` once, :class:`Ranks` many times.

Ranks are plain interpreters, one :mod:`subprocess` each, or all below one ``mpiexec``. Processes of
:mod:`multiprocessing` would import the caller's ``__main__``, which a notebook does not have and a
script without a guard does not survive.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from varcomm.errors import LaunchError, MissingPackageError
from varcomm.sizes import at_least
from varcomm.transport.debug import checked_seconds
from varcomm.transport.worker import STOP, Report, importing_module, pickled_call, stack_file
from varcomm.transport.world import World, init, uses_mpi

__all__ = ["Ranks", "World", "init", "launch"]

T = TypeVar("T")

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from varcomm.transport.worker import main; main(*sys.argv[2:])"
)
_START_LIMIT = 180.0  # seconds for imports, on a machine that may be busy
_GRACE = 0.2  # seconds for the reports of other ranks, after one has failed
_FAREWELL = 5.0  # seconds for a rank to run its exit handlers


def launch(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float | timedelta = 300.0,
    backend: str | None = "gloo",
) -> list[T]:
    """Run ``fn(rank, *args)`` on `world_size` new local processes, joined in a process group.

    Works in a script (with or without a ``__main__`` guard), a notebook and a doctest, with
    functions, lambdas and closures defined there. Each rank runs torch with
    ``max(1, cpu_count // world_size)`` threads. `fn` may launch ranks of its own; a module that a
    rank imports may not, so guard its launches.

    Parameters
    ----------
    fn : callable
        Called as ``fn(rank, *args)`` on every rank, after :func:`init`.
    world_size : int
        Number of ranks.
    *args
        Pickled arguments of `fn`.
    timeout : float or timedelta
        Seconds for `fn` without the start of the processes; at most 24 days. Collectives of the
        world have no timeout of their own.
    backend : str or None
        As in :func:`init`; None chooses NCCL if there are GPUs; ``"mpi"`` runs ``mpiexec``.

    Returns
    -------
    list
        Results in rank order.

    Raises
    ------
    ArgumentError
        If an argument is wrong or cannot be pickled; nothing is started.
    LaunchError
        If a rank fails, dies or does not finish in time, or if a module calls this while a rank
        imports it. The message holds the traceback of the rank that failed first, or the stacks of
        unfinished ranks.
    MissingPackageError
        If `fn` or `args` need cloudpickle, or `backend` an MPI, that is not installed.

    Examples
    --------
    >>> import torch, varcomm
    >>> def total(rank, base):
    ...     value = torch.tensor(base + rank)
    ...     torch.distributed.all_reduce(value)
    ...     return value.item()
    >>> varcomm.launch(total, 2, 10)
    [21, 21]
    """
    with Ranks(world_size, timeout, backend=backend) as ranks:
        return ranks.run(fn, *args)


class _Worker(NamedTuple):
    connection: Connection[Any, Any]
    pid: int


class Ranks:
    """Local ranks that stay alive, so that only the first :meth:`run` pays for their imports.

    They start at the first run, and again at the run after one that failed. Global variables,
    process groups and random states remain from run to run. All ranks end with :meth:`close`, with
    a ``with`` block, and with this process, even if it is killed. Threads may share them: their
    calls wait for each other. A forked child gets its own.

    Parameters
    ----------
    world_size, timeout, backend
        As in :func:`launch`.

    Examples
    --------
    >>> import varcomm
    >>> with varcomm.Ranks(2) as ranks:
    ...     print(ranks.run(lambda rank: rank + 1), ranks.run(lambda rank, x: x * rank, 5))
    [1, 2] [0, 5]
    """

    def __init__(
        self,
        world_size: int,
        timeout: float | timedelta = 300.0,
        *,
        backend: str | None = "gloo",
    ) -> None:
        self.world_size = at_least(1, world_size, "world_size")
        self.timeout = checked_seconds(timeout)
        self.backend = backend
        self._mpi = uses_mpi(backend)
        self._forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, fn: Callable[..., T], *args: Any, timeout: float | timedelta | None = None
    ) -> list[T]:
        """Run ``fn(rank, *args)`` on every rank and return the results, as :func:`launch`.

        `timeout` is in seconds; by default that of the pool.
        """
        limit = self.timeout if timeout is None else checked_seconds(timeout)
        task = pickle.dumps((sys.path, pickled_call(fn, args)))
        with self._held():
            if any(worker.connection.poll() for worker in self._workers):
                self._kill()  # an idle rank sends nothing: one has died
            try:
                if not self._workers:
                    self._start()
                for worker in self._workers:
                    with suppress(BrokenPipeError):  # it died just now, and gets an obituary
                        worker.connection.send_bytes(task)
                reports = self._reports(limit, "finished")
                return [_result(rank, report) for rank, report in enumerate(reports)]
            except BaseException:
                self._kill()
                raise

    def close(self) -> None:
        """End all ranks after their exit handlers; a later run starts new ones."""
        with self._held():
            for worker in self._workers:
                with suppress(OSError):
                    worker.connection.send_bytes(STOP)
            # A rank's end of the socket closes with its process. A process that was waited for no
            # longer owns its id, so it is signalled before.
            leaving = {worker.connection for worker in self._workers}
            deadline = time.monotonic() + _FAREWELL
            while leaving and (gone := wait(leaving, max(0.0, deadline - time.monotonic()))):
                leaving.difference_update(gone)
            self._kill()

    def _forget(self) -> None:
        """Reset to a pool without ranks, owned by this process."""
        self._owner, self._lock = os.getpid(), threading.RLock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._workers: list[_Worker] = []
        self._end: Callable[[], object] = lambda: None

    def _held(self) -> threading.RLock:
        """Return the lock that a call holds from its first look at the ranks to its last."""
        if self._owner != os.getpid():
            self._forget()  # after a fork the ranks, and a held lock, are the parent's
        return self._lock

    def _kill(self) -> None:
        self._end()
        self._processes, self._workers = [], []

    def _start(self) -> None:
        if module := importing_module():
            raise LaunchError(
                f"rank {os.environ.get('RANK')} imports module {module!r}, which launches ranks "
                "when it is imported: each would do so again. Guard what it launches by "
                'if __name__ == "__main__":'
            )
        # the path of a socket may have 107 characters
        elsewhere = "/tmp" if len(tempfile.gettempdir()) > 80 else None
        self._folder = tempfile.mkdtemp(prefix="varcomm-", dir=elsewhere)
        # also called when this object is forgotten, or at exit
        self._end = weakref.finalize(
            self, _end, self._processes, self._workers, self._folder, self._owner
        )
        python = [sys.executable, "-c", _START, json.dumps(sys.path), self._folder]
        if self._mpi:
            python = [_mpiexec(), "-n", str(self.world_size), *python]
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{self._folder}/ranks")
            server.listen(self.world_size)
            for rank in [-1] if self._mpi else range(self.world_size):
                # a rank that Ctrl-C keeps out of this list loses its connection, and ends
                process = subprocess.Popen(
                    [*python, *map(str, (self._owner, rank, self.world_size, self.backend or ""))],
                    env=self._environment(rank),
                    stdin=subprocess.DEVNULL,
                    # A process group of its own: Ctrl-C in the terminal is ours to handle, and
                    # killing it ends all that the rank has started.
                    start_new_session=True,
                )
                self._processes.append(process)
            self._connect(server)
        self._reports(_START_LIMIT, "started")

    def _environment(self, rank: int) -> dict[str, str]:
        environ = dict(os.environ)
        if sys.platform == "linux":
            # no name to resolve, nothing reachable from outside
            environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if not self._mpi:
            names = {"WORLD_SIZE": self.world_size, "RANK": rank, "LOCAL_RANK": rank}
            return environ | {name: str(value) for name, value in names.items()}
        # this process may be a rank itself, but not of this MPI
        others = ("PMI", "OMPI_", "MPI_LOCAL", "HYDI_", "RANK", "WORLD_SIZE", "LOCAL_RANK")
        default = {
            "HYDRA_LAUNCHER": "fork",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        }
        return default | {k: v for k, v in environ.items() if not k.startswith(others)}

    def _connect(self, server: socket.socket) -> None:
        server.settimeout(0.1)
        found: dict[int, _Worker] = {}
        deadline = time.monotonic() + _START_LIMIT
        while len(found) < self.world_size:
            late = [rank for rank in range(self.world_size) if rank not in found]
            for rank, code in enumerate(process.poll() for process in self._processes):
                if code is not None:
                    raise LaunchError(
                        f"{_ranks(late if self._mpi else [rank])} of {self.world_size} failed: "
                        f"{_how(code)} before it could start."
                    )
            if time.monotonic() > deadline:
                raise self._overdue(late, _START_LIMIT, "started")
            with suppress(TimeoutError, EOFError):  # a rank that died just now is found above
                connection: Connection[Any, Any] = Connection(server.accept()[0].detach())
                rank, pid = pickle.loads(connection.recv_bytes())
                found[rank] = _Worker(connection, pid)
        self._workers.extend(found[rank] for rank in range(self.world_size))

    def _reports(self, limit: float, done: str) -> list[Report]:
        """Collect one report per rank; raise soon after one fails, or after the limit."""
        waiting = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        reports: dict[int, Report] = {}
        deadline = time.monotonic() + limit
        failed: dict[int, Report] = {}
        while waiting and (ready := wait(waiting, max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    reports[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    reports[rank] = self._obituary(rank)
            if not failed and any(report.failure for report in reports.values()):
                deadline = min(deadline, time.monotonic() + _GRACE)
            failed = {rank: report for rank, report in reports.items() if report.failure}
        if failed:
            raise self._failure(failed)
        if waiting:
            raise self._overdue(sorted(waiting.values()), limit, done)
        return [reports[rank] for rank in range(self.world_size)]

    def _failure(self, failed: dict[int, Report]) -> LaunchError:
        """Return an error that names the rank that failed first: others lost connection to it."""
        # the parent may notice a death after a peer has reported it
        first, *others = sorted(failed, key=lambda rank: (not failed[rank].died, failed[rank].when))
        also = f" (then {_ranks(sorted(others))} failed)" if others else ""
        text = f"rank {first} of {self.world_size} failed{also}: {failed[first].failure}"
        error = LaunchError(text)
        if (payload := failed[first].payload) is not None:
            with suppress(Exception):
                error.__cause__ = pickle.loads(payload)
        return error

    def _obituary(self, rank: int) -> Report:
        when, process = time.monotonic(), self._processes[0 if self._mpi else rank]
        if self._mpi:  # mpiexec ends when one of its ranks dies
            with suppress(subprocess.TimeoutExpired):
                process.wait(_FAREWELL)
        _kill_group(process)
        stack = stack_file(self._folder, rank)
        text = stack.read_text() if stack.exists() else ""
        how = f"{_how(process.wait())} before it gave a result. {text}".rstrip()
        return Report(when, failure=how, died=True)

    def _overdue(self, late: Sequence[int], limit: float, done: str) -> LaunchError:
        """Return an error that names the late ranks, with their stacks."""
        message = f"{_ranks(late)} of {self.world_size} not {done} within {limit:g} s."
        if done == "started":
            return LaunchError(message)
        stacks = {rank: stack_file(self._folder, rank) for rank in late}
        for rank in late:
            os.kill(self._workers[rank].pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and not all(s.stat().st_size for s in stacks.values()):
            time.sleep(0.05)
        time.sleep(0.1)  # a stack is written line by line
        texts = [f"rank {rank}: {path.read_text()}" for rank, path in stacks.items()]
        return LaunchError("\n\n".join([message, *texts]))


def _result(rank: int, report: Report) -> Any:
    try:
        return pickle.loads(report.payload or b"")
    except Exception as error:
        raise LaunchError(
            f"what rank {rank} returned cannot be unpickled here: {error!r}"
        ) from error


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _how(code: int) -> str:
    if code < 0:
        return f"signal {signal.Signals(-code).name} ended it"
    return f"it exited with code {code}"


def _mpiexec() -> str:
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise MissingPackageError('backend "mpi" needs mpiexec: pip install "varcomm[mpi]".')
    return found


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it started, unless its id may belong to another by now."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _end(
    processes: list[subprocess.Popen[bytes]], workers: list[_Worker], folder: str, owner: int
) -> None:
    if os.getpid() != owner:
        return  # the ranks of a forked child are its parent's
    for process in processes:
        _kill_group(process)
    for worker in workers:
        worker.connection.close()  # ends ranks below mpiexec, which have sessions of their own
    for process in processes:
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
