"""What is measured, by whom, and what came of it: the records that the other files pass on."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import torch

from varcomm.transport.serialization import travels

__all__ = [
    "COPY",
    "FLOOR",
    "OURS",
    "PEER",
    "Answer",
    "Case",
    "Contender",
    "Result",
    "Task",
    "Timing",
]

# Kinds of contenders.
OURS, FLOOR, PEER, COPY = "varcomm", "floor", "peer", "copy"

Values: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes
    ----------
    suite, operation, engine : str
    backward : bool
        Whether the gradient is measured, in place of the value.
    world : int
        Number of ranks.
    dtype : str
        ``"float32"``, by torch's names.
    nbytes : int
        Bytes asked for; a whole number of rows comes close to it.
    skew : str
        How shards differ: ``"even"``, ``"1:8"``, ``"empty"``.
    """

    suite: str
    operation: str
    backward: bool
    world: int
    engine: str
    dtype: str
    nbytes: int
    skew: str

    @property
    def direction(self) -> str:
        """``"forward"`` or ``"backward"``."""
        return "backward" if self.backward else "forward"


@dataclass(frozen=True)
class Contender:
    """One way to do what a case asks for; `run` is called on all ranks, again and again."""

    name: str
    kind: str
    run: Callable[[], Values]


@dataclass(frozen=True)
class Task:
    """A case on one rank, ready to be run.

    Attributes
    ----------
    contenders : list of Contender
        varcomm's way, which comes first, and others.
    expected : tensor or tuple of tensors
        What each must return on this rank.
    tolerance : float
        Relative to the largest value expected; 0 where values are only moved.
    nbytes : int
        Bytes of the whole, or the mean over ranks of what each has, as the suite defines it.
    skew : float
        Largest over mean shard.
    sent, received : int
        The fewest bytes that this rank can send, and receive.
    cannot : dict of str to str
        Who cannot do it, and why.
    """

    contenders: list[Contender]
    expected: Values
    tolerance: float
    nbytes: int
    skew: float
    sent: int
    received: int
    cannot: dict[str, str] = field(default_factory=dict)


@travels
@dataclass(frozen=True)
class Answer:
    """What one rank measured: for each contender seconds a call by repetition, or None."""

    seconds: dict[str, list[float | None]]
    kinds: dict[str, str]
    cannot: dict[str, str]
    nbytes: int
    skew: float
    sent: int
    received: int
    traced: int
    calls: int


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender, the slowest rank of each repetition, and how varcomm compares.

    Attributes
    ----------
    seconds, low, high : float
        Median and quartiles.
    repetitions : int
    ratio : float
        varcomm's time over this one's: the median over repetitions, in which they ran close to
        each other.
    """

    name: str
    kind: str
    seconds: float
    low: float
    high: float
    repetitions: int
    ratio: float

    @classmethod
    def of(
        cls, name: str, kind: str, samples: list[float | None], ours: list[float | None]
    ) -> Timing:
        """Condense the samples of one contender, beside varcomm's."""
        there = [sample for sample in samples if sample is not None]
        low, middle, high = (
            statistics.quantiles(there, n=4, method="inclusive") if len(there) > 1 else there * 3
        )
        pairs = zip(ours, samples, strict=True)
        ratio = statistics.median(a / b for a, b in pairs if a is not None and b is not None)
        return cls(name, kind, middle, low, high, len(there), ratio)


@dataclass(frozen=True)
class Result:
    """A case with its measurements.

    Attributes
    ----------
    bus_bytes : int
        The most bytes that a rank has to send, or to receive.
    wire : float
        Bytes that varcomm sent over the fewest possible, all ranks together.
    calls : int
        Calls a sample, one after the other.
    timings : tuple of Timing
        varcomm's first.
    cannot : dict of str to str
        Who could not run, and why; a wrong result is such a reason.
    """

    case: Case
    nbytes: int
    skew: float
    bus_bytes: int
    wire: float
    calls: int
    timings: tuple[Timing, ...]
    cannot: dict[str, str]

    @property
    def ours(self) -> Timing:
        """Those of varcomm."""
        return self.timings[0]

    @property
    def floor(self) -> Timing | None:
        """The fastest bare schedule."""
        floors = [timing for timing in self.timings if timing.kind == FLOOR]
        return min(floors, key=lambda timing: timing.seconds, default=None)

    @property
    def peers(self) -> dict[str, Timing]:
        """Other libraries, by name."""
        return {timing.name: timing for timing in self.timings if timing.kind == PEER}

    @property
    def algbw(self) -> float:
        """Bytes over time, in GB/s."""
        return self.nbytes / self.ours.seconds / 1e9

    @property
    def busbw(self) -> float:
        """Bytes of the busiest rank over time, in GB/s; nccl-tests' where shards are even."""
        return self.bus_bytes / self.ours.seconds / 1e9

    @classmethod
    def of(cls, case: Case, answers: list[Answer]) -> Result:
        """Put together what the ranks measured."""
        first = answers[0]
        samples = {
            name: [_slowest(turn) for turn in zip(*(a.seconds[name] for a in answers), strict=True)]
            for name in first.seconds
        }
        least = sum(answer.sent for answer in answers)
        traced = sum(answer.traced for answer in answers)
        ours = samples[OURS]
        return cls(
            case,
            first.nbytes,
            first.skew,
            max(max(answer.sent, answer.received) for answer in answers),
            traced / least if least else 1.0 + traced,
            first.calls,
            tuple(Timing.of(n, first.kinds[n], s, ours) for n, s in samples.items()),
            first.cannot,
        )

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Result:
        """Read what :func:`dataclasses.asdict` made of a result.

        Whatever is not as it was made is a ValueError, a KeyError or a TypeError.
        """
        result = cls(
            **record
            | {
                "case": Case(**record["case"]),
                "timings": tuple(Timing(**timing) for timing in record["timings"]),
            }
        )
        parts: list[Result | Case | Timing] = [result, result.case, *result.timings]
        for part in parts:
            _check_kinds(part)
        kinds = [timing.kind for timing in result.timings]
        if kinds[:1] != [OURS] or not set(kinds) <= {OURS, FLOOR, PEER, COPY}:
            raise ValueError(f"timings of {kinds}")
        if not all(timing.seconds > 0 and timing.ratio > 0 for timing in result.timings):
            raise ValueError("a timing that is not positive")
        return result


# How the fields of records are annotated, and what a file may have there.
_KINDS: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "bool": bool,
    "float": (int, float),
    "dict[str, str]": dict,
}


def _check_kinds(record: Result | Case | Timing) -> None:
    for place in fields(record):
        value, kind = getattr(record, place.name), _KINDS.get(str(place.type), object)
        if not isinstance(value, kind):
            raise TypeError(f"{place.name} is {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{place.name} is {value!r}")


def _slowest(turn: tuple[float | None, ...]) -> float | None:
    there = [seconds for seconds in turn if seconds is not None]
    return max(there) if there else None
