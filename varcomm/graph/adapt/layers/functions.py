"""PyG's functions and methods that need the full graph, and their replacements."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch_geometric import nn as pyg
from torch_geometric import utils
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.nn.conv.han_conv import group as han_group
from torch_geometric.utils.hetero import construct_bipartite_edge_index

from varcomm.graph.adapt.layers import attention, degrees, hetero, methods, self_loops
from varcomm.graph.adapt.shard_context import ShardContext
from varcomm.graph.nn import pooling
from varcomm.ops.compilation import kept_from_compilation

__all__ = ["FUNCTIONS", "functions_in"]

Function = Callable[..., Any]


def _pool_in(pool: Function, context: ShardContext) -> Function:
    """Return a pool with PyG's arguments over the nodes of a context's graph.

    If `x` has more than two dimensions, nodes are along the last but one, as in PyG.
    """

    @kept_from_compilation
    def pooled(x: Any, batch: Any, size: int | None = None) -> Any:
        if not isinstance(x, torch.Tensor) or x.dim() <= 2:
            return pool(x, batch, context.graph, size)
        out = pool(x.movedim(-2, 0), batch, context.graph, size)
        return out[0] if batch is None else out.movedim(0, -2)

    return pooled


FUNCTIONS: dict[Any, Callable[[ShardContext], Function]] = {
    gcn_norm: degrees.gcn_norm_in,
    utils.get_laplacian: degrees.get_laplacian_in,
    utils.add_self_loops: self_loops.add_self_loops_in,
    utils.add_remaining_self_loops: self_loops.add_remaining_self_loops_in,
    utils.remove_self_loops: self_loops.remove_self_loops_in,
    construct_bipartite_edge_index: hetero.hgt_edges_in,
    han_group: hetero.han_group_in,
    pyg.ChebConv.__norm__: degrees.cheb_norm_in,
    pyg.DirGNNConv.forward: methods.dir_forward_in,
    pyg.FastRGCNConv.message: methods.fast_rgcn_message_in,
    pyg.GPSConv.forward: attention.gps_forward_in,
    pyg.SuperGATConv.get_attention_loss: methods.attention_loss_in,
    pyg.SuperGATConv.negative_sampling: methods.no_edges_in,
    pyg.SuperGATConv.positive_sampling: methods.no_edges_in,
    pyg.global_add_pool: partial(_pool_in, pooling.global_add_pool),
    pyg.global_mean_pool: partial(_pool_in, pooling.global_mean_pool),
    pyg.global_max_pool: partial(_pool_in, pooling.global_max_pool),
}


def functions_in(context: ShardContext) -> dict[Any, Function]:
    """Return, for each function that needs the full graph, one that is exact in a context."""
    return {original: make(context) for original, make in FUNCTIONS.items()}
