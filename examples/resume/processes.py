"""Processes that end with the script."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Self, TypeVar

T = TypeVar("T")

FAREWELL = 20.0  # seconds, for agents to end their ranks


class Failure(Exception):
    """An error that ends the demonstration."""


class Processes:
    """Python processes by name; the end of a ``with`` block ends all of them.

    This includes the end by an exception, the deadline, SIGINT, SIGTERM or SIGHUP.
    """

    def __init__(self, folder: Path, deadline: float) -> None:
        self.folder = folder  # for the output and temporary files of processes
        self.deadline = deadline  # in time.monotonic()
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.signalled: int | None = None

    def __enter__(self) -> Self:
        # Handlers only record signals, so no signal interrupts a start or the end.
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self.handlers = {number: signal.signal(number, self._take_down) for number in signals}
        return self

    def _take_down(self, number: int, frame: FrameType | None) -> None:
        self.signalled = number

    def start(self, name: str, *arguments: str, **environ: str) -> None:
        launcher = ("RANK", "WORLD_SIZE")  # the handlers of a parent that started this script
        known = {name: value for name, value in os.environ.items() if name not in launcher}
        with self._printed(name).open("wb") as output:
            self.running[name] = subprocess.Popen(
                [sys.executable, *arguments],
                env=known | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder)} | environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl+C reaches this script alone
            )

    def pid(self, name: str) -> int:
        return self.running[name].pid

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL, which it cannot catch."""
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def wait_for(self, found: Callable[[], T | None]) -> T:
        """Return the result of a function as soon as it is true."""
        while not (result := found()):
            self._check()
            time.sleep(0.002)
        return result

    def wait_for_end(self) -> None:
        """Wait until all running processes have ended without an error."""
        running = self.running.values()
        self.wait_for(lambda: all(process.poll() == 0 for process in running))

    def _check(self) -> None:
        for name, process in self.running.items():
            if process.poll():
                end = self._printed(name).read_text(errors="replace")[-3000:]
                raise Failure(f"{name} has ended with {process.returncode}, after it said\n{end}")
        if self.signalled is not None:
            raise Failure(f"ended by {signal.Signals(self.signalled).name}")
        if time.monotonic() > self.deadline:
            raise Failure("time is up")

    def _printed(self, name: str) -> Path:
        return self.folder / f"{name}.txt"

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.terminate()  # on which an agent ends its rank
        deadline = time.monotonic() + FAREWELL
        for process in self.running.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
