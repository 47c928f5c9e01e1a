"""``varcomm doctor``: versions, machine, and a test of each engine on ranks of this machine."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist

import varcomm as vc
from varcomm.cli import arguments
from varcomm.cli.bench import in_turns
from varcomm.cli.table import aligned
from varcomm.errors import LaunchError
from varcomm.testing import dot_test

__all__ = ["CHECKS", "DESCRIPTION", "Engine", "add_arguments", "engines", "machine", "run", "tried"]

DESCRIPTION = """\
Print versions, machine, GPUs and network interfaces, and test each installed
engine on 2 ranks of this machine. The tests check the rows that primitives
move, and that backward is the adjoint. If both run on CPUs, Gloo and MPI are
timed. The last line is the verdict. For an issue, print Markdown.

The status is 1 if an installed engine does not work. An engine takes at most
180 s to start its ranks, and 60 s for each check.

example:
  %(prog)s --markdown > doctor.md
"""

# Distributions, of which only the first three are required.
_PACKAGES = (
    *("varcomm", "torch", "numpy", "torch_geometric", "pymetis", "meshio", "mpi4py"),
    *("matplotlib", "cloudpickle", "ase", "scipy"),
)
# Variables that change how ranks find each other, or how fast they are.
_PREFIXES = ("GLOO_", "NCCL_", "TORCH_NCCL_", "MPI4PY_", "VARCOMM_", "OMP_NUM_", "CUDA_VISIBLE_")
LIMIT = 60.0  # seconds of a check
_DTYPES = (
    *(torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the argument of the command."""
    words = "print Markdown instead of aligned columns"
    parser.add_argument("--markdown", action="store_true", help=words)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Collect, test, and print."""
    seconds: dict[str, list[float]] = {}
    results = {engine: tried(engine, seconds) for engine in engines()}
    print(*_page(results, seconds, _markdown if options.markdown else _text), sep="\n")
    return 1 if any(any(failures.values()) for failures in results.values()) else 0


class Engine(NamedTuple):
    """An engine on a kind of device; `absent` says why it is not installed."""

    name: str
    backend: str
    device: str = "cpu"
    ranks: int = 2
    absent: str = ""


def engines() -> Iterator[Engine]:
    """Yield all engines, also those that are not installed."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield Engine("Gloo", "gloo")
    if gpus:
        yield Engine("Gloo, tensors on a GPU", "gloo", "cuda")
    absent = "" if dist.is_nccl_available() else "this torch is built without NCCL"
    absent = absent if gpus else "no GPU that torch can use"
    yield Engine("NCCL", "nccl", "cuda", min(2, gpus), absent)  # a GPU for each rank
    has_mpi = importlib.util.find_spec("mpi4py") is not None
    yield Engine("MPI", "mpi", absent="" if has_mpi else "pip install mpi4py mpich")


def tried(engine: Engine, seconds: dict[str, list[float]]) -> dict[str, str]:
    """Start ranks and run each check on them; return the reasons of failures by check, or "".

    A check that ends the ranks is the last one. Put the `seconds` of an engine for CPUs that works.
    """
    failures: dict[str, str] = {}
    if engine.absent:
        return failures
    with vc.Ranks(engine.ranks, LIMIT, backend=engine.backend) as ranks:
        for name in CHECKS:
            arguments.progress(f"{engine.name}: {name}")
            try:
                failures[name] = ranks.run(check, name, engine.device)[0]
            except LaunchError as error:
                cause = error.__cause__
                text = f"{type(cause).__name__}: {cause}" if cause else str(error).splitlines()[0]
                failures[name] = " ".join(text.split())
                break
        if engine.device == "cpu" and not any(failures.values()):
            seconds[engine.name] = ranks.run(times)[0]
    arguments.progress("")
    return failures


