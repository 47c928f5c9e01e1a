"""Run a function on several local ranks: :func:`launch` once, :class:`Ranks` many times.

Ranks are plain interpreters started by :mod:`subprocess`. Those of :mod:`multiprocessing` import
the caller's ``__main__`` again, which a notebook does not have and which a script without a guard
cannot survive.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Self, TypeVar

from varcomm.errors import ArgumentError, LaunchError
from varcomm.sizes import exact_int
from varcomm.transport.call import pickled_call
from varcomm.transport.interrupt import interrupt_later
from varcomm.transport.timeout import seconds
from varcomm.transport.worker import STOP, Report, importing_module, stack_file
from varcomm.transport.world import World, init

__all__ = ["Ranks", "World", "init", "launch"]

T = TypeVar("T")

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from varcomm.transport.worker import main; main(*sys.argv[2:])"
)
_START_LIMIT = 180.0  # imports only, but on a machine that may be busy
_GRACE = 0.2  # for the other ranks to tell what happened to them, after one has failed
_FAREWELL = 5.0  # for a rank to run its exit handlers


def launch(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float | timedelta = 300.0,
    backend: str | None = "gloo",
) -> list[T]:
    """Run ``fn(rank, *args)`` on `world_size` new local processes, joined in a process group.

    Works in a script (guarded by ``__main__`` or not), a notebook and a doctest, with functions,
    lambdas and closures that are defined there. Each rank runs torch with
    ``max(1, cpu_count // world_size)`` threads. `fn` may launch ranks of its own; a module that
    a rank imports may not, so guard what is launched there.

    Parameters
    ----------
    fn : callable
        Called as ``fn(rank, *args)``; :func:`init` and ``torch.distributed`` are ready inside.
    world_size : int
        How many ranks to start.
    *args
        Sent to every rank, pickled.
    timeout : float or timedelta
        Seconds that `fn` may take, the start of the processes not counted; ``inf`` and whatever
        exceeds 24 days count as 24 days. Collectives of the world have no limit of their own.
    backend : str or None
        As in :func:`init`; None chooses NCCL where there are GPUs.

    Returns
    -------
    list
        What each rank returned, in rank order.

    Raises
    ------
    ArgumentError
        If an argument is wrong or cannot be pickled; nothing is started.
    LaunchError
        If a rank fails, dies or does not finish in time, or if a module calls this while a rank
        imports it. The message holds the traceback of the
        rank that failed first, or the stacks of those that did not finish; the cause is the
        original exception. All ranks are ended.
    MissingPackageError
        If `fn` or `args` can only be sent by cloudpickle, which is not installed.

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


@dataclass(frozen=True)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection[Any, Any]


class Ranks:
    """Local ranks that are kept alive, so that only the first :meth:`run` pays for their imports.

    They start at the first run, and anew at the run after one that failed. What a function leaves
    behind in them (global variables, process groups, random states) is there at the next run. All
    are ended by :meth:`close`, at the end of a ``with`` block, and with this process, even if it is
    killed. Threads may share them: their calls wait for each other. A forked child gets its own.

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
        size = exact_int(world_size)
        if size is None or size < 1:
            raise ArgumentError(f"world_size must be a positive integer; got {world_size!r}.")
        self.world_size = size
        self.timeout = seconds(timeout)
        self.backend = backend
        self._forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, fn: Callable[..., T], *args: Any, timeout: float | timedelta | None = None
    ) -> list[T]:
        """Run ``fn(rank, *args)`` on every rank and return the results, as :func:`launch` does.

        Parameters
        ----------
        fn, *args
            As in :func:`launch`.
        timeout : float or timedelta, optional
            Seconds that this run may take; by default those of the pool.

        Returns
        -------
        list
            What each rank returned, in rank order.
        """
        limit = self.timeout if timeout is None else seconds(timeout)
        task = pickle.dumps((sys.path, pickled_call(fn, args)))
        with self._held():
            if any(worker.connection.poll() for worker in self._workers):
                self._kill()  # an idle rank says nothing: one has died
            try:
                if not self._workers:
                    self._start()
                for worker in self._workers:
                    with suppress(BrokenPipeError):  # it died just now: its report will say so
                        worker.connection.send_bytes(task)
                return [
                    self._result(rank, report)
                    for rank, report in enumerate(self._reports(limit, "finished"))
                ]
            except BaseException:
                self._kill()
                raise

    def close(self) -> None:
        """End all ranks, letting them run their exit handlers.

        A later run starts new ones.
        """
        with self._held():
            for worker in self._workers:
                with suppress(OSError):
                    worker.connection.send_bytes(STOP)
            # A rank's end of the socket closes with its process. We do not wait() for that before
            # the last signal, since a process that has been waited for no longer owns its id.
            leaving = {worker.connection for worker in self._workers}
            deadline = time.monotonic() + _FAREWELL
            while leaving and (gone := wait(leaving, max(0.0, deadline - time.monotonic()))):
                leaving.difference_update(gone)
            self._kill()

    def _forget(self) -> None:
        """Be as new: without ranks, and this process's own."""
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._workers: list[_Worker] = []
        self._folder = ""
        self._end: Callable[[], object] = lambda: None

    def _held(self) -> threading.RLock:
        """Return the lock that a call holds from its first look at the ranks to its last."""
        if self._owner != os.getpid():
            self._forget()  # after a fork they are the parent's, as is a lock that is held
        return self._lock

    def _start(self) -> None:
        if module := importing_module():
            raise LaunchError(
                f"rank {os.environ.get('RANK')} imports module {module!r}, which launches ranks "
                "when it is imported: each would do so again. Guard what it launches by "
                'if __name__ == "__main__":'
            )
        self._folder = tempfile.mkdtemp(prefix="varcomm-")
        # also called when this object is forgotten, or at exit
        self._end = weakref.finalize(self, _end, self._workers, self._folder, self._owner)
        environ = {**os.environ, "WORLD_SIZE": str(self.world_size)}
        if sys.platform == "linux":
            # no name to resolve, nothing reachable from outside
            environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        for rank in range(self.world_size):
            with interrupt_later():  # or a rank could be started, and nobody know it to end it
                self._workers.append(self._worker(rank, environ))
        self._reports(_START_LIMIT, "started")

    def _worker(self, rank: int, environ: dict[str, str]) -> _Worker:
        """Start the process of a rank."""
        ours, theirs = Pipe()
        with theirs:
            descriptor = theirs.fileno()
            place = (self._owner, rank, self.world_size, self.backend or "", self._folder)
            process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(sys.path)]
                + [str(argument) for argument in (descriptor, *place)],
                env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                pass_fds=[descriptor],
                # Its own process group: the terminal's Ctrl-C is ours to handle, and killing it
                # takes along whatever the rank has started.
                start_new_session=True,
            )
        return _Worker(process, ours)

    def _kill(self) -> None:
        self._end()
        self._workers = []

    def _reports(self, limit: float, done: str) -> list[Report]:
        """Collect one report a rank; raise soon after one fails, or when time is over."""
        waiting = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        reports: dict[int, Report] = {}
        failures: dict[int, Report] = {}
        deadline = time.monotonic() + limit
        while waiting and (ready := wait(waiting, max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    report = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    report = self._obituary(rank)
                reports[rank] = report
                if report.failure is not None:
                    if not failures:
                        deadline = min(deadline, time.monotonic() + _GRACE)
                    failures[rank] = report
        if failures:
            raise self._failure(failures)
        if waiting:
            raise self._overdue(sorted(waiting.values()), limit, done)
        return [reports[rank] for rank in range(self.world_size)]

    def _failure(self, failures: dict[int, Report]) -> LaunchError:
        """Name the rank that failed first: others mostly lost their connection to it."""
        # A death is noticed by the parent, maybe after a peer's complaint about it has been
        # written.
        first, *others = sorted(
            failures, key=lambda rank: (not failures[rank].died, failures[rank].when)
        )
        also = f" (then {_ranks(sorted(others))} failed)" if others else ""
        error = LaunchError(
            f"rank {first} of {self.world_size} failed{also}: {failures[first].failure}"
        )
        payload = failures[first].payload
        if payload is not None:
            with suppress(Exception):
                error.__cause__ = pickle.loads(payload)
        return error

    def _obituary(self, rank: int) -> Report:
        """Write the report of a rank whose end of the socket is closed."""
        when, process = time.monotonic(), self._workers[rank].process
        _kill_group(process)
        code = process.wait()
        how = (
            f"signal {signal.Signals(-code).name} ended it"
            if code < 0
            else f"it exited with code {code}"
        )
        stack = stack_file(self._folder, rank)
        text = stack.read_text() if stack.exists() else ""
        return Report(when, failure=f"{how} before it gave a result. {text}".rstrip(), died=True)

    def _overdue(self, late: list[int], limit: float, done: str) -> LaunchError:
        """Name the ranks that are late, and where each stands if it can tell."""
        message = f"{_ranks(late)} of {self.world_size} not {done} within {limit:g} s."
        if done == "started":
            return LaunchError(message)
        stacks = {rank: stack_file(self._folder, rank) for rank in late}
        for rank in late:
            os.kill(self._workers[rank].process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and not all(
            path.stat().st_size for path in stacks.values()
        ):
            time.sleep(0.05)
        time.sleep(0.1)  # a stack is written line by line
        return LaunchError(
            "\n\n".join(
                [message, *(f"rank {rank}: {path.read_text()}" for rank, path in stacks.items())]
            )
        )

    def _result(self, rank: int, report: Report) -> Any:
        try:
            return pickle.loads(report.payload or b"")
        except Exception as error:
            raise LaunchError(
                f"what rank {rank} returned cannot be unpickled here: {error!r}"
            ) from error


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a rank and all that it started.

    Not if it was waited for: its id may be someone else's by now.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _end(workers: list[_Worker], folder: str, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child leaves: the ranks are its parent's
    for worker in workers:
        _kill_group(worker.process)
    for worker in workers:
        worker.process.wait()
        worker.connection.close()
    shutil.rmtree(folder, ignore_errors=True)
