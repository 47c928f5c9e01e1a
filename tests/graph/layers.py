"""The table of PyG's layers that are exact on a part of a graph, with several options each."""

import torch
from torch import nn
from torch_geometric import nn as pyg

from tests.graph.graphs import wild

NODE, EDGE = 4, 3  # channels of ``wild()``

HISTOGRAM = torch.tensor([2, 1, 3, 5, 4, 3])


def example():
    """``wild()``, with what layers take beside features."""
    data = wild()
    generator = torch.Generator().manual_seed(2)
    nodes, edges = data.num_nodes, data.num_edges

    def draw(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    data.weight = draw(edges).sigmoid() + 0.1  # whose sums have a root
    data.pseudo = draw(edges, 2).sigmoid()
    data.normal = draw(nodes, 3)
    data.pos3 = draw(nodes, 3)
    data.seen = draw(nodes, 3, NODE)
    data.stack = draw(nodes, 2 * NODE)
    data.number = torch.arange(nodes)
    data.node_kind = torch.randint(2, (nodes,), generator=generator)
    data.positive = torch.rand(edges, generator=generator) < 0.5
    return data


# Of each name how to make a layer, how to call it, and what is differentiated by.
LAYERS = {}
CALLS = {}  # layers called in other ways
BETWEEN = {}  # layers from nodes of type "a" to nodes of type "b"


def layer(name, *takes, table=LAYERS, args=None, pair=False, call=None, by=("x",), **settings):
    """Add PyG's layer of the first word of the name, with these arguments.

    It is called with features, edges and then attributes of the graph, which `takes` names. With a
    `call` of its own, `takes` names what is differentiated by beside the features.
    """
    values = ("weight", "edge_weight", "edge_attr", "pseudo")

    def make():
        given = args() if callable(args) else args
        channels = ((NODE, 2) if pair else NODE, 5)
        made = getattr(pyg, name.split()[0].rstrip(","))
        return made(*(channels if given is None else given), **settings)

    def usual(layer, g):
        # as a pair, targets have features of their own
        x = (g.x, g.x[:, :2].tanh()) if pair else g.x
        return layer(x, g.edge_index, *(getattr(g, key) for key in takes))

    by += tuple(key for key in takes if call or key in values)
    table[name] = make, call or usual, *by


def between(name, *takes, args=((4, 3), 5), sources=False, call=None, by=None, **settings):
    """Add a layer called with features of both types, or of sources and a `size`."""

    def usual(layer, g):
        more = {"size": (len(g.x_a), len(g.x_b))} if sources else {}
        x = g.x_a, None if sources else g.x_b
        return layer(x, g.edge_index, *(getattr(g, key) for key in takes), **more)

    by = by or (("x_a",) if sources else ("x_a", "x_b"))
    layer(name, table=BETWEEN, args=args, call=call or usual, by=by, **settings)


def called_with(*names):
    """Return a call with these attributes of the graph."""
    return lambda m, g: m(*(getattr(g, name) for name in names))


def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs))


def rgat(layer):
    nn.init.constant_(layer.l2, 0.2)  # which PyG leaves as memory was
    return layer


for aggr in ("mean", "max", "min", "sum", "std", "var", "softmax", ["mean", "max", "std"]):
    layer(f"SAGEConv {aggr}", aggr=aggr)
layer("SAGEConv learned softmax", args=lambda: (NODE, 5, pyg.aggr.SoftmaxAggregation(learn=True)))
layer("SAGEConv normalised", normalize=True, project=True)
layer("SAGEConv without root", root_weight=False)
layer("SAGEConv pair", pair=True)
layer(
    "SAGEConv, several features for one graph",
    call=lambda m, g: (
        m(torch.stack([g.x, g.x.sin(), -g.x]), g.edge_index).transpose(0, 1).flatten(1)
    ),
)

for aggr in ("add", "mean", "max"):
    layer(f"GraphConv {aggr}", "edge_weight", aggr=aggr)
for aggr in ("mul", "powermean"):
    layer(f"GraphConv {aggr}", aggr=aggr)
layer("GraphConv plain")
layer("GraphConv pair", "edge_weight", pair=True)

