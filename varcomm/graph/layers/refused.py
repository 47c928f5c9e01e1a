"""Checks of a model before it is distributed: modules that are not exact are refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch_geometric.nn import CorrectAndSmooth, MessagePassing, aggr, norm
from torch_geometric.nn.conv import GPSConv

from varcomm.errors import ArgumentError
from varcomm.graph.layers.norms import GLOBAL_NORMS, is_global_norm

_COMPILED = "it needs another compiled package, and is not compared with one process"
_OWN_CODE = "it needs code of its own on a sharded graph, and none of PyG's models uses it"
_NEIGHBOURS = "it searches for neighbours among this rank's nodes only"
_WALKS = "it samples walks and nodes of this rank only"
_MEMORY = "it keeps a state of all nodes by their ids"

# When the model runs, vectors of edges and graphs refuse most operations that have no meaning on a
# part of a graph. These layers read nodes without such vectors.
REFUSED = {
    "CuGraphGATConv": _COMPILED,
    "CuGraphRGCNConv": _COMPILED,
    "CuGraphSAGEConv": _COMPILED,
    "DeepGraphInfomax": "its summary, its corruption and its loss use this rank's nodes only. "
    "Distribute its encoder; graph.mean and pools by graph.batch summarise all nodes",
    "DimeNet": _NEIGHBOURS,
    "DynamicEdgeConv": _NEIGHBOURS,
    "FeaStConv": "PyG's own fails on a rank without edges",
    "FusedGATConv": _COMPILED,
    "GNNFF": _NEIGHBOURS,
    "GravNetConv": _NEIGHBOURS,
    "HypergraphConv": _OWN_CODE,
    "MeshCNNConv": _OWN_CODE,
    "MetaPath2Vec": _WALKS,
    "Node2Vec": _WALKS,
    "PANConv": _COMPILED,
    "RENet": _MEMORY,
    "RadiusInteractionGraph": f"{_NEIGHBOURS}. Pass SchNet an interaction_graph that returns "
    "graph.edge_index and lengths",
    "SplineConv": _COMPILED,
    "TGNMemory": _MEMORY,
    "ViSNet": _NEIGHBOURS,
    "WLConv": "it numbers colours in the order of its nodes, and every rank has other nodes",
    "XConv": _NEIGHBOURS,
}

# Each of them is tested against one process, and on a rank without edges, where PyG's other
# aggregations fail. Others pad all neighbourhoods to the largest one of the rank, or depend on the
# order of edges.
_AGGREGATIONS = """
    Attentional DeepSets DegreeScaler Fused Max Mean Min Mul Multi PowerMean Softmax Std Sum Var
    VariancePreserving
