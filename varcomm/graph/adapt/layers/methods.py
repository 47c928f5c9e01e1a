"""Methods of PyG's layers that look past ``propagate``, and their replacements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch_geometric import nn as pyg

from varcomm.errors import ArgumentError
from varcomm.graph.adapt.reversed_edges import reversed_edges
from varcomm.graph.adapt.shard_context import ShardContext
from varcomm.ops.operator import checking

__all__ = ["attention_loss_in", "dir_forward_in", "fast_rgcn_message_in", "no_edges_in"]


def dir_forward_in(context: ShardContext) -> Callable[..., Any]:
    """Return ``DirGNNConv.forward``, with edges reversed across ranks."""

    def forward(self: Any, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        x_in = self.conv_in(x, edge_index)
        back = reversed_edges(context.checked_in("DirGNNConv", edge_index), edge_index)
        with context.running_on(back):
            x_out = self.conv_out(x, back.edge_index)
        out = self.alpha * x_out + (1 - self.alpha) * x_in
        return out + self.lin(x) if self.root_weight else out  # type: ignore[no-any-return]

    return forward


def fast_rgcn_message_in(context: ShardContext) -> Callable[..., Any]:
    """Return ``FastRGCNConv.message``, which refuses to look up nodes by their local ids."""
    original = pyg.FastRGCNConv.message

    def message(
        self: Any, x_j: torch.Tensor, edge_type: torch.Tensor, edge_index_j: torch.Tensor
    ) -> torch.Tensor:
        with checking("FastRGCNConv", context.group) as where:
            if not x_j.is_floating_point():
                raise ArgumentError(
                    f"{where}it looks up nodes by their ids, which are local here. Pass features; "
                    "or use RGCNConv with x=graph.owned_ids."
                )
        return original(self, x_j, edge_type, edge_index_j)  # type: ignore[no-any-return]

    return message


def no_edges_in(context: ShardContext) -> Callable[..., Any]:
    """Return a sampling of ``SuperGATConv`` that draws no edges for its loss."""
    return lambda self, edge_index, *_: edge_index[:, :0]


def attention_loss_in(context: ShardContext) -> Callable[..., Any]:
    """Return ``SuperGATConv.get_attention_loss``, which refuses in training."""
    original = pyg.SuperGATConv.get_attention_loss

    def get_attention_loss(self: Any) -> torch.Tensor:
        with checking("get_attention_loss", context.group) as where:
            if self.training:
                raise ArgumentError(
                    f"{where}the loss of attention samples edges among all pairs of nodes, which "
                    "no rank has. The layer's output is exact without the loss."
                )
        return original(self)  # type: ignore[no-any-return]

    return get_attention_loss
