"""Uneven bytes on NCCL, for tensors on GPUs; only the current stream waits, not the host."""

# ruff: noqa: D102, Engine documents its methods

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import Tensor

from varcomm.transport.engine import Engine, Route, Start, Works, as_bytes

# Named so from torch 2.13 on, which warns of the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _broadcast(route: Route, out: Tensor, data: Tensor) -> Works:
    pg = route.group.process_group
    return [dist.broadcast(as_bytes(data), group=pg, group_src=route.root, async_op=True)]


class NCCL(Engine):
    """NCCL, through torch.distributed."""

    in_cuda_graphs = True

    def prepare(self, route: Route) -> Start:
        schedule, group, recv, send, _ = route
        pg, counts, out_counts, copies = group.process_group, list(send), list(recv), 1
        if schedule == "broadcast":
            return partial(_broadcast, route)
        if schedule == "copies":
            copies = len(send) - send.count(0)

        def start(out: Tensor, data: Tensor) -> Works:
            out, data = as_bytes(out), as_bytes(data)
            if schedule != "all_gather":
                data = data.repeat(copies) if copies != 1 else data
                work = dist.all_to_all_single(out, data, out_counts, counts, pg, async_op=True)
            # a list of uneven tensors is one group of broadcasts; one of even tensors has a buffer
            elif len(set(recv)) == 1:
                work = _all_gather_single(out, data, group=pg, async_op=True)
            else:
                work = dist.all_gather(list(out.split(out_counts)), data, group=pg, async_op=True)
            return [work]

        return start
