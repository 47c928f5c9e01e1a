"""Measure the contenders of a case on one rank: checked once, then in turns."""

from __future__ import annotations

import gc
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

import varcomm as vc
from varcomm.cli.bench.case import COPY, OURS, Answer, Case, Contender, Task, Values
from varcomm.transport.agreement import share
from varcomm.transport.group import resolve

__all__ = ["Effort", "measure"]

# A sample takes about this long, so that how differently ranks leave a barrier does not matter:
# that is tens of microseconds.
_SAMPLE = 2e-3
_MOST_CALLS = 100
# Who takes this many times longer than varcomm runs in every second repetition, and so on.
_SLOW = 4
_RAREST = 4
_FEWEST, _MOST = 15, 200


@dataclass(frozen=True)
class Effort:
    """How long to measure a case.

    Attributes
    ----------
    seconds : float
        About this long, but at least 15 and at most 200 repetitions.
    repetitions : int or None
        This many exactly.
    peers : bool
        Whether other libraries run.
    """

    seconds: float = 0.5
    repetitions: int | None = None
    peers: bool = True


def measure(
    rank: int, case: Case, effort: Effort, build: Callable[[Case, Effort, torch.device], Task]
) -> Answer:
    """Check what each contender returns, and time those that are right; collective.

    Parameters
    ----------
    rank : int
        Of this process, among all.
    case : Case
        The same on all ranks.
    effort : Effort
        How long to take.
    build : callable
        Makes the case's task on this rank.
    """
    del rank
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning, message="torch.distributed.nn")
    device = vc.init().device
    task = build(case, effort, device)
    contenders, cannot = _right(task, case)
    with vc.trace() as trace:
        contenders[0].run()
    copied = torch.ones(max(task.sent, task.received), dtype=torch.uint8, device=device)
    contenders.append(Contender("copy", COPY, copied.clone))
    calls, pace = _pace(contenders, device)
    seconds = _in_turns(contenders, calls, pace, effort, device)
    return Answer(
        seconds,
        {contender.name: contender.kind for contender in contenders},
        cannot,
        task.nbytes,
        task.skew,
        task.sent,
        task.received,
        trace.total.sent,
        calls,
    )


def _right(task: Task, case: Case) -> tuple[list[Contender], dict[str, str]]:
    """Run each once; return those that are right on all ranks, and what is wrong with others."""
    right, cannot = [], dict(task.cannot)
    for contender in task.contenders:
        try:
            wrong = _difference(contender.run(), task)
        except Exception as error:
            wrong = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        # the reason of the first rank that has one
        wrongs = share("bench", partial(str, wrong), resolve(None))
        if not any(wrongs):
            right.append(contender)
            continue
        wrong = next(filter(None, wrongs))
        if contender.kind == OURS:
            raise RuntimeError(f"{case}: varcomm is wrong, which is a bug: {wrong}")
        cannot[contender.name] = wrong
    return right, cannot


def _difference(result: Values, task: Task) -> str:
    """Tell how a result differs from what is expected, or give an empty text."""
    results = result if isinstance(result, tuple) else (result,)
    expected = task.expected if isinstance(task.expected, tuple) else (task.expected,)
    for got, want in zip(results, expected, strict=True):
        if got.shape != want.shape or got.dtype != want.dtype:
            return (
                f"wrong result: shape {tuple(got.shape)} of {got.dtype} in place of "
                f"{tuple(want.shape)} of {want.dtype}"
            )
        if want.numel():
            error = float((got.detach().double() - want.double()).abs().max())
            if not error <= task.tolerance * float(want.double().abs().max()):
                return f"wrong result: off by {error:.2g}"
    return ""


def _pace(contenders: list[Contender], device: torch.device) -> tuple[int, dict[str, float]]:
    """Return how many calls make a sample, and about how long a call of each takes."""
    pace = {}
    for contender in contenders:
        once = min(_sample(contender, 1, device) for _ in range(3))
        slowest = torch.tensor([once], dtype=torch.float64, device=device)
        pace[contender.name] = float(vc.all_gather_v(slowest, [1] * dist.get_world_size()).max())
    calls = int(_SAMPLE / pace[contenders[0].name])
    return min(max(calls, 1), _MOST_CALLS), pace


def _in_turns(
    contenders: list[Contender],
    calls: int,
    pace: dict[str, float],
    effort: Effort,
    device: torch.device,
) -> dict[str, list[float | None]]:
    """Time all, in an order that is drawn anew in each repetition, the same on all ranks."""
    ours = pace[contenders[0].name]
    every = {
        name: min(max(int(seconds / (_SLOW * ours)), 1), _RAREST) for name, seconds in pace.items()
    }
    turn = sum(calls * seconds / every[name] for name, seconds in pace.items())
    repetitions = effort.repetitions or min(max(int(effort.seconds / turn), _FEWEST), _MOST)
    samples: dict[str, list[float | None]] = {contender.name: [] for contender in contenders}
    draw = random.Random(repetitions)
    with _without_collector():
        for repetition in range(repetitions):
            for contender in draw.sample(contenders, len(contenders)):
                runs = repetition % every[contender.name] == 0
                samples[contender.name].append(_sample(contender, calls, device) if runs else None)
    return samples


def _sample(contender: Contender, calls: int, device: torch.device) -> float:
    """Return seconds a call on this rank, of several one after the other."""
    run = contender.run
    dist.barrier()
    _synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    _synchronize(device)
    return (time.perf_counter() - begin) / calls


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Keep the collector from running within somebody's time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
