"""A run as a whole: on what machine it was, and all of its results, as JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from varcomm.cli.bench.case import Result
from varcomm.cli.bench.files import write_whole
from varcomm.cli.bench.peers.offer import versions
from varcomm.errors import ArgumentError

__all__ = ["Report", "described"]

_FORMAT = "varcomm bench 1"


@dataclass(frozen=True)
class Report:
    """Results, and what they were measured on.

    Attributes
    ----------
    about : dict of str to str
        Machine, versions, command and date.
    results : list of Result
    """

    about: dict[str, str]
    results: list[Result]

    def save(self, path: Path) -> None:
        """Write it as JSON, all of it or nothing."""
        record = {
            "format": _FORMAT,
            "about": self.about,
            "results": [
                asdict(result) | {"algbw": result.algbw, "busbw": result.busbw}
                for result in self.results
            ],
        }
        write_whole(path, json.dumps(record, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read it again.

        Raises
        ------
        ArgumentError
            If the file is not there or no such report.
        """
        if not path.is_file():
            raise ArgumentError(f"there is no file {path}.")
        try:
            record = json.loads(path.read_text())
            if record["format"] != _FORMAT:
                raise KeyError("format")
            about = {str(name): str(value) for name, value in record["about"].items()}
            return cls(about, [_result(entry) for entry in record["results"]])
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ArgumentError(
                f"{path} is no report of this command's --json: {type(error).__name__}: {error}"
            ) from error

    def lines(self) -> Iterator[str]:
        """Yield what stands above the table."""
        for name, value in self.about.items():
            yield f"{name}: {value}"


def _result(entry: dict[str, Any]) -> Result:
    derived = ("algbw", "busbw")
    return Result.from_json({name: entry[name] for name in entry if name not in derived})


def described(engine: str, command: str) -> dict[str, str]:
    """Return machine, versions, command and date."""
    packages = [f"torch {torch.__version__}", f"varcomm {_version('varcomm')}"]
    if engine == "mpi":
        packages += [f"mpi4py {_version('mpi4py')}", _mpi_library()]
    if engine == "nccl":
        packages.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    packages += [f"{name} {number}" for name, number in versions().items()]
    return {
        "machine": f"{os.cpu_count()} cores of {_processor()}, {platform.system()}, "
        f"Python {platform.python_version()}",
        "versions": ", ".join(packages),
        "command": command,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of this folder" if package == "varcomm" else "not installed"


def _mpi_library() -> str:
    try:
        if "mpi4py.MPI" not in sys.modules:
            # this process only asks: its ranks are others
            import_module("mpi4py").rc.initialize = False
        text: str = import_module("mpi4py.MPI").Get_library_version()
    except (ImportError, RuntimeError):
        return "no MPI library"
    return " ".join(text.split("\n")[0].split())


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
