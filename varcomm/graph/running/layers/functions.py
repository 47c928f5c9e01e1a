"""Of PyG's functions and methods, those that need the whole graph, and what stands for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch_geometric import nn as pyg
from torch_geometric import utils
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.nn.conv.han_conv import group as han_group
from torch_geometric.utils.hetero import construct_bipartite_edge_index

from varcomm.graph.over_nodes.pooling import POOL_FUNCTIONS, pools_for
from varcomm.graph.running.layers import attention, degrees, hetero, hypergraph, methods, self_loops
from varcomm.graph.running.place import Place

__all__ = ["FUNCTIONS", "functions_at"]

Function = Callable[..., Any]


def _pool_at(pool: Function, place: Place) -> Function:
    """Return one that asks for the graph when it is called: a model may be moved to another."""

    def pooled(x: Any, batch: Any, size: int | None = None) -> Any:
        return pools_for(place.graph)[pool](x, batch, size)

    return pooled


FUNCTIONS: dict[Any, Callable[[Place], Function]] = {
    gcn_norm: degrees.gcn_norm_at,
    utils.get_laplacian: degrees.get_laplacian_at,
    utils.add_self_loops: self_loops.add_self_loops_at,
    utils.add_remaining_self_loops: self_loops.add_remaining_self_loops_at,
    utils.remove_self_loops: self_loops.remove_self_loops_at,
    construct_bipartite_edge_index: hetero.hgt_edges_at,
    han_group: hetero.han_group_at,
    pyg.ChebConv.__norm__: degrees.cheb_norm_at,
    pyg.DirGNNConv.forward: methods.dir_forward_at,
    pyg.FastRGCNConv.message: methods.fast_rgcn_message_at,
    pyg.FeaStConv.message: methods.feast_message_at,
    pyg.GPSConv.forward: attention.gps_forward_at,
    pyg.HypergraphConv.forward: hypergraph.hypergraph_forward_at,
    pyg.MFConv.forward: methods.mf_forward_at,
    pyg.MeshCNNConv.forward: methods.mesh_forward_at,
    pyg.SuperGATConv.get_attention_loss: methods.attention_loss_at,
    pyg.SuperGATConv.negative_sampling: methods.no_edges_at,
    pyg.SuperGATConv.positive_sampling: methods.no_edges_at,
    **{pool: partial(_pool_at, pool) for pool in POOL_FUNCTIONS},
}


def functions_at(place: Place) -> dict[Any, Function]:
    """Return, for each function that needs the whole graph, one that is exact at a place."""
    return {original: at(place) for original, at in FUNCTIONS.items()}
