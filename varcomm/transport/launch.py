"""Local ranks that run functions: :func:`launch` once, :class:`Ranks` many times.

Ranks are plain interpreters, one :mod:`subprocess` each, or all below one ``mpiexec``: processes of
:mod:`multiprocessing` would import the caller's ``__main__``. Parent and child share one socket;
its closed end shows that the other process has ended.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, Self, TextIO, TypeVar

import torch

from varcomm.errors import ArgumentError, LaunchError, MissingPackageError, at_least
from varcomm.transport import environment
from varcomm.transport.debug import checked_seconds
from varcomm.transport.environment import Place
from varcomm.transport.world import join, uses_mpi

T = TypeVar("T")

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from varcomm.transport.launch import serve; serve(*sys.argv[2:])"
)
_STOP = b""
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
    """Run ``fn(rank, *args)`` on `world_size` new local processes in one process group.

    ``launch`` works in a script, a notebook and a doctest, and accepts functions, lambdas and
    closures defined there. Each rank runs torch with ``max(1, cpu_count // world_size)`` threads.
    `fn` may launch further ranks; a module that a rank imports must not.

    Parameters
    ----------
    fn : callable
        Called as ``fn(rank, *args)`` on every rank, after :func:`init`.
    world_size : int
        Number of ranks.
    *args
        Pickled arguments of `fn`.
    timeout : float or timedelta
        Seconds for `fn`, without the start of the processes; at most 24 days.
    backend : str or None
        As in :func:`init`; None chooses NCCL if there are GPUs; ``"mpi"`` runs ``mpiexec``.

    Returns
    -------
    list
        Results in rank order.

    Raises
    ------
    ArgumentError
        If an argument is wrong or cannot be pickled (functions of a script need cloudpickle).
    LaunchError
        If a rank fails, dies or does not finish in time. The message holds the traceback of the
        rank that failed first, or the stacks of unfinished ranks.
    MissingPackageError
        If `backend` needs an MPI that is not installed.

    See Also
    --------
    Ranks, init, debug

    Examples
    --------
    >>> import torch, varcomm
    >>> varcomm.launch(lambda rank, base: varcomm.all_reduce(torch.tensor(base + rank)), 2, 10)
    [tensor(21), tensor(21)]
    """
    with Ranks(world_size, timeout, backend=backend) as ranks:
        return ranks.run(fn, *args)


class _Report(NamedTuple):
    """Answer of a rank to one task."""

    when: float  # time.monotonic(), which all processes of a host share; 0 if the rank has died
    payload: bytes | None = None  # the pickled result, or exception if it can be pickled
    failure: str | None = None  # the traceback, if the rank failed


class Ranks:
    """Local ranks that stay alive, so that only the first :meth:`run` pays for their imports.

    The ranks start at the first run, and again after a failed run. Global variables, process groups
    and random states remain between runs. All ranks exit after :meth:`close`, at the end of a
    ``with`` block, or when this process ends or is killed. Threads may share the ranks. A forked
    child process starts its own ranks.

    Parameters
    ----------
    world_size, timeout, backend
        As in :func:`launch`.

    See Also
    --------
    launch, init

    Examples
    --------
    >>> import varcomm
    >>> with varcomm.Ranks(2) as ranks:
    ...     print(ranks.run(lambda rank: rank + 1), ranks.run(lambda rank, x: x * rank, 5))
    [1, 2] [0, 5]
    """

    def __init__(
        self, world_size: int, timeout: float | timedelta = 300.0, *, backend: str | None = "gloo"
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
        """Run ``fn(rank, *args)`` on every rank and return the results, as :func:`launch`."""
        limit = self.timeout if timeout is None else checked_seconds(timeout)
        task = pickle.dumps((sys.path, limit, _pickled_call(fn, args)))
        with self._held():
            if any(connection.poll() for connection in self._connections):
                self._kill()  # an idle rank sends nothing: one has died
            try:
                if not self._connections:
                    self._start()
                for connection in self._connections:
                    with suppress(BrokenPipeError):  # it died just now, and gets an obituary
                        connection.send_bytes(task)
                return self._results(limit, "finished")
            except BaseException:
                self._kill()
                raise

    def close(self) -> None:
        """End all ranks after their exit handlers; a later run starts new ones."""
        with self._held():
            for connection in self._connections:
                with suppress(OSError):
                    connection.send_bytes(_STOP)
            # a process that was waited for no longer owns its id, so wait for its socket
            leaving: set[Any] = {*self._connections}
            deadline = time.monotonic() + _FAREWELL
            while leaving and (gone := wait(leaving, max(0.0, deadline - time.monotonic()))):
                leaving.difference_update(gone)
            self._kill()

    def _forget(self) -> None:
        """Reset to a pool without ranks, owned by this process."""
        self._owner, self._lock = os.getpid(), threading.RLock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection[Any, Any]] = []
        self._end: Callable[[], object] = lambda: None

    def _held(self) -> threading.RLock:
        """Return the lock that a call holds from its first look at the ranks to its last."""
        if self._owner != os.getpid():
            self._forget()  # after a fork the ranks, and a held lock, are the parent's
        return self._lock

    def _kill(self) -> None:
        self._end()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        if module := _importing_module():
            raise LaunchError(
                f"rank {os.environ.get('RANK')} imports module {module!r}, which launches ranks "
                'again. Guard the launch by if __name__ == "__main__":'
            )
        # the path of a socket may have 107 characters
        elsewhere = "/tmp" if len(tempfile.gettempdir()) > 80 else None
        self._folder = tempfile.mkdtemp(prefix="varcomm-", dir=elsewhere)
        # also called when this object is forgotten, or at exit
        self._end = weakref.finalize(
            self, _end, self._processes, self._connections, self._folder, self._owner
        )
        python = [sys.executable, "-c", _START, json.dumps(sys.path), self._folder]
        if self._mpi:
            python = [_mpiexec(), "-n", str(self.world_size), *python]
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{self._folder}/ranks")
            server.listen(self.world_size)
            for rank in [-1] if self._mpi else range(self.world_size):
                # In a session of its own: Ctrl-C in the terminal is ours to handle, and killing
                # its process group ends all that the rank has started.
                process = subprocess.Popen(
                    [*python, *map(str, (self._owner, rank, self.world_size, self.backend or ""))],
                    env=self._environment(rank),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
                self._processes.append(process)
            self._connect(server)
        self._results(_START_LIMIT, "started")

    def _environment(self, rank: int) -> dict[str, str]:
        environ = dict(os.environ)
        if sys.platform == "linux":
            # no name to resolve, nothing reachable from outside
            environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        names = {"WORLD_SIZE": self.world_size, "RANK": rank, "LOCAL_RANK": rank}
        if not self._mpi:
            return environ | {name: str(value) for name, value in names.items()}
        environ.setdefault("HYDRA_LAUNCHER", "fork")
        environ.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
        # this process may be a rank itself, but not of this MPI
        others = ("PMI", "OMPI_", "MPI_LOCAL", "HYDI_")
        return {k: v for k, v in environ.items() if k not in names and not k.startswith(others)}

    def _connect(self, server: socket.socket) -> None:
        server.settimeout(0.1)
        found: dict[int, Connection[Any, Any]] = {}
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
                found[pickle.loads(connection.recv_bytes())] = connection
        self._connections.extend(found[rank] for rank in range(self.world_size))

    def _results(self, limit: float, done: str) -> list[Any]:
        """Return the result of each rank; raise soon after one fails, or after the limit."""
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        reports: dict[int, _Report] = {}
        deadline = time.monotonic() + limit
        failed: dict[int, _Report] = {}
        while waiting and (ready := wait(waiting, max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    reports[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    reports[rank] = self._obituary(rank)
            failed = {rank: report for rank, report in reports.items() if report.failure}
            if failed:
                deadline = min(deadline, time.monotonic() + _GRACE)
        if failed:
            raise self._failure(failed)
        if waiting:
            raise self._overdue(sorted(waiting.values()), limit, done)
        try:
            return [pickle.loads(reports[rank].payload or b"") for rank in range(self.world_size)]
        except Exception as error:
            raise LaunchError(f"a result cannot be unpickled here: {error!r}") from error

    def _failure(self, failed: dict[int, _Report]) -> LaunchError:
        """Return an error that names the rank that failed first: others lost connection to it."""
        first, *others = sorted(failed, key=lambda rank: failed[rank].when)
        also = f" (then {_ranks(sorted(others))} failed)" if others else ""
        report = failed[first]
        error = LaunchError(f"rank {first} of {self.world_size} failed{also}: {report.failure}")
        with suppress(Exception):
            error.__cause__ = pickle.loads(report.payload or b"")
        return error

    def _obituary(self, rank: int) -> _Report:
        process = self._processes[0 if self._mpi else rank]
        if self._mpi:  # mpiexec ends when one of its ranks dies
            with suppress(subprocess.TimeoutExpired):
                process.wait(_FAREWELL)
        _kill_group(process)
        stack = Path(self._folder, f"stack-{rank}")
        text = stack.read_text() if stack.exists() else ""
        how = f"{_how(process.wait())} before it gave a result. {text}".rstrip()
        return _Report(0.0, failure=how)

    def _overdue(self, late: Sequence[int], limit: float, done: str) -> LaunchError:
        """Return an error that names the late ranks, with their stacks."""
        message = f"{_ranks(late)} of {self.world_size} not {done} within {limit:g} s."
        stacks = {r: Path(self._folder, f"stack-{r}") for r in late if done != "started"}
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and not all(s.stat().st_size for s in stacks.values()):
            time.sleep(0.05)
        time.sleep(0.1)  # a stack is written line by line
        texts = [f"rank {rank}: {path.read_text()}" for rank, path in stacks.items()]
        return LaunchError("\n\n".join([message, *texts]))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _how(code: int) -> str:
    if code < 0:
        return f"signal {signal.Signals(-code).name} ended it"
    return f"it exited with code {code}"


def _mpiexec() -> str:
    beside = Path(sys.executable).with_name("mpiexec")
    path = str(beside) if beside.exists() else shutil.which("mpiexec")
    if path is None:
        raise MissingPackageError('backend "mpi" needs mpiexec: pip install mpi4py mpich.')
    return path


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it started, unless its id may belong to another by now."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _end(
    processes: list[subprocess.Popen[bytes]],
    connections: list[Connection[Any, Any]],
    folder: str,
    owner: int,
) -> None:
    if os.getpid() != owner:
        return  # the ranks of a forked child are its parent's
    for process in processes:
        _kill_group(process)
    for connection in connections:
        connection.close()  # ends ranks below mpiexec, which have sessions of their own
    for process in processes:
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)


# In the ranks.


def serve(folder: str, parent: str, rank: str, size: str, backend: str) -> None:
    """Join the other ranks, then serve the parent; `rank` is -1 if ``mpiexec`` sets it."""
    place = Place(int(rank), int(size), int(rank), f"file://{folder}/rendezvous", "varcomm.launch")
    if uses_mpi(backend):
        place = environment.read(os.environ, mpi=True)
        names = {"RANK": place.rank, "WORLD_SIZE": place.size, "LOCAL_RANK": place.local_rank}
        os.environ.update({name: str(value) for name, value in names.items()})
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)  # so that this rank ends with its children, and without other ranks
        parent = str(os.getppid())
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(f"{folder}/ranks")
    except FileNotFoundError:  # the parent has given up
        return
    connection: Connection[Any, Any] = Connection(client.detach())
    connection.send_bytes(pickle.dumps(place.rank))
    watch = threading.Thread(
        target=_end_with_parent, args=(connection, int(parent), folder), daemon=True
    )
    watch.start()
    # a crash writes the stack of the main thread, which runs the task; a late task those of all
    with Path(folder, f"stack-{place.rank}").open("w") as stack:
        faulthandler.enable(stack, all_threads=False)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.size))
        # the parent keeps the time, so joining has no limit
        connection.send_bytes(_attempt(join, place, backend or None, math.inf))
        while (task := connection.recv_bytes()) != _STOP:
            connection.send_bytes(_attempt(_run, task, place.rank, stack))
        faulthandler.disable()


def _end_with_parent(connection: Connection[Any, Any], parent: int, folder: str) -> None:
    """Wait for the end of the parent, or of its socket; then end with all that was started here."""
    watch = select.poll()
    watch.register(connection, 0)  # no event asked for: a hang-up is always reported
    while os.getppid() == parent and not watch.poll(1000):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _run(task: bytes, rank: int, stack: TextIO) -> Any:
    # the path first: the function's module may be new to this process
    sys.path[:], limit, call = pickle.loads(task)
    faulthandler.dump_traceback_later(limit, file=stack)
    try:
        fn, args = pickle.loads(call)
        return fn(rank, *args)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _importing_module() -> str | None:
    """Return the name of the module that the running task is importing, if any."""
    module, importing = None, False
    for frame, _ in traceback.walk_stack(None):
        if frame.f_code is _run.__code__:
            return module if importing else None
        name = str(frame.f_globals.get("__name__"))
        if module is None and frame.f_code.co_name == "<module>":
            module = name
        importing |= name.startswith("importlib._bootstrap")
    return None


def _attempt(step: Callable[..., Any], *args: Any) -> bytes:
    """Return the pickled report of a step, with its result or its exception."""
    failure: str | None = None
    payload: bytes | None = None
    try:
        result = step(*args)
        failure = f"its result, of type {type(result).__qualname__}, cannot be pickled: "
        payload, failure = _dumps(result), None
    except BaseException as error:
        trace = error.__traceback__ and error.__traceback__.tb_next  # without this function's frame
        lines = traceback.format_exception(type(error), error, trace)
        failure = f"{failure}{error!r}" if failure else "".join(lines)
        with suppress(Exception):  # an exception that cannot be unpickled goes without
            pickle.loads(data := _dumps(error))
            payload = data
    sys.stdout.flush()
    sys.stderr.flush()
    return pickle.dumps(_Report(time.monotonic(), payload, failure))


def _dumps(value: object) -> bytes:
    """Pickle with cloudpickle, which accepts lambdas and a script's classes; else with pickle."""
    try:
        from cloudpickle import dumps
    except ImportError:
        from pickle import dumps
    data: bytes = dumps(value)
    return data


def _pickled_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle ``(fn, args)``, or raise ArgumentError."""
    if not callable(fn):
        raise ArgumentError(f"fn must be callable as fn(rank, *args); got {fn!r}.")
    hint = "Create or import that object inside fn, or move fn to a module."
    try:
        data = _dumps((fn, args))
        if sys.modules.get("cloudpickle") is None and b"__main__" in data:
            raise pickle.PicklingError("ranks have another module __main__")
        return data
    except Exception as error:
        if sys.modules.get("cloudpickle") is None:
            hint = "For lambdas and functions of a script: pip install cloudpickle"
        raise ArgumentError(
            f"{fn!r} or its arguments cannot be pickled to be sent to the ranks: {error!r}. {hint}"
        ) from error
