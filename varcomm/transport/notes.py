"""Notes of ranks on their last call, in the store of torch.distributed.

The store answers in place of a lost rank.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from varcomm.errors import CommunicationError
from varcomm.transport.group import Group, resolve
from varcomm.transport.serialization import from_bytes, to_bytes

_LIBRARIES = {"varcomm", "torch", "torch_geometric"}
_MADE_BY_TORCH = "<eval_with_key>", os.path.dirname(dist.__path__[0])
_GRACE = 2.0  # seconds for which a rank that has failed waits for the notes of others

Note = dict[str, Any]


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
