"""Uneven bytes on NCCL, for tensors on GPUs; only the current stream waits, not the host."""

# ruff: noqa: D102, Engine documents its methods

from __future__ import annotations

import torch.distributed as dist

from varcomm.transport.engine import Engine, Move, Works

# Named so from torch 2.13 on, which warns of the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class NCCL(Engine):
    """NCCL, through torch.distributed."""

    def start(self, move: Move) -> Works:
        schedule, group, out, data, recv, send = move
        pg = group.process_group
        if schedule == "broadcast":
            work = dist.broadcast(data, group=pg, group_src=move.root, async_op=True)
        elif schedule != "all_gather":
            if schedule == "copies":
                data = data.repeat(len(send) - send.count(0))
            work = dist.all_to_all_single(out, data, list(recv), list(send), pg, async_op=True)
        # a list of uneven tensors is one group of broadcasts; one of even tensors has a buffer
        elif len(set(recv)) == 1:
            work = _all_gather_single(out, data, group=pg, async_op=True)
        else:
            work = dist.all_gather(list(out.split(list(recv))), data, group=pg, async_op=True)
        return [work]
