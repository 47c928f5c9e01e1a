"""The group on which messages of shards travel, and whether some are on their way."""

from __future__ import annotations

from varcomm.transport.agreement import debugging
from varcomm.transport.group import Group
from varcomm.transport.auxiliary_group import Lane, weakly

__all__ = ["Traffic"]


class Traffic:
    """Messages on a lane, or on the group itself where there is none.

    Parameters
    ----------
    group : Group
    lane : Lane or None
        Of the same ranks. It is left as under way, if not all that was begun has been waited for.
    """

    def __init__(self, group: Group, lane: Lane | None) -> None:
        self.group = weakly(group)
        self.lane = lane
        self._on_their_way = 0

    def over(self) -> Group:
        """Return the group on which to send.

        Ranks that differ are to find each other there, while they compare.
        """
        return self.group() if self.lane is None or debugging() else self.lane.group()

    def begin(self) -> None:
        """Note that a call is about to begin."""
        self._note(1)

    def end(self) -> None:
        """Note that one has been waited for."""
        self._note(-1)

    def _note(self, more: int) -> None:
        self._on_their_way += more
        if self.lane is not None:
            self.lane.under_way = self._on_their_way > 0
