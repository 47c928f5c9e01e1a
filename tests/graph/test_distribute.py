"""Whole models on a partitioned graph: as in one process, through any number of derivatives."""

import copy
import io

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import add_remaining_self_loops, degree, softmax

import varcomm
from tests.graph.graphs import split_by, wild
from tests.ops.comparing import Failures, assert_none
from tests.worlds import WORLDS
from varcomm.graph import distribute, partition

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


class Jumping(nn.Module):
    """Layers of several kinds in a ModuleList, all of whose outputs are read."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [pyg.SAGEConv(4, 6, aggr="max"), pyg.GATConv(6, 3, heads=2), pyg.TransformerConv(6, 6)]
        )
        self.norms = nn.ModuleList(pyg.LayerNorm(6, mode="node") for _ in self.layers)
        self.jump = pyg.JumpingKnowledge("cat")
        self.read = nn.Linear(18, 2)

    def forward(self, x, edge_index):
        seen = []
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x, edge_index)).tanh()
            seen.append(x)
        return self.read(self.jump(seen))


class Attending(MessagePassing):
    """A layer of a user's own: weights of edges by edge_updater, two propagations, an update."""

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.key, self.query = nn.Linear(4, 5), nn.Linear(4, 5)
        self.value = nn.Linear(4, 5)

    def forward(self, x, edge_index):
        weight = self.edge_updater(edge_index, query=self.query(x), key=self.key(x))
        once = self.propagate(edge_index, value=self.value(x), weight=weight, kept=x)
        return self.propagate(edge_index, value=once.tanh(), weight=weight, kept=x)

    def edge_update(self, query_i, key_j, index, size_i):
        return softmax((query_i * key_j).sum(-1), index, num_nodes=size_i)

    def message(self, value_j, weight):
        return value_j * weight.view(-1, 1)

    def update(self, inputs, kept):
        return inputs + kept.sum(1, keepdim=True)


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


class Twice(nn.Module):
    """One layer used twice, and a residual around it."""

    def __init__(self):
        super().__init__()
        self.layer = pyg.GraphConv(4, 4)

    def forward(self, x, edge_index):
        return x + self.layer(self.layer(x, edge_index).tanh(), edge_index)


def sequential():
    return pyg.Sequential(
        "x, edge_index",
        [
            (pyg.SAGEConv(4, 6), "x, edge_index -> x"),
            nn.Tanh(),
            (nn.Dropout(0.0), "x -> x"),
            (pyg.GATv2Conv(6, 3, heads=2), "x, edge_index -> x"),
            nn.Linear(6, 2),
        ],
    )


MODELS = {
    "a model of layers": Jumping,
    "a layer of one's own": Attending,
    "a layer used twice": Twice,
    "Sequential": sequential,
    "GraphSAGE": lambda: pyg.GraphSAGE(4, 6, 3, 2, jk="lstm", norm=pyg.LayerNorm(6, mode="node")),
    "GAT": lambda: pyg.GAT(4, 6, 2, 2, heads=2, jk="max", dropout=0.0),
    "GIN": lambda: pyg.GIN(4, 6, 2, 2, act="tanh"),
    "DeepGCNLayer": lambda: pyg.DeepGCNLayer(pyg.SAGEConv(4, 4), nn.LayerNorm(4), nn.Tanh()),
    "a degree of sources": DegreesThroughPropagate,
    "pairs as lists": PairsAsLists,
    "EdgeCNN": lambda: pyg.EdgeCNN(4, 6, 2, 2),
    "GCN": lambda: pyg.GCN(4, 6, 3, 2, jk="cat", norm=pyg.LayerNorm(6, mode="node")),
    "PNA": lambda: pyg.PNA(
        4,
        6,
        2,
        2,
        aggregators=["mean", "max", "std"],
        scalers=["identity", "attenuation"],
        deg=torch.tensor([2, 1, 3, 5, 4, 3]),
    ),
}


def made(name):
    torch.manual_seed(0)
    return MODELS[name]().double()


def gradient(x):
    return torch.zeros_like(x) if x.grad is None else x.grad


