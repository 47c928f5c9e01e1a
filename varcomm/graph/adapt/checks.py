"""Checks of a model before it is distributed: modules that are not exact are refused."""

from __future__ import annotations

import torch
from torch_geometric.nn import MessagePassing, aggr, norm
from torch_geometric.nn.conv import ChebConv, DirGNNConv, GPSConv

from varcomm.errors import ArgumentError
from varcomm.graph.adapt.exact import EXACT, EXACT_AGGREGATIONS, REFUSED
from varcomm.graph.nn.norms import GLOBAL_NORMS, is_global_norm
from varcomm.graph.nn.readouts import is_global_readout

__all__ = ["check_deep", "check_exact"]

# PyG's models that consist of their layers, which are checked one by one.
_MODELS = "BasicGNN DeepGCNLayer EdgeCNN GAT GCN GIN GraphSAGE JumpingKnowledge MLP PNA"
_MADE_OF_LAYERS = frozenset(_MODELS.split())

_OVER_ALL_NODES = (
    *(
        getattr(torch.nn, f"{lazy}{kind}Norm{dims}d")
        for lazy in ("", "Lazy")
        for kind in ("Batch", "Instance")
        for dims in (1, 2, 3)
    ),
    torch.nn.SyncBatchNorm,
    *(kind for kind in GLOBAL_NORMS if kind is not norm.LayerNorm),
)

_BETWEEN_ROWS = (
    torch.nn.MultiheadAttention,
    torch.nn.Transformer,
    torch.nn.TransformerDecoder,
    torch.nn.TransformerDecoderLayer,
    torch.nn.TransformerEncoder,
    torch.nn.TransformerEncoderLayer,
)

_DATA_PARALLEL = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)

# Modules of PyG without MessagePassing: attention between all nodes, layers made of layers that
# reverse the edges, layers of a dense adjacency matrix.
_OUT_OF_REACH = (
    "torch_geometric.nn.attention",
    "torch_geometric.nn.conv",
    "torch_geometric.nn.dense.d",
)

# They count edges that leave a node, reverse edges, or look at all nodes.
_NOT_DEEP = (ChebConv, DirGNNConv, GPSConv)

# PyG passes these to a layer's functions; they are sizes of this rank's part.
_LOCAL = frozenset({"adj_t", "size", "size_j"})


def check_exact(name: str, module: torch.nn.Module, model: torch.nn.Module) -> None:
    """Raise ArgumentError if a module of `model` is not known to be exact on a sharded graph.

    Its own code outside of ``propagate`` cannot be checked.
    """
    reason = _reason(name, module, model)
    if reason is not None:
        what = f"{name or 'the model'} ({type(module).__name__})"
        raise ArgumentError(f"cannot distribute {what}: {reason}.")


def check_deep(name: str, module: torch.nn.Module) -> None:
    """Raise ArgumentError if a module needs more than halos of several hops have."""
    if isinstance(module, _NOT_DEEP):
        raise ArgumentError(
            f"cannot distribute {name or 'the model'} ({type(module).__name__}): it needs more "
            "than the edges that lead to a node, and halos of several hops have no others. "
            "Partition the graph with hops=1."
        )


