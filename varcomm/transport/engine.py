"""What an engine offers.

An engine moves bytes of uneven length and knows nothing of rows, dtypes or gradients. All its
tensors are flat, contiguous and of uint8; all counts are bytes, one a rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from varcomm.transport.group import Group

__all__ = ["Engine", "Pending", "works"]


@dataclass
class Pending:
    """Communication under way: what to wait for, and what to make of it then."""

    works: Sequence[dist.Work]
    finish: Callable[[], torch.Tensor]
    number: int | None = None  # of the call, the same on all ranks, where they compare calls

    def wait(self) -> torch.Tensor:
        """Wait until this rank's part is done, and return the result."""
        for work in self.works:
            work.wait()
        return self.finish()


class Engine(ABC):
    """Uneven collectives on bytes, over one of torch.distributed's backends.

    Each starts at once, and is done on this rank when its works have been waited for; inputs stay
    unchanged until then. Empty messages are ordinary.
    """

    @abstractmethod
    def all_gather(
        self, group: Group, out: torch.Tensor, data: torch.Tensor, counts: Sequence[int]
    ) -> list[dist.Work]:
        """Fill `out` on every rank with the ``counts[r]`` bytes of each rank r, in order.

        `data` may be this rank's place in `out`.
        """

    def all_gather_small(self, group: Group, out: torch.Tensor, data: torch.Tensor) -> None:
        """Fill `out` on every rank with the few bytes of each rank, as many on all; wait for it."""
        for work in self.all_gather(group, out, data, [len(data)] * group.size):
            work.wait()

    def exchange(
        self,
        group: Group,
        out: torch.Tensor,
        data: torch.Tensor,
        recv: Sequence[int],
        send: Sequence[int],
    ) -> list[dist.Work]:
        """Send ``send[r]`` bytes of `data` to rank r, and fill `out` sender by sender."""
        return works(
            dist.all_to_all_single(
                out, data, list(recv), list(send), group=group.process_group, async_op=True
            )
        )

    def broadcast(self, group: Group, data: torch.Tensor, src: int) -> list[dist.Work]:
        """Overwrite `data` on every rank by that of `src`."""
        return works(dist.broadcast(data, group=group.process_group, group_src=src, async_op=True))


def works(work: dist.Work | None) -> list[dist.Work]:
    """Return what torch.distributed gives for an asynchronous call as a list."""
    return [] if work is None else [work]
