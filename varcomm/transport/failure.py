"""Errors of calls that could not be completed, and notes of ranks on their last call.

Each rank leaves notes in the store of torch.distributed, which answers in place of a lost rank.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from varcomm.errors import CommunicationError, VarcommError
from varcomm.transport.engine import EngineFailure, engine_for
from varcomm.transport.group import Group, resolve
from varcomm.transport.serialization import from_bytes, to_bytes

_LIBRARIES = {"varcomm", "torch", "torch_geometric"}
_MADE_BY_TORCH = "<eval_with_key>", os.path.dirname(dist.__path__[0])
_GRACE = 2.0  # seconds for which a rank that has failed waits for the notes of others
_SERVED = 0.5  # seconds for which rank 0 then still serves the store

Note = dict[str, Any]


def failure(
    what: str, group: Group, began: float, error: Exception, details: str = ""
) -> CommunicationError:
    """Return the error for a call that began at a time of ``time.monotonic()``; takes seconds.

    This rank leaves the group, so that every waiting rank fails at once. The message names the
    ranks that failed in the same call; the others did not come to it, or are gone.
    """
    after, call = time.monotonic() - began, {"failed": what, "in group": group.name}
    leave_note(call)
    leave(group)
    failed = {group.rank}

    def all_failed(found: list[Note]) -> bool:
        # kept: a rank that has caught its error overwrites its note in its next call
        failed.update(r for r, note in enumerate(found) if call.items() <= note.items())
        return len(failed) == group.size

    found, answered = notes(group, all_failed)
    if dist.is_initialized() and dist.get_rank() == 0:
        time.sleep(_SERVED)  # it serves the store, which other ranks still ask
    lost = [rank for rank in range(group.size) if rank not in failed]
    ends = {rank: found[rank]["ended with"] for rank in lost if "ended with" in found[rank]}
    others = [f"rank {rank} ended with {end}" for rank, end in ends.items()]
    if silent := [rank for rank in lost if rank not in ends]:
        ranks = f"rank{'s' if len(silent) > 1 else ''} {spans(silent)}"
        others.append(f"{ranks} not come to it, gone, or cut off")
    if not answered:
        others = ["of others nothing is known: the store in which ranks met has ended"]
    rest = "; ".join(others) or "so all have come to it, and the network or the timeout has failed"
    return CommunicationError(
        f"{what} on {group}: failed after {after:.1f} s: {brief(error)}. {details}"
        f"{members(group)} It has failed on {len(failed)} of {group.size}: "
        f"{spans(sorted(failed))}; {rest}."
    )


def leave(group: Group) -> None:
    """Close the group on this rank, if its engine can: no rank waits here or takes stale data."""
    with suppress(VarcommError, RuntimeError):  # the group may be destroyed
        engine_for(group, group.device()).leave(group)


class explained:
    """Context of communication outside operators: an EngineFailure becomes a CommunicationError."""

    def __init__(self, what: str, group: Group) -> None:
        self._what, self._group, self._began = what, group, time.monotonic()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, EngineFailure):
            raise failure(self._what, self._group, self._began, error) from error.__cause__


def leave_note(note: Mapping[str, Any]) -> None:
    """Update this rank's note; an empty string removes an entry."""
    if not dist.is_initialized():
        return
    world = resolve(None)
    world.note = {word: text for word, text in {**world.note, **note}.items() if text != ""}
    with suppress(RuntimeError):  # the process that serves the store has ended: no rank can ask
        _store().set(_key(world.rank), to_bytes(world.note).decode())


def notes(
    group: Group, until: Callable[[list[Note]], bool] = lambda found: True
) -> tuple[list[Note], bool]:
    """Return the note of each rank of a group, and whether the store answered.

    Looks again for two seconds until `until` returns True. A stopped host never answers its thread.
    """
    found: list[Note] = [{} for _ in range(group.size)]
    if dist.is_initialized():
        found[group.rank] = dict(resolve(None).note)
    answered = threading.Event()

    def ask() -> None:
        deadline = time.monotonic() + _GRACE
        with suppress(RuntimeError, ValueError):
            store = _store()
            while True:
                for place, rank in enumerate(group.ranks):
                    if place != group.rank and store.check([_key(rank)]):
                        found[place] = from_bytes(store.get(_key(rank)))
                answered.set()
                if until(found) or time.monotonic() > deadline:
                    return
                time.sleep(0.05)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_GRACE + 1)
    return found, answered.is_set()


def _store() -> Any:
    """Return the store in which the ranks of the world met."""
    return resolve(None).process_group.get_group_store()


def _key(rank: int) -> str:
    return f"varcomm/last seen/{rank}"


@functools.cache  # one hook per process
def note_exceptions() -> None:
    """Leave a note when an uncaught exception ends this process."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, CommunicationError):  # the consequence of another rank's end
            leave_note({"ended with": f"{kind.__name__}: {brief(error)}"})
        before(kind, error, trace)

    sys.excepthook = hook


def user_line() -> str:
    """Return the line of the user's code that is running, such as ``"train.py:12, in step"``."""
    frame = sys._getframe(1)
    while frame.f_back and _is_of_a_library(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"


def _is_of_a_library(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__", "").split(".")[0]
    return module in _LIBRARIES or frame.f_code.co_filename.startswith(_MADE_BY_TORCH)


def brief(error: BaseException) -> str:
    """Return the message of an engine's error, without its place in the engine's sources."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    said = text.split("] ", 1)[-1] if text.startswith("[/") else text
    return said.partition(". This ")[0]


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a table with one row per rank; ranks with equal rows share a line.

    >>> print(table([{"dim": 0, "at": "a.py:1"}, {"dim": 1, "at": "a.py:1"}, {"at": "a.py:2"}]))
      rank  dim  at
      0     0    a.py:1
      1     1    a.py:1
      2          a.py:2
    """
    cells = [{word: str(value) for word, value in row.items()} for row in rows]
    words = list(dict.fromkeys(word for row in cells for word in row))
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    for rank, row in enumerate(cells):
        ranks_of.setdefault(tuple(row.get(word, "") for word in words), []).append(rank)
    lines = [("rank", *words), *((spans(ranks), *row) for row, ranks in ranks_of.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ("  ".join(map(str.ljust, line, widths)) for line in lines)
    return "\n".join(f"  {text}".rstrip() for text in texts)


def members(group: Group) -> str:
    """Return a sentence that names the world ranks of a group, and their group ranks if other."""
    own = range(group.size)
    other = f" of the world, which are {spans(own)} in it" if group.ranks != tuple(own) else ""
    return f"The group is of ranks {spans(group.ranks)}{other}."


def spans(ranks: Iterable[int]) -> str:
    """Return ascending ranks in short form.

    >>> spans([0, 2, 3, 4, 7, 8])
    '0, 2-4, 7, 8'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )
