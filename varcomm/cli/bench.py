"""``varcomm bench``: time of each primitive and of a plan, in the columns of nccl-tests."""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import varcomm as vc
from varcomm.cli import arguments
from varcomm.cli.workload import OPERATIONS, Case, workload
from varcomm.transport import environment

__all__ = ["DESCRIPTION", "add_arguments", "cases", "in_turns", "run", "summary"]

DESCRIPTION = """\
Measure the primitives and an ExchangePlan ("halo": columns of a grid) on an
engine, forward and backward. A time is the slowest rank's time from the input
to a new output: the median over repetitions.

  bytes   of the full tensor; of exchanges, the mean over ranks
  shards  how shards differ, an entry of --skews
  algbw   bytes / time, in GB/s
  busbw   bytes that the busiest rank must send or receive / time, in GB/s:
          equal to busbw of nccl-tests if shards are even
  wire    bytes sent / fewest possible bytes, over all ranks

example:
  %(prog)s --world 2 --sizes 1M,16M --skews even,1:8
"""

_DTYPES = ("float64", "float32", "float16", "bfloat16")
_LIMIT = 600.0  # seconds for one case
_SAMPLE = 2e-3  # seconds per sample; ranks leave a barrier tens of microseconds apart
_MOST_CALLS = 100
_FEWEST, _MOST = 15, 200  # repetitions
_COLUMNS = "operation pass ranks dtype bytes shards us algbw busbw wire"
_LINE = "{:<20}  {:<8}  {:>5}  {:<8}  {:>9}  {:>6}  {:>7}  {:>6}  {:>6}  {:>5}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add_case_arguments(parser)
    names = arguments.separated(arguments.one_of(OPERATIONS, "an operation"))
    some = f"some of {', '.join(OPERATIONS)} (default: all)"
    parser.add_argument(
        "--operations", type=names, default=OPERATIONS, metavar="NAME,...", help=some
    )


def add_case_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that choose engine, ranks, sizes and effort."""
    several, add = arguments.separated, parser.add_argument
    add("--engine", choices=("gloo", "nccl", "mpi"), default="gloo", help="default: gloo")
    started = "numbers of ranks to start here (default: 2,3); omit it under torchrun or mpiexec"
    add("--world", type=several(arguments.positive), metavar="N,...", help=started)
    skews = "even, empty (the first rank has no rows), or weights that ranks use in turn"
    dtype = arguments.one_of(_DTYPES, "a dtype to measure")
    for name, read, letter, default, words in (
        ("--sizes", arguments.nbytes, "B", "768,16K,64K,1M,16M", "bytes, with K, M or G"),
        ("--skews", arguments.skew, "S", "even,1:2,1:8,empty", skews),
        ("--dtypes", dtype, "D", "float32,bfloat16", f"some of {', '.join(_DTYPES)}"),
    ):
        words = f"{words} (default: {default})"
        add(name, type=several(read), default=default, metavar=f"{letter},...", help=words)
    duration = "time for a case, of 15 to 200 repetitions (default: 0.5)"
    add("--seconds", type=float, default=0.5, help=duration)
    add("--repeat", type=arguments.positive, metavar="N", help="exact number of repetitions")
    add("--json", type=Path, metavar="FILE", help="also write the results to a file")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measure each case and print its line; an interrupted run keeps its results."""
    results: list[dict[str, Any]] = []
    check_options(options, parser)
    run_all = cases(options, parser, [("ops", name) for name in options.operations])
    if speaks := is_first_rank():
        print(_LINE.format(*_COLUMNS.split()), flush=True)
    try:
        for case, on_ranks in run_all:
            result = on_ranks(measure, case, options.seconds, options.repeat)
            results.append(result)
            if speaks:
                names = ("world", "dtype", "nbytes", "skew")
                cells = [case.operation, "backward" if case.backward else "forward"]
                cells += [str(result[name]) for name in names]
                cells += [microseconds(result["seconds"]), f"{result['algbw']:.3g}"]
                cells += [f"{result['busbw']:.3g}", f"{result['wire']:.2f}"]
                print(_LINE.format(*cells), flush=True)
        if speaks and results:
            print(f"\n{_summary(results)}")
    finally:
        if speaks and options.json is not None:
            record = {"command": sys.argv[1:], "torch": torch.__version__, "results": results}
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _summary(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the last line: the range of busbw, and the number of cases with the fewest bytes.

    >>> _summary([{"busbw": 0.5, "wire": 1.0}, {"busbw": 2.0, "wire": 1.25}])
    '2 cases: busbw 0.5 to 2 GB/s; 1 of 2 send the fewest possible bytes'
    """
    rates = [result["busbw"] for result in results]
    exact = sum(result["wire"] == 1.0 for result in results)
    ends = f"{min(rates):.3g} to {max(rates):.3g} GB/s"
    return (
        f"{len(rates)} cases: busbw {ends}; {exact} of {len(rates)} send the fewest possible bytes"
    )


def check_options(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse an engine without a device, and a file that cannot be written."""
    if options.engine == "nccl" and not torch.cuda.is_available():
        parser.error("--engine nccl: this machine has no GPU that torch can use")
    if options.json is not None and is_first_rank():
        try:
            options.json.open("ab").close()
        except OSError as error:
            parser.error(f"{options.json} cannot be written: {error.strerror}")


def cases(
    options: argparse.Namespace,
    parser: argparse.ArgumentParser,
    operations: Sequence[tuple[str, str]],
) -> Iterator[tuple[Case, Callable[..., Any]]]:
    """Yield each case of (suite, operation) pairs beside a function that runs another on its ranks.

    If a launcher started this process, the ranks are the ranks of its job; otherwise this function
    starts them. The function returns the result of rank 0.
    """
    is_launched = environment.read(os.environ).meeting_point is not None
    joined = vc.init(backend=options.engine) if is_launched or dist.is_initialized() else None
    if joined is not None and options.world not in (None, [joined.size]):
        parser.error(f"this job has {joined.size} ranks; omit --world")
    choices = ((False, True), options.dtypes, options.sizes, options.skews)
    for size in [joined.size] if joined else options.world or [2, 3]:
        with nullcontext() if joined else vc.Ranks(size, _LIMIT, backend=options.engine) as pool:

            def on_ranks(fn: Callable[..., Any], *args: Any, pool: vc.Ranks | None = pool) -> Any:
                return pool.run(fn, *args)[0] if pool else fn(dist.get_rank(), *args)

            for (suite, name), backward, dtype, nbytes, skew in product(operations, *choices):
                case = Case(name, backward, size, options.engine, dtype, nbytes, skew, suite)
                yield case, on_ranks


def measure(rank: int, case: Case, seconds: float, repetitions: int | None) -> dict[str, Any]:
    """Time varcomm's call of a case; collective, with the same result on all ranks."""
    torch.set_num_threads(1)
    device = vc.init().device
    load = workload(case, rank, device)
    call, rows = load.call(case.operation)
    x = torch.randn(rows, load.width, device=device).to(load.dtype).requires_grad_()
    fewest, run = load.fewest(), partial(call, x)
    if case.backward:
        y = call(x)
        fewest, gradient = fewest[::-1], torch.ones_like(y)
        run = partial(torch.autograd.grad, y, x, gradient, retain_graph=True)  # type: ignore[arg-type]
    with vc.trace() as trace:
        run()
    samples = in_turns({"varcomm": run}, seconds, repetitions, device)["varcomm"]
    skew = max(load.sizes) * len(load.sizes) / sum(load.sizes)
    return summary(case, load.nbytes(case.operation), skew, fewest, trace.total.sent, samples)


def summary(
    case: Case, nbytes: int, skew: float, fewest: tuple[int, int], sent: int, samples: list[float]
) -> dict[str, Any]:
    """Return the numbers of a line; collective. `fewest` and `sent` are bytes of this rank."""
    least_sent, least_received, traced = over_ranks([*fewest, sent], vc.init().device).unbind(1)
    least, total = float(least_sent.sum()), float(traced.sum())
    busiest = float(torch.maximum(least_sent, least_received).max())
    median = statistics.median(samples)
    return {
        **vars(case),
        "asked": case.nbytes,
        "nbytes": nbytes,
        "largest_over_mean": skew,
        "count": nbytes // getattr(torch, case.dtype).itemsize,
        "busiest": busiest,
        "seconds": median,
        "repetitions": len(samples),
        "algbw": nbytes / median / 1e9,
        "busbw": busiest / median / 1e9,
        "wire": total / least if least else 1.0 + total,
    }


def in_turns(
    runs: Mapping[str, Callable[[], object]],
    seconds: float = 0.5,
    repetitions: int | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, list[float]]:
    """Return seconds per call of the slowest rank, for each function and repetition; collective.

    The order of functions is drawn again for each repetition, the same on all ranks.
    """
    pace = [min(_sample(run, 1, device) for _ in range(3)) for run in runs.values()]
    pace = over_ranks(pace, device).amax(0).tolist()
    calls = min(max(int(_SAMPLE / min(pace)), 1), _MOST_CALLS)
    repetitions = repetitions or min(max(int(seconds / calls / sum(pace)), _FEWEST), _MOST)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    draw = random.Random(repetitions)
    gc.collect()
    gc.disable()  # a collection would count as the time of one function
    try:
        for _ in range(repetitions):
            for name in draw.sample(list(runs), len(runs)):
                samples[name].append(_sample(runs[name], calls, device))
    finally:
        gc.enable()
    slowest = over_ranks([each for taken in samples.values() for each in taken], device).amax(0)
    return dict(zip(runs, slowest.view(len(runs), -1).tolist(), strict=True))


def _sample(run: Callable[[], object], calls: int, device: torch.device | str) -> float:
    dist.barrier()
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else int
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    wait()
    return (time.perf_counter() - start) / calls


def over_ranks(numbers: Sequence[float], device: torch.device | str) -> torch.Tensor:
    """Return the numbers of all ranks: fp64 of shape (P, len(numbers)), on the CPU; collective."""
    own = torch.tensor([numbers], dtype=torch.float64, device=device)
    return vc.all_gather_v(own, [1] * dist.get_world_size()).cpu()


def microseconds(seconds: float) -> str:
    """Write seconds as microseconds, with three digits or more.

    >>> microseconds(1.2345e-3), microseconds(12.345e-6)
    ('1234', '12.3')
    """
    return f"{seconds * 1e6:.3g}" if seconds < 1e-3 else f"{seconds * 1e6:.0f}"


def is_first_rank() -> bool:
    """Return whether this process prints and writes for its job."""
    return (dist.get_rank() if dist.is_initialized() else environment.read(os.environ).rank) == 0
