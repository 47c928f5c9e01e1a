"""Which engines there are, and what each does when it is tried on ranks of this machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import varcomm as vc
from varcomm.cli.doctor.checks import CHECKS, check
from varcomm.errors import LaunchError

__all__ = ["Engine", "engines", "tried"]


@dataclass(frozen=True)
class Engine:
    """An engine and a kind of device, and what came of trying it.

    Attributes
    ----------
    backend, device : str
        As torch.distributed and torch call them.
    ranks : int
        On how many it is tried; 0 where it is not there.
    passed : dict of str to bool
        By check; empty where no rank came up.
    reasons : dict of str to str
        What went wrong, by check; ``"start"`` where ranks did not come up. Where the engine is not
        there, ``"absent"`` says what would bring it.
    """

    backend: str
    device: str
    ranks: int
    passed: dict[str, bool] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What it is called."""
        kinds = {"cpu": "", "cuda": ", tensors on a GPU"}
        names = {"gloo": "Gloo", "nccl": "NCCL", "mpi": "MPI"}
        return names[self.backend] + ("" if self.backend == "nccl" else kinds[self.device])

    @property
    def state(self) -> str:
        """``"works"``, ``"fails"`` or ``"absent"``."""
        if not self.ranks:
            return "absent"
        return "works" if len(self.passed) == len(CHECKS) and not self.reasons else "fails"

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {**vars(self), "state": self.state}


def engines() -> Iterator[Engine]:
    """Yield all engines; those that are not there say what would bring them."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield Engine("gloo", "cpu", 2)
    if gpus:
        yield Engine("gloo", "cuda", 2)
    if not gpus:
        yield Engine("nccl", "cuda", 0, reasons={"absent": "no GPU that torch can use"})
    elif not dist.is_nccl_available():
        yield Engine("nccl", "cuda", 0, reasons={"absent": "this torch is built without NCCL"})
    else:
        yield Engine("nccl", "cuda", min(2, gpus))  # which takes no GPU twice
    if importlib.util.find_spec("mpi4py") is None:
        yield Engine("mpi", "cpu", 0, reasons={"absent": 'pip install "varcomm[mpi]"'})
    else:
        yield Engine("mpi", "cpu", 2)


def tried(engine: Engine, limit: float, progress: Callable[[str], None]) -> Engine:
    """Start ranks, let them make each check, and return what came of it.

    After a check that has ended the ranks, the others are not made: the engine does not work.
    """
    if not engine.ranks:
        return engine
    passed: dict[str, bool] = {}
    reasons: dict[str, str] = {}
    name = "start"
    with vc.Ranks(engine.ranks, limit, backend=engine.backend) as ranks:
        try:
            progress(f"{engine.name}: {name}")
            ranks.run(_nothing)
            for name in CHECKS:
                progress(f"{engine.name}: {name}")
                wrong = ranks.run(check, name, engine.ranks, engine.device)[0]
                passed[name] = wrong is None
                if wrong is not None:
                    reasons[name] = wrong
        except LaunchError as error:
            reasons[name] = _reason(error)
            if name != "start":
                passed[name] = False
    return Engine(engine.backend, engine.device, engine.ranks, passed, reasons)


def _nothing(rank: int) -> None:
    """Have come up."""


def _reason(error: LaunchError) -> str:
    """Return in one line what a rank died of, or that ranks were late."""
    cause = error.__cause__
    if cause is not None:
        return " ".join(f"{type(cause).__name__}: {cause}".split())
    return str(error).splitlines()[0]
