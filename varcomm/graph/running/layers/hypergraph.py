"""``HypergraphConv`` where nodes and hyperedges are split over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import dropout, leaky_relu
from torch_geometric.utils import softmax

from varcomm.errors import ArgumentError
from varcomm.graph.running.edges import with_halo
from varcomm.graph.running.place import Place
from varcomm.graph.running.turned import turned
from varcomm.ops.operator import checking

__all__ = ["hypergraph_forward_at"]


def hypergraph_forward_at(place: Place) -> Callable[..., Any]:
    """Return ``HypergraphConv.forward`` for incidences which are edges of a graph at a place.

    They lead from nodes to hyperedges, so that a rank has all nodes of the hyperedges that it owns.
    What comes back, from hyperedges to nodes, needs them turned round.

    Communication: one exchange of features from nodes to hyperedges and one back; one number for
    each incidence of a node and a hyperedge on different ranks, and with attention that of its
    heads.
    """

    def forward(
        self: Any,
        x: torch.Tensor,
        hyperedge_index: torch.Tensor,
        hyperedge_weight: torch.Tensor | None = None,
        hyperedge_attr: torch.Tensor | None = None,
        num_edges: int | None = None,
    ) -> torch.Tensor:
        with checking("HypergraphConv", place.group) as where:
            edges = place.checked(hyperedge_index, where)
            if num_edges not in (None, edges.num_targets):
                raise ArgumentError(
                    f"{where}num_edges is {num_edges}, but this rank owns {edges.num_targets} "
                    "hyperedges. Leave it out."
                )
        node, hyperedge = hyperedge_index
        nodes, hyperedges = edges.num_sources, edges.num_targets
        back = turned(edges)(hyperedge_index)
        if hyperedge_weight is None:
            hyperedge_weight = x.new_ones(hyperedges)
        x = with_halo(edges, self.lin(x))

        alpha = alpha_back = None
        if self.use_attention:
            assert hyperedge_attr is not None
            of_nodes = x.view(-1, self.heads, self.out_channels)[node]
            of_edges = self.lin(hyperedge_attr).view(-1, self.heads, self.out_channels)[hyperedge]
            alpha = (torch.cat([of_nodes, of_edges], dim=-1) * self.att).sum(dim=-1)
            alpha = leaky_relu(alpha, self.negative_slope)
            if self.attention_mode == "node":
                alpha = softmax(alpha, hyperedge, num_nodes=hyperedges)
                alpha = dropout(alpha, self.dropout, self.training)
                alpha_back = back.plan(alpha)
            else:
                alpha_back = softmax(back.plan(alpha), back.edges.edge_index[1], num_nodes=nodes)
                alpha_back = dropout(alpha_back, self.dropout, self.training)
                alpha = back.plan.adjoint(alpha_back)

        weight = back.plan(hyperedge_weight.view(-1, 1)[hyperedge])
        of_nodes = _inverse(x.new_zeros(nodes, 1).index_add(0, back.edges.edge_index[1], weight))
        ones = x.new_ones(len(hyperedge), 1)
        of_edges = _inverse(x.new_zeros(hyperedges, 1).index_add(0, hyperedge, ones))

        # PyG's own: all halos are there
        propagate = type(self).propagate
        out = propagate(
            self,
            hyperedge_index,
            x=(x, None),
            norm=(None, of_edges),
            alpha=alpha,
            size=(nodes + edges.num_halo, hyperedges),
        )
        out = propagate(
            self,
            back.edges.edge_index,
            x=(with_halo(back.edges, out), None),
            norm=(None, of_nodes),
            alpha=alpha_back,
            size=(hyperedges + back.edges.num_halo, nodes),
        )
        out = out.view(-1, self.heads * self.out_channels) if self.concat else out.mean(dim=1)
        return out if self.bias is None else out + self.bias  # type: ignore[no-any-return]

    return forward


def _inverse(degree: torch.Tensor) -> torch.Tensor:
    inverse = 1.0 / degree
    return inverse.masked_fill(inverse == torch.inf, 0)
