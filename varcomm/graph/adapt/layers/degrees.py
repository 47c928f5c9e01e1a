"""Normalisation by degrees, as PyG's functions do it, for sharded graphs.

The degree of a target is local. The degree of a source takes an exchange: its owner sends it to the
ranks with a copy; if edges are counted at their source, these ranks first send their parts to the
owner.

Weights are columns here: torch.cat drops an empty tensor of one dimension from the autograd graph,
and a rank without edges would miss a collective in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.adapt.layers.self_loops import looped_nodes
from varcomm.graph.adapt.propagate import FLOW
from varcomm.graph.adapt.shard_context import ShardContext
from varcomm.graph.edge_shard import EdgeShard, LocalEdges
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.all_reduce import all_reduce
from varcomm.ops.compilation import kept_from_compilation
from varcomm.ops.operator import checking

__all__ = ["cheb_norm_in", "gcn_norm_in", "get_laplacian_in"]


def gcn_norm_in(context: ShardContext) -> Callable[..., Any]:
    """Return PyG's ``gcn_norm`` for edges of a context's graph.

    Communication: the inverse root of the degree, one number for each node of the halo. As much in
    backward, if weights are differentiated.
    """

    def gcn_norm(
        edge_index: torch.Tensor,
        edge_weight: torch.Tensor | None = None,
        num_nodes: int | None = None,
        improved: bool = False,
        add_self_loops: bool = True,
        flow: str = "source_to_target",
        dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with checking("gcn_norm", context.group) as where:
            edges = context.checked(edge_index, where)
            if flow != "source_to_target":
                raise ArgumentError(f"{where}{FLOW}")
        weight = _column(edge_weight, edge_index, dtype)
        targets = edges.layer_counts()[2]
        if add_self_loops:
            nodes = looped_nodes(context, edge_index, num_nodes)
            others, loop = edges.split_self_loops(edge_index)
            # a loop that exists keeps its weight
            loops = weight.new_full((targets, 1), 2.0 if improved else 1.0)
            loops[edge_index[0, loop]] = weight[loop]
            edge_index = torch.cat([edge_index[:, others], nodes.expand(2, -1)], dim=1)
            weight = torch.cat([weight[others], loops[nodes]])
        degree = weight.new_zeros(targets, 1).index_add(0, edge_index[1], weight)
        if isinstance(edges, EdgeShard) and edges.hops > 1:
            # nodes of the halo lack edges here: their owners send the degree
            degree = edges.with_halo(degree[: edges.num_sources])
        scale = _power(degree, -0.5)
        source, target = edge_index
        weight = edges.layer_sources(scale)[source] * weight * scale[target]
        return edge_index, weight.squeeze(1)

    return gcn_norm


def get_laplacian_in(context: ShardContext) -> Callable[..., Any]:
    """Return PyG's ``get_laplacian`` for edges of a context's graph.

    Communication: a number for each node of the halo to its owner, and if `normalization` is not
    None, one from it. As much in backward, if weights are differentiated.
    """

    def get_laplacian(
        edge_index: torch.Tensor,
        edge_weight: torch.Tensor | None = None,
        normalization: str | None = None,
        dtype: torch.dtype | None = None,
        num_nodes: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with checking("get_laplacian", context.group) as where:
            edges = context.checked(edge_index, where)
            if normalization not in (None, "sym", "rw"):
                raise ArgumentError(
                    f"{where}normalization must be None, 'sym' or 'rw'; got {normalization!r}."
                )
        weight = _column(edge_weight, edge_index, dtype)
        others, _ = edges.split_self_loops(edge_index)
        edge_index, weight = edge_index[:, others], weight[others]
        degree = _at_sources(edges, edge_index, weight)
        source, target = edge_index
        if normalization == "sym":
            scale = _power(degree, -0.5)
            weight = edges.layer_sources(scale)[source] * weight * scale[target]
        elif normalization == "rw":
            weight = edges.layer_sources(_power(degree, -1.0))[source] * weight
        nodes = looped_nodes(context, edge_index, num_nodes)
        loop = degree[nodes] if normalization is None else degree.new_ones(len(nodes), 1)
        edge_index = torch.cat([edge_index, nodes.expand(2, -1)], dim=1)
        return edge_index, torch.cat([-weight, loop]).squeeze(1)

    return get_laplacian


def cheb_norm_in(context: ShardContext) -> Callable[..., Any]:
    """Return ``ChebConv.__norm__``, whose default largest eigenvalue is that of the full graph."""
    laplacian = get_laplacian_in(context)

    @kept_from_compilation
    def norm(
        self: torch.nn.Module,
        edge_index: torch.Tensor,
        num_nodes: int | None,
        edge_weight: torch.Tensor | None,
        normalization: str | None,
        lambda_max: Any = None,
        dtype: torch.dtype | None = None,
        batch: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        edges = context.checked_in("get_laplacian", edge_index)
        edge_index, weight = laplacian(edge_index, edge_weight, normalization, dtype, num_nodes)
        if lambda_max is None:
            lambda_max = 2.0 * _greatest(context, weight)
        elif not isinstance(lambda_max, torch.Tensor):
            lambda_max = torch.tensor(lambda_max, dtype=dtype, device=edge_index.device)
        if batch is not None and lambda_max.numel() > 1:
            lambda_max = lambda_max[edges.layer_sources(batch)[edge_index[0]]]
        weight = 2.0 * weight / lambda_max
        weight = weight.masked_fill(weight == torch.inf, 0)
        return edge_index, weight - (edge_index[0] == edge_index[1]).to(weight.dtype)

    return norm


def _column(
    weight: torch.Tensor | None, edge_index: torch.Tensor, dtype: torch.dtype | None
) -> torch.Tensor:
    count = edge_index.shape[1]
    if weight is None:
        return torch.ones(count, 1, dtype=dtype, device=edge_index.device)
    return weight.reshape(count, 1)


def _at_sources(edges: LocalEdges, edge_index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if edges.hops > 1:
        raise ArgumentError(
            "edges are counted where they leave a node, and halos of several hops lack these. "
            "Partition the graph with hops=1."
        )
    sources, halo, _ = edges.layer_counts()
    local = weight.new_zeros(sources + halo, 1).index_add(0, edge_index[0], weight)
    return local[:sources] + edges.plan.adjoint(local[sources:])


def _power(degree: torch.Tensor, exponent: float) -> torch.Tensor:
    scale = degree.pow(exponent)
    return scale.masked_fill(scale == torch.inf, 0)


def _greatest(context: ShardContext, weight: torch.Tensor) -> torch.Tensor:
    """Return the greatest weight of all ranks; equal ones share its gradient evenly."""
    pg = context.group.process_group
    own = weight.detach().amax(0, keepdim=True) if len(weight) else weight.new_tensor([-torch.inf])
    top = all_gather_v(own.detach(), [1] * context.group.size, group=pg).amax()
    reaching = weight[weight.detach() == top]
    # the value is `top`, the derivative that of the weights
    rise = torch.stack([(reaching - reaching.detach()).sum(), reaching.new_tensor(len(reaching))])
    total = all_reduce(rise, group=pg)
    return top + total[0] / total[1]
