"""Layers that look past ``propagate``, or take several hops."""

import torch
from torch import nn
from torch_geometric import nn as pyg

from tests.graph.layers import EDGE, HISTOGRAM, LAYERS, NODE, Layer, layer, mlp, other


def rgat(**settings):
    made = pyg.RGATConv(NODE, 4, 3, **settings)
    nn.init.constant_(made.l2, 0.2)  # which PyG leaves as memory was
    return made


# the family of normalised adjacency matrices
layer("GCNConv", lambda: pyg.GCNConv(NODE, 5))
layer("GCNConv weights", lambda: pyg.GCNConv(NODE, 5, improved=True), "weight")
layer("GCNConv without loops", lambda: pyg.GCNConv(NODE, 5, add_self_loops=False), "weight")
layer("GCNConv not normalised", lambda: pyg.GCNConv(NODE, 5, normalize=False), "weight")
layer("SGConv", lambda: pyg.SGConv(NODE, 5, K=3), "weight")
layer("SSGConv", lambda: pyg.SSGConv(NODE, 5, alpha=0.2, K=2), "weight")
layer("TAGConv", lambda: pyg.TAGConv(NODE, 5, K=2), "weight")
layer("ARMAConv", lambda: pyg.ARMAConv(NODE, 5, num_stacks=3, num_layers=2), "weight")
layer("ARMAConv shared", lambda: pyg.ARMAConv(NODE, 5, 2, 3, shared_weights=True, act=nn.Tanh()))
layer("APPNP", lambda: pyg.APPNP(K=3, alpha=0.1), "weight")
layer("LGConv", lambda: pyg.LGConv(), "weight")
layer("MixHopConv", lambda: pyg.MixHopConv(NODE, 5, powers=[0, 1, 3]), "weight")
layer("PDNConv", lambda: pyg.PDNConv(NODE, 5, EDGE, 6), "edge_attr")
layer("ClusterGCNConv", lambda: pyg.ClusterGCNConv(NODE, 5, diag_lambda=0.5))
layer("AntiSymmetricConv", lambda: pyg.AntiSymmetricConv(NODE, num_iters=2))
layer("AntiSymmetricConv of GAT", lambda: pyg.AntiSymmetricConv(NODE, pyg.GATConv(NODE, NODE)))
for name, settings in {
    "GCN2Conv": {"theta": 0.5, "layer": 2},
    "GCN2Conv two weights": {"shared_weights": False},
}.items():
    other(
        name,
        lambda settings=settings: pyg.GCN2Conv(NODE, alpha=0.3, **settings),
        lambda layer, g, e: layer(g.x, g.x.sin(), e, g.weight),
        "weight",
    )
other("FAConv", lambda: pyg.FAConv(NODE, eps=0.2), lambda layer, g, e: layer(g.x, g.x.sin(), e))
other(
    "FAConv given weights",
    lambda: pyg.FAConv(NODE, normalize=False),
    lambda layer, g, e: layer(g.x, g.x.sin(), e, g.weight),
    "weight",
)
for name, settings in {"DNAConv": {}, "DNAConv heads": {"heads": 2, "groups": 2}}.items():
    other(
        name,
        lambda settings=settings: pyg.DNAConv(NODE, **settings),
        lambda layer, g, e: layer(g.seen * g.x[:, None], e, g.weight),
        "weight",
        "seen",
    )
layer("EGConv", lambda: pyg.EGConv(NODE, 6, num_heads=3, num_bases=2))
layer(
    "EGConv several",
    lambda: pyg.EGConv(NODE, 6, ["symnorm", "max", "var", "mean"], num_heads=3, num_bases=2),
)
layer(
    "EGConv loops up to the last node",
    lambda: pyg.EGConv(NODE, 6, ["std", "sum", "min"], num_heads=3, num_bases=2),
)
for normalization in ("sym", "rw", None):
    layer(
        f"ChebConv {normalization}",
        lambda n=normalization: pyg.ChebConv(NODE, 5, K=3, normalization=n),
        "weight",
    )
layer("ChebConv plain", lambda: pyg.ChebConv(NODE, 5, K=2))
other(
    "ChebConv eigenvalue",
    lambda: pyg.ChebConv(NODE, 5, K=2, normalization=None),
    lambda layer, g, e: layer(g.x, e, g.weight, lambda_max=7.5),
    "weight",
)
other(
    "ChebConv eigenvalue of each graph",
    lambda: pyg.ChebConv(NODE, 5, K=3, normalization="rw"),
    lambda layer, g, e: layer(g.x, e, g.weight, g.node_kind, torch.tensor([1.5, 2.5]).double()),
    "weight",
)

# attention
layer("AGNNConv", lambda: pyg.AGNNConv())
layer("AGNNConv without loops", lambda: pyg.AGNNConv(add_self_loops=False))
for attention in ("MX", "SD"):
    layer(
        f"SuperGATConv {attention}",
        lambda attention=attention: pyg.SuperGATConv(NODE, 3, 2, attention_type=attention),
    )
