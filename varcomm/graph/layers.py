"""Which layers give on a partitioned graph what they give on the whole one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch_geometric.nn import MessagePassing, aggr, norm

from varcomm.errors import ArgumentError

__all__ = ["EXACT", "check_exact", "names_read_at_source"]

# Each of them is tested against one process. All they do with a node is local, or goes through
# propagate and edge_updater.
EXACT = frozenset(
    {
        "CGConv",
        "EdgeConv",
        "FiLMConv",
        "GATConv",
        "GATv2Conv",
        "GENConv",
        "GINConv",
        "GINEConv",
        "GeneralConv",
        "GraphConv",
        "LEConv",
        "MFConv",
        "NNConv",
        "ResGatedGraphConv",
        "SAGEConv",
        "TransformerConv",
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

# Modules of PyG that are no MessagePassing: attention between all nodes, layers made of layers that
# turn the edges round, and the like.
_OUT_OF_REACH = ("torch_geometric.nn.attention", "torch_geometric.nn.conv")


def check_exact(name: str, module: torch.nn.Module, model: torch.nn.Module) -> None:
    """Raise ArgumentError if a module of `model` is not exact on a part of the graph."""
    what = f"{name or 'the model'} ({type(module).__name__})"

    def inside(*kinds: type[torch.nn.Module]) -> bool:
        return any(isinstance(model.get_submodule(part), kinds) for part in _ancestors(name))

    reason = None
    if isinstance(module, MessagePassing):
        reason = _reason_against_layer(module)
    elif isinstance(module, _OVER_ALL_NODES) or (
        isinstance(module, norm.LayerNorm) and module.mode == "graph"
    ):
        reason = "it normalises over all nodes, and would do so over this rank's only"
    elif type(module).__module__.startswith("torch_geometric.nn.pool"):
        reason = "it pools over all nodes, and would do so over this rank's only"
    elif type(module).__module__.startswith(_OUT_OF_REACH) and not inside(MessagePassing):
        reason = (
            "it looks at other nodes, or at the edges, past the propagate of MessagePassing, which "
            "is where halos are exchanged"
        )
    elif isinstance(module, aggr.Aggregation) and not inside(MessagePassing, aggr.Aggregation):
        reason = "it reads out all nodes, and would read this rank's only"
    elif isinstance(module, aggr.QuantileAggregation):
        reason = "PyG's own fails where there are no edges, as on a rank that owns none"
    if reason is not None:
        raise ArgumentError(f"cannot distribute {what}: {reason}.")


def names_read_at_source(layer: MessagePassing, functions: Sequence[str]) -> frozenset[str]:
    """Return the values of nodes that these functions of a layer read at the source of an edge."""
    names = layer.inspector.get_flat_param_names(list(functions))
    return frozenset(name.removesuffix("_j") for name in names if name.endswith("_j"))


def _reason_against_layer(layer: MessagePassing) -> str | None:
    known = next(
        cls
        for cls in type(layer).__mro__
        if cls is MessagePassing or cls.__module__.startswith("torch_geometric.")
    )
    if known is not MessagePassing and known.__name__ not in EXACT:
        return (
            f"{known.__name__} is not known to be exact on a part of the graph; layers that need "
            "degrees of nodes on other ranks, or several hops at once, are not. Known are "
            f"{', '.join(sorted(EXACT))}, and own subclasses of MessagePassing"
        )
    if layer.flow != "source_to_target":
        return "its flow is target_to_source, but ranks own the edges into their nodes"
    if layer.decomposed_layers > 1:
        return "decomposed_layers is not supported"
    functions = ["message", "aggregate", "update"]
    whole = names_read_at_source(layer, functions) & set(
        layer.inspector.get_flat_param_names(functions)
    )
    if whole:
        names = ", ".join(sorted(whole))
        return (
            f"its functions take {names} both at the source of edges and as a whole, which would "
            "be a pair; give the whole to propagate under another name"
        )
    return None


def _ancestors(name: str) -> list[str]:
    """Return the names of all modules that contain the one of this name.

    >>> _ancestors("a.b.c")
    ['', 'a', 'a.b']
    """
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))]
