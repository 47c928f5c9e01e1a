"""What the benchmarks share: seconds, peak memory and tables."""

import os
import platform
import resource
import statistics
import time
from dataclasses import dataclass

import torch
import torch_geometric

import varcomm as vc


@dataclass
class Cost:
    """What a piece of work took on this rank."""

    wall: float = 0.0
    cpu: float = 0.0
    rise: int = 0
    high: int = 0
    sent: int = 0


class Measured:
    """Measure a block: seconds, CPU seconds, bytes sent, and memory at its peak."""

    def __enter__(self):
        self.cost = Cost()
        self._base = resident()
        reset_peak()
        self._trace = vc.trace()
        self._calls = self._trace.__enter__()
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self.cost

    def __exit__(self, *error):
        self.cost.wall = time.perf_counter() - self._wall
        self.cost.cpu = time.process_time() - self._cpu
        self._trace.__exit__(*error)
        self.cost.sent = sum(call.sent for call in self._calls)
        self.cost.high = peak()
        self.cost.rise = self.cost.high - self._base


def reset_peak():
    """Let the kernel count the peak anew; where it cannot, the peak is that of the process."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


def resident():
    """Bytes of this process in memory."""
    return _status("VmRSS")


def peak():
    """Bytes at the highest since :func:`reset_peak`."""
    return _status("VmHWM")


def _status(field):
    try:
        with open("/proc/self/status") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines[field].split()[0]) * 1024
    except (OSError, KeyError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def machine():
    """One line on what this runs on."""
    processor = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            processor = next(line.split(":")[1].strip() for line in file if "model name" in line)
    except (OSError, StopIteration):
        pass
    return (
        f"{os.cpu_count()} cores of {processor}, Python {platform.python_version()}, "
        f"torch {torch.__version__.split('+')[0]}, PyG {torch_geometric.__version__}"
    )


def table(columns, rows):
    """Print rows under columns."""
    cells = [[str(cell) for cell in row] for row in [columns, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print()


def median(values):
    return statistics.median(values)