for name, settings in {
    "": {},
    " bases": {"num_bases": 2, "edge_dim": EDGE, "heads": 2, "concat": False},
    " blocks": {"num_blocks": 2, "mod": "scaled"},
    " within": {"attention_mechanism": "within-relation", "mod": "additive"},
    " product": {"attention_mode": "multiplicative-self-attention", "dim": 2, "mod": "f-scaled"},
}.items():
    takes = ("edge_type", "edge_attr")[: 1 + ("edge_dim" in settings)]
    layer(f"RGATConv{name}", lambda s=settings: rgat(**s), *takes)
layer(
    "HEATConv",
    lambda: pyg.HEATConv(NODE, 5, 2, 3, 4, EDGE, 5, heads=2),
    "node_kind",
    "edge_type",
    "edge_attr",
)

# relations
for aggr in ("mean", "sum", "max"):
    layer(f"RGCNConv {aggr}", lambda aggr=aggr: pyg.RGCNConv(NODE, 5, 3, aggr=aggr), "edge_type")
for conv in (pyg.RGCNConv, pyg.FastRGCNConv):
    name = conv.__name__
    layer(f"{name} bases", lambda conv=conv: conv(NODE, 5, 3, num_bases=2), "edge_type")
    layer(f"{name} blocks", lambda conv=conv: conv(NODE, 6, 3, num_blocks=2), "edge_type")
    layer(f"{name} pair", lambda conv=conv: conv((NODE, 2), 5, 3), "edge_type", pair=True)
layer("FastRGCNConv", lambda: pyg.FastRGCNConv(NODE, 5, 3, aggr="add"), "edge_type")
LAYERS["RGCNConv numbers of nodes"] = Layer(
    lambda: pyg.RGCNConv(24, 5, 3), lambda layer, g, e: layer(g.number, e, g.edge_type), ()
)
for first in (True, False):
    other(
        f"SignedConv {'first' if first else 'further'}",
        lambda first=first: pyg.SignedConv(NODE, 5, first_aggr=first),
        lambda layer, g, e, first=first: layer(
            g.x if first else g.stack * g.x.repeat(1, 2), e[:, g.positive], e[:, ~g.positive]
        ),
    )

# positions
other(
    "PointNetConv",
    lambda: pyg.PointNetConv(mlp(NODE + 2, 5), mlp(5, 3)),
    lambda layer, g, e: layer(g.x, g.pos, e),
    "pos",
)
other(
    "PointNetConv without features",
    lambda: pyg.PointNetConv(mlp(2, 5), aggr="mean"),
    lambda layer, g, e: layer(None, g.pos * g.x[:, :2], e),
    "pos",
)
other(
    "PointGNNConv",
    lambda: pyg.PointGNNConv(mlp(NODE, 3), mlp(NODE + 3, 5), mlp(5, NODE)),
    lambda layer, g, e: layer(g.x, g.pos3, e),
    "pos3",
)
other(
    "PointTransformerConv",
    lambda: pyg.PointTransformerConv(NODE, 5, attn_nn=mlp(5, 5)),
    lambda layer, g, e: layer(g.x, g.pos3, e),
    "pos3",
)
other(
    "PPFConv",
    lambda: pyg.PPFConv(mlp(NODE + 4, 5)),
    lambda layer, g, e: layer(g.x, g.pos3, g.normal, e),
)
for separate in (True, False):
    other(
        f"GMMConv {'separate' if separate else 'shared'}",
        lambda separate=separate: pyg.GMMConv(NODE, 5, 2, 3, separate_gaussians=separate),
        lambda layer, g, e: layer(g.x, e, g.pseudo),
        "pseudo",
    )

# several hops, and others
layer("GatedGraphConv", lambda: pyg.GatedGraphConv(5, num_layers=3), "edge_weight")
layer("WLConvContinuous", lambda: pyg.WLConvContinuous(), "edge_weight")
for root in ("sum", "cat", "self_loop", None):
    layer(f"SimpleConv {root}", lambda root=root: pyg.SimpleConv("mean", root), "edge_weight")
for name, settings in {
    "PNAConv": {},
    "PNAConv towers": {"towers": 2, "divide_input": True, "edge_dim": EDGE, "pre_layers": 2},
}.items():
    layer(
        name,
        lambda s=settings: pyg.PNAConv(
            NODE, 6, ["mean", "max", "std"], ["identity", "amplification"], HISTOGRAM, **s
        ),
        *(["edge_attr"] if settings else []),
    )
for conv in (
    lambda: pyg.SAGEConv(NODE, 5),
    lambda: pyg.GCNConv(NODE, 5),
    lambda: pyg.GATConv(NODE, 5),
    lambda: pyg.DirGNNConv(pyg.GraphConv(NODE, 5), root_weight=False),
):
    name = f"DirGNNConv of {type(conv()).__name__}"
    outer = "DirGNN" not in name[10:]
    layer(name, lambda c=conv, o=outer: pyg.DirGNNConv(c(), alpha=0.3, root_weight=o))
layer("GPSConv", lambda: pyg.GPSConv(NODE, pyg.GCNConv(NODE, NODE), heads=2, norm=None))
layer("GPSConv attention alone", lambda: pyg.GPSConv(NODE, None, norm=None, act="tanh"))
other(
    "GPSConv several graphs",
    lambda: pyg.GPSConv(
        NODE, pyg.GINConv(mlp(NODE, NODE)), norm="layer", norm_kwargs={"mode": "node"}
    ),
    lambda layer, g, e: layer(g.x, e, (g.number > 13).long()),
)