for name in ("GATConv", "GATv2Conv"):
    # these add self loops by default: every owned node gets one, as it does on the whole graph
    layer(f"{name} heads", heads=2)
    by_edges = {"edge_dim": EDGE}
    layer(f"{name} edges filled by mean", "edge_attr", heads=2, concat=False, **by_edges)
    layer(f"{name} edges filled by max", "edge_attr", heads=3, fill_value="max", **by_edges)
    layer(
        f"{name} edges filled by a number", "edge_attr", fill_value=0.5, residual=True, **by_edges
    )
    layer(f"{name} without self loops", "edge_attr", heads=2, add_self_loops=False, **by_edges)
    layer(f"{name} pair", pair=True, add_self_loops=False)
    layer(f"{name} pair and self loops", pair=True)
layer("GATv2Conv shared", heads=2, share_weights=True)

layer("TransformerConv heads", heads=2)
layer("TransformerConv gated", "edge_attr", heads=2, concat=False, beta=True, edge_dim=EDGE)
layer("TransformerConv pair", pair=True)

layer("GINConv", args=lambda: (mlp(NODE, 5),), train_eps=True)
layer("GINEConv", "edge_attr", args=lambda: (mlp(NODE, 5),), train_eps=True, edge_dim=EDGE)

layer("GENConv softmax", "edge_attr", learn_t=True, norm=None, edge_dim=EDGE)
layer("GENConv powermean", aggr="powermean", p=2.0, learn_p=True, norm=None)
layer(
    "GENConv normed messages",
    args=(NODE, NODE),
    aggr="add",
    msg_norm=True,
    learn_msg_scale=True,
    norm=None,
)
layer("GENConv pair", pair=True, norm=None)
for words, aggr in {
    "attention": lambda: pyg.aggr.AttentionalAggregation(nn.Linear(NODE, 1), nn.Linear(NODE, NODE)),
    "deep sets": lambda: pyg.aggr.DeepSetsAggregation(nn.Linear(NODE, NODE), nn.Linear(NODE, NODE)),
    "variance preserving": pyg.aggr.VariancePreservingAggregation,
    "softmax of groups": lambda: pyg.aggr.SoftmaxAggregation(learn=True, channels=NODE),
    "several, combined by attention": lambda: pyg.aggr.MultiAggregation(
        ["sum", "mul", "var", "powermean"],
        mode="attn",
        mode_kwargs={"in_channels": NODE, "out_channels": NODE, "num_heads": 2},
    ),
    "several, one by one": lambda: pyg.aggr.MultiAggregation(["sum", "min", "var"], mode="mean"),
    **{
        scaler: lambda scaler=scaler: pyg.aggr.DegreeScalerAggregation(
            "max", scaler, HISTOGRAM, train_norm=True
        )
        for scaler in ("identity", "amplification", "attenuation", "linear", "inverse_linear")
    },
}.items():
    layer(f"GENConv {words}", args=lambda aggr=aggr: (NODE, NODE, aggr()), norm=None)

for aggr in ("max", "mean", "add"):
    layer(f"EdgeConv {aggr}", args=lambda: (mlp(2 * NODE, 5),), aggr=aggr)
layer("CGConv", "edge_attr", args=(NODE, EDGE))
layer("CGConv pair", pair=True, args=((NODE, 2),), aggr="mean")
layer("FiLMConv")
layer("FiLMConv relations", "edge_type", num_relations=3)
layer("FiLMConv pair", pair=True)
layer("GeneralConv", "edge_attr", in_edge_channels=EDGE)
layer("GeneralConv attention", heads=2, attention=True, l2_normalize=True)
layer(
    "GeneralConv dot product",
    heads=2,
    attention=True,
    attention_type="dot_product",
    directed_msg=False,
)
layer("LEConv", "edge_weight")
layer("LEConv pair", pair=True)
layer("MFConv", max_degree=3)
layer("MFConv pair", pair=True)
layer("NNConv", "edge_attr", args=lambda: (NODE, 5, mlp(EDGE, NODE * 5)), aggr="mean")
layer("NNConv pair", "edge_attr", pair=True, args=lambda: ((NODE, 2), 5, mlp(EDGE, 20)))
layer("ResGatedGraphConv")
layer("ResGatedGraphConv edges", "edge_attr", edge_dim=EDGE)
layer("ResGatedGraphConv pair", pair=True)

