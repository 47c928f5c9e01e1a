"""PyG's functions and methods that need the whole graph, and their replacements."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch_geometric import nn as pyg
from torch_geometric import utils
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.nn.conv.han_conv import group as han_group
from torch_geometric.utils.hetero import construct_bipartite_edge_index

from varcomm.graph.nn.pooling import POOL_FUNCTIONS, pools_for
from varcomm.graph.adapt.layers import attention, degrees, hetero, methods, self_loops
from varcomm.graph.adapt.shard_context import ShardContext

__all__ = ["FUNCTIONS", "functions_in"]

Function = Callable[..., Any]


def _pool_in(pool: Function, context: ShardContext) -> Function:
    """Return one that asks for the graph when it is called: a model may be moved to another."""

    def pooled(x: Any, batch: Any, size: int | None = None) -> Any:
        return pools_for(context.graph)[pool](x, batch, size)

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
    **{pool: partial(_pool_in, pool) for pool in POOL_FUNCTIONS},
}


def functions_in(context: ShardContext) -> dict[Any, Function]:
    """Return, for each function that needs the whole graph, one that is exact in a context."""
    return {original: make(context) for original, make in FUNCTIONS.items()}
