"""The child's side of :class:`~varcomm.transport.launch.Ranks`: run what the parent sends.

Parent and child share one socket. Its death in either direction is the news that the other process
is gone, so nobody has to be told.
"""

from __future__ import annotations

import faulthandler
import inspect
import math
import os
import pickle
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from varcomm.transport.call import dumps
from varcomm.transport.environment import Place
from varcomm.transport.world import join

__all__ = ["STOP", "Report", "importing_module", "main", "stack_file"]

STOP = b""


@dataclass(frozen=True)
class Report:
    """What a rank answers to one task.

    Attributes
    ----------
    when : float
        ``time.monotonic()``, which all processes of a host share: tells the cause from its
        consequences.
    payload : bytes or None
        The pickled result, or the pickled exception where there is one that can be pickled.
    failure : str or None
        The traceback, if the rank failed.
    died : bool
        Whether the parent wrote this in place of a rank that no longer could.
    """

    when: float
    payload: bytes | None = None
    failure: str | None = None
    died: bool = False


def stack_file(folder: str | Path, rank: int) -> Path:
    """Return where `rank` writes its stack, when it crashes or is asked to by SIGUSR1."""
    return Path(folder, f"stack-{rank}")


def main(descriptor: str, parent: str, rank: str, size: str, backend: str, folder: str) -> None:
    """Join the other ranks, then serve the parent until it says stop.

    The arguments come from the command line.
    """
    connection: Connection[Any, Any] = Connection(int(descriptor))
    watch = threading.Thread(
        target=_end_with_parent, args=(connection, int(parent), folder), daemon=True
    )
    watch.start()
    # `all_threads=False` is the main thread: to it the kernel delivers signals first, and in it the
    # task runs.
    with stack_file(folder, int(rank)).open("w") as stack:
        faulthandler.enable(stack, all_threads=False)
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(size)))
        place = Place(
            int(rank), int(size), int(rank), f"file://{folder}/rendezvous", "varcomm.launch"
        )
        # The parent keeps the time, which each run may set anew: no limit here.
        joining = partial(join, place, backend or None, math.inf)
        connection.send_bytes(pickle.dumps(_attempt(joining)))
        while (task := connection.recv_bytes()) != STOP:
            connection.send_bytes(pickle.dumps(_attempt(partial(_run, task, int(rank)))))
        faulthandler.disable()
        faulthandler.unregister(signal.SIGUSR1)


def _run(task: bytes, rank: int) -> Any:
    # The path first, since the function may come from a module that the parent has found only
    # meanwhile
    sys.path[:], call = pickle.loads(task)
    fn, args = pickle.loads(call)
    return fn(rank, *args)


def importing_module() -> str | None:
    """Name the module that the task below this call is just importing, if any."""
    frame, module, importing = inspect.currentframe(), None, False
    while frame is not None and frame.f_code is not _run.__code__:
        name = str(frame.f_globals.get("__name__"))
        if module is None and frame.f_code.co_name == "<module>":
            module = name
        importing |= name.startswith("importlib._bootstrap")
        frame = frame.f_back
    return module if importing and frame is not None else None


def _attempt(step: Callable[[], Any]) -> Report:
    """Run `step` and describe how it went; whatever it raises ends up in the report."""
    try:
        result = step()
    except BaseException as error:
        # without this function's own frame
        lines = traceback.format_exception(
            type(error), error, error.__traceback__ and error.__traceback__.tb_next
        )
        return Report(time.monotonic(), _portable(error), "".join(lines))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    try:
        return Report(time.monotonic(), dumps(result))
    except Exception as error:
        return Report(
            time.monotonic(),
            _portable(error),
            f"its result, of type {type(result).__qualname__}, cannot be pickled: {error!r}",
        )


def _portable(error: BaseException) -> bytes | None:
    """Pickle an exception, or give None where the parent could not make the same one of it."""
    try:
        data = dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _end_with_parent(connection: Connection[Any, Any], parent: int, folder: str) -> None:
    """Wait for the parent to end, however it does, and end with it.

    Its end of the socket closes then, at once, unless a process that it forked holds it open.
    Whatever this rank has started is in its process group, and ends too.
    """
    watch = select.poll()
    watch.register(connection, 0)  # no event asked for: a hang-up is always reported
    while os.getppid() == parent and not watch.poll(1000):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
