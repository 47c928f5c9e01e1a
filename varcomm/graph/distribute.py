"""``distribute``: let a model of PyTorch Geometric run on a partitioned graph, unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch_geometric.nn import MessagePassing

from varcomm.errors import ArgumentError
from varcomm.graph.layers import check_exact, names_read_at_source
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.ops.operator import checking

__all__ = ["distribute"]

Model = TypeVar("Model", bound=torch.nn.Module)


def distribute(model: Model, graph: PartitionedGraph) -> Model:
    """Let every message-passing layer of a model exchange halos before it propagates.

    The model then takes the local part, ``model(graph.x, graph.edge_index, ...)``, and gives the
    owned rows of what it gives for the whole graph in one process; so do its derivatives of any
    order. Nothing in the model changes but hooks; calling this again moves it to another graph.

    Parameters
    ----------
    model : torch.nn.Module
        Made of layers of PyTorch Geometric or of own subclasses of its ``MessagePassing``, in which
        values of nodes reach edges as arguments of ``propagate`` and ``edge_updater``. The same
        parameters on every rank.
    graph : PartitionedGraph
        What it will run on.

    Returns
    -------
    torch.nn.Module
        `model` itself.

    Raises
    ------
    ArgumentError
        If a layer is known not to be exact, or not known to be: the message says why.

    Notes
    -----
    PyG's hooks hand over what is about to be propagated. Values that a message reads at its source
    become pairs: owned rows and halo for sources, owned rows for targets. As all edges into owned
    nodes are local, any aggregation over them is exact.

    Communication: in each ``propagate`` and ``edge_updater``, one exchange for each value of nodes
    that messages read at their source; none for what they read at their target. The adjoint
    exchange in backward.

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> from torch_geometric.nn import SAGEConv
    >>> def fn(rank):
    ...     edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    ...     ring = Data(x=torch.eye(4), edge_index=edge_index)
    ...     torch.manual_seed(0)
    ...     model = SAGEConv(4, 2)
    ...     alone = model(ring.x, ring.edge_index)
    ...     graph = varcomm.graph.partition(ring)
    ...     model = varcomm.graph.distribute(model, graph)
    ...     parts = model(graph.x, graph.edge_index)
    ...     return torch.allclose(parts, alone[graph.owned_ids])
    >>> varcomm.launch(fn, 2)
    [True, True]
    """
    for name, module in model.named_modules():
        check_exact(name, module, model)
    for module in model.modules():
        if isinstance(module, MessagePassing):
            _attach(module, graph)
    return model


def _attach(layer: MessagePassing, graph: PartitionedGraph) -> None:
    hooks = layer._propagate_forward_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, _BeforePropagate)]:
        del hooks[key]
    at_source = names_read_at_source(layer, ["message", "aggregate", "update"])
    layer.register_propagate_forward_pre_hook(_BeforePropagate(graph, at_source))
    if layer.inspector.implements("edge_update"):
        # PyG's hook for this one comes too late: when values already are at the edges.
        at_source = names_read_at_source(layer, ["edge_update"])
        layer.edge_updater = _EdgeUpdater(layer, graph, at_source)


@dataclass(frozen=True)
class _BeforePropagate:
    """PyG's hook: turns what messages read at their source into pairs."""

    graph: PartitionedGraph
    at_source: frozenset[str]

    def __call__(self, layer: MessagePassing, inputs: Any) -> tuple[Any, Any, Any]:
        edge_index, _, values = inputs
        with checking("propagate", self.graph.group) as where:
            _check_local(edge_index, self.graph, where)
            for name in self.at_source & values.keys():
                _check_rows(name, values[name], self.graph, where)
        pairs = {
            name: _with_halo(value, self.graph) if name in self.at_source else value
            for name, value in values.items()
        }
        return edge_index, _size(self.graph), pairs


@dataclass(frozen=True)
class _EdgeUpdater:
    """Stands before a layer's own ``edge_updater`` and does the same."""

    layer: MessagePassing
    graph: PartitionedGraph
    at_source: frozenset[str]

    def __call__(self, edge_index: torch.Tensor, size: Any = None, **values: Any) -> Any:
        _, size, pairs = _BeforePropagate(self.graph, self.at_source)(
            self.layer, (edge_index, size, values)
        )
        return type(self.layer).edge_updater(self.layer, edge_index, size=size, **pairs)


def _size(graph: PartitionedGraph) -> tuple[int, int]:
    """Return the numbers of sources and of targets, in which PyG thinks."""
    return graph.num_owned + graph.num_halo, graph.num_owned


def _with_halo(value: Any, graph: PartitionedGraph) -> Any:
    """Return what sources and what targets of edges have of a value of nodes."""
    if value is None:
        return None
    source, target = value if isinstance(value, tuple) else (value, value)
    return value if source is None else (graph.with_halo(source), target)


def _check_rows(name: str, value: Any, graph: PartitionedGraph, where: str) -> None:
    """Raise unless a value of nodes, or both of a pair, have the owned rows."""
    for side in value if isinstance(value, tuple) else (value,):
        if side is not None and side.shape[0] != graph.num_owned:
            raise ArgumentError(
                f"{where}{name!r} has {side.shape[0]} rows, but this rank owns {graph.num_owned} "
                "nodes. Call the model with the local part: graph.x, graph.edge_index, ...; halos "
                "are added by varcomm."
            )


def _check_local(edge_index: Any, graph: PartitionedGraph, where: str) -> None:
    """Raise unless edges are in local numbers; a layer may have added self loops to them."""
    if edge_index is graph.edge_index:
        return
    if not isinstance(edge_index, torch.Tensor) or edge_index.layout != torch.strided:
        raise ArgumentError(
            f"{where}edges must be given as graph.edge_index, of shape (2, E); got "
            f"{type(edge_index).__name__}."
        )
    sources, targets = _size(graph)
    if edge_index.numel() and not (
        int(edge_index[0].max()) < sources and int(edge_index[1].max()) < targets
    ):
        raise ArgumentError(
            f"{where}edges reach beyond the {sources} local sources and {targets} owned "
            "targets: call the model with graph.edge_index, not with that of the whole graph."
        )