def times(rank: int) -> list[float]:
    """Return the median seconds of all_gather_v for each of SIZES; takes 1 s."""
    torch.set_num_threads(1)
    ranks, seconds = dist.get_world_size(), []
    for nbytes in SIZES:
        x = torch.zeros(nbytes // ranks // 4)
        samples = in_turns({"": partial(vc.all_gather_v, x, [len(x)] * ranks)})
        seconds.append(median(samples[""]))
    return seconds


def check(rank: int, name: str, device: str) -> str:
    """Run a check and return its failure, or ""; the same on all ranks."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    sizes = vc.ShardSizes([1 if other % 2 else 3 for other in range(dist.get_world_size())])
    try:
        if name in _CALLS:
            call, has_all_rows = _CALLS[name]
            rows = sizes.total if has_all_rows else sizes[rank]
            x = torch.randn(rows, 4, dtype=torch.float64).to(device)
            dot_test(lambda x: call(rank, sizes, x), x)
        else:
            mine = sizes.range(rank)
            for dtype in _DTYPES:
                sent = (torch.arange(sizes.total) % 2).to(device, dtype)
                found = vc.all_gather_v(sent[mine.start : mine.stop], sizes)
                assert torch.equal(found, sent), f"{dtype} arrives altered"
    except AssertionError as error:
        return str(error)
    return ""


def _first_rows(rank: int, sizes: vc.ShardSizes, x: torch.Tensor) -> torch.Tensor:
    needed = torch.tensor(sizes.offsets[: len(sizes)], device=x.device)
    return vc.ExchangePlan.from_needed(needed, sizes)(x)


# Calls for the dot test, with rank, sizes and x; and whether x has all rows, not this rank's.
_CALLS: dict[str, tuple[Callable[[int, vc.ShardSizes, torch.Tensor], torch.Tensor], bool]] = {
    "all_gather_v": (lambda _, s, x: vc.all_gather_v(x, s), False),
    "gather_v": (lambda _, s, x: vc.gather_v(x, s), False),
    "scatter_v": (lambda _, s, x: vc.scatter_v(x, s), True),
    "reduce_scatter_v": (lambda _, s, x: vc.reduce_scatter_v(x, s), True),
    "all_to_all_v": (lambda r, s, x: vc.all_to_all_v(x, s, [s[r]] * len(s)), True),
    "broadcast": (lambda _, s, x: vc.broadcast(x), True),
    "reduce": (lambda _, s, x: vc.reduce(x), True),
    "all_reduce": (lambda _, s, x: vc.all_reduce(x), True),
    "ExchangePlan": (_first_rows, False),
}
CHECKS = (*_CALLS, "every dtype")
SIZES = (1024, 1 << 20)  # bytes of the gathered tensor that engines are timed with


def versions() -> dict[str, str]:
    """Return versions by name; of a missing package, how to install it."""
    found = {"Python": f"{platform.python_version()} on {platform.platform()}"}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = f"not installed: pip install {name}"
    return found | {"torch": torch.__version__}


def machine() -> dict[str, str]:
    """Return cores, memory, GPUs and network interfaces."""
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return {
        "cores": f"{usable} of {cores}, {model[1] if model else platform.machine()}",
        "memory": f"{memory / 2**30:.1f} GiB",
        "GPUs": "; ".join(map(torch.cuda.get_device_name, gpus)) or "none that torch can use",
        "network interfaces": ", ".join(name for _, name in socket.if_nameindex()),
    }


Table: TypeAlias = Callable[[Sequence[str], Iterable[Sequence[str]]], Iterable[str]]


def _page(
    results: Mapping[Engine, Mapping[str, str]],
    seconds: Mapping[str, Sequence[float]],
    table: Table,
) -> Iterator[str]:
    chosen = {k: v for k, v in sorted(os.environ.items()) if k.startswith(_PREFIXES)}
    yield "### varcomm doctor\n" if table is _markdown else "varcomm doctor\n"
    yield from table(["", ""], {**versions(), **machine(), **chosen}.items())
    work = [
        e.name for e, failures in results.items() if not e.absent and not any(failures.values())
    ]
    fail = [e.name for e, failures in results.items() if any(failures.values())]
    if "NCCL" in work:
        engine = "NCCL for tensors on GPUs, Gloo for those on CPUs"
    elif "MPI" in work:
        engine = "MPI under mpiexec and mpirun, Gloo under torchrun and srun"
    else:
        engine = "Gloo under any launcher"
    yield f"\n`varcomm.init()` here: {engine}."
    if {"Gloo", "MPI"} <= seconds.keys():
        yield "\nall_gather_v on 2 ranks:\n"
        rows = [
            (f"{size // 1024} KiB", f"{a * 1e6:.0f} us", f"{b * 1e6:.0f} us", f"{a / b:.1f}")
            for size, a, b in zip(SIZES, seconds["Gloo"], seconds["MPI"], strict=True)
        ]
        yield from table(["bytes", "Gloo", "MPI", "Gloo / MPI"], rows)
    yield ""
    summary, reasons = [], []
    for e, failures in results.items():
        passed = f"{list(failures.values()).count('')} of {len(CHECKS)} checks"
        result = f"FAILS: {passed} pass" if e.name in fail else f"works: {passed}"
        row = ("", f"not installed: {e.absent}") if e.absent else (str(e.ranks), result)
        summary.append((e.name, *row))
        reasons += [f"\n{e.name}, {check}: {why}" for check, why in failures.items() if why]
    yield from table(["engine", "ranks", "result"], summary)
    yield from reasons
    parts = [f"{', '.join(work)} work{'s' * (len(work) == 1)}"] if work else []
    parts += [f"{', '.join(fail)} fail{'s' * (len(fail) == 1)}"] if fail else []
    parts += [f"{e.name}: {e.absent}" for e in results if e.absent]
    yield f"\n{'FAILED' if fail else 'OK'}: {'; '.join(parts)}"


def _text(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in aligned columns."""
    return aligned([head, *rows] if any(head) else [*rows], left=len(head))


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
