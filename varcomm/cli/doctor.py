"""``varcomm doctor``: versions, machine, and a test of each engine on ranks of this machine."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import varcomm as vc
from varcomm.cli import arguments
from varcomm.errors import LaunchError
from varcomm.testing import dot_test

__all__ = ["CHECKS", "DESCRIPTION", "Engine", "add_arguments", "engines", "run", "tried"]

DESCRIPTION = """\
Print versions, machine, GPUs and network interfaces, and test each installed
engine on 2 ranks of this machine: each primitive must move the right rows, and
its backward must be the adjoint. The output is Markdown. It holds addresses of
this machine; read it before you publish it.

The status is 1 if an installed engine does not work. An engine takes at most
180 s to start its ranks, and --timeout for each check.

example:
  %(prog)s > doctor.md
"""

# Distributions, and the extra that installs an optional one.
_PACKAGES = {
    **{"varcomm": "", "torch": "", "numpy": "", "torch_geometric": "graph", "pymetis": "partition"},
    **{"meshio": "mesh", "mpi4py": "mpi", "matplotlib": "plot"},
    "cloudpickle": "launch",
}
# Variables that change how ranks find each other, or how fast they are.
_PREFIXES = ("GLOO_", "NCCL_", "TORCH_NCCL_", "MPI4PY_", "VARCOMM_", "OMP_NUM_", "CUDA_VISIBLE_")
_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface
_DTYPES = (
    *(torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON")
    limit = "limit of a check; default 60"
    add("--timeout", type=arguments.seconds, default=60.0, metavar="SECONDS", help=limit)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Collect, test, and print."""
    found: dict[str, Any] = {
        "versions": versions(),
        "machine": machine(),
        "gpus": gpus(),
        "interfaces": interfaces(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_PREFIXES)},
    }
    results = [tried(engine, options.timeout) for engine in engines()]
    ok = all(engine.state != "fails" for engine in results)
    if options.json:
        listed = [{**vars(engine), "state": engine.state} for engine in results]
        print(json.dumps({"ok": ok, **found, "engines": listed}, indent=1))
    else:
        print("\n".join(_page(found, results)))
    return 0 if ok else 1


@dataclass(frozen=True)
class Engine:
    """An engine on a kind of device, and the results of its test.

    `ranks` is 0 if the engine is not installed. `passed` has the results by check; it is empty if
    the ranks did not start. `reasons` has failures by check, or under ``"start"``; under
    ``"absent"``, how to install the engine.
    """

    backend: str
    device: str
    ranks: int
    passed: dict[str, bool] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the engine and, of Gloo on a GPU, the device."""
        name = {"gloo": "Gloo", "nccl": "NCCL", "mpi": "MPI"}[self.backend]
        is_plain = self.backend == "nccl" or self.device == "cpu"
        return name if is_plain else f"{name}, tensors on a GPU"

    @property
    def state(self) -> str:
        """``"works"``, ``"fails"`` or ``"absent"``."""
        if not self.ranks:
            return "absent"
        return "works" if len(self.passed) == len(CHECKS) and not self.reasons else "fails"


def engines() -> Iterator[Engine]:
    """Yield all engines; one that is not installed has no ranks."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield Engine("gloo", "cpu", 2)
    if gpus:
        yield Engine("gloo", "cuda", 2)
    absent = "" if gpus else "no GPU that torch can use"
    if gpus and not dist.is_nccl_available():
        absent = "this torch is built without NCCL"
    yield _installed(Engine("nccl", "cuda", min(2, gpus)), absent)  # a GPU for each rank
    has_mpi = importlib.util.find_spec("mpi4py") is not None
    yield _installed(Engine("mpi", "cpu", 2), "" if has_mpi else 'pip install "varcomm[mpi]"')


def _installed(engine: Engine, absent: str) -> Engine:
    return replace(engine, ranks=0, reasons={"absent": absent}) if absent else engine


def tried(engine: Engine, limit: float) -> Engine:
    """Start ranks, run each check on them, and return the engine with its results.

    A check that ends the ranks is the last one.
    """
    if not engine.ranks:
        return engine
    passed: dict[str, bool] = {}
    reasons: dict[str, str] = {}
    name = "start"
    with vc.Ranks(engine.ranks, limit, backend=engine.backend) as ranks:
        try:
            for name in ("start", *CHECKS):
                arguments.progress(f"{engine.name}: {name}")
                wrong = ranks.run(check, name, engine.ranks, engine.device)[0]
                passed[name] = wrong is None
                if wrong is not None:
                    reasons[name] = wrong
        except LaunchError as error:
            cause = error.__cause__
            text = f"{type(cause).__name__}: {cause}" if cause else str(error).splitlines()[0]
            reasons[name] = " ".join(text.split())
            passed[name] = False
    passed.pop("start", None)
    arguments.progress("")
    return replace(engine, passed=passed, reasons=reasons)


def check(rank: int, name: str, ranks: int, device: str) -> str | None:
    """Run a check, or nothing, and return its failure, or None; the same on all ranks."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    sizes = vc.ShardSizes([1 if other % 2 else 3 for other in range(ranks)])
    try:
        if name in CHECKS:
            CHECKS[name](rank, sizes, torch.device(device))
    except AssertionError as error:
        return str(error)
    return None


Check = Callable[[int, vc.ShardSizes, torch.device], None]


def _adjoint(
    apply: Callable[[int, vc.ShardSizes, torch.Tensor], torch.Tensor], has_all_rows: bool = False
) -> Check:
    """Return the dot test of a primitive on this rank's rows, or on all rows."""

    def test(rank: int, sizes: vc.ShardSizes, device: torch.device) -> None:
        rows = sizes.total if has_all_rows else sizes[rank]
        x = torch.randn(rows, 4, dtype=torch.float64).to(device)
        dot_test(lambda x: apply(rank, sizes, x), x)

    return test