"""
EXACT_AGGREGATIONS = frozenset(f"{name}Aggregation" for name in _AGGREGATIONS.split())

OVER_ALL_NODES = (
    *(
        getattr(torch.nn, f"{lazy}{kind}Norm{dims}d")
        for lazy in ("", "Lazy")
        for kind in ("Batch", "Instance")
        for dims in (1, 2, 3)
    ),
    torch.nn.SyncBatchNorm,
    *(kind for kind in GLOBAL_NORMS if kind is not norm.LayerNorm),
)

_DATA_PARALLEL = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)

# Modules of PyG that pool or attend over all nodes, or take a dense adjacency matrix.
_OUT_OF_REACH = (
    "torch_geometric.nn.attention",
    "torch_geometric.nn.dense.d",
    "torch_geometric.nn.dense.mincut",
    "torch_geometric.nn.pool",
)

# Arguments of a layer's functions that PyG makes of all edges: ids at the targets of edges, other
# ids, numbers of targets, which a reduction by ids needs, and sizes of this rank's part.
TARGET_IDS = frozenset({"edge_index_i", "index", "ptr"})
OTHER_IDS = frozenset({"edge_index", "edge_index_j"})
_COUNTS = frozenset({"dim_size", "size_i"})
_LOCAL = frozenset({"adj_t", "size", "size_j"})
OF_ALL_EDGES = TARGET_IDS | OTHER_IDS | _COUNTS | _LOCAL


def check_exact(name: str, module: torch.nn.Module, model: torch.nn.Module) -> None:
    """Raise ArgumentError if a module of `model` cannot be exact on a sharded graph.

    A layer's own code outside ``propagate`` cannot be checked.
    """
    reason = _reason(name, module, model)
    if reason is not None:
        raise refusal(name, module, reason)


def refusal(name: str, module: torch.nn.Module, reason: str) -> ArgumentError:
    """Return the error of a module that cannot be distributed."""
    what = f"{name or 'the model'} ({type(module).__name__})"
    return ArgumentError(f"cannot distribute {what}: {reason}.")


def _reason(name: str, module: torch.nn.Module, model: torch.nn.Module) -> str | None:
    """Return why a module is refused, or None."""
    known = _class_of_pyg(module)
    home = known.__module__ if known else ""

    def inside(*kinds: type[torch.nn.Module]) -> bool:
        return is_inside(model, name, kinds)

    if known and known.__name__ in REFUSED:
        return REFUSED[known.__name__]
    if isinstance(module, MessagePassing):
        return _reason_against_layer(module)
    if isinstance(module, OVER_ALL_NODES):
        if is_global_norm(module):
            return None
        return "it normalises over all nodes, in a way that is not known across ranks"
    if not _is_python(module.forward):
        return "it is compiled, as for TorchScript, and nothing can be exchanged in it"
    # MultiAggregation attends between its results for one node; GPSConv is replaced
    if isinstance(module, torch.nn.MultiheadAttention) and not inside(
        aggr.MultiAggregation, GPSConv
    ):
        return (
            "it attends between the rows that it is given, and would see this rank's nodes only. "
            "If these are not nodes, call it outside the model that is distributed"
        )
    if isinstance(module, _DATA_PARALLEL):
        return (
            "it averages gradients over ranks, while ranks have parts of one sum here. Distribute "
            "what is inside it, and call varcomm.data_parallel.sum_gradients after backward"
        )
    if isinstance(module, CorrectAndSmooth) and module.autoscale:
        return "it divides by a mean over this rank's training nodes. Build it with autoscale=False"
    if home.startswith(_OUT_OF_REACH) and not inside(MessagePassing):
        return (
            "it pools or attends over all nodes, or has a row for each, and sees this rank's only"
        )
    if isinstance(module, aggr.Aggregation) and not inside(norm.HeteroBatchNorm):
        if isinstance(module, aggr.Set2Set) and is_readout(model, name):
            return None
        return inexact(type(module))
    return None


def _is_python(function: Any) -> bool:
    """Return whether Python runs a function, so that index vectors reach torch's functions."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return hasattr(function, "__code__") or hasattr(type(function).__call__, "__code__")


def is_inside(model: torch.nn.Module, name: str, kinds: tuple[type[torch.nn.Module], ...]) -> bool:
    """Return whether a submodule is a part of a module of these kinds."""
    parts = name.split(".")
    around = [model.get_submodule(".".join(parts[:count])) for count in range(len(parts))]
    return bool(name) and any(isinstance(outer, kinds) for outer in around)


def is_readout(model: torch.nn.Module, name: str) -> bool:
    """Return whether a submodule is an aggregation that no layer calls."""
    layers = (MessagePassing, aggr.Aggregation, norm.HeteroBatchNorm)
    module = model.get_submodule(name)
    return isinstance(module, aggr.Aggregation) and not is_inside(model, name, layers)


def inexact(kind: type[aggr.Aggregation]) -> str | None:
    """Return why an aggregation is refused: PyG's class is not known to be exact."""
    known = next(c for c in kind.__mro__ if c.__module__.startswith("torch_geometric."))
    own = known is aggr.Aggregation and kind is not aggr.Aggregation
    if own or known.__name__ in EXACT_AGGREGATIONS:
        return None
    return (
        f"{known.__name__} is not known to be exact on a part of the graph: PyG's own fails on a "
        "rank without edges, or depends on edges of other ranks. Known are "
        f"{', '.join(sorted(EXACT_AGGREGATIONS))}, and own subclasses of Aggregation"
    )


def _reason_against_layer(layer: MessagePassing) -> str | None:
    if layer.decomposed_layers > 1:
        return (
            "decomposed_layers above 1 propagates parts of the features one after another, with an "
            "exchange for each. Build the layer with decomposed_layers=1, which computes the same"
        )
    if layer.explain:
        return "explain is on; explain the model on the full graph, in one process"
    functions = ("message", "aggregate", "update", "edge_update")
    local: set[str] = set()
    for names in map(set, map(layer.inspector.get_param_names, functions)):
        reduces = names & {*TARGET_IDS, "edge_index"}
        local |= names & (_LOCAL if reduces else _LOCAL | _COUNTS)
    if local:
        return (
            f"its functions take {', '.join(sorted(local))}, which would be sizes of this rank's "
            "part; give what they are for to propagate, as a value of nodes or of edges"
        )
    return None


def _class_of_pyg(module: torch.nn.Module) -> type | None:
    """Return the class of PyG that a module is of, or is derived from."""
    classes = type(module).__mro__
    return next((cls for cls in classes if cls.__module__.startswith("torch_geometric.")), None)
