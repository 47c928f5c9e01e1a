"""Attention of ``GPSConv`` between all nodes of a sharded graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import dropout

from varcomm.errors import ArgumentError
from varcomm.graph.adapt.shard_context import ShardContext
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.operator import checking

__all__ = ["gps_forward_in"]


def gps_forward_in(context: ShardContext) -> Callable[..., Any]:
    """Return ``GPSConv.forward`` for the nodes of a graph at a context.

    Queries are this rank's nodes, keys and values all nodes: no work is done twice, but every rank
    receives the features of all nodes.

    Communication: every rank sends its rows to all others; their gradients return.
    """

    def attention(
        self: Any, x: torch.Tensor, batch: torch.Tensor | None, where: str
    ) -> torch.Tensor:
        sizes, pg = tuple(context.graph.node_sizes), context.group.process_group
        if len(x) != sizes[context.group.rank]:
            raise ArgumentError(
                f"{where}x has {len(x)} rows, but this rank owns {sizes[context.group.rank]} nodes."
            )
        everyone = all_gather_v(x, sizes, group=pg)
        others = None
        if batch is not None:
            others = batch.view(-1, 1) != all_gather_v(batch, sizes, group=pg)
        rows = (x[None], everyone[None], everyone[None])
        return self.attn(*rows, attn_mask=others, need_weights=False)[0][0]  # type: ignore[no-any-return]

    def forward(
        self: Any,
        x: torch.Tensor,
        edge_index: torch.Tensor,
        batch: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        def normalised(norm: Any, h: torch.Tensor) -> torch.Tensor:
            if norm is None:
                return h
            return norm(h, batch=batch) if self.norm_with_batch else norm(h)  # type: ignore[no-any-return]

        parts = []
        if self.conv is not None:
            h = dropout(self.conv(x, edge_index, **kwargs), self.dropout, self.training)
            parts.append(normalised(self.norm1, h + x))
        with checking("GPSConv", context.group) as where:
            h = attention(self, x, batch, where)
        h = dropout(h, self.dropout, self.training)
        parts.append(normalised(self.norm2, h + x))
        out = torch.stack(parts).sum(0)
        return normalised(self.norm3, out + self.mlp(out))

    return forward
