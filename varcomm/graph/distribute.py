"""``distribute``: let a model of PyTorch Geometric run on a partitioned graph, unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch_geometric.nn import MessagePassing

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.graph.digest import differing, digest
from varcomm.graph.layers import check_exact, names_read_at_source
from varcomm.graph.local_edges import plan_of
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.layout import holds_integers
from varcomm.ops.autograd import kept_from_compilation
from varcomm.ops.operator import checking
from varcomm.transport.agree import share

__all__ = ["distribute"]

Model = TypeVar("Model", bound=torch.nn.Module)


def distribute(model: Model, graph: PartitionedGraph) -> Model:
    """Let every message-passing layer of a model exchange halos before it propagates.

    Collective: every rank calls it with the same model, and all raise if one has to.

    The model then takes the local part, ``model(graph.x, graph.edge_index, ...)``, and gives the
    owned rows of what it gives for the whole graph in one process; so do its derivatives of any
    order. Nothing in the model changes but how its layers propagate; its ``state_dict`` stays as it
    is. Calling this again moves it to another graph, say one for validation.

    Parameters
    ----------
    model : torch.nn.Module
        Made of layers of PyTorch Geometric or of own subclasses of its ``MessagePassing``, in which
        values of nodes reach edges as arguments of ``propagate`` and ``edge_updater``. The same
        parameters and buffers on every rank; of lazy ones, what there is so far is compared, so
        seed the ranks alike.
    graph : PartitionedGraph
        What it will run on.

    Returns
    -------
    torch.nn.Module
        `model` itself.

    Raises
    ------
    ArgumentError
        On every rank, if a module of PyTorch or PyG is known not to be exact, or not known to be:
        the message says why. On this rank, before any communication, if `graph` is none.
    DisagreementError
        On every rank, if names, shapes, dtypes or values of parameters or buffers differ.

    Notes
    -----
    A layer's own ``propagate`` gets what is about to be propagated. Values that a message reads at
    its source become pairs: owned rows and halo for sources, owned rows for targets. As all edges
    into owned nodes are local, any aggregation over them is exact.

    What cannot be seen is code of one's own that reaches other nodes by itself: degrees of sources
    or ``x[edge_index[0]]`` in a ``forward``, a mean over nodes. Such values go through
    ``propagate``, as ``degree_j``, say.

    Edges may be left out (dropout of edges) and self loops added. Edges that are not in the graph
    are refused when the model runs.

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
    if not isinstance(graph, PartitionedGraph):
        raise ArgumentError(
            "graph.distribute: graph must be a PartitionedGraph, as graph.partition gives; got "
            f"{type(graph).__name__}. The order is distribute(model, graph)."
        )
    what = "graph.distribute"
    given = share(what, lambda: _checked(model), graph.group)
    others, names = differing(given)
    if others:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise DisagreementError(
            f"{what}: ranks {others} have other parameters or buffers than rank 0; they differ in "
            f"{', '.join(names[:3])}{more}. Seed the ranks alike before the model is made, or "
            "broadcast those of one rank."
        )
    for module in model.modules():
        if isinstance(module, MessagePassing):
            _attach(module, graph)
    return model


def _checked(model: torch.nn.Module) -> dict[str, object]:
    """Return, by its name, a digest of all that must be the same on all ranks, if it will do."""
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module; got {type(model).__name__}.")
    # under all its names: what is fine inside of a layer may be used outside of it too
    for name, module in model.named_modules(remove_duplicate=False):
        check_exact(name, module, model)
    state: dict[str, object] = {}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(name, recurse=False))
        own |= dict(module.named_buffers(name, recurse=False))
        # where some are not initialised yet, the others may be whatever was in memory
        lazy = any(torch.nn.parameter.is_lazy(value) for value in own.values())
        for key, value in own.items():
            state[key] = "uninitialised" if lazy else (value.requires_grad, digest(value))
    return state


def _attach(layer: MessagePassing, graph: PartitionedGraph) -> None:
    # At the instance: PyG's hooks are skipped under torch.compile, and the one for edge_updater
    # comes too late, when values already are at the edges.
    at_source = names_read_at_source(layer, ["message", "aggregate", "update"])
    layer.propagate = _WithHalos(layer, "propagate", graph, at_source)
    if layer.inspector.implements("edge_update"):
        at_source = names_read_at_source(layer, ["edge_update"])
        layer.edge_updater = _WithHalos(layer, "edge_updater", graph, at_source)


