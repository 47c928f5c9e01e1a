"""Uneven bytes on NCCL, for tensors on GPUs.

NCCL runs ``all_to_all_single`` with split sizes as one group of sends and receives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from varcomm.transport.engine import Engine, works
from varcomm.transport.group import Group

__all__ = ["NCCL"]

# torch 2.13 gave it this name, and warns of the old one.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class NCCL(Engine):
    """NCCL, through torch.distributed."""

    def all_gather(
        self, group: Group, out: torch.Tensor, data: torch.Tensor, counts: Sequence[int]
    ) -> list[dist.Work]:
        """Use the schedule that writes straight into `out`.

        For a list of uneven tensors that is one group of broadcasts; a list of even ones would
        pass through a buffer, so these take the call for one tensor.
        """
        pg = group.process_group
        if len(set(counts)) == 1:
            return works(_all_gather_single(out, data, group=pg, async_op=True))
        places = list(out.split(list(counts)))
        return works(dist.all_gather(places, data, group=pg, async_op=True))