def _reason(name: str, module: torch.nn.Module, model: torch.nn.Module) -> str | None:
    """Return why a module is refused, or None."""
    known = _class_of_pyg(module)
    home = known.__module__ if known else ""
    parts = name.split(".")
    around = [model.get_submodule(".".join(parts[:count])) for count in range(len(parts))]

    def inside(*kinds: type[torch.nn.Module]) -> bool:
        return any(isinstance(outer, kinds) for outer in around if outer is not module)

    if isinstance(module, MessagePassing):
        return _reason_against_layer(module, known)
    if isinstance(module, _OVER_ALL_NODES):
        if is_global_norm(module):
            return None
        return "it normalises over all nodes, in a way that is not known across ranks"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is compiled for TorchScript, in which nothing can be exchanged"
    # MultiAggregation attends between its results for one node; GPSConv is replaced
    if isinstance(module, _BETWEEN_ROWS) and not inside(aggr.MultiAggregation, GPSConv):
        return (
            "it attends between the rows that it is given, and would see this rank's nodes only. "
            "If these are not nodes, call it outside the model that is distributed"
        )
    if isinstance(module, _DATA_PARALLEL):
        return (
            "it averages gradients over ranks, while ranks have parts of one sum here. Distribute "
            "what is inside it, and call varcomm.data_parallel.sum_gradients after backward"
        )
    if home.startswith("torch_geometric.nn.pool"):
        return "it pools over all nodes, and would do so over this rank's only"
    if known and home.startswith("torch_geometric.nn.conv") and known.__name__ in EXACT | REFUSED:
        return _reason_against_class(known)
    if home.startswith(_OUT_OF_REACH) and not inside(MessagePassing):
        return (
            "it looks at other nodes, or at the edges, past the propagate of MessagePassing, which "
            "is where halos are exchanged"
        )
    if isinstance(module, aggr.Aggregation):
        return _reason_against_aggregation(
            module, known, model, is_readout=not inside(MessagePassing, aggr.Aggregation)
        )
    if (
        known
        and home.startswith("torch_geometric.nn.models")
        and known.__name__ not in _MADE_OF_LAYERS
    ):
        return (
            f"{known.__name__} is not known to be exact on a part of the graph: its code may look "
            "at nodes and edges by itself. Known of PyG's models are "
            f"{', '.join(sorted(_MADE_OF_LAYERS))}, where their layers are"
        )
    return None


def _reason_against_aggregation(
    module: aggr.Aggregation, known: type | None, model: torch.nn.Module, is_readout: bool
) -> str | None:
    if is_readout:
        if not is_global_readout(module):
            return "it reads out all nodes, in a way that is not known across ranks"
        outer = (m for m in model.modules() if isinstance(m, MessagePassing | aggr.Aggregation))
        if any(part is module for m in outer for part in m.modules() if m is not module):
            return (
                "it reads out all nodes, and is a layer's aggregation as well, which looks at the "
                "edges into a node; make two of them"
            )
        return None
    if known in (None, aggr.Aggregation) or known.__name__ in EXACT_AGGREGATIONS:
        return None
    return (
        f"{known.__name__} is not known to be exact on a part of the graph: PyG's own fails on a "
        "rank without edges, or depends on edges of other ranks. Known are "
        f"{', '.join(sorted(EXACT_AGGREGATIONS))}, and own subclasses of Aggregation"
    )


def _reason_against_class(known: type) -> str | None:
    name = known.__name__
    if name in EXACT:
        return None
    own = f"Known are {', '.join(sorted(EXACT))}, and own subclasses of MessagePassing"
    if name in REFUSED:
        return f"{name} is not exact on a part of the graph: {REFUSED[name]}. {own}"
    return f"{name} is not known to be exact on a part of the graph. {own}"


def _reason_against_layer(layer: MessagePassing, known: type | None) -> str | None:
    if known is not None and (reason := _reason_against_class(known)) is not None:
        return reason
    if layer.decomposed_layers > 1:
        return "decomposed_layers is not supported"
    if layer.explain:
        return "explain is on; explain the model on the full graph, in one process"
    functions = ("message", "aggregate", "update", "edge_update")
    taken = {name for one in functions for name in layer.inspector.get_param_names(one)}
    if local := taken & _LOCAL:
        return (
            f"its functions take {', '.join(sorted(local))}, which would be sizes of this rank's "
            "part; give what they are for to propagate, as a value of nodes or of edges"
        )
    return None


def _class_of_pyg(module: torch.nn.Module) -> type | None:
    """Return the class of PyG that a module is of, or is derived from."""
    classes = type(module).__mro__
    return next((cls for cls in classes if cls.__module__.startswith("torch_geometric.")), None)
