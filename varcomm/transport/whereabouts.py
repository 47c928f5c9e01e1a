"""Where ranks are: told through the store in which they met, which answers where a rank does not.

A collective that lacks a rank says on the others that time is up or that a connection was closed,
and no more. So a rank whose call fails leaves a note for those who ask where it is, and in
:func:`varcomm.debug` so does one that is about to wait for others.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from varcomm.transport.group import Group
from varcomm.transport.plain import from_bytes, to_bytes

__all__ = ["brief", "failed_together", "leave_note", "notes", "spans", "table", "user_line"]

# What stands between a user's code and a call.
_LIBRARIES = {"varcomm", "torch", "torch_geometric"}

# Seconds for which a rank that has failed waits for what others say.
_GRACE = 2.0

Note = dict[str, Any]

_told: Note = {}  # by this rank so far


def user_line() -> str:
    """Return the line of the user's code that is running, such as ``"train.py:12, in step"``."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"


def leave_note(note: Mapping[str, Any]) -> None:
    """Tell where this rank is; what a note does not mention stays as the one before said."""
    if not dist.is_initialized():
        return
    store = distributed_c10d._get_default_store()
    _told.update(note)
    text = to_bytes({word: said for word, said in _told.items() if said != ""}).decode()
    try:
        store.set(_key(dist.get_rank()), text)
    except RuntimeError:
        return  # whoever serves the store has gone: nobody could ask


def notes(group: Group) -> list[Note]:
    """Return what each rank of a group told last, in rank order; nothing of one that told none."""
    found: list[Note] = [{} for _ in range(group.size)]
    _within(_GRACE, lambda: _read(group, found))
    return found


def failed_together(note: Mapping[str, Any], group: Group) -> list[int]:
    """Tell that a call has failed here; return the ranks where it has too, after a while."""
    wanted, found = {**note, "group": group.name}, [Note() for _ in range(group.size)]
    leave_note(wanted)

    def failed() -> list[int]:
        return [rank for rank, told in enumerate(found) if wanted.items() <= told.items()]

    def ask() -> None:
        deadline = time.monotonic() + _GRACE
        while len(failed()) < group.size and time.monotonic() < deadline:
            _read(group, found)
            time.sleep(0.05)

    _within(_GRACE + 1, ask)
    return failed()


def _read(group: Group, found: list[Note]) -> None:
    store = distributed_c10d._get_default_store()
    for place, rank in enumerate(group.ranks):
        if store.check([_key(rank)]):
            found[place] = from_bytes(store.get(_key(rank)))


def _within(seconds: float, ask: Any) -> None:
    """Ask the store, whose host may have gone, or may not answer."""

    def asking() -> None:
        try:
            ask()
        except (RuntimeError, ValueError):
            return

    thread = threading.Thread(target=asking, daemon=True)
    thread.start()
    thread.join(seconds)


def _key(rank: int) -> str:
    return f"varcomm/whereabouts/{rank}"


def brief(error: BaseException) -> str:
    r"""Return what an engine says, without where in its sources it was.

    >>> brief(RuntimeError("[/src/pair.cc:14] Connection closed by peer. This may\nbe ..."))
    'Connection closed by peer. This may'
    """
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text.split("] ", 1)[-1] if text.startswith("[/") else text


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