# the family of normalised adjacency matrices
layer("GCNConv")
layer("GCNConv weights", "weight", improved=True)
layer("GCNConv without loops", "weight", add_self_loops=False)
layer("GCNConv not normalised", "weight", normalize=False)
layer("SGConv", "weight", K=3)
layer("SSGConv", "weight", alpha=0.2, K=2)
layer("TAGConv", "weight", K=2)
layer("ARMAConv", "weight", num_stacks=3, num_layers=2)
layer("ARMAConv shared", args=lambda: (NODE, 5, 2, 3, True, nn.Tanh()))
layer("APPNP", "weight", args=(3, 0.1))
layer("LGConv", "weight", args=())
layer("MixHopConv", "weight", powers=[0, 1, 3])
layer("PDNConv", "edge_attr", args=(NODE, 5, EDGE, 6))
layer("ClusterGCNConv", diag_lambda=0.5)
layer("AntiSymmetricConv", args=(NODE,), num_iters=2)
layer("AntiSymmetricConv of GAT", args=lambda: (NODE, pyg.GATConv(NODE, NODE)))
for name, settings in {
    "GCN2Conv": {"theta": 0.5, "layer": 2},
    "GCN2Conv two weights": {"shared_weights": False},
}.items():
    layer(
        name,
        "weight",
        args=(NODE, 0.3),
        call=lambda m, g: m(g.x, g.x.sin(), g.edge_index, g.weight),
        **settings,
    )
layer("FAConv", args=(NODE, 0.2), call=lambda m, g: m(g.x, g.x.sin(), g.edge_index))
layer(
    "FAConv given weights",
    "weight",
    args=(NODE,),
    normalize=False,
    call=lambda m, g: m(g.x, g.x.sin(), g.edge_index, g.weight),
)
for name, settings in {"DNAConv": {}, "DNAConv heads": {"heads": 2, "groups": 2}}.items():
    layer(
        name,
        *("weight", "seen"),
        args=(NODE,),
        call=lambda m, g: m(g.seen * g.x[:, None], g.edge_index, g.weight),
        **settings,
    )
for name, *aggr in (
    ("EGConv",),
    ("EGConv several", ["symnorm", "max", "var", "mean"]),
    ("EGConv loops up to the last node", ["std", "sum", "min"]),
):
    layer(name, args=(NODE, 6, *aggr), num_heads=3, num_bases=2)
for normalization in ("sym", "rw", None):
    layer(f"ChebConv {normalization}", "weight", K=3, normalization=normalization)
layer("ChebConv plain", K=2)
layer(
    "ChebConv eigenvalue",
    "weight",
    K=2,
    normalization=None,
    call=lambda m, g: m(g.x, g.edge_index, g.weight, lambda_max=7.5),
)
layer(
    "ChebConv eigenvalue of each graph",
    "weight",
    K=3,
    normalization="rw",
    call=lambda m, g: m(
        g.x, g.edge_index, g.weight, g.node_kind, torch.tensor([1.5, 2.5]).double()
    ),
)

# attention
layer("AGNNConv", args=())
layer("AGNNConv without loops", args=(), add_self_loops=False)
for attention in ("MX", "SD"):
    layer(f"SuperGATConv {attention}", args=(NODE, 3, 2), attention_type=attention)
for name, settings in {
    "RGATConv": {},
    "RGATConv bases": {"num_bases": 2, "edge_dim": EDGE, "heads": 2, "concat": False},
    "RGATConv blocks": {"num_blocks": 2, "mod": "scaled"},
    "RGATConv within": {"attention_mechanism": "within-relation", "mod": "additive"},
    "RGATConv product": {
        "attention_mode": "multiplicative-self-attention",
        "dim": 2,
        "mod": "f-scaled",
    },
}.items():
    takes = ("edge_type", "edge_attr")[: 1 + ("edge_dim" in settings)]
    layer(name, *takes, args=(NODE, 4, 3), **settings)
    make, *call = LAYERS[name]
    LAYERS[name] = lambda make=make: rgat(make()), *call
takes = ("node_kind", "edge_type", "edge_attr")
layer("HEATConv", *takes, args=(NODE, 5, 2, 3, 4, EDGE, 5), heads=2)

# relations
for aggr in ("mean", "sum", "max"):
    layer(f"RGCNConv {aggr}", "edge_type", args=(NODE, 5, 3), aggr=aggr)
