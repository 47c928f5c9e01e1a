"""The switch of ``varcomm.debug``: whether ranks compare their calls, and how long they wait."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from numbers import Real

from varcomm.errors import ArgumentError, CommunicationError
from varcomm.transport.engine import is_capturing
from varcomm.transport.group import Group, living
from varcomm.transport.notes import brief, leave_note

DEFAULT_TIMEOUT = 30.0  # seconds


def is_on(variable: str) -> bool:
    """Return whether an environment variable of varcomm is set, and not to a word for no."""
    return os.environ.get(variable, "").lower() not in {"", "0", "false", "no", "off"}


def checked_seconds(timeout: object) -> float:
    """Return a timeout in seconds, at most 24 days: ``poll`` counts milliseconds in an int."""
    given = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(given, Real) and not isinstance(given, bool) and float(given) > 0:
        return min(float(given), 24 * 86_400.0)
    raise ArgumentError(
        f"timeout must be a positive number of seconds or a timedelta; got {timeout!r}."
    )


# Timeout of each open debug() block; threads may close them in another order. Backward runs in
# threads of its own and must see them.
_timeouts: list[list[float]] = []

if is_on("VARCOMM_DEBUG"):
    _timeouts.append([DEFAULT_TIMEOUT])


@contextmanager
def debug(timeout: float | timedelta = DEFAULT_TIMEOUT) -> Iterator[None]:
    """Compare every call between ranks before its data moves, in forward and in backward.

    All ranks of a group enter the block together. If their calls do not match, or one rank's
    arguments are wrong, all ranks raise one :class:`~varcomm.errors.DisagreementError` with a table
    of the ranks. If a rank is missing, the other ranks raise after `timeout` and print its last
    call. ``VARCOMM_DEBUG=1`` compares all calls of a program, with a timeout of 30 seconds.
    The end of the block makes the comparisons of sums on GPUs that are not made yet.

    Parameters
    ----------
    timeout : float or timedelta
        Seconds that ranks wait for each other before a call; ArgumentError if not positive.

    Raises
    ------
    CommunicationError
        Inside the block, on ranks that have waited for a missing rank. Every later call in the
        group raises this error too. After a DisagreementError the group remains usable.

    See Also
    --------
    trace, varcomm.testing.same_as_one_process

    Notes
    -----
    Communication: a round of messages before each call, about 1 KiB per rank, and a note in the
    store of torch.distributed.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     try:
    ...         with varcomm.debug():
    ...             varcomm.all_gather_v(torch.zeros(2, 3 + rank), [2, 2])
    ...     except varcomm.DisagreementError as error:
    ...         return str(error)
    >>> print(varcomm.launch(fn, 2)[0].splitlines()[0])
    all_gather_v: ranks disagree on shape of a row: rank 0 has [3]; rank 1 has [4].
    """
    block = [checked_seconds(timeout)]
    _timeouts.append(block)
    try:
        yield
        for group in living():
            settle(group)
    except BaseException as error:
        if not (getattr(error, "on_all_ranks", False) or isinstance(error, CommunicationError)):
            leave_note({"left with": f"{type(error).__name__}: {brief(error)}"})
        raise
    finally:
        # not the first equal one
        del _timeouts[next(at for at, one in enumerate(_timeouts) if one is block)]


def debugging() -> bool:
    """Return whether ranks compare their calls."""
    return bool(_timeouts)


def debug_timeout() -> timedelta:
    """Return the time that ranks wait for each other inside the last block of :func:`debug`."""
    return timedelta(seconds=_timeouts[-1][0])


def settle(group: Group, left: int = 0) -> None:
    """Compare what sums on a GPU carried, but for the last `left`; a capture leaves all."""
    log = group.log
    if log is not None and len(log.pending) > left and not is_capturing():
        while len(log.pending) > left:
            log.pending.popleft()()
