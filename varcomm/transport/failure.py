"""What to say where an engine could not complete a call: what it was, for how long, and whose."""

from __future__ import annotations

import time
from types import TracebackType

from varcomm.errors import CommunicationError
from varcomm.transport.engine import EngineFailure
from varcomm.transport.group import Group
from varcomm.transport.whereabouts import brief, failed_together, spans

__all__ = ["explained", "failure"]


def failure(
    what: str, group: Group, began: float, error: Exception, details: str = ""
) -> CommunicationError:
    """Return the error for a call that began at a time of ``time.monotonic()``; takes seconds.

    It says which ranks of the group have failed in the same call: the others have not come to it,
    or are gone.
    """
    after = time.monotonic() - began
    alike = failed_together({"failed": what}, group)
    others = [rank for rank in range(group.size) if rank not in alike]
    if others:
        verb = "have" if len(others) > 1 else "has"
        who = f"rank{'s' * (len(others) > 1)} {spans(others)} {verb} not said so"
        rest = f"{who}: not come to it, or ended."
    else:
        rest = "so all have come to it, and the network or the time limit has failed."
    return CommunicationError(
        f"{what} on {group}: failed after {after:.1f} s: {brief(error)}. {details}"
        f"The group is of ranks {spans(group.ranks)}. It has failed on {spans(alike)} of "
        f"{group.size}; {rest}"
    )


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
