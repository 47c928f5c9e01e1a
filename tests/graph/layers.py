"""Layers of PyG that are exact on a part of a graph, in several configurations each."""

from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Layer:
    """How to make a layer, and how to call it; `by` names what is differentiated by."""

    make: Callable[[], nn.Module]
    call: Callable[..., torch.Tensor]
    by: tuple[str, ...]


LAYERS = {}


def layer(name, make, *takes, pair=False, by=("x",)):
    """Add a layer that takes features, edges and then attributes of the graph."""

    def call(layer, graph, edge_index):
        # as a pair, targets have features of their own
        x = (graph.x, graph.x[:, :2].tanh()) if pair else graph.x
        return layer(x, edge_index, *(getattr(graph, key) for key in takes))

    by += tuple(key for key in takes if key in ("weight", "edge_weight", "edge_attr"))
    LAYERS[name] = Layer(make, call, by)


def other(name, make, call, *by):
    """Add a layer that is called in another way."""
    LAYERS[name] = Layer(make, call, ("x", *by))


def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs))


def scaled(scaler):
    return pyg.aggr.DegreeScalerAggregation("max", scaler, HISTOGRAM, train_norm=True)


for aggr in ("mean", "max", "min", "sum", "std", "var", "softmax", ["mean", "max", "std"]):
    layer(f"SAGEConv {aggr}", lambda aggr=aggr: pyg.SAGEConv(NODE, 5, aggr=aggr))
layer(
    "SAGEConv learned softmax",
    lambda: pyg.SAGEConv(NODE, 5, aggr=pyg.aggr.SoftmaxAggregation(learn=True)),
)
layer("SAGEConv normalised", lambda: pyg.SAGEConv(NODE, 5, normalize=True, project=True))
layer("SAGEConv without root", lambda: pyg.SAGEConv(NODE, 5, root_weight=False))
layer("SAGEConv pair", lambda: pyg.SAGEConv((NODE, 2), 5), pair=True)
other(
    "SAGEConv, several features for one graph",
    lambda: pyg.SAGEConv(NODE, 5),
    lambda layer, g, e: layer(torch.stack([g.x, g.x.sin(), -g.x]), e).transpose(0, 1).flatten(1),
)

for aggr in ("add", "mean", "max"):
    layer(f"GraphConv {aggr}", lambda aggr=aggr: pyg.GraphConv(NODE, 5, aggr=aggr), "edge_weight")
layer("GraphConv plain", lambda: pyg.GraphConv(NODE, 5))
layer("GraphConv pair", lambda: pyg.GraphConv((NODE, 2), 5), "edge_weight", pair=True)

for conv in (pyg.GATConv, pyg.GATv2Conv):
    # these add self loops by default: every owned node gets one, as it does on the whole graph
    name = conv.__name__
    layer(f"{name} heads", lambda conv=conv: conv(NODE, 5, heads=2))
    layer(
        f"{name} edges filled by mean",
        lambda conv=conv: conv(NODE, 5, heads=2, concat=False, edge_dim=EDGE),
        "edge_attr",
    )
    layer(
        f"{name} edges filled by max",
        lambda conv=conv: conv(NODE, 5, heads=3, edge_dim=EDGE, fill_value="max"),
        "edge_attr",
    )
    layer(
        f"{name} edges filled by a number",
        lambda conv=conv: conv(NODE, 5, edge_dim=EDGE, fill_value=0.5, residual=True),
        "edge_attr",
    )
    layer(
        f"{name} without self loops",
        lambda conv=conv: conv(NODE, 5, heads=2, add_self_loops=False, edge_dim=EDGE),
        "edge_attr",
    )
    layer(f"{name} pair", lambda conv=conv: conv((NODE, 2), 5, add_self_loops=False), pair=True)
    layer(f"{name} pair and self loops", lambda conv=conv: conv((NODE, 2), 5), pair=True)
layer("GATv2Conv shared", lambda: pyg.GATv2Conv(NODE, 5, heads=2, share_weights=True))

