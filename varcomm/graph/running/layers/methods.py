"""Methods of PyG's layers which look past ``propagate``, or fail on a rank without edges: ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch_geometric import nn as pyg
from torch_geometric.utils import degree

from varcomm.errors import ArgumentError
from varcomm.graph.running.place import Place
from varcomm.graph.running.turned import turned
from varcomm.ops.operator import checking

__all__ = [
    "attention_loss_at",
    "dir_forward_at",
    "fast_rgcn_message_at",
    "feast_message_at",
    "mesh_forward_at",
    "mf_forward_at",
    "no_edges_at",
]


def dir_forward_at(place: Place) -> Callable[..., Any]:
    """Return ``DirGNNConv.forward``: its layer for edges the other way gets edges turned round."""

    def forward(self: Any, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        x_in = self.conv_in(x, edge_index)
        back = turned(place.checked_in("DirGNNConv", edge_index))(edge_index).edges
        with place.running_on(back):
            x_out = self.conv_out(x, back.edge_index)
        out = self.alpha * x_out + (1 - self.alpha) * x_in
        return out + self.lin(x) if self.root_weight else out  # type: ignore[no-any-return]

    return forward


def fast_rgcn_message_at(place: Place) -> Callable[..., Any]:
    """Return ``FastRGCNConv.message``, which refuses to look up nodes by their local numbers."""
    original = pyg.FastRGCNConv.message

    def message(
        self: Any, x_j: torch.Tensor, edge_type: torch.Tensor, edge_index_j: torch.Tensor
    ) -> torch.Tensor:
        with checking("FastRGCNConv", place.group) as where:
            if not x_j.is_floating_point():
                raise ArgumentError(
                    f"{where}it looks up nodes by their numbers, which are local here. Give "
                    "features; or take RGCNConv with x=graph.owned_ids."
                )
        return original(self, x_j, edge_type, edge_index_j)  # type: ignore[no-any-return]

    return message


def feast_message_at(place: Place) -> Callable[..., Any]:
    """Return ``FeaStConv.message``, where there may be no edges: PyG's asks for a shape (0, -1)."""

    def message(self: Any, x_i: torch.Tensor, x_j: torch.Tensor) -> torch.Tensor:
        q = torch.softmax(self.u(x_j - x_i) + self.c, dim=1)
        x_j = self.lin(x_j).view(len(x_j), self.heads, self.out_channels)
        return (x_j * q.view(-1, self.heads, 1)).sum(dim=1)

    return message


def mesh_forward_at(place: Place) -> Callable[..., Any]:
    """Return ``MeshCNNConv.forward``, which makes sure that edges come as the layer reads them."""
    original = pyg.MeshCNNConv.forward

    def forward(self: Any, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        with checking("MeshCNNConv", place.group) as where:
            place.checked(edge_index, where)
            target = edge_index[1]
            if len(target) % 4 or bool((target.view(-1, 4) != target[::4, None]).any()):
                raise ArgumentError(
                    f"{where}edges must come by four, the four edges into a node one after the "
                    "other. Sort them by their targets before the graph is partitioned."
                )
        return original(self, x, edge_index)  # type: ignore[no-any-return]

    return forward


def mf_forward_at(place: Place) -> Callable[..., Any]:
    """Return ``MFConv.forward``, which counts the edges of nodes wherever these are owned."""
    original = pyg.MFConv.forward

    def forward(
        self: Any, x: Any, edge_index: torch.Tensor, size: tuple[int, int] | None = None
    ) -> torch.Tensor:
        if self.flow == "source_to_target":
            return original(self, x, edge_index, size)  # type: ignore[no-any-return]
        x = (x, x) if isinstance(x, torch.Tensor) else x
        edges = place.checked_in("MFConv", edge_index)
        there = turned(edges)(edge_index).edges
        counts = degree(there.edge_index[1], there.num_targets, torch.long)
        counts = counts.clamp(max=self.max_degree)
        h = self.propagate(edge_index, x=x)
        out: torch.Tensor = h.new_empty(*h.shape[:-1], self.out_channels)
        for count, (lin_l, lin_r) in enumerate(zip(self.lins_l, self.lins_r, strict=True)):
            nodes = (counts == count).nonzero().view(-1)
            row = lin_l(h.index_select(self.node_dim, nodes))
            if x[1] is not None:
                row = row + lin_r(x[1].index_select(self.node_dim, nodes))
            out = out.index_copy(self.node_dim, nodes, row)
        return out

    return forward


def no_edges_at(place: Place) -> Callable[..., Any]:
    """Return what ``SuperGATConv`` draws edges for its loss with: it draws none."""

    def sampling(self: Any, edge_index: torch.Tensor, *_: Any) -> torch.Tensor:
        return edge_index[:, :0]

    return sampling


def attention_loss_at(place: Place) -> Callable[..., Any]:
    """Return ``SuperGATConv.get_attention_loss``, which refuses in training."""
    original = pyg.SuperGATConv.get_attention_loss

    def get_attention_loss(self: Any) -> torch.Tensor:
        with checking("get_attention_loss", place.group) as where:
            if self.training:
                raise ArgumentError(
                    f"{where}the loss of attention is of edges drawn among all pairs of nodes, "
                    "which no rank has. What the layer gives is exact without it."
                )
        return original(self)  # type: ignore[no-any-return]

    return get_attention_loss
