"""Tables of models on a part of a graph: exact, or refused for a reason that is true of them."""

from functools import partial
from itertools import product

import torch
import torch_geometric.nn as pyg
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric import utils
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_remaining_self_loops, add_self_loops, degree, softmax

from tests.graph.layers import EDGE, NODE, mlp

# A user's own code


class DegreesThroughPropagate(MessagePassing):
    """GCN with self loops: what is needed of sources is handed to propagate."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin = nn.Linear(4, 4)

    def forward(self, x, edge_index):
        edge_index, _ = add_remaining_self_loops(edge_index, num_nodes=len(x))
        scale = degree(edge_index[1], len(x), x.dtype).rsqrt().view(-1, 1)
        return self.propagate(edge_index, x=self.lin(x), scale=scale)

    def message(self, x_j, scale_i, scale_j):
        return scale_i * scale_j * x_j


class PairsAsLists(MessagePassing):
    """PyG takes lists for pairs, and whatever else is read at edges as it is."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=[self.lin(x), x], power=3, nothing=None)

    def message(self, x_j, x_i, power, nothing_j):
        assert nothing_j is None
        return (x_j - x_i) ** power


class OwnGCN(pyg.GCNConv):
    """Calls what it is derived from."""

    def forward(self, x, edge_index, edge_weight=None):
        return super().forward(x.tanh(), edge_index, edge_weight).sin()


class OwnGCNTwice(OwnGCN):
    def forward(self, x, edge_index, edge_weight):
        edge_index, edge_weight = gcn_norm(edge_index, edge_weight, len(x), flow=self.flow)
        return super().forward(x, edge_index, edge_weight)


class NormalisedOnce(nn.Module):
    """Degrees are counted in the model, for all of its layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(pyg.GCNConv(4, 4, normalize=False) for _ in range(2))

    def forward(self, x, edge_index, weight):
        edge_index, weight = gcn_norm(edge_index, weight, num_nodes=x.size(0))
        for layer in self.layers:
            x = layer(x, edge_index, weight).tanh()
        return x


class MadeEdges(nn.Module):
    """A layer on edges and weights that a function makes of x, edges and weights."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.layer = pyg.GraphConv(4, 4)

    def forward(self, x, edge_index, weight):
        return self.layer(x, *self.function(x, edge_index, weight))


def laplacian(x, edges, weight, normalization, loops):
    nodes = len(x) if loops else None
    return utils.get_laplacian(edges, weight, normalization, x.dtype, nodes)


def looped(x, edges, weight, add, fill):
    """Self loops up to the last node that has an edge: the last node of all has none."""
    return add(edges, weight, fill)


class LoopedWithoutWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = pyg.SAGEConv(4, 4, aggr="sum")

    def forward(self, x, edge_index, weight):
        x = self.layer(x, add_self_loops(edge_index)[0]) * (1 + 0 * weight.sum())
        return self.layer(x, gcn_norm(edge_index, dtype=x.dtype)[0])


class LoopedByItself(pyg.SAGEConv):
    """Up to the last node with an edge; also where the edges are turned round."""

    def forward(self, x, edge_index):
        return super().forward(x, add_self_loops(edge_index)[0])