def check_model(failures, name, model, data, graph, *takes):
    """Compare a model of nodes, edges and values `takes` of edges with one process."""
    alone, names = copy.deepcopy(model), ("x", *takes)
    whole = [data[key].clone().requires_grad_() for key in names]
    out = alone(whole[0], data.edge_index, *whole[1:])
    (out[data.train_mask] ** 2).mean().backward()
    together = distribute(copy.deepcopy(model), graph)
    own = [graph[key].clone().requires_grad_() for key in names]
    part = together(own[0], graph.edge_index, *own[1:])
    graph.mean(part**2, graph.train_mask).backward()
    varcomm.data_parallel.sum_gradients(together)
    pairs = {"output": (part, out[graph.owned_ids])}
    for key, mine, full in zip(names, own, whole, strict=True):
        ids = graph.owned_ids if key == "x" else graph.edges.owned_ids
        pairs[f"input {key}"] = gradient(mine), gradient(full)[ids]
    for key, parameter in alone.named_parameters():
        pairs[key] = gradient(together.get_parameter(key)), gradient(parameter)
    for key, (got, expected) in pairs.items():
        with failures.named(name, graph.method, key):
            torch.testing.assert_close(got, expected, **CLOSE)


def check_models(rank, methods):
    failures = Failures()
    for method in methods:
        graph = partition(wild(), method=method)
        for name in MODELS:
            check_model(failures, name, made(name), wild(), graph)
    return failures


@pytest.mark.parametrize("ranks", WORLDS)
def test_model_equals_its_single_process_twin(worlds, ranks):
    nothing = split_by("a rank owns nothing", wild().num_nodes, ranks)
    methods = ["metis"] if ranks == 1 else ["metis", nothing]
    assert_none(worlds.run(ranks, check_models, methods))


class Potential(MessagePassing):
    """Energies of nodes by what they see of their neighbours' positions."""

    def __init__(self):
        super().__init__(aggr="sum")
        self.pair = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
        self.own = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, pos, edge_index):
        received = self.propagate(edge_index, pos=pos)
        # once more, so that forces go through two exchanges
        return self.own(received) * self.propagate(edge_index, pos=received[:, :2]).sin()

    def message(self, pos_i, pos_j):
        step = pos_i - pos_j
        return self.pair(torch.cat([step, step.square().sum(1, keepdim=True)], dim=1))


def fit_forces(model, total, mean, pos, edge_index, target):
    """Forces are minus the gradient of the energy; the loss is differentiated through them."""
    energy = total(model(pos, edge_index))
    (forces,) = torch.autograd.grad(-energy, pos, create_graph=True)
    loss = mean((forces - target) ** 2)
    loss.backward()
    return loss.item(), forces.detach()


def check_forces(rank, methods):
    failures, data = Failures(), wild()
    torch.manual_seed(0)
    model = Potential().double()
    alone, pos = copy.deepcopy(model), data.pos.clone().requires_grad_()
    loss, forces = fit_forces(alone, torch.sum, torch.mean, pos, data.edge_index, data.y)
    for method in methods:
        graph = partition(data, method=method)
        together, own = distribute(copy.deepcopy(model), graph), graph.pos.requires_grad_()
        got = fit_forces(together, graph.sum, graph.mean, own, graph.edge_index, graph.y)
        varcomm.data_parallel.sum_gradients(together)
        ids = graph.owned_ids
        with failures.named(graph.method, "loss and forces"):
            assert got[0] == pytest.approx(loss, rel=1e-12)
            torch.testing.assert_close(got[1], forces[ids], **CLOSE)
        with failures.named(graph.method, "positions"):
            torch.testing.assert_close(own.grad, pos.grad[ids], **CLOSE)
        for key, parameter in alone.named_parameters():
            with failures.named(graph.method, key):
                got = together.get_parameter(key).grad
                torch.testing.assert_close(got, parameter.grad, **CLOSE)
    return failures


@pytest.mark.parametrize("ranks", WORLDS)
def test_forces_and_what_a_loss_of_forces_teaches(worlds, ranks):
    nothing = split_by("a rank owns nothing", wild().num_nodes, ranks)
    assert_none(worlds.run(ranks, check_forces, ["metis", nothing]))


def saved(rank):
    for name in ("a model of layers", "GCN"):
        model = made(name)
        before = list(model.state_dict())
        distribute(model, partition(wild(), method="block"))
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        assert list(state) == before
        made(name).load_state_dict(state)  # strict: the same keys as without varcomm
        assert all(torch.equal(state[key], value) for key, value in made(name).state_dict().items())


def test_the_state_of_a_model_is_as_without_ranks(worlds):
    assert worlds.run(3, saved) == [None] * 3
