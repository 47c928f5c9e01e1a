"""Child process of :class:`~varcomm.transport.launch.Ranks`: a rank that runs the parent's calls.

Parent and child share one socket. Its closed end shows that the other process has ended.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import io
import math
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from varcomm.errors import ArgumentError, MissingPackageError
from varcomm.transport import environment
from varcomm.transport.environment import Place
from varcomm.transport.world import join, uses_mpi

__all__ = ["STOP", "Report", "importing_module", "main", "pickled_call", "stack_file"]

STOP = b""


@dataclass(frozen=True)
class Report:
    """Answer of a rank to one task."""

    when: float  # time.monotonic(), which all processes of a host share: the cause comes first
    payload: bytes | None = None  # the pickled result, or exception if it can be pickled
    failure: str | None = None  # the traceback, if the rank failed
    died: bool = False  # the parent wrote the report, because the process of the rank has ended


def stack_file(folder: str | Path, rank: int) -> Path:
    """Return the file in which `rank` writes its stack at a crash or at SIGUSR1."""
    return Path(folder, f"stack-{rank}")


def main(folder: str, parent: str, rank: str, size: str, backend: str) -> None:
    """Join the other ranks, then serve the parent until it sends STOP.

    The arguments come from the command line; `rank` is -1 if ``mpiexec`` sets it.
    """
    place = Place(int(rank), int(size), int(rank), f"file://{folder}/rendezvous", "varcomm.launch")
    if uses_mpi(backend):
        place = environment.read(os.environ, mpi=True)
        names = {"RANK": place.rank, "WORLD_SIZE": place.size, "LOCAL_RANK": place.local_rank}
        os.environ.update({name: str(value) for name, value in names.items()})
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)  # so that this rank ends with its children, and without other ranks
        parent = str(os.getppid())
    client = socket.socket(socket.AF_UNIX)
    client.connect(f"{folder}/ranks")
    connection: Connection[Any, Any] = Connection(client.detach())
    connection.send_bytes(pickle.dumps((place.rank, os.getpid())))
    watch = threading.Thread(
        target=_end_with_parent, args=(connection, int(parent), folder), daemon=True
    )
    watch.start()
    # `all_threads=False` is the main thread: the kernel delivers signals there first, and the task
    # runs there
    with stack_file(folder, place.rank).open("w") as stack:
        faulthandler.enable(stack, all_threads=False)
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.size))
        # the parent keeps the time, so joining has no limit
        joining = partial(join, place, backend or None, math.inf)
        connection.send_bytes(pickle.dumps(_attempt(joining)))
        while (task := connection.recv_bytes()) != STOP:
            connection.send_bytes(pickle.dumps(_attempt(partial(_run, task, place.rank))))
        faulthandler.disable()
        faulthandler.unregister(signal.SIGUSR1)


def _end_with_parent(connection: Connection[Any, Any], parent: int, folder: str) -> None:
    """Wait for the end of the parent, and end with it.

    The parent's end of the socket closes then, unless a process that it forked holds it open. All
    that this rank has started is in its process group, and ends too.
    """
    watch = select.poll()
    watch.register(connection, 0)  # no event asked for: a hang-up is always reported
    while os.getppid() == parent and not watch.poll(1000):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _run(task: bytes, rank: int) -> Any:
    # the path first: the function's module may be new to this process
    sys.path[:], call = pickle.loads(task)
    fn, args = pickle.loads(call)
    return fn(rank, *args)


def importing_module() -> str | None:
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


def _attempt(step: Callable[[], Any]) -> Report:
    """Return the report of `step`, with its result or its exception."""
    try:
        result = step()
    except BaseException as error:
        trace = error.__traceback__ and error.__traceback__.tb_next  # without this function's frame
        lines = traceback.format_exception(type(error), error, trace)
        return Report(time.monotonic(), _portable(error), "".join(lines))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    try:
        return Report(time.monotonic(), _dumps(result))
    except Exception as error:
        failure = f"its result, of type {type(result).__qualname__}, cannot be pickled: {error!r}"
        return Report(time.monotonic(), _portable(error), failure)


def _portable(error: BaseException) -> bytes | None:
    """Pickle an exception; None if it cannot be unpickled."""
    try:
        data = _dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _dumps(value: object) -> bytes:
    """Pickle with cloudpickle, which accepts lambdas and a script's classes; else with pickle."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(value)
    data: bytes = cloudpickle.dumps(value)
    return data


def pickled_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle ``(fn, args)``, or raise if the ranks could not read it."""
    if not callable(fn):
        raise ArgumentError(f"fn must be callable as fn(rank, *args); got {fn!r}.")
    by_name = importlib.util.find_spec("cloudpickle") is None
    try:
        if not by_name:
            return _dumps((fn, args))
        buffer = io.BytesIO()
        _PicklerByName(buffer).dump((fn, args))
        return buffer.getvalue()
    except Exception as error:
        if by_name:
            raise MissingPackageError(
                f"{fn!r} and its arguments cannot be sent to the ranks by name ({error}). "
                'To send them by value: pip install "varcomm[launch]"'
            ) from error
        raise ArgumentError(
            f"{fn!r} or its arguments cannot be pickled to be sent to the ranks: {error!r}"
        ) from error


class _PicklerByName(pickle.Pickler):
    """Refuses objects of ``__main__``, which in the ranks is another module."""

    def persistent_id(self, obj: object) -> None:
        if isinstance(obj, (type, FunctionType)) and obj.__module__ == "__main__":
            raise pickle.PicklingError(f"{obj.__qualname__} is defined in __main__")