layer("TransformerConv heads", lambda: pyg.TransformerConv(NODE, 5, heads=2))
layer(
    "TransformerConv gated",
    lambda: pyg.TransformerConv(NODE, 5, heads=2, concat=False, beta=True, edge_dim=EDGE),
    "edge_attr",
)
layer("TransformerConv pair", lambda: pyg.TransformerConv((NODE, 2), 5), pair=True)

layer("GINConv", lambda: pyg.GINConv(mlp(NODE, 5), train_eps=True))
layer("GINEConv", lambda: pyg.GINEConv(mlp(NODE, 5), train_eps=True, edge_dim=EDGE), "edge_attr")

layer(
    "GENConv softmax",
    lambda: pyg.GENConv(NODE, 5, learn_t=True, norm=None, edge_dim=EDGE),
    "edge_attr",
)
layer(
    "GENConv powermean",
    lambda: pyg.GENConv(NODE, 5, aggr="powermean", p=2.0, learn_p=True, norm=None),
)
layer(
    "GENConv normed messages",
    lambda: pyg.GENConv(NODE, NODE, aggr="add", msg_norm=True, learn_msg_scale=True, norm=None),
)
layer("GENConv pair", lambda: pyg.GENConv((NODE, 2), 5, norm=None), pair=True)

for aggr in ("max", "mean", "add"):
    layer(f"EdgeConv {aggr}", lambda aggr=aggr: pyg.EdgeConv(mlp(2 * NODE, 5), aggr=aggr))

layer("CGConv", lambda: pyg.CGConv(NODE, dim=EDGE), "edge_attr")
layer("CGConv pair", lambda: pyg.CGConv((NODE, 2), aggr="mean"), pair=True)

layer("FiLMConv", lambda: pyg.FiLMConv(NODE, 5))
layer("FiLMConv relations", lambda: pyg.FiLMConv(NODE, 5, num_relations=3), "edge_type")
layer("FiLMConv pair", lambda: pyg.FiLMConv((NODE, 2), 5), pair=True)

layer("GeneralConv", lambda: pyg.GeneralConv(NODE, 5, in_edge_channels=EDGE), "edge_attr")
layer(
    "GeneralConv attention",
    lambda: pyg.GeneralConv(NODE, 5, heads=2, attention=True, l2_normalize=True),
)
layer(
    "GeneralConv dot product",
    lambda: pyg.GeneralConv(
        NODE, 5, heads=2, attention=True, attention_type="dot_product", directed_msg=False
    ),
)

layer("LEConv", lambda: pyg.LEConv(NODE, 5), "edge_weight")
layer("LEConv pair", lambda: pyg.LEConv((NODE, 2), 5), pair=True)

layer("MFConv", lambda: pyg.MFConv(NODE, 5, max_degree=3))
layer("MFConv pair", lambda: pyg.MFConv((NODE, 2), 5), pair=True)

layer("NNConv", lambda: pyg.NNConv(NODE, 5, mlp(EDGE, NODE * 5), aggr="mean"), "edge_attr")
layer("NNConv pair", lambda: pyg.NNConv((NODE, 2), 5, mlp(EDGE, 20)), "edge_attr", pair=True)

layer("ResGatedGraphConv", lambda: pyg.ResGatedGraphConv(NODE, 5))
layer(
    "ResGatedGraphConv edges",
    lambda: pyg.ResGatedGraphConv(NODE, 5, edge_dim=EDGE),
    "edge_attr",
)
layer("ResGatedGraphConv pair", lambda: pyg.ResGatedGraphConv((NODE, 2), 5), pair=True)

for aggr in ("mul", "powermean"):
    layer(f"GraphConv {aggr}", lambda aggr=aggr: pyg.GraphConv(NODE, 5, aggr=aggr))
for name, aggr in {
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
}.items():
    layer(f"GENConv {name}", lambda aggr=aggr: pyg.GENConv(NODE, NODE, aggr=aggr(), norm=None))
for scaler in ("identity", "amplification", "attenuation", "linear", "inverse_linear"):
    layer(
        f"GENConv {scaler}",
        lambda scaler=scaler: pyg.GENConv(NODE, NODE, scaled(scaler), norm=None),
    )
