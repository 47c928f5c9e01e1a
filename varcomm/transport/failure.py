"""Errors for calls that an engine could not complete: the call, its duration, the ranks in it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType

import torch.distributed as dist

from varcomm.errors import CommunicationError, VarcommError
from varcomm.transport.engine import EngineFailure, engine_for
from varcomm.transport.group import Group
from varcomm.transport.last_seen import Note, brief, leave_note, members, notes, spans

__all__ = ["explained", "failure", "leave"]

_SERVED = 0.5  # seconds


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

    def failed_ranks(found: list[Note]) -> list[int]:
        return [rank for rank, note in enumerate(found) if call.items() <= note.items()]

    found, answered = notes(group, lambda found: len(failed_ranks(found)) == group.size)
    if dist.is_initialized() and dist.get_rank() == 0:
        time.sleep(_SERVED)  # it serves the store, which other ranks still ask
    failed = failed_ranks(found)
    others = {rank: found[rank] for rank in range(group.size) if rank not in failed}
    late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
    limit = " varcomm.init(timeout=...) sets how long ranks wait." if late else ""
    return CommunicationError(
        f"{what} on {group}: failed after {after:.1f} s: {brief(error)}. {details}"
        f"{members(group)} It has failed on {len(failed)} of {group.size}: {spans(failed)}; "
        f"{_others(others, answered)}{limit}"
    )


def leave(group: Group) -> None:
    """Close the group on this rank, if its engine can: no rank waits here or takes stale data."""
    with suppress(VarcommError, RuntimeError):  # the group may be destroyed
        engine_for(group, group.device()).leave(group)


def _others(others: Mapping[int, Note], answered: bool) -> str:
    if not answered:
        return "of others nothing is known: the store in which ranks met has ended, or the network."
    if not others:
        return "so all have come to it, and the network or the time limit has failed."
    ended = [
        f"rank {r} ended with {n['ended with']}" for r, n in others.items() if "ended with" in n
    ]
    silent = [rank for rank, note in others.items() if "ended with" not in note]
    named = f"rank{'s' if len(silent) > 1 else ''} {spans(silent)}"
    texts = [*ended, *([f"{named} not come to it, gone, or cut off"] if silent else [])]
    return "; ".join(texts) + "."


class explained:
    """Context of communication outside operators: an EngineFailure becomes a CommunicationError.

    It can be entered several times; the call began when it was made.
    """

    def __init__(self, what: str, group: Group) -> None:
        self._what, self._group, self._began = what, group, time.monotonic()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, EngineFailure):
            raise failure(self._what, self._group, self._began, error) from error.__cause__