class BothWays(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = pyg.DirGNNConv(LoopedByItself(4, 4, aggr="sum"))

    def forward(self, x, edge_index, weight):
        return self.layer(x + 0 * weight.sum(), edge_index)


class EarlyReturn(MessagePassing):
    """Where there are no edges, its messages do not look at what came."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x, edge_index, weight):
        weight = self.edge_updater(edge_index, x=x, weight=weight)
        return self.propagate(edge_index, x=self.lin(x), weight=weight)

    def edge_update(self, x_j, weight):
        if len(x_j) == 0:
            return x_j[:, 0]
        return weight * x_j.sin().sum(1)

    def message(self, x_j, weight):
        if len(x_j) == 0:
            return x_j.new_zeros(0, 4)
        return x_j * weight.view(-1, 1)

    def update(self, inputs, x):
        return inputs if isinstance(x, tuple) else inputs + x


class IgnoresValues(MessagePassing):
    """Its message names tensors of two dtypes at the sources, and uses the values of one."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x, edge_index, weight):
        rows = self.lin(x)
        out = self.propagate(edge_index, x=rows, w=rows.to(torch.complex128), weight=weight)
        out += 1  # in place, as layers add their bias
        return out

    def message(self, x_j, w_j, weight):
        return x_j * weight.view(-1, 1)


class IgnoresTheFirst(IgnoresValues):
    def message(self, x_j, w_j, weight):
        return w_j.real * weight.view(-1, 1)


class IgnoresTheFirstInPairs(IgnoresTheFirst):
    def forward(self, x, edge_index, weight):
        rows = self.lin(x)
        out = self.propagate(edge_index, x=rows, w=rows.to(torch.complex128), weight=weight)
        return out[0] + out[1]

    def update(self, inputs):
        return inputs, 2 * inputs


class IgnoresAll(IgnoresValues):
    def message(self, x_j, weight):
        return torch.ones_like(x_j) * weight.view(-1, 1)


class PairInUpdate(MessagePassing):
    def forward(self, x, edge_index, weight):
        return self.propagate(edge_index, x=(x.sin(), x), weight=weight)

    def message(self, x_j, weight):
        return x_j * weight.view(-1, 1)

    def update(self, inputs, x):
        return inputs + 2 * x[0] + 3 * x[1]


class OwnAttention(MessagePassing):
    """Without annotations, which PyG does not need of what it provides itself."""

    def forward(self, x, edge_index, weight):
        return self.propagate(edge_index, x=x, weight=weight)

    def message(self, x_i, x_j, weight, index, ptr, size_i):
        return softmax((x_i * x_j).sum(1) * weight, index, ptr, size_i).view(-1, 1) * x_j


class OwnPropagate(MessagePassing):
    """For which PyG makes no template."""

    def propagate(self, edge_index, size=None, **values):
        return super().propagate(edge_index, size, **values).tanh()

    def forward(self, x, edge_index, weight):
        return self.propagate(edge_index, x=[x.sin(), x.cos()], weight=weight)

    def message(self, x_i, x_j, weight):
        return (x_i - 2 * x_j) * weight.view(-1, 1)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(
            [
                pyg.GCNConv(4, 4),
                pyg.TransformerConv(4, 4),
                pyg.DirGNNConv(pyg.GATConv(4, 4)),
            ]
        )

    def forward(self, x, edge_index, weight):
        for layer in self.layers:
            more = (weight,) if isinstance(layer, pyg.GCNConv) else ()
            x = checkpoint(layer, x, edge_index, *more, use_reentrant=self.reentrant).tanh()
        return x


class Deep(nn.Module):
    """Checkpointing of PyG's own, and of half of a model at once."""

    def __init__(self):
        super().__init__()
        self.layer = pyg.DeepGCNLayer(
            pyg.GCNConv(4, 4), nn.LayerNorm(4), nn.Tanh(), block="dense", ckpt_grad=True
        )
        self.rest = pyg.GCN(8, 6, 2, 3, act="tanh", jk="lstm")

    def forward(self, x, edge_index, weight):
        x = self.layer(x, edge_index, weight)
        return checkpoint(self.rest, x, edge_index, weight, use_reentrant=False)


MODELS = {
    "GraphSAGE": lambda: pyg.GraphSAGE(4, 6, 3, 2, jk="lstm", norm=pyg.LayerNorm(6, mode="node")),
    "GAT": lambda: pyg.GAT(4, 6, 2, 2, heads=2, jk="max", dropout=0.0),
    "DeepGCNLayer": lambda: pyg.DeepGCNLayer(pyg.SAGEConv(4, 4), nn.LayerNorm(4), nn.Tanh()),
    "a degree of sources": DegreesThroughPropagate,
    "pairs as lists": PairsAsLists,
    "GCN": lambda: pyg.GCN(4, 6, 3, 2, jk="cat", norm=pyg.LayerNorm(6, mode="node")),
}


# these take weights of edges as well
OWN_CODE = {
    "an own GCN": lambda: OwnGCN(4, 5, improved=True),
    "an own GCN, normalised twice": lambda: OwnGCNTwice(4, 5),
    "normalised in the model": NormalisedOnce,
    "self loops without weights": LoopedWithoutWeights,
    "self loops both ways": BothWays,
    "early return": EarlyReturn,
    "a pair in an update": PairInUpdate,
    "own attention": OwnAttention,
    "own propagate": OwnPropagate,
    "checkpointed": lambda: Checkpointed(reentrant=False),
    "checkpointed, reentrant": lambda: Checkpointed(reentrant=True),
    "PyG's checkpointing": Deep,
    "ignores values": IgnoresValues,
    "ignores values of the first": IgnoresTheFirst,
    "ignores values of the first, in pairs": IgnoresTheFirstInPairs,
    "ignores all values": IgnoresAll,
}
for normalization, loops in product((None, "sym", "rw"), (True, False)):
    if loops or normalization != "rw":  # which needs num_nodes
        function = partial(laplacian, normalization=normalization, loops=loops)
        name = f"Laplacian {normalization}, {'all' if loops else 'some'} loops"
        OWN_CODE[name] = partial(MadeEdges, function)
for add, fill in product((add_self_loops, add_remaining_self_loops), (None, 0.5, "mean")):
    function = partial(looped, add=add, fill=fill)
    OWN_CODE[f"{add.__name__} filled by {fill}"] = partial(MadeEdges, function)


# PyG's own models


class Parts(nn.Module):
    """Modules by their names."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.log = pyg.GCNConv(NODE, 5), pyg.GCNConv(NODE, 5)

    def forward(self, x, edge_index):
        return self.mean(x, edge_index), self.log(x, edge_index)


class Lengths(nn.Module):
    """The edges of a SchNet, which has no neighbours to look for."""

    edges = None

    def forward(self, pos, batch):
        return self.edges, (pos[self.edges[0]] - pos[self.edges[1]] + 0.1).norm(dim=-1)


def schnet():
    return pyg.SchNet(8, 8, 2, 10, cutoff=5.0, interaction_graph=Lengths())


def run_schnet(model, g):
    model.interaction_graph.edges = g.edge_index
    return model(g.atom, g.pos3, g.batch)


def gcn():
    return pyg.GCNConv(NODE, NODE)


def edges_of(model, g):
    return model(g.x, g.edge_index)


def of_graphs(model, g):
    return model(g.x, g.edge_index, g.batch)


def smoothed(model, g):
    known = g.label[g.train_mask]
    soft = model.correct(g.x.softmax(-1), known, g.train_mask, g.edge_index)
    return model.smooth(soft, known, g.train_mask, g.edge_index)


def head():
    return nn.Sequential(nn.Linear(NODE, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


EXACT = {
    "SchNet": (schnet, run_schnet, "pos3"),
    "GAE": (lambda: pyg.GAE(gcn()), lambda m, g: m.encode(g.x, g.edge_index)),
    "GAE, decoded": (
        lambda: pyg.GAE(gcn()),
        lambda m, g: m.decode(m.encode(g.x, g.edge_index), g.edge_index),
    ),
    "VGAE": (lambda: pyg.VGAE(Encoder()).eval(), lambda m, g: m.encode(g.x, g.edge_index)),
    "SignedGCN": (
        lambda: pyg.SignedGCN(NODE, 6, 2),
        lambda m, g: m(g.x, g.edge_index[:, g.positive], g.edge_index[:, ~g.positive]),
    ),
    "NeuralFingerprint": (lambda: pyg.models.NeuralFingerprint(NODE, 5, 3, 2), of_graphs),
    "PMLP": (lambda: pyg.models.PMLP(NODE, 5, 3, 2).eval(), edges_of),
    "PMLP, trained": (lambda: pyg.models.PMLP(NODE, 5, 3, 2), lambda m, g: m(g.x)),
    "LabelPropagation": (
        lambda: Parts(part=pyg.LabelPropagation(3, 0.5)),
        lambda m, g: (m.part(g.label, g.edge_index, g.train_mask), m.part(g.x, g.edge_index)),
    ),
    "CorrectAndSmooth": (
        lambda: pyg.CorrectAndSmooth(2, 0.5, 2, 0.6, autoscale=False),
        smoothed,
    ),
    "MaskLabel": (lambda: pyg.MaskLabel(4, NODE), lambda m, g: m(g.x, g.label, g.train_mask)),
    "GroupAddRev": (
        lambda: pyg.GroupAddRev(pyg.GCNConv(2, 2), num_groups=2),
        lambda m, g: m(g.x * 1, g.edge_index),
    ),
    "RECT_L": (lambda: pyg.RECT_L(NODE, 5), lambda m, g: m(g.x, g.edge_index, g.weight)),
    "MetaLayer": (
        lambda: pyg.MetaLayer(EdgeModel(), NodeModel()),
        lambda m, g: m(g.x, g.edge_index, g.edge_attr)[0],
    ),
    "a norm behind a pool": (
        lambda: Parts(conv=gcn(), head=head()),
        lambda m, g: m.head(pyg.global_mean_pool(m.conv(g.x, g.edge_index), g.batch)),
    ),
    "norms over edges with loops": (
        lambda: pyg.PointNetConv(pyg.MLP([NODE + 2, 6, 5], norm="batch_norm"), pyg.MLP([5, 4, 3])),
        lambda m, g: m(g.x, g.pos, g.edge_index),
    ),
    "norms in attention over edges": (
        lambda: pyg.PointTransformerConv(NODE, 5, pyg.MLP([3, 6, 5]), pyg.MLP([5, 6, 5])),
        lambda m, g: m(g.x, g.pos3, g.edge_index),
    ),
    "norms of features of point pairs": (
        lambda: pyg.PPFConv(pyg.MLP([NODE + 4, 6, 5]), pyg.MLP([5, 4, 3])),
        lambda m, g: m(g.x, g.pos3, g.normal, g.edge_index),
    ),
    "norms over some edges": (
        lambda: pyg.EdgeConv(pyg.MLP([2 * NODE, 6, 5], norm="batch_norm")),
        lambda m, g: m(g.x, g.edge_index[:, g.weight > 0.5]),
    ),
    "mean by torch": (
        None,
        lambda m, g: torch.zeros_like(g.x).scatter_reduce(
            0, g.edge_index[1].view(-1, 1).expand(-1, NODE), g.x[g.edge_index[0]], "mean"
        ),
    ),
    "mean of graphs by torch": (
        None,
        lambda m, g: g.x.new_zeros(3, NODE).index_reduce(
            0, g.batch, g.x, "mean", include_self=False
        ),
    ),
    "rows of a table": (lambda: nn.Embedding(3, NODE), lambda m, g: g.x * m(g.batch)),
}


class EdgeModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(2 * NODE + EDGE, EDGE)

    def forward(self, source, target, edge_attr, u, batch):
        return self.net(torch.cat([source, target, edge_attr], dim=1))


class NodeModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(NODE + EDGE, 5)

    def forward(self, x, edge_index, edge_attr, u, batch):
        into = x.new_zeros(len(x), EDGE).index_add(0, edge_index[1], edge_attr)
        return self.net(torch.cat([x, into], dim=1))


def recon(model, g):
    return model.recon_loss(model.encode(g.x, g.edge_index), g.edge_index, g.edge_index)


REFUSED = {
    "AttentiveFP": (
        lambda: pyg.AttentiveFP(NODE, 6, 2, EDGE, 2, 2),
        lambda m, g: m(g.x, g.edge_index, g.edge_attr, g.batch),
    ),
    "DeepGraphInfomax": (
        lambda: pyg.DeepGraphInfomax(
            NODE, gcn(), lambda z, *_: z.mean(0), lambda x, e: (x.flip(0), e)
        ),
        edges_of,
    ),
    "GAE, loss": (lambda: pyg.GAE(gcn()), recon),
    "VGAE, loss": (
        lambda: pyg.VGAE(Encoder()).eval(),
        lambda m, g: (m.encode(g.x, g.edge_index), m.kl_loss()),
    ),
    "LightGCN": (lambda: pyg.LightGCN(24, 6, 2), lambda m, g: m.get_embedding(g.edge_index)),
    "CorrectAndSmooth, scaled": (lambda: pyg.CorrectAndSmooth(2, 0.5, 2, 0.6), smoothed),
    "GraphUNet": (lambda: pyg.GraphUNet(NODE, 6, 3, 2), edges_of),
    "LINKX": (lambda: pyg.LINKX(24, NODE, 6, 3, 2), edges_of),
}


def networks():
    """Return how to make each model, how to call it, and what is differentiated by."""
    plain = {name: (make, lambda m, g: m(g.x, g.edge_index)) for name, make in MODELS.items()}
    return plain | {
        name: (make, lambda m, g: m(g.x, g.edge_index, g.weight), "x", "weight")
        for name, make in OWN_CODE.items()
    }


def of_pyg():
    return EXACT | REFUSED
