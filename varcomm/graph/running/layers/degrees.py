"""Normalisation by degrees, as PyG's functions do it: for graphs that are split over ranks.

The degree of a target is known where the edge is. That of a source takes an exchange: the owner of
a node sends it to whoever has a copy; and where edges are counted at their source, those who have
copies first send their parts to the owner.

Weights are columns here: torch cuts an empty tensor of one dimension out of what it concatenates,
and a rank without edges would then miss a collective in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.running.edges import Counts, DeepEdges, EdgeSet, loops_of, with_halo
from varcomm.graph.running.layers.self_loops import looped_nodes
from varcomm.graph.running.place import Place
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.all_reduce import all_reduce
from varcomm.ops.autograd import kept_from_compilation
from varcomm.ops.operator import checking

__all__ = ["cheb_norm_at", "gcn_norm_at", "get_laplacian_at"]


def gcn_norm_at(place: Place) -> Callable[..., Any]:
    """Return PyG's ``gcn_norm`` for edges of a graph at a place.

    Communication: the inverse root of the degree, one number for each node of the halo; for
    ``flow="target_to_source"`` also one back. As much in backward, if weights are differentiated.
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
        edges = place.checked_in("gcn_norm", edge_index)
        weight = _column(edge_weight, edge_index, dtype)
        if add_self_loops:
            nodes = looped_nodes(place, edge_index, num_nodes)
            fill, owned = 2.0 if improved else 1.0, Counts.of(edges).targets
            at = loops_of(edges, edge_index)
            edge_index, weight = _with_loops(edge_index, weight, at, nodes, owned, fill)
        if flow == "source_to_target":
            degree = _at_targets(edges, edge_index, weight)
        else:
            degree = _at_sources(edges, edge_index, weight)
        scale = _power(degree, -0.5)
        source, target = edge_index
        weight = with_halo(edges, scale)[source] * weight * scale[target]
        return edge_index, weight.squeeze(1)

    return gcn_norm


def get_laplacian_at(place: Place) -> Callable[..., Any]:
    """Return PyG's ``get_laplacian`` for edges of a graph at a place.

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
        edges = place.checked_in("get_laplacian", edge_index)
        with checking("get_laplacian", place.group) as where:
            if normalization not in (None, "sym", "rw"):
                raise ArgumentError(
                    f"{where}normalization must be None, 'sym' or 'rw'; got {normalization!r}."
                )
        weight = _column(edge_weight, edge_index, dtype)
        others, _ = loops_of(edges, edge_index)
        edge_index, weight = edge_index[:, others], weight[others]
        degree = _at_sources(edges, edge_index, weight)
        source, target = edge_index
        if normalization == "sym":
            scale = _power(degree, -0.5)
            weight = with_halo(edges, scale)[source] * weight * scale[target]
        elif normalization == "rw":
            weight = with_halo(edges, _power(degree, -1.0))[source] * weight
        nodes = looped_nodes(place, edge_index, num_nodes)
        loop = degree[nodes] if normalization is None else degree.new_ones(len(nodes), 1)
        edge_index = torch.cat([edge_index, nodes.expand(2, -1)], dim=1)
        return edge_index, torch.cat([-weight, loop]).squeeze(1)

    return get_laplacian


def cheb_norm_at(place: Place) -> Callable[..., Any]:
    """Return ``ChebConv.__norm__``, whose default largest eigenvalue is that of the whole graph."""
    laplacian = get_laplacian_at(place)

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
        edges = place.checked_in("get_laplacian", edge_index)
        edge_index, weight = laplacian(edge_index, edge_weight, normalization, dtype, num_nodes)
        if lambda_max is None:
            lambda_max = 2.0 * _greatest(place, weight)
        elif not isinstance(lambda_max, torch.Tensor):
            lambda_max = torch.tensor(lambda_max, dtype=dtype, device=edge_index.device)
        if batch is not None and lambda_max.numel() > 1:
            lambda_max = lambda_max[with_halo(edges, batch)[edge_index[0]]]
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


def _with_loops(
    edge_index: torch.Tensor,
    weight: torch.Tensor,
    at: tuple[torch.Tensor, torch.Tensor],
    nodes: torch.Tensor,
    owned: int,
    fill: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give a self loop to each of these nodes; one that there is keeps its weight.

    `at` is where there are other edges, and where self loops.
    """
    others, loop = at
    loops = weight.new_full((owned, 1), fill)
    loops[edge_index[0, loop]] = weight[loop]
    edge_index = torch.cat([edge_index[:, others], nodes.expand(2, -1)], dim=1)
    return edge_index, torch.cat([weight[others], loops[nodes]])


def _at_targets(edges: EdgeSet, edge_index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    degree = weight.new_zeros(Counts.of(edges).targets, 1).index_add(0, edge_index[1], weight)
    return edges.refreshed(degree) if isinstance(edges, DeepEdges) else degree


def _at_sources(edges: EdgeSet, edge_index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if isinstance(edges, DeepEdges):
        raise ArgumentError(
            "edges are counted where they leave a node, and halos of several hops lack these. "
            "Partition the graph with hops=1."
        )
    counts = Counts.of(edges)
    local = weight.new_zeros(counts.sources + counts.halo, 1)
    local = local.index_add(0, edge_index[0], weight)
    return local[: counts.sources] + edges.plan.adjoint(local[counts.sources :])


def _power(degree: torch.Tensor, exponent: float) -> torch.Tensor:
    scale = degree.pow(exponent)
    return scale.masked_fill(scale == torch.inf, 0)


def _greatest(place: Place, weight: torch.Tensor) -> torch.Tensor:
    """Return the greatest weight of all ranks; those that reach it share its gradient evenly."""
    pg = place.group.process_group
    own = weight.detach().amax(0, keepdim=True) if len(weight) else weight.new_tensor([-torch.inf])
    top = all_gather_v(own.detach(), [1] * place.group.size, group=pg).amax()
    reaching = weight[weight.detach() == top]
    # the value is that of `top`, the derivative that of the weights
    rise = torch.stack([(reaching - reaching.detach()).sum(), reaching.new_tensor(len(reaching))])
    total = all_reduce(rise, group=pg)
    return top + total[0] / total[1]
