"""Where ranks are: told through the store in which they met, which answers where a rank does not.

A collective that lacks a rank says on the others that time is up or that a connection was closed,
and no more. So a rank whose call fails leaves a note for those who ask where it is, and in
:func:`varcomm.debug` so does one that is about to wait for others.
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
from torch.distributed import distributed_c10d

from varcomm.errors import CommunicationError
from varcomm.transport.group import Group
from varcomm.transport.serialization import from_bytes, to_bytes

__all__ = [
    "Note",
    "brief",
    "leave_note",
    "members",
    "notes",
    "spans",
    "table",
    "tell_of_exceptions",
    "user_line",
]

# What stands between a user's code and a call.
_LIBRARIES = {"varcomm", "torch", "torch_geometric"}
_MADE_BY_TORCH = "<eval_with_key>", os.path.dirname(dist.__path__[0])

# Seconds for which a rank that has failed waits for what others say.
_GRACE = 2.0

Note = dict[str, Any]

# What this rank has told so far, in the store of the world that it is in.
_told: tuple[object, Note] = (None, {})


def user_line() -> str:
    """Return the line of the user's code that is running, such as ``"train.py:12, in step"``."""
    frame = sys._getframe(1)
    while frame.f_back and _is_of_a_library(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"


def _is_of_a_library(frame: FrameType) -> bool:
    """Tell whether code is of one, or was made by torch of what it has traced."""
    module = frame.f_globals.get("__name__", "").split(".")[0]
    return module in _LIBRARIES or frame.f_code.co_filename.startswith(_MADE_BY_TORCH)


def leave_note(note: Mapping[str, Any]) -> None:
    """Tell where this rank is; what a note does not mention stays as the one before said."""
    global _told
    if not dist.is_initialized():
        return
    store = distributed_c10d._get_default_store()
    if _told[0] is not store:
        _told = store, {}
    said = {word: text for word, text in {**_told[1], **note}.items() if text != ""}
    _told = store, said
    try:
        store.set(_key(dist.get_rank()), to_bytes(said).decode())
    except RuntimeError:
        return  # whoever serves the store has gone: nobody could ask


def notes(
    group: Group, until: Callable[[list[Note]], bool] = lambda found: True
) -> tuple[list[Note], bool]:
    """Return what each rank of a group told last, in rank order; nothing of one that told none.

    Looks again for a while, until that is what is waited for. Also returns whether the store has
    answered: it is served by the first rank of the world, or by its launcher.
    """
    found: list[Note] = [{} for _ in range(group.size)]
    found[group.rank] = dict(_told[1])
    answered = threading.Event()

    def ask() -> None:
        store = distributed_c10d._get_default_store()
        deadline = time.monotonic() + _GRACE
        while True:
            for place, rank in enumerate(group.ranks):
                if place != group.rank and store.check([_key(rank)]):
                    found[place] = from_bytes(store.get(_key(rank)))
            answered.set()
            if until(found) or time.monotonic() > deadline:
                return
            time.sleep(0.05)

    _within(_GRACE + 1, ask)
    return found, answered.is_set()


@functools.cache  # once
def tell_of_exceptions() -> None:
    """Leave a note where an exception ends this process."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, CommunicationError):  # of which others know
            leave_note({"ended with": f"{kind.__name__}: {brief(error)}"})
        before(kind, error, trace)

    sys.excepthook = hook


def _within(seconds: float, ask: Callable[[], None]) -> None:
    """Ask the store, whose host may have gone, or may not answer.

    Its calls have no time limit where the host is stopped: a thread that asks then stays until the
    host goes on, or this process ends, which it does not keep.
    """

    def asking() -> None:
        with suppress(RuntimeError, ValueError):
            ask()

    thread = threading.Thread(target=asking, daemon=True)
    thread.start()
    thread.join(seconds)


def _key(rank: int) -> str:
    return f"varcomm/whereabouts/{rank}"


def brief(error: BaseException) -> str:
    r"""Return what an engine says, without where in its sources it was.

    >>> brief(RuntimeError("[/src/pair.cc:14] Connection closed by peer. This may\nbe ..."))
    'Connection closed by peer'
    """
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    said = text.split("] ", 1)[-1] if text.startswith("[/") else text
    return said.partition(". This ")[0]


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a table of what each rank says; ranks that say the same share a line.

    Examples
    --------
    >>> print(table([{"dim": 0, "at": "a.py:1"}, {"dim": 1, "at": "a.py:1"}, {"at": "a.py:2"}]))
      rank  dim  at
      0     0    a.py:1
      1     1    a.py:1
      2          a.py:2
    """
    told: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for rank, row in enumerate(rows):
        cells = tuple((word, str(value)) for word, value in row.items())
        told.setdefault(cells, []).append(rank)
    words = list(dict.fromkeys(word for row in told for word, _ in row))
    lines = [["rank", *words]]
    lines += [
        [spans(ranks), *(dict(row).get(word, "") for word in words)] for row, ranks in told.items()
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(f"  {text}".rstrip() for text in texts)


def members(group: Group) -> str:
    """Say which ranks of the world a group has; what numbers they have in it, where others."""
    own = range(group.size)
    other = f" of the world, which are {spans(own)} in it" if group.ranks != tuple(own) else ""
    return f"The group is of ranks {spans(group.ranks)}{other}."


def spans(ranks: Iterable[int]) -> str:
    """Return ascending ranks in few words.

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
