"""Which layers and aggregations of PyG are exact on a part of a graph, and why others are not."""

from __future__ import annotations

__all__ = ["EXACT", "EXACT_AGGREGATIONS", "REFUSED"]

# Each of them is tested against one process. What is to be known about some of them stands beside.
EXACT = {
    "AGNNConv": "",
    "APPNP": "",
    "ARMAConv": "",
    "AntiSymmetricConv": "",
    "CGConv": "",
    "ChebConv": "",
    "ClusterGCNConv": "",
    "DNAConv": "",
    "DirGNNConv": "",
    "EGConv": "",
    "EdgeConv": "",
    "FAConv": "",
    "FastRGCNConv": "for features; `RGCNConv` takes numbers of nodes",
    "FeaStConv": "",
    "FiLMConv": "",
    "GATConv": "",
    "GATv2Conv": "",
    "GCN2Conv": "",
    "GCNConv": "",
    "GENConv": "",
    "GINConv": "",
    "GINEConv": "",
    "GMMConv": "",
    "GPSConv": 'for `attn_type="multihead"`: every rank gets the features of all nodes',
    "GatedGraphConv": "",
    "GeneralConv": "",
    "GraphConv": "",
    "HANConv": "",
    "HEATConv": "",
    "HGTConv": "",
    "HeteroConv": "",
    "HypergraphConv": "a rank owns hyperedges, as targets of edges from nodes",
    "LEConv": "",
    "LGConv": "",
    "MFConv": "",
    "MeshCNNConv": "four edges into each node, one after the other; PyG makes its messages in fp32",
    "MessagePassing": "own subclasses: values reach edges by `propagate` and `edge_updater`",
    "MixHopConv": "",
    "NNConv": "",
    "PDNConv": "",
    "PNAConv": "",
    "PPFConv": "",
    "PointGNNConv": "",
    "PointNetConv": "",
    "PointTransformerConv": "",
    "RGATConv": "",
    "RGCNConv": "in place of `x=None`, give `x=graph.owned_ids`",
    "ResGatedGraphConv": "",
    "SAGEConv": "",
    "SGConv": "",
    "SSGConv": "",
    "SignedConv": "",
    "SimpleConv": "",
    "SuperGATConv": "its loss of attention, for which it draws edges, is refused",
    "TAGConv": "",
    "TransformerConv": "",
    "WLConvContinuous": "",
}

_COMPILED = "it needs a compiled package beside PyTorch, and is not compared with one process"
_NEIGHBOURS = "it looks for neighbours among the nodes that it is given, which are this rank's only"

REFUSED = {
    "CuGraphGATConv": _COMPILED,
    "CuGraphRGCNConv": _COMPILED,
    "CuGraphSAGEConv": _COMPILED,
    "DynamicEdgeConv": _NEIGHBOURS,
    "FusedGATConv": _COMPILED,
    "GravNetConv": _NEIGHBOURS,
    "PANConv": _COMPILED,
    "SplineConv": _COMPILED,
    "WLConv": (
        "it numbers colours in the order in which it meets them, and every rank would meet others"
    ),
    "XConv": _NEIGHBOURS,
}

# Each of them is tested against one process, and on a rank without edges, on which others of PyG
# fail. Others pad all neighbourhoods to the largest one, which is another one on each rank, or
# depend on the order of edges.
EXACT_AGGREGATIONS = frozenset(
    {
        "AttentionalAggregation",
        "DeepSetsAggregation",
        "DegreeScalerAggregation",
        "FusedAggregation",
        "MaxAggregation",
        "MeanAggregation",
        "MinAggregation",
        "MulAggregation",
        "MultiAggregation",
        "PowerMeanAggregation",
        "SoftmaxAggregation",
        "StdAggregation",
        "SumAggregation",
        "VarAggregation",
        "VariancePreservingAggregation",
    }
)