for name in ("RGCNConv", "FastRGCNConv"):
    layer(f"{name} bases", "edge_type", args=(NODE, 5, 3), num_bases=2)
    layer(f"{name} blocks", "edge_type", args=(NODE, 6, 3), num_blocks=2)
    layer(f"{name} pair", "edge_type", pair=True, args=((NODE, 2), 5, 3))
layer("FastRGCNConv", "edge_type", args=(NODE, 5, 3), aggr="add")
at_numbers = called_with("number", "edge_index", "edge_type")
layer("RGCNConv numbers of nodes", args=(24, 5, 3), call=at_numbers, by=())
layer(
    "SignedConv first",
    first_aggr=True,
    call=lambda m, g: m(g.x, g.edge_index[:, g.positive], g.edge_index[:, ~g.positive]),
)
layer(
    "SignedConv further",
    first_aggr=False,
    call=lambda m, g: m(
        g.stack * g.x.repeat(1, 2), g.edge_index[:, g.positive], g.edge_index[:, ~g.positive]
    ),
)

# positions
at_points = called_with("x", "pos", "edge_index")
layer("PointNetConv", "pos", args=lambda: (mlp(NODE + 2, 5), mlp(5, 3)), call=at_points)
layer(
    "PointNetConv without features",
    "pos",
    args=lambda: (mlp(2, 5),),
    aggr="mean",
    call=lambda m, g: m(None, g.pos * g.x[:, :2], g.edge_index),
)
for name, args in {
    "PointGNNConv": lambda: (mlp(NODE, 3), mlp(NODE + 3, 5), mlp(5, NODE)),
    "PointTransformerConv": lambda: (NODE, 5, None, mlp(5, 5)),
}.items():
    layer(name, "pos3", args=args, call=called_with("x", "pos3", "edge_index"))
at_surfaces = called_with("x", "pos3", "normal", "edge_index")
layer("PPFConv", args=lambda: (mlp(NODE + 4, 5),), call=at_surfaces)
for name, separate in {"GMMConv separate": True, "GMMConv shared": False}.items():
    layer(name, "pseudo", args=(NODE, 5, 2, 3), separate_gaussians=separate)

# several hops, and others
layer("GatedGraphConv", "edge_weight", args=(5, 3))
layer("WLConvContinuous", "edge_weight", args=())
for root in ("sum", "cat", "self_loop", None):
    layer(f"SimpleConv {root}", "edge_weight", args=("mean", root))
pna = NODE, 6, ["mean", "max", "std"], ["identity", "amplification"], HISTOGRAM
layer("PNAConv", args=pna)
layer(
    "PNAConv towers",
    "edge_attr",
    args=pna,
    towers=2,
    divide_input=True,
    edge_dim=EDGE,
    pre_layers=2,
)
for name in ("SAGEConv", "GCNConv", "GATConv"):
    layer(f"DirGNNConv of {name}", args=lambda name=name: (getattr(pyg, name)(NODE, 5),), alpha=0.3)
layer(
    "DirGNNConv of DirGNNConv",
    args=lambda: (pyg.DirGNNConv(pyg.GraphConv(NODE, 5), root_weight=False), 0.3, False),
)
layer("GPSConv", args=lambda: (NODE, pyg.GCNConv(NODE, NODE)), heads=2, norm=None)
layer("GPSConv attention alone", args=(NODE, None), norm=None, act="tanh")
layer(
    "GPSConv several graphs",
    args=lambda: (NODE, pyg.GINConv(mlp(NODE, NODE))),
    norm="layer",
    norm_kwargs={"mode": "node"},
    call=lambda m, g: m(g.x, g.edge_index, (g.number > 13).long()),
)

