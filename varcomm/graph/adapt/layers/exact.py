"""Tables of PyG's layers and aggregations: exact on a sharded graph, or refused with a reason."""

from __future__ import annotations

__all__ = ["EXACT", "EXACT_AGGREGATIONS", "REFUSED"]

# Each of them is tested against one process; remarks for the page stand beside.
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
    "FastRGCNConv": "for features; `RGCNConv` takes ids of nodes",
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
    "LEConv": "",
    "LGConv": "",
    "MFConv": "",
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
    "SuperGATConv": "its loss of attention, which samples edges, is refused",
    "TAGConv": "",
    "TransformerConv": "",
    "WLConvContinuous": "",
}

_COMPILED = "it needs a compiled package beside PyTorch, and is not compared with one process"
_OWN_CODE = "it needs code of its own on a sharded graph, and none of PyG's models uses it"
_NEIGHBOURS = "it looks for neighbours among the nodes that it is given, which are this rank's only"

REFUSED = {
    "CuGraphGATConv": _COMPILED,
    "CuGraphRGCNConv": _COMPILED,
    "CuGraphSAGEConv": _COMPILED,
    "DynamicEdgeConv": _NEIGHBOURS,
    "FeaStConv": _OWN_CODE,
    "FusedGATConv": _COMPILED,
    "GravNetConv": _NEIGHBOURS,
    "HypergraphConv": _OWN_CODE,
    "MeshCNNConv": _OWN_CODE,
    "PANConv": _COMPILED,
    "SplineConv": _COMPILED,
    "WLConv": "it numbers colours in the order of its nodes, and every rank has other nodes",
    "XConv": _NEIGHBOURS,
}

# Each of them is tested against one process, and on a rank without edges, where PyG's other
# aggregations fail. Others pad all neighbourhoods to the largest one of the rank, or depend on the
# order of edges.
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
