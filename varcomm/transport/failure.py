"""What to say where an engine could not complete a call: what it was, for how long, and whose."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType

import torch.distributed as dist

from varcomm.errors import CommunicationError, VarcommError
from varcomm.transport.engine import EngineFailure
from varcomm.transport.engines import engine_for
from varcomm.transport.group import Group
from varcomm.transport.whereabouts import Note, brief, leave_note, members, notes, spans

__all__ = ["explained", "failure", "leave"]

_SERVED = 0.5  # seconds


def failure(
    what: str, group: Group, began: float, error: Exception, details: str = ""
) -> CommunicationError:
    """Return the error for a call that began at a time of ``time.monotonic()``; takes seconds.

    It says which ranks of the group have failed in the same call: the others have not come to it,
    or are gone. No rank waits for this one any more: that of those that have come, each hears of it
    at once, and not from the one after the other.
    """
    after, call = time.monotonic() - began, {"failed": what, "in group": group.name}
    leave_note(call)
    leave(group)

    def alike(found: list[Note]) -> list[int]:
        return [rank for rank, note in enumerate(found) if call.items() <= note.items()]

    found, answered = notes(group, lambda found: len(alike(found)) == group.size)
    if (
        dist.is_initialized() and dist.get_rank() == 0
    ):  # which serves the store, and may end now: others still ask
        time.sleep(_SERVED)
    failed = alike(found)
    others = {rank: found[rank] for rank in range(group.size) if rank not in failed}
    limit = " varcomm.init(timeout=...) sets how long ranks wait." if _is_late(error) else ""
    return CommunicationError(
        f"{what} on {group}: failed after {after:.1f} s: {brief(error)}. {details}"
        f"{members(group)} It has failed on {len(failed)} of {group.size}: {spans(failed)}; "
        f"{_of_others(others, answered)}{limit}"
    )


def leave(group: Group) -> None:
    """Let no rank wait for this one in a group any more, nor take what was sent for another call.

    Where its engine can; the group is of no use afterwards.
    """
    with suppress(VarcommError, RuntimeError):  # of a group that has been destroyed
        engine_for(group, group.device()).leave(group)


def _is_late(error: Exception) -> bool:
    return "timed out" in str(error).lower() or "timeout" in str(error).lower()


def _of_others(others: Mapping[int, Note], answered: bool) -> str:
    """Say of ranks that have not failed in the same call what is known of them."""
    if not answered:
        return "of others nothing is known: the store in which ranks met has ended, or the network."
    if not others:
        return "so all have come to it, and the network or the time limit has failed."
    ended = [
        f"rank {r} ended with {n['ended with']}" for r, n in others.items() if "ended with" in n
    ]
    silent = [rank for rank, note in others.items() if "ended with" not in note]
    who = f"rank{'s' if len(silent) > 1 else ''} {spans(silent)}"
    texts = [*ended, *([f"{who} not come to it, gone, or cut off"] if silent else [])]
    return "; ".join(texts) + "."


class explained:
    """Surround communication that is no operator's: what fails in it says what it was."""

    def __init__(self, what: str, group: Group) -> None:
        self._what, self._group, self._began = what, group, time.monotonic()

    def __enter__(self) -> None:
        """Nothing has to be done before."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raise CommunicationError in place of what an engine has raised."""
        if isinstance(error, EngineFailure):
            raise failure(self._what, self._group, self._began, error) from error.__cause__
