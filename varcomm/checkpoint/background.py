"""A save that goes on while training does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

__all__ = ["PendingSave", "finish_earlier"]

logger = logging.getLogger("varcomm")


class PendingSave:
    """A save under way, returned by :func:`varcomm.checkpoint.save` with ``async_=True``.

    It ends by itself, on all ranks or on none, and an interpreter that ends waits for it. What
    goes wrong is logged at once, as an error of the logger ``"varcomm"``, which Python writes to
    stderr where a program says nothing else: who never calls :meth:`wait` learns of it there. The
    exit code of the program stays as it is.

    Examples
    --------
    >>> import tempfile, torch
    >>> from varcomm.checkpoint import read, save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pending = save({"x": torch.ones(2)}, folder, async_=True)
    ...     pending.wait()
    ...     read(folder)
    {'x': tensor([1., 1.])}
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
            logger.error("%s", error)

    def done(self) -> bool:
        """Return whether it has ended, well or not; no communication."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is complete on all ranks; no communication.

        Raises
        ------
        VarcommError
            The same on every rank, if it could not be written; it names the folder. The earlier
            checkpoint is there.
        CommunicationError
            If ranks could not agree: one is gone, or has written for longer than the limit of the
            group (``varcomm.init(timeout=...)``), or ``destroy_process_group()`` was called
            before. The folder has the earlier checkpoint or the new one, whole.
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
