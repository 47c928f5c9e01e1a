"""Where the ranks come from: started here, or those that a launcher has started."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import torch.distributed as dist

import varcomm as vc
from varcomm.transport import environment
from varcomm.transport.agreement import share
from varcomm.transport.group import resolve

__all__ = ["Here", "Pool", "is_first", "is_launched", "pool"]

T = TypeVar("T")

# No case takes this long, unless a rank waits for a message that never comes.
_LIMIT = 600.0


class Pool(Protocol):
    """Ranks that run a function and give back what each returns, as :class:`varcomm.Ranks` do."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End."""

    def run(self, fn: Callable[..., T], *args: Any) -> list[T]:
        """Run ``fn(rank, *args)`` on every rank."""


class Here:
    """The ranks of the job that this process belongs to; all of them call the same."""

    def __init__(self, engine: str) -> None:
        world = vc.init(backend=engine)
        self.rank, self.size = world.rank, world.size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, fn: Callable[..., T], *args: Any) -> list[T]:
        """Run it here, and collect what the others return."""
        return share("bench", lambda: fn(self.rank, *args), resolve(None))


def is_launched() -> bool:
    """Tell whether a launcher has started this process as one of several ranks, or torch knows."""
    return dist.is_initialized() or environment.read(os.environ).meeting_point is not None


def is_first() -> bool:
    """Tell whether this process is the one that speaks for its job."""
    rank = dist.get_rank() if dist.is_initialized() else environment.read(os.environ).rank
    return rank == 0


def pool(world: int, engine: str) -> Pool:
    """Return new ranks on this machine."""
    return vc.Ranks(world, _LIMIT, backend=engine)
