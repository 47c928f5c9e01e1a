"""Timeouts as numbers of seconds."""

from __future__ import annotations

from datetime import timedelta
from numbers import Real

from varcomm.errors import ArgumentError

__all__ = ["seconds"]

_LONGEST = 24 * 86_400.0  # seconds; poll() counts milliseconds in an int


def seconds(timeout: object) -> float:
    """Return a timeout in seconds, at most 24 days.

    >>> seconds(timedelta(minutes=1)), seconds(0.5), seconds(float("inf"))
    (60.0, 0.5, 2073600.0)
    """
    given = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(given, Real) and not isinstance(given, bool) and float(given) > 0:
        return min(float(given), _LONGEST)
    raise ArgumentError(
        f"timeout must be a positive number of seconds or a timedelta; got {timeout!r}."
    )