# called in other ways
layer(
    "HGTConv of one type",
    table=CALLS,
    args=(NODE, 6, (["a"], [("a", "to", "a")])),
    call=lambda m, g: m({"a": g.x}, {("a", "to", "a"): g.edge_index})["a"],
)
layer(
    "SAGEConv size",
    table=CALLS,
    call=lambda m, g: m((g.x, g.x), g.edge_index, size=(len(g.x), len(g.x))),
)
layer(
    "TransformerConv attention",
    table=CALLS,
    heads=2,
    edge_dim=EDGE,
    call=lambda m, g: m(g.x, g.edge_index, g.edge_attr, return_attention_weights=True)[0],
)
layer(
    "GATv2Conv attention with loops",
    table=CALLS,
    heads=2,
    call=lambda m, g: m(g.x, g.edge_index, return_attention_weights=True)[0],
)
layer("GraphConv the same targets", table=CALLS, call=lambda m, g: m((g.x, g.x), g.edge_index))
layer("GCNConv against the edges", "weight", table=CALLS, flow="target_to_source")
layer("SAGEConv against the edges, maxima", table=CALLS, aggr="max", flow="target_to_source")
layer(
    "GCNConv cached",
    table=CALLS,
    cached=True,
    call=lambda m, g: m(g.x, g.edge_index) + m(g.x.sin(), g.edge_index),
)
layer("GMMConv lazy", "pseudo", table=CALLS, args=(-1, 5, 2, 3))
layer(
    "GINEConv some edges",
    table=CALLS,
    args=lambda: (mlp(NODE, 5),),
    edge_dim=EDGE,
    call=lambda m, g: m(g.x, g.edge_index[:, g.positive], g.edge_attr[g.positive]),
)

# from nodes of one type to nodes of another
between("SAGEConv")
between("MFConv", max_degree=3)
between("ResGatedGraphConv")
between("SAGEConv of sources", sources=True)
between("SAGEConv, lazy", args=((-1, -1), 5))
for sources in ("", " of sources"):
    between(f"GraphConv{sources}", "weight", sources=sources)
    between(f"GATConv{sources}", sources=sources, heads=2, add_self_loops=False)
    between(f"NNConv{sources}", "attr", sources=sources, args=lambda: ((4, 3), 5, mlp(2, 20)))
    between(f"GMMConv{sources}", "attr", sources=sources, args=((4, 3), 5, 2, 3))
between("GMMConv, lazy", "attr", args=((-1, -1), 5, 2, 3, True))


def with_attention(m, g):
    out, (edges, alpha) = m((g.x_a, g.x_b), g.edge_index, return_attention_weights=True)
    return out, torch.zeros(len(g.x_b), 2).double().index_add(0, edges[1], alpha)


between("GATConv, weights of attention", heads=2, add_self_loops=False, call=with_attention)
between("GATv2Conv", add_self_loops=False)
between("TransformerConv", "attr", heads=2, edge_dim=2)
between("GINConv of sources", sources=True, args=lambda: (mlp(4, 5),))
between("LEConv", "weight")
between("CGConv", "attr", args=((4, 3), 2))
between("GENConv", "attr", norm=None, edge_dim=2)
between("FiLMConv", "kind", num_relations=3)
between("RGCNConv", "kind", num_relations=3)
between("GeneralConv", "attr", in_edge_channels=2)
between("SimpleConv", args=("mean",), by=("x_a",))


def of_types(m, g):
    return m({"a": g.x_a, "b": g.x_b}, {("a", "to", "b"): g.edge_index})["b"]


def points(m, g):
    normals = [(g.normal_a, g.normal_b)] if isinstance(m, pyg.PPFConv) else []
    x_b = g.x_b if isinstance(m, pyg.PointTransformerConv) else None
    return m((g.x_a, x_b), (g.pos_a, g.pos_b), *normals, g.edge_index)


between("HGTConv, lazy", args=(-1, 6, (["a", "b"], [("a", "to", "b")]), 2), call=of_types)
POINTS = {
    "PointNetConv": lambda: (mlp(7, 5), mlp(5, 3)),
    "PointNetConv, tied maxima": lambda: (nn.Sequential(mlp(7, 5), nn.ReLU()),),
    "PointTransformerConv": ((4, 3), 5),
    "PPFConv": lambda: (mlp(8, 5),),
}
by = "x_a", "pos_a", "pos_b"
for name, args in POINTS.items():
    between(name, args=args, add_self_loops=False, call=points, by=by)
# PyG adds loops in numbers of either type, which mean nothing
for name, args in POINTS.items():
    between(f"{name} with loops", args=args, call=points, by=by)
for name in ("GATConv", "GATv2Conv"):
    between(f"{name} with loops")
between(
    "HeteroConv of a GATConv with loops",
    args=lambda: ({("a", "to", "b"): pyg.GATConv((4, 3), 5)},),
    call=of_types,
)
