"""What is installed, and what this machine has; found without starting anything."""

from __future__ import annotations

import os
import platform
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

__all__ = ["gpus", "interfaces", "machine", "variables", "versions"]

# By the name of a distribution: what brings it, where it is optional.
_PACKAGES = {
    "varcomm": "",
    "torch": "",
    "numpy": "",
    "torch_geometric": "varcomm[graph]",
    "pymetis": "varcomm[partition]",
    "kahip": "varcomm[kahip]",
    "meshio": "varcomm[mesh]",
    "mpi4py": "varcomm[mpi]",
    "matplotlib": "varcomm[plot]",
    "cloudpickle": "varcomm[launch]",
}
# What changes how ranks find each other, or how fast they are.
_PREFIXES = ("GLOO_", "NCCL_", "TORCH_NCCL_", "MPI4PY_", "VARCOMM_", "OMP_NUM_", "CUDA_VISIBLE_")
_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface


def versions() -> dict[str, str]:
    """Return versions by name; of what is missing, how to get it."""
    found = {"Python": f"{platform.python_version()} on {platform.platform()}"}
    for name, extra in _PACKAGES.items():
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            missing = f'not installed: pip install "{extra}"'
            found[name] = missing if extra else "of a folder, not installed"
    found["torch"] = torch.__version__
    return found


def machine() -> dict[str, str]:
    """Return cores and memory."""
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    found = {"cores": f"{usable} of {cores}, {_processor()}"}
    page = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    with suppress(ValueError, OSError, AttributeError):
        found["memory"] = f"{page * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    with suppress(OSError, ValueError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) / 2**20
        found["memory"] += f", {free:.1f} GiB of it available"
    return found


def gpus() -> list[str]:
    """Return a line for each GPU that torch can use."""
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        found.append(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")
    return found


def interfaces() -> dict[str, list[str]]:
    """Return the addresses of each network interface, by its name."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    for name in found:
        found[name] += _ipv4(name)
    for name, address in _ipv6():
        found.setdefault(name, []).append(address)
    return found


def variables() -> dict[str, str]:
    """Return the variables of the environment that matter to engines."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}


def _ipv4(name: str) -> Iterator[str]:
    with suppress(ImportError, OSError):  # not on every system; no such address
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        yield socket.inet_ntoa(answer[20:24])


def _ipv6() -> Iterator[tuple[str, str]]:
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, *_, name = line.split()
            yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))


def _processor() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()
