"""What a call of torch.distributed returns: a collective in one or more rounds of messages."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from mpi4py import MPI

from varcomm.transport.mpi.progress import (
    failed,
    keep,
    keep_for_good,
    move_on,
    one_at_a_time,
    poll,
    too_late,
)

__all__ = ["Message", "Steps", "Work", "joint"]

# Starts a round, yields its requests, and is resumed when they are done; None is to be asked again.
# What it holds is alive until then.
Steps: TypeAlias = Generator[list[MPI.Request] | None, None, None]

_test_all = MPI.Request.Testall


class Work(dist.Work):
    """A collective under way.

    Parameters
    ----------
    name : str
        For messages.
    where : callable
        Returns what messages say of rank and group.
    seconds : float
        Time limit of a wait.
    steps : generator
        The collective itself, of which the first step is made at once.
    result : sequence of torch.Tensor
        What it fills.
    """

    def __init__(
        self,
        name: str,
        where: Callable[[], str],
        seconds: float,
        steps: Steps,
        result: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        self._name, self._where, self._seconds = name, where, seconds
        self._steps, self._result = steps, list(result)
        self._requests: list[MPI.Request] = []
        self._done = False
        self._error: Exception | None = None
        self._future: _Future | None = None
        if not self.advance():
            keep(self)

    def advance(self) -> bool:
        """Go on to the next round, if this one is done; return whether all are."""
        with one_at_a_time:  # of this and of works that it is made of, whichever thread asks
            return self._advanced()

    def _advanced(self) -> bool:
        while not self._done:
            try:
                if self._requests and not _test_all(self._requests):
                    return False
                requests = next(self._steps)
                self._requests = requests or []
                if requests is None:
                    return False
            except StopIteration:
                self._finish()
            except MPI.Exception as error:
                keep_for_good(self._steps, self._requests)
                self._finish(failed(self._name, self._where(), error))
            except Exception as error:
                self._finish(error)
        return True

    def _finish(self, error: Exception | None = None) -> None:
        self._done, self._error, self._requests = True, error, []
        if self._future is not None:
            self._future.settle(self._result, error)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when it is done; zero stands for the group's time limit.

        Raises
        ------
        RuntimeError
            If it failed, or is not done in time. Then it stays under way, and may be waited for
            again.
        """
        if not self._done:
            move_on()
            seconds = timeout.total_seconds() or self._seconds
            if not self._done and not poll(lambda: self._done, seconds):
                raise too_late(self._name, self._where(), seconds)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Tell whether it is done, without waiting."""
        if not self._done:
            move_on()
        return self._done

    def is_success(self) -> bool:
        """Tell whether it is done, and has not failed."""
        return self._done and self._error is None

    def exception(self) -> Exception | None:
        """Return what it failed with."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return what it fills."""
        return self._result

    def synchronize(self) -> None:
        """Wait for it; what follows on a GPU's current stream sees what has arrived."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the result.

        Whoever waits for it in C++ does not poll, as the reducer of DistributedDataParallel at the
        end of a backward. So where a backward runs this is waited for at its end, before what
        asked later to be called then, which the reducer does; elsewhere a thread goes on for it.
        """
        if self._future is None:
            self._future = _Future(self)
            if self._done:
                self._future.settle(self._result, self._error)
            elif torch._C._current_autograd_node() is not None:
                torch.autograd.Variable._execution_engine.queue_callback(self.synchronize)
        return self._future


class Message(Work):
    """A receive, which knows from whom."""

    def __init__(self, *args: Any, status: MPI.Status) -> None:
        self._status = status
        super().__init__(*args)

    def source_rank(self) -> int:
        """Return the sender's rank in the group."""
        self.wait()
        return self._status.Get_source()

    _source_rank = source_rank


class _Future(torch.futures.Future[Any]):
    """Of a work: whoever waits for it in Python keeps it going."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._work = work

    def settle(self, result: Any, error: Exception | None) -> None:
        if error is None:
            self.set_result(result)
        else:
            self.set_exception(error)

    def wait(self) -> Any:
        self._work.wait()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        following = _Future(self._work)

        def follow(future: torch.futures.Future[Any]) -> None:
            try:
                following.set_result(callback(future))
            except Exception as error:
                following.set_exception(error)

        super().then(follow)
        return following


def joint(works: Sequence[Work]) -> Steps:
    """Return the steps of what is done when all of these are."""
    while not all(work.advance() for work in works):
        yield None
    for work in works:
        work.wait()  # which raises what it failed with
