"""What varcomm promises, held against the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from varcomm.cli.bench.case import Case, Result, Timing
from varcomm.cli.bench.text import seconds_text, short_bytes

__all__ = ["GOALS", "Goal", "Verdict", "verdicts"]

_LARGE, _SMALL = 2**20, 2**16


@dataclass(frozen=True)
class Goal:
    """A limit that a number has to keep, over the cases to which it applies.

    Attributes
    ----------
    text : str
    limit : float
    at_least : bool
        Whether the number must not be smaller than the limit, in place of not larger.
    number : callable
        Of a result; None where the goal does not apply.
    unit : str
        ``"x"`` for ratios, ``"us"`` for microseconds.
    """

    text: str
    limit: float
    number: Callable[[Result], float | None]
    at_least: bool = False
    unit: str = "x"

    def holds(self, number: float) -> bool:
        """Tell whether a number keeps the limit."""
        if self.at_least:
            return number >= self.limit
        return number <= self.limit + 1e-9


@dataclass(frozen=True)
class Verdict:
    """How a goal fared: cases, those that hold, the median and the worst number, and where."""

    goal: Goal
    cases: int
    held: int
    median: float
    worst: float
    where: str


def _is(case: Case, suite: str, engine: str | None = None) -> bool:
    return case.suite == suite and (engine is None or case.engine == engine)


def _ratio(timing: Timing | None) -> float | None:
    return None if timing is None else timing.ratio


def _large(result: Result) -> float | None:
    case = result.case
    applies = _is(case, "ops") and case.engine != "mpi" and case.nbytes >= _LARGE
    return _ratio(result.floor) if applies else None


def _small(result: Result) -> float | None:
    case = result.case
    applies = _is(case, "ops") and case.engine != "mpi" and case.nbytes < _SMALL
    return _ratio(result.floor) if applies else None


def _padded(result: Result) -> float | None:
    case, there = result.case, result.peers.get("padded")
    applies = _is(case, "ops", "gloo") and case.skew == "1:2" and case.nbytes >= _LARGE
    return 1 / there.ratio if applies and there is not None else None


def _mpi_large(result: Result) -> float | None:
    applies = _is(result.case, "ops", "mpi") and result.case.nbytes >= _LARGE
    return _ratio(result.floor) if applies else None


def _mpi_small(result: Result) -> float | None:
    if not _is(result.case, "ops", "mpi") or result.case.nbytes >= _SMALL:
        return None
    floor = result.floor
    return None if floor is None else (result.ours.seconds - floor.seconds) * 1e6


def _plan(result: Result) -> float | None:
    return _ratio(result.floor) if _is(result.case, "plan") else None


GOALS = (
    Goal("1 MB and more, of the floor", 1.10, _large),
    Goal("under 64 KB, of the floor", 1.25, _small),
    Goal("Gloo, 1:2, 1 MB and more: times as fast as the padded gather", 4.0, _padded, True),
    Goal("MPI, 1 MB and more, of mpi4py's bare call", 1.15, _mpi_large),
    Goal("MPI, under 64 KB, more than mpi4py's bare call", 40.0, _mpi_small, unit="us"),
    Goal("bytes on the wire, of the fewest possible", 1.0, lambda result: result.wire),
    Goal("plans, of the bare schedule", 1.15, _plan),
)


def verdicts(results: Sequence[Result]) -> list[Verdict]:
    """Hold the goals that apply to any result against all results."""
    found = []
    for goal in GOALS:
        numbers = [(n, result) for result in results if (n := goal.number(result)) is not None]
        if not numbers:
            continue
        numbers.sort(key=lambda pair: pair[0], reverse=goal.at_least)
        worst, result = numbers[-1]
        held = sum(goal.holds(number) for number, _ in numbers)
        case = result.case
        where = (
            f"{case.operation} {case.direction}, {case.world} ranks, {case.dtype}, "
            f"{short_bytes(case.nbytes)} {case.skew}: {seconds_text(result.ours.seconds)} us"
        )
        median = numbers[len(numbers) // 2][0]
        found.append(Verdict(goal, len(numbers), held, median, worst, where))
    return found
