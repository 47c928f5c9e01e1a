"""Cases that run one after the other, each in a process of its own, and a page of their results."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path

PACKAGES = ("torch_geometric", "numpy", "safetensors", "xxhash", "pytest")
TORCH = (2, 11)
MESSAGE = 600  # characters of a failure on the page


class Skip(Exception):
    """A case that cannot run here, and the reason."""


@dataclass(frozen=True)
class Case:
    """A function without arguments, picklable, that returns a text or a table in Markdown."""

    name: str
    run: Callable[[], str]
    seconds: float = 120


@dataclass
class Page:
    """The results so far; each :meth:`add` writes the file again."""

    path: Path
    head: str
    device: str
    rows: list[tuple[str, str, float, str]] = field(default_factory=list)

    def add(self, name: str, result: str, seconds: float, text: str) -> None:
        """Add a case to the page, and print it."""
        self.rows.append((name, result, seconds, text))
        print(f"{result:8} {seconds:6.1f} s  {name}  {text}", flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self.text())

    def text(self) -> str:
        """Return the page in Markdown."""
        counts = {word: sum(row[1] == word for row in self.rows) for word in _RESULTS}
        lines = [
            self.head,
            machine(self.device) + "\n",
            ", ".join(f"{count} {word}" for word, count in counts.items()) + ".\n",
            "| case | result | seconds | details |",
            "| --- | --- | --- | --- |",
        ]
        for name, result, seconds, text in self.rows:
            cell = "below" if "\n" in text.strip() and result == "passed" else _cell(text)
            lines.append(f"| {name} | {result} | {seconds:.0f} | {cell} |")
        for name, result, _, text in self.rows:
            if "\n" in text.strip() and result == "passed":
                lines += ["", f"## {name[:1].upper()}{name[1:]}", "", text.strip()]
        return "\n".join(lines) + "\n"

    @property
    def failed(self) -> int:
        """Number of failed cases."""
        return sum(result == "failed" for _, result, *_ in self.rows)


_RESULTS = ("passed", "failed", "skipped")


def _cell(text: str) -> str:
    return text.strip().replace("\n", " ").replace("|", "/")[-MESSAGE:]


def run_cases(cases: Sequence[Case], page: Page, seconds: float, jobs: int = 1) -> int:
    """Run cases, `jobs` at a time, until the time is over; return the number of failures."""
    end = time.monotonic() + seconds

    def run(case: Case) -> tuple[str, float, str]:
        start = time.monotonic()
        if end - start < 10:
            return "skipped", 0, "out of time"
        result, text = _in_a_process(case, min(case.seconds, end - start))
        return result, time.monotonic() - start, text

    with ThreadPoolExecutor(jobs) as pool:
        for case, (result, took, text) in zip(cases, pool.map(run, cases), strict=True):
            page.add(case.name, result, took, text)
    return page.failed


def _in_a_process(case: Case, seconds: float) -> tuple[str, str]:
    """Run a case; a process that crashes or hangs ends alone, with the ranks that it started."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_run, args=(case, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            return "failed", f"not finished within {seconds:.0f} s"
        return ours.recv()  # type: ignore[no-any-return]
    except EOFError:
        process.join()
        return "failed", f"the process ended with exit code {process.exitcode}"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()  # its group may not have begun
        process.join()


def _run(case: Case, results: Connection) -> None:
    os.setsid()  # so that its ranks end with it
    try:
        results.send(("passed", case.run()))
    except Skip as reason:
        results.send(("skipped", str(reason)))
    except Exception as error:
        missing = type(error).__name__ == "MissingPackageError"
        text = str(error) if missing else "".join(traceback.format_exception(error))
        print(text, file=sys.stderr, flush=True)
        results.send(("skipped" if missing else "failed", text))


def markdown(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table."""
    lines = [list(columns), *[[str(cell) for cell in row] for row in rows]]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def missing_packages(device: str) -> list[str]:
    """Return what this Python lacks for the cases, in words."""
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    found = [f"the package {name}" for name in absent]
    if importlib.util.find_spec("torch") is None:
        return [*found, "torch"]
    import torch

    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if version < TORCH:
        found.append(f"torch {TORCH[0]}.{TORCH[1]} or newer; it has {torch.__version__}")
    if device == "cuda" and not torch.cuda.is_available():
        found.append("a GPU that torch can use")
    return found


def machine(device: str) -> str:
    """Return one sentence about the machine and the versions."""
    import torch

    words = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    words.append(f"torch_geometric {importlib.metadata.version('torch_geometric')}")
    if device == "cpu":
        return f"Rehearsal on a CPU, {date.today()}: {', '.join(words)}."
    cuda = torch.cuda
    words += [f"CUDA {torch.version.cuda}", f"NCCL {'.'.join(map(str, cuda.nccl.version()))}"]
    return f"{cuda.device_count()} x {cuda.get_device_name()}, {date.today()}: {', '.join(words)}."
