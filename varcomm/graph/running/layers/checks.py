"""Which layers give on a partitioned graph what they give on the whole one."""

from __future__ import annotations

import torch
from torch_geometric.nn import MessagePassing, aggr, norm
from torch_geometric.nn.conv import (
    ChebConv,
    DirGNNConv,
    FastRGCNConv,
    GPSConv,
    HypergraphConv,
)

from varcomm.errors import ArgumentError
from varcomm.graph.over_nodes.norms import is_global_norm
from varcomm.graph.over_nodes.readouts import is_global_readout
from varcomm.graph.running.layers.exact import EXACT, EXACT_AGGREGATIONS, REFUSED
from varcomm.graph.running.propagate import names_read_at_source, names_taken

__all__ = ["check_deep", "check_exact"]

# Of PyG's models, those that are nothing but their layers, which are looked at one by one.
_MADE_OF_LAYERS = frozenset(
    {
        "BasicGNN",
        "DeepGCNLayer",
        "EdgeCNN",
        "GAT",
        "GCN",
        "GIN",
        "GraphSAGE",
        "JumpingKnowledge",
        "MLP",
        "PNA",
    }
)

_OVER_ALL_NODES = (
    torch.nn.modules.batchnorm._BatchNorm,
    torch.nn.modules.instancenorm._InstanceNorm,
    norm.BatchNorm,
    norm.DiffGroupNorm,
    norm.GraphNorm,
    norm.GraphSizeNorm,
    norm.HeteroBatchNorm,
    norm.InstanceNorm,
    norm.MeanSubtractionNorm,
    norm.PairNorm,
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

# Modules of PyG that are no MessagePassing: attention between all nodes, layers made of layers that
# turn the edges round, layers that take a dense adjacency matrix, and the like.
_OUT_OF_REACH = (
    "torch_geometric.nn.attention",
    "torch_geometric.nn.conv",
    "torch_geometric.nn.dense.d",
)

_LAYERS = EXACT.keys() | REFUSED.keys()

# They count edges that leave a node, turn edges round, or look at all nodes.
_NOT_DEEP = (ChebConv, DirGNNConv, GPSConv, HypergraphConv)

# What PyG hands to a layer's functions under these names is about the local part.
_LOCAL_NUMBERS = frozenset({"adj_t", "edge_index", "edge_index_j", "size", "size_j"})


def check_exact(name: str, module: torch.nn.Module, model: torch.nn.Module) -> None:
    """Raise ArgumentError if a module of `model` is known not to be exact on a part of the graph.

    What its code does past ``propagate`` cannot be told.
    """
    what = f"{name or 'the model'} ({type(module).__name__})"
    known = _class_of_pyg(module)
    home = known.__module__ if known else ""

    def inside(*kinds: type[torch.nn.Module]) -> bool:
        return any(isinstance(model.get_submodule(part), kinds) for part in _ancestors(name))

    reason = None
    if isinstance(module, MessagePassing):
        reason = _reason_against_layer(module)
    elif isinstance(module, _OVER_ALL_NODES):
        if not is_global_norm(module):
            reason = "it normalises over all nodes, in a way that is not known across ranks"
    elif isinstance(module, torch.jit.ScriptModule):
        reason = "it is compiled for TorchScript, in which nothing can be exchanged"
    elif isinstance(module, _BETWEEN_ROWS) and not inside(aggr.MultiAggregation, GPSConv):
        # MultiAggregation attends between its results for one node; of GPSConv all is known
        reason = (
            "it attends between the rows that it is given, and would see this rank's nodes only. "
            "If these are not nodes, call it outside the model that is distributed"
        )
    elif isinstance(module, _DATA_PARALLEL):
        reason = (
            "it averages gradients over ranks, while ranks have parts of one sum here. Distribute "
            "what is inside it, and call varcomm.data_parallel.sum_gradients after backward"
        )
    elif home.startswith("torch_geometric.nn.pool"):
        reason = "it pools over all nodes, and would do so over this rank's only"
    elif known and home.startswith("torch_geometric.nn.conv") and known.__name__ in _LAYERS:
        reason = _reason_against_class(known)
    elif home.startswith(_OUT_OF_REACH) and not inside(MessagePassing):
        reason = (
            "it looks at other nodes, or at the edges, past the propagate of MessagePassing, which "
            "is where halos are exchanged"
        )
    elif isinstance(module, aggr.Aggregation) and not inside(MessagePassing, aggr.Aggregation):
        if not is_global_readout(module):
            reason = "it reads out all nodes, in a way that is not known across ranks"
        elif _is_within_a_layer(module, model):
            reason = (
                "it reads out all nodes, and is a layer's aggregation as well, which looks at the "
                "edges into a node; make two of them"
            )
    elif known is None:
        pass
    elif isinstance(module, aggr.Aggregation):
        if known is not aggr.Aggregation and known.__name__ not in EXACT_AGGREGATIONS:
            reason = (
                f"{known.__name__} is not known to be exact on a part of the graph: PyG's own "
                "fails on a rank without edges, or gives what depends on edges of other ranks. "
                f"Known are {', '.join(sorted(EXACT_AGGREGATIONS))}, and own subclasses of "
                "Aggregation"
            )
    elif home.startswith("torch_geometric.nn.models") and known.__name__ not in _MADE_OF_LAYERS:
        reason = (
            f"{known.__name__} is not known to be exact on a part of the graph: its code may look "
            "at nodes and edges by itself. Known of PyG's models are "
            f"{', '.join(sorted(_MADE_OF_LAYERS))}, where their layers are"
        )
    if reason is not None:
        raise ArgumentError(f"cannot distribute {what}: {reason}.")


def _is_within_a_layer(module: torch.nn.Module, model: torch.nn.Module) -> bool:
    outer = (m for m in model.modules() if isinstance(m, MessagePassing | aggr.Aggregation))
    return any(part is module for m in outer for part in m.modules() if m is not module)


def check_deep(name: str, module: torch.nn.Module) -> None:
    """Raise ArgumentError if a module needs more than halos of several hops have."""
    turns = isinstance(module, MessagePassing) and module.flow == "target_to_source"
    if turns or isinstance(module, _NOT_DEEP):
        raise ArgumentError(
            f"cannot distribute {name or 'the model'} ({type(module).__name__}): it needs more "
            "than the edges that lead to a node, and halos of several hops have no others. "
            "Partition the graph with hops=1."
        )


def _reason_against_class(known: type) -> str | None:
    name = known.__name__
    if name in EXACT:
        return None
    own = f"Known are {', '.join(sorted(EXACT))}, and own subclasses of MessagePassing"
    if name in REFUSED:
        return f"{name} is not exact on a part of the graph: {REFUSED[name]}. {own}"
    return f"{name} is not known to be exact on a part of the graph. {own}"


def _reason_against_layer(layer: MessagePassing) -> str | None:
    known = _class_of_pyg(layer)
    if known is not None and (reason := _reason_against_class(known)) is not None:
        return reason
    if layer.decomposed_layers > 1:
        return "decomposed_layers is not supported"
    if layer.explain:
        return "explain is on; explain the model on the whole graph, in one process"
    whole: set[str] = set()
    for functions in (["message", "aggregate"], ["edge_update"]):
        whole |= names_read_at_source(layer, functions) & set(names_taken(layer, functions))
    if whole:
        return (
            f"its functions take {', '.join(sorted(whole))} both at the source of edges and as a "
            "whole, which would be a pair; give the whole to propagate under another name"
        )
    taken = set(names_taken(layer, ["message", "aggregate", "update", "edge_update"]))
    if known is FastRGCNConv:
        taken.discard("edge_index_j")  # it is seen to that this is not used
    if local := taken & _LOCAL_NUMBERS:
        return (
            f"its functions take {', '.join(sorted(local))}, which would be numbers of this "
            "rank's part, not of the whole graph; give what they are for to propagate, as a value "
            "of nodes or of edges"
        )
    return None


def _class_of_pyg(module: torch.nn.Module) -> type | None:
    """Return the class of PyG that a module is of, or is derived from."""
    classes = type(module).__mro__
    return next((cls for cls in classes if cls.__module__.startswith("torch_geometric.")), None)


def _ancestors(name: str) -> list[str]:
    """Return the names of all modules that contain the one of this name.

    >>> _ancestors("a.b.c")
    ['', 'a', 'a.b']
    """
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))]
