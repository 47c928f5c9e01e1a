"""Uneven bytes on NCCL, for tensors on GPUs; only the current stream waits, not the host."""

# ruff: noqa: D102, Engine documents its methods

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from varcomm.transport.engine import Counts, Engine, Peers, Works
from varcomm.transport.group import Group

# Named so from torch 2.13 on, which warns of the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class NCCL(Engine):
    """NCCL, through torch.distributed."""

    def all_gather(self, group: Group, out: Tensor, data: Tensor, counts: Counts) -> Works:
        pg = group.process_group
        # a list of uneven tensors is one group of broadcasts; one of even tensors has a buffer
        if len(set(counts)) == 1:
            return [_all_gather_single(out, data, group=pg, async_op=True)]
        return [dist.all_gather(list(out.split(list(counts))), data, group=pg, async_op=True)]

    def exchange(
        self, group: Group, out: Tensor, data: Tensor, recv: Counts, send: Counts, peers: Peers
    ) -> Works:
        pg = group.process_group
        return [dist.all_to_all_single(out, data, list(recv), list(send), pg, async_op=True)]

    def broadcast(self, group: Group, data: Tensor, src: int) -> Works:
        return [dist.broadcast(data, group=group.process_group, group_src=src, async_op=True)]
