"""Tables of PyG's layers and aggregations: exact on a sharded graph, or refused with a reason."""

from __future__ import annotations

__all__ = ["EXACT", "EXACT_AGGREGATIONS", "REFUSED"]

_WITHOUT_REMARK = """
    AGNNConv APPNP ARMAConv AntiSymmetricConv CGConv ChebConv ClusterGCNConv DNAConv DirGNNConv
    EGConv EdgeConv FAConv FiLMConv GATConv GATv2Conv GCN2Conv GCNConv GENConv GINConv GINEConv
    GMMConv GatedGraphConv GeneralConv GraphConv HANConv HEATConv HGTConv HeteroConv LEConv LGConv
    MFConv MixHopConv NNConv PDNConv PNAConv PPFConv PointGNNConv PointNetConv PointTransformerConv
    RGATConv ResGatedGraphConv SAGEConv SGConv SSGConv SignedConv SimpleConv TAGConv TransformerConv
    WLConvContinuous
"""

# Each layer is tested against one process. The page of layers shows the remarks.
EXACT = dict.fromkeys(_WITHOUT_REMARK.split(), "") | {
    "FastRGCNConv": "for features; `RGCNConv` takes ids of nodes",
    "GPSConv": 'for `attn_type="multihead"`: every rank gets the features of all nodes',
    "MessagePassing": "own subclasses: values reach edges by `propagate` and `edge_updater`",
    "RGCNConv": "in place of `x=None`, give `x=graph.owned_ids`",
    "SuperGATConv": "its loss of attention, which samples edges, is refused",
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
_AGGREGATIONS = """
    Attentional DeepSets DegreeScaler Fused Max Mean Min Mul Multi PowerMean Softmax Std Sum Var
    VariancePreserving
"""
EXACT_AGGREGATIONS = frozenset(f"{name}Aggregation" for name in _AGGREGATIONS.split())
