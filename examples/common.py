"""Code shared by the examples: options, time and memory per step, comparison with one process.

Your own programs do not need this module.
"""

import argparse
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from command_line import hindrance, image, positive
from torch.optim.lr_scheduler import OneCycleLR
from tqdm import tqdm

import varcomm as vc

LIMITS = {torch.float64: (1e-10, 1e-12), torch.float32: (1e-4, 1e-3)}  # of losses, of gradients


class Parser(argparse.ArgumentParser):
    """Options of an example; ``--smoke`` sets options for a run of seconds."""

    def __init__(self, description: str | None, smoke: dict[str, Any]) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=form)
        self.smoke = smoke
        said = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in smoke.items())
        self.add_argument("--smoke", action="store_true", help=f"run in seconds: {said}")

    def add_whole(self, name: str, default: int, help: str, least: int = 1) -> None:
        """Add an option whose value is an integer of at least `least`."""
        number = partial(positive, least=least)
        self.add_argument(
            name, type=number, default=default, metavar="N", help=f"{help} (%(default)s)"
        )

    def add_seed(self, draws: str) -> None:
        """Add the option for the seed of these `draws`."""
        self.add_argument(
            "--seed", type=int, default=0, metavar="N", help=f"seed of {draws} (%(default)s)"
        )

    def add_check(self, compared: str = "") -> None:
        """Add the option to compare a run, or `compared`, with one process."""
        text = f"compare {compared} with one process" if compared else "compare with one process"
        self.add_argument("--check", action="store_true", help=text)

    def add_picture(self, default: str) -> None:
        """Add the option for the file of the picture."""
        self.add_argument(
            "--picture",
            type=image,
            default=Path(default),
            metavar="FILE",
            help="file of the picture (%(default)s)",
        )

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the options; given options override ``--smoke``."""
        if self.parse_args(arguments).smoke:
            self.set_defaults(**self.smoke)
        options = self.parse_args(arguments)
        if hasattr(options, "picture"):
            self.require(lambda: hindrance(options.picture))
        return options

    def require(self, problem: Callable[[], str | None]) -> None:
        """End all ranks if rank 0 finds a problem, because others may not see its files."""
        found = [problem() if is_first() else None]
        torch.distributed.broadcast_object_list(found)
        if found[0]:
            self.error(found[0])

    def error(self, message: str) -> NoReturn:
        """Print the error once, on rank 0, before any rank exits."""
        if is_first():
            print(f"{self.format_usage()}{self.prog}: error: {message}", file=sys.stderr)
        torch.distributed.barrier()
        sys.exit(2)


def is_first() -> bool:
    return vc.init().rank == 0


def say(text: str) -> None:
    """Print on the first rank."""
    if is_first():
        print(text, flush=True)


class Cost:
    """The time of steps, and the peak memory of this rank."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds.append(time.perf_counter() - began)

    def report(self) -> str:
        """Return the median time of a step and the peak memory of each rank; collective."""
        peaks = vc.all_gather_v(torch.tensor([peak_memory()]), [1] * vc.init().size)
        ranks = " and ".join(f"{peak:.0f}" for peak in peaks)
        return (
            f"{statistics.median(self.seconds):.3f} s per step, the median of {len(self.seconds)}; "
            f"at most {ranks} MiB per rank"
        )


def peak_memory() -> float:
    """Return the peak memory of this process in MiB, on Linux."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) / 1024 if found else float("nan")


def training(
    losses: Iterable[float], steps: int, cost: Cost, form: str = "{:.4f}"
) -> Iterator[float]:
    """Yield the losses, one per step, with a progress bar; record the cost of each step."""
    iterator = iter(losses)
    with tqdm(total=steps, desc="training", unit="step", disable=not is_first()) as bar:
        while True:
            with cost.step():
                loss = next(iterator, None)
            if loss is None:
                cost.seconds.pop()
                return
            bar.set_postfix(loss=form.format(loss), refresh=False)
            bar.update()
            yield loss


def one_cycle(optimizer: torch.optim.Optimizer, rate: float, steps: int, rise: float) -> OneCycleLR:
    """Return a schedule that raises the learning rate to `rate`, then lowers it to zero.

    A training of a few steps ends before the fall, because torch needs several steps for the rise.
    """
    shortest = math.ceil(2 / rise)
    return OneCycleLR(optimizer, rate, max(steps, shortest), pct_start=rise, cycle_momentum=False)


Record = tuple[Sequence[float], Sequence[torch.Tensor]]


def differences(on_ranks: Callable[[], Record], alone: Callable[[], Record]) -> tuple[float, float]:
    """Return the largest differences between training on ranks and in one process; collective.

    Both functions return the losses of all steps and the full gradients of the first step. The
    differences are relative: of losses, and of each gradient relative to its largest entry. The
    first rank runs `alone`, and the other ranks wait.
    """
    losses, gradients = on_ranks()
    found = None
    if is_first():
        true_losses, true_gradients = alone()
        values = torch.tensor(losses, dtype=torch.float64)
        wanted = torch.tensor(true_losses, dtype=torch.float64)
        errors = [
            ((x - y).abs().max() / y.abs().max()).double()
            for x, y in zip(gradients, true_gradients, strict=True)
        ]
        found = torch.stack([((values - wanted) / wanted).abs().max(), max(errors)])
    of_losses, of_gradients = vc.broadcast(found).tolist()
    return of_losses, of_gradients


def one_answer(found: Callable[[torch.dtype], tuple[float, float]]) -> bool:
    """Print whether ranks agree with one process in fp64 and fp32; return whether they do."""
    passed = True
    for dtype, (loss_limit, gradient_limit) in LIMITS.items():
        loss_error, gradient_error = found(dtype)
        passed &= loss_error <= loss_limit and gradient_error <= gradient_limit
        say(
            f"  {dtype}: losses differ by {loss_error:.1e} (allowed {loss_limit:.0e}), "
            f"first gradients by {gradient_error:.1e} (allowed {gradient_limit:.0e})"
        )
    say("one answer" if passed else "NOT one answer")
    return passed