@dataclass(frozen=True, eq=False)
class _WithHalos:
    """Stands before a method of a layer; turns what messages read at their source into pairs."""

    layer: MessagePassing
    method: str
    graph: PartitionedGraph
    at_source: frozenset[str]

    def __call__(self, edge_index: torch.Tensor, size: Any = None, **values: Any) -> Any:
        values = self._exchange(edge_index, values)
        own = getattr(type(self.layer), self.method)
        return own(self.layer, edge_index, size=_size(self.graph), **values)

    @kept_from_compilation
    def _exchange(self, edge_index: Any, values: dict[str, Any]) -> dict[str, Any]:
        # PyG takes lists for pairs as well
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        with checking(self.method, self.graph.group) as where:
            _check_local(edge_index, self.graph, where)
            for name in self.at_source & values.keys():
                _check_rows(name, values[name], self.layer, self.graph, where)
        return {
            name: _with_halo(value, self.graph) if name in self.at_source else value
            for name, value in values.items()
        }


def _size(graph: PartitionedGraph) -> tuple[int, int]:
    """Return the numbers of sources and of targets, in which PyG thinks."""
    return graph.num_owned + graph.num_halo, graph.num_owned


def _with_halo(value: Any, graph: PartitionedGraph) -> Any:
    """Return what sources and what targets of edges have of a value of nodes."""
    source, target = value if isinstance(value, tuple) else (value, value)
    # whatever is no tensor is not read at edges, but handed on as it is
    return (graph.with_halo(source), target) if isinstance(source, torch.Tensor) else value


def _check_rows(
    name: str, value: Any, layer: MessagePassing, graph: PartitionedGraph, where: str
) -> None:
    """Raise unless a value of nodes, or both of a pair, have the owned rows as first dimension."""
    sides = value if isinstance(value, tuple) else (value,)
    if len(sides) > 2:
        raise ArgumentError(
            f"{where}{name!r} must be a tensor or a pair of them, for sources and for targets; got "
            f"{len(sides)}."
        )
    for side in sides:
        if not isinstance(side, torch.Tensor):
            continue
        along = layer.node_dim + (side.dim() if layer.node_dim < 0 else 0)
        if along != 0:
            raise ArgumentError(
                f"{where}{name!r} has shape {tuple(side.shape)}, and the layer, whose node_dim is "
                f"{layer.node_dim}, looks for nodes along dimension {along}. They must come first: "
                "shape (n, F), or node_dim=0. A batch (B, n, F) on one graph is not supported."
            )
        if side.shape[0] != graph.num_owned:
            raise ArgumentError(
                f"{where}{name!r} has {side.shape[0]} rows, but this rank owns {graph.num_owned} "
                "nodes. Call the model with the local part: graph.x, graph.edge_index, ...; halos "
                "are added by varcomm."
            )


def _check_local(edge_index: Any, graph: PartitionedGraph, where: str) -> None:
    """Raise unless edges are those of the graph, in local numbers, or self loops."""
    if edge_index is graph.edge_index:
        return
    if type(edge_index) is not torch.Tensor or not _are_edges(edge_index):
        raise ArgumentError(
            f"{where}edges must be given as graph.edge_index, of shape (2, E); got "
            f"{type(edge_index).__name__}."
        )
    again = "If the model is to run on another graph, call distribute(model, graph) again."
    if plan_of(edge_index) not in (None, graph.plan):
        raise ArgumentError(
            f"{where}these are the edges of another graph than the one that the model is "
            f"distributed on. {again}"
        )
    sources, targets = _size(graph)
    if edge_index.numel() and not (
        int(edge_index.min()) >= 0
        and int(edge_index[0].max()) < sources
        and int(edge_index[1].max()) < targets
    ):
        raise ArgumentError(
            f"{where}edges reach beyond the {sources} local sources and {targets} owned "
            "targets: call the model with graph.edge_index, not with that of the whole graph. "
            f"{again}"
        )
    if not graph.edges.local_edges.include(edge_index):
        raise ArgumentError(
            f"{where}some edges are not in the graph that the model is distributed on. Edges of "
            f"graph.edge_index may be left out, and self loops added, but no others. {again}"
        )


def _are_edges(edge_index: torch.Tensor) -> bool:
    dense = edge_index.layout == torch.strided
    return dense and holds_integers(edge_index) and edge_index.shape[:-1] == (2,)
