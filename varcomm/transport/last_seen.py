"""Notes of ranks on their last call, in the store of torch.distributed.

A collective that lacks a rank reports a timeout or a closed connection on the others, and no more.
The store answers in place of a rank that does not.
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

from varcomm.errors import CommunicationError
from varcomm.transport.c10d import default_store
from varcomm.transport.group import Group, resolve
from varcomm.transport.serialization import from_bytes, to_bytes

__all__ = [
    "Note",
    "brief",
    "leave_note",
    "members",
    "note_exceptions",
    "notes",
    "spans",
    "table",
    "user_line",
]

_LIBRARIES = {"varcomm", "torch", "torch_geometric"}
_MADE_BY_TORCH = "<eval_with_key>", os.path.dirname(dist.__path__[0])

# Seconds for which a rank that has failed waits for the notes of others.
_GRACE = 2.0

Note = dict[str, Any]


def user_line() -> str:
    """Return the line of the user's code that is running, such as ``"train.py:12, in step"``."""
    frame = sys._getframe(1)
    while frame.f_back and _is_of_a_library(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"


def _is_of_a_library(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__", "").split(".")[0]
    return module in _LIBRARIES or frame.f_code.co_filename.startswith(_MADE_BY_TORCH)


def leave_note(note: Mapping[str, Any]) -> None:
    """Update this rank's note; an empty string removes an entry."""
    if not dist.is_initialized():
        return
    world = resolve(None)
    own = {word: text for word, text in {**world.note, **note}.items() if text != ""}
    world.note = own
    with suppress(RuntimeError):  # the process that serves the store has ended: no rank can ask
        default_store().set(_key(world.rank), to_bytes(own).decode())


def notes(
    group: Group, until: Callable[[list[Note]], bool] = lambda found: True
) -> tuple[list[Note], bool]:
    """Return the note of each rank of a group, and whether the store answered.

    Looks again for two seconds until `until` returns True. A stopped host never answers: the thread
    that asks stays until the host goes on or this process ends.
    """
    found: list[Note] = [{} for _ in range(group.size)]
    if dist.is_initialized():
        found[group.rank] = dict(resolve(None).note)
    answered = threading.Event()

    def ask() -> None:
        deadline = time.monotonic() + _GRACE
        with suppress(RuntimeError, ValueError):
            store = default_store()
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


@functools.cache  # one hook per process
def note_exceptions() -> None:
    """Leave a note when an uncaught exception ends this process."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, CommunicationError):  # the consequence of another rank's end
            leave_note({"ended with": f"{kind.__name__}: {brief(error)}"})
        before(kind, error, trace)

    sys.excepthook = hook


def _key(rank: int) -> str:
    return f"varcomm/last seen/{rank}"


def brief(error: BaseException) -> str:
    r"""Return the message of an engine's error, without its place in the engine's sources.

    >>> brief(RuntimeError("[/src/pair.cc:14] Connection closed by peer. This may\nbe ..."))
    'Connection closed by peer'
    """
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
    ranks_of: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for rank, row in enumerate(rows):
        cells = tuple((word, str(value)) for word, value in row.items())
        ranks_of.setdefault(cells, []).append(rank)
    words = list(dict.fromkeys(word for row in ranks_of for word, _ in row))
    lines = [["rank", *words]]
    for cells, ranks in ranks_of.items():
        lines.append([spans(ranks), *(dict(cells).get(word, "") for word in words)])
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
