"""A save that goes on while training does."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["PendingSave", "finish_earlier"]


class PendingSave:
    """A save under way, returned by :func:`varcomm.checkpoint.save` with ``async_=True``.

    It ends by itself, on all ranks or on none, and an interpreter that ends waits for it.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(run,), name="varcomm.checkpoint")
        _under_way.append(self)
        self._thread.start()

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        """Return whether it has ended, well or not; no communication."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is complete on all ranks; no communication.

        Raises
        ------
        VarcommError
            The same on every rank, if it could not be written. The earlier checkpoint is there.
        """
        self._thread.join()
        if self in _under_way:
            _under_way.remove(self)
        if self._error is not None:
            raise self._error


# The one that this process has under way, or that failed with nobody waiting. Two at a time would
# hold two copies of a model in memory, and in one folder each would take the other's files for
# those of a save that was killed.
_under_way: list[PendingSave] = []


def finish_earlier() -> None:
    """Wait for the save that is under way, and raise what went wrong in it."""
    for pending in list(_under_way):
        pending.wait()
