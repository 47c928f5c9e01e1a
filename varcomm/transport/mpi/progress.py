"""Waiting for MPI: polling that yields, keeps others going, and ends.

MPI's own wait cannot be interrupted and knows no time limit. With an `os.sched_yield` after each
test that fails, polling is as fast; without it, three ranks on two cores are 1000 times as slow.

While a rank waits for something else than MPI, a thread goes on for it: peers may wait for what
this rank has under way.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import Protocol

from mpi4py import MPI

__all__ = [
    "Unfinished",
    "all_finished",
    "failed",
    "keep",
    "keep_for_good",
    "move_on",
    "one_at_a_time",
    "poll",
    "too_late",
]


class Unfinished(Protocol):
    """Something under way that goes on when it is asked to."""

    def advance(self) -> bool:
        """Do what can be done without waiting; return whether nothing is left."""


# In the order in which they were started. They hold what they read and write, so nothing is lost
# where nobody waits for them. A rank that waits for one keeps all others going, of all groups: its
# peers may wait for another, of which this rank still owes them the second round.
_unfinished: dict[int, Unfinished] = {}
one_at_a_time = threading.RLock()

_wrecks: list[object] = []

# Seconds between two looks of the thread: longer than what is waited for at once mostly takes.
_PAUSE = 1e-3
_something = threading.Event()
_thread: threading.Thread | None = None


def keep(work: Unfinished) -> None:
    """Keep going, and alive, what has been started, until it is finished."""
    global _thread
    with one_at_a_time:
        _unfinished[id(work)] = work
        if _thread is None:
            _thread = threading.Thread(target=_go_on, name="varcomm-mpi", daemon=True)
            _thread.start()
    _something.set()


def _go_on() -> None:
    while True:
        _something.wait()
        sleep(_PAUSE)
        if MPI.Is_finalized():
            return
        move_on()
        if not _unfinished:
            _something.clear()
            if _unfinished:  # since
                _something.set()


def keep_for_good(*what: object) -> None:
    """Keep what a failed call may still read or write: MPI does not take a message back."""
    _wrecks.append(what)


def move_on() -> None:
    """Do what can be done for all that is under way, without waiting."""
    if _unfinished:
        with one_at_a_time:
            for key, work in list(_unfinished.items()):
                if work.advance():
                    _unfinished.pop(key, None)


def all_finished() -> bool:
    """Return whether nothing is under way, after all that can be done without waiting."""
    move_on()
    return not _unfinished


def poll(done: Callable[[], bool], seconds: float) -> bool:
    """Return whether `done` within the time limit."""
    end = monotonic() + seconds
    while not done():
        if monotonic() > end:
            return False
        move_on()
        os.sched_yield()
    return True


def too_late(what: str, where: str, seconds: float) -> RuntimeError:
    """Return the error of a wait that has come to its end."""
    return RuntimeError(
        f"{what} on {where} was not done within {seconds:g} s. Look for a rank that has failed, "
        "that calls something else or in another order (varcomm.debug() names it), that expects "
        "another size, or that computes for longer than this: the limit is the timeout of "
        "varcomm.init or of the group."
    )


def failed(what: str, where: str, error: MPI.Exception) -> RuntimeError:
    """Return the error of what MPI refused."""
    kind = error.Get_error_class()
    # of several messages MPI says only that one of them has failed
    said = "a message failed" if kind == MPI.ERR_IN_STATUS else MPI.Get_error_string(kind)
    return RuntimeError(
        f"{what} on {where} failed: {said}. Mostly ranks expect other sizes than their peers send "
        "(varcomm.debug() names them), or a peer has ended."
    )
