"""Seconds, peak memory and tables, for the benchmarks of this folder."""

import platform
import statistics
import time
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch

import varcomm as vc
from varcomm.cli import doctor
from varcomm.cli.table import aligned


class Measured:
    """Measure a block: seconds, CPU seconds, sent bytes, peak memory and its growth."""

    def __enter__(self):
        self.cost = SimpleNamespace()
        self._base = status("VmRSS")
        reset_peak()
        self._trace = vc.trace()
        self._calls = self._trace.__enter__()
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self.cost

    def __exit__(self, *error):
        self.cost.wall = time.perf_counter() - self._wall
        self.cost.cpu = time.process_time() - self._cpu
        self._trace.__exit__(*error)
        self.cost.sent = self._calls.total.sent
        self.cost.high = status("VmHWM")
        self.cost.rise = self.cost.high - self._base


def reset_peak():
    """Reset the kernel's peak of memory; without support, the peak of the process remains."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def status(field):
    """Return the resident bytes: now (VmRSS), or the peak since reset_peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[field].split()[0]) * 1024


def peak_of_tensors(step):
    """Return the largest total of the tensors that a call makes and has not freed, in bytes."""
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    changes = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in changes))


def turns_of(names, turn):
    """Return names in alternating order, because the first may find cold caches."""
    return list(names) if turn % 2 else list(names)[::-1]


def slowest(parts):
    """Return the seconds of the slowest rank in each turn."""
    return [max(turn) for turn in zip(*parts, strict=True)]


def ratio(seconds, of):
    """Return the median of the ratios per turn."""
    return median([a / b for a, b in zip(seconds, of, strict=True)])


def spread(seconds, of):
    """Return the median and quartiles of the ratios per turn, as text."""
    ratios = [a / b for a, b in zip(seconds, of, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def ms(*seconds, digits=1):
    """Return cells with milliseconds."""
    return [f"{1e3 * each:.{digits}f}" for each in seconds]


def machine():
    """Return one line about the machine."""
    torch_version = torch.__version__.split("+")[0]
    cores = doctor.machine()["cores"]
    return f"cores: {cores}, Python {platform.python_version()}, torch {torch_version}"


def table(columns, rows):
    """Print rows under columns."""
    cells = [[str(cell) for cell in row] for row in [columns, *rows]]
    print(*aligned(cells), sep="\n", end="\n\n")


def arguments(parser, **defaults):
    """Add integer options with defaults, parse, and print the machine."""
    for name, default in defaults.items():
        many = {"nargs": "+"} if isinstance(default, list) else {}
        kind = type(default[0] if many else default)
        parser.add_argument(f"--{name}", type=kind, default=default, **many)
    options = parser.parse_args()
    print(machine(), end="\n\n")
    return options