def _last_rows(rank: int, sizes: vc.ShardSizes, x: torch.Tensor) -> torch.Tensor:
    last, ranks = torch.tensor([sizes[rank] - 1], device=x.device), len(sizes)
    return vc.indexed_all_to_all_v(x, [last] * ranks, [[1] * ranks] * ranks)


def _first_rows(rank: int, sizes: vc.ShardSizes, x: torch.Tensor) -> torch.Tensor:
    needed = torch.tensor(sizes.offsets[: len(sizes)], device=x.device)
    return vc.ExchangePlan.from_needed(needed, sizes)(x)


def _every_dtype(rank: int, sizes: vc.ShardSizes, device: torch.device) -> None:
    wrong, mine = [], sizes.range(rank)
    for dtype in _DTYPES:
        sent = (torch.arange(sizes.total) % 2).to(device, dtype)
        if not torch.equal(vc.all_gather_v(sent[mine.start : mine.stop], sizes), sent):
            wrong.append(str(dtype).removeprefix("torch."))
    assert not wrong, f"arrives altered: {', '.join(wrong)}"


CHECKS: dict[str, Check] = {
    "all_gather_v": _adjoint(lambda r, s, x: vc.all_gather_v(x, s)),
    "gather_v": _adjoint(lambda r, s, x: vc.gather_v(x, s)),
    "scatter_v": _adjoint(lambda r, s, x: vc.scatter_v(x, s), True),
    "reduce_scatter_v": _adjoint(lambda r, s, x: vc.reduce_scatter_v(x, s), True),
    "all_to_all_v": _adjoint(lambda r, s, x: vc.all_to_all_v(x, s, [s[r]] * len(s)), True),
    "shard_v": _adjoint(lambda r, s, x: vc.shard_v(x, s), True),
    "transpose_v": _adjoint(
        lambda r, s, x: vc.transpose_v(x, 1, vc.ShardSizes.balanced(4, len(s)), 0, s)
    ),
    "broadcast": _adjoint(lambda r, s, x: vc.broadcast(x), True),
    "reduce": _adjoint(lambda r, s, x: vc.reduce(x), True),
    "all_reduce": _adjoint(lambda r, s, x: vc.all_reduce(x), True),
    "indexed_all_to_all_v": _adjoint(_last_rows),
    "ExchangePlan": _adjoint(_first_rows),
    "every dtype": _every_dtype,
}


def versions() -> dict[str, str]:
    """Return versions by name; of a missing package, how to install it."""
    found = {"Python": f"{platform.python_version()} on {platform.platform()}"}
    for name, extra in _PACKAGES.items():
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            install = f'not installed: pip install "varcomm[{extra}]"'
            found[name] = install if extra else "of a folder, not installed"
    return found | {"torch": torch.__version__}


def machine() -> dict[str, str]:
    """Return cores and memory."""
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    models = re.findall(r"^model name\s*: (.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    name = models[0] if models else platform.processor() or platform.machine()
    found = {"cores": f"{usable} of {cores}, {name}"}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found["memory"] = f"{memory / 2**30:.1f} GiB"
    if free := re.search(r"MemAvailable:\s*(\d+)", _read("/proc/meminfo")):
        found["memory"] += f", {int(free[1]) / 2**20:.1f} GiB of it available"
    return found


def _read(path: str) -> str:
    """Return the text of a file, or nothing if this system does not have it."""
    return Path(path).read_text() if Path(path).exists() else ""


def gpus() -> list[str]:
    """Return a line for each GPU that torch can use."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [torch.cuda.get_device_properties(index) for index in range(count)]
    return [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in found]


def interfaces() -> dict[str, list[str]]:
    """Return the addresses of each network interface, by its name."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    for name in found:
        with suppress(ImportError, OSError):  # not on every system; no such address
            import fcntl

            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
            found[name].append(socket.inet_ntoa(answer[20:24]))
    for line in _read("/proc/net/if_inet6").splitlines():
        address, *_, name = line.split()
        text = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
        found.setdefault(name, []).append(text)
    return found


def _page(found: Mapping[str, Any], results: Sequence[Engine]) -> Iterator[str]:
    yield "### varcomm doctor\n"
    rows = {**found["versions"], **found["machine"]}
    rows["GPUs"] = "; ".join(found["gpus"]) or "none that torch can use"
    for name, addresses in found["interfaces"].items():
        rows[f"interface {name}"] = ", ".join(addresses) or "no address"
    yield from _table(["", ""], rows.items())
    if found["environment"]:
        yield ""
        yield from _table(["variable", "value"], found["environment"].items())
    yield "\n### Engines\n"
    yield from _table(["engine", "ranks", "result"], map(_summary, results))
    started = [engine for engine in results if engine.passed]
    if started:
        yield ""
        verdicts = {True: "pass", False: "**fail**", None: "not tried"}
        listed = [[name, *(verdicts[e.passed.get(name)] for e in started)] for name in CHECKS]
        yield from _table(["dot test on all ranks", *(engine.name for engine in started)], listed)
    for engine in results:
        if engine.state == "fails":
            for name, reason in engine.reasons.items():
                yield f"\n{engine.name}, {name}: {reason}"


def _summary(engine: Engine) -> list[str]:
    if engine.state == "absent":
        return [engine.name, "", f"not installed: {engine.reasons['absent']}"]
    passed = f"{sum(engine.passed.values())} of {len(CHECKS)} checks"
    result = f"works: {passed}" if engine.state == "works" else f"**fails**: {passed} pass"
    return [engine.name, str(engine.ranks), result]


def _table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
