"""PyG's own models on ranks: exact, or refused on all ranks for a reason that is true of them."""

import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks

import varcomm
from tests.graph.against_one import assert_verdicts, data_of, graph_of, verdict
from tests.graph.layers import EDGE, NODE, mlp
from tests.worlds import on_ranks
from varcomm import ArgumentError
from varcomm.graph import distribute


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
    "rows of a table": (lambda: nn.Embedding(3, NODE), lambda m, g: g.x * m(g.batch)),
    "LightGCN": (lambda: pyg.LightGCN(24, 6, 2), lambda m, g: m.get_embedding(g.edge_index)),
    "CorrectAndSmooth, scaled": (lambda: pyg.CorrectAndSmooth(2, 0.5, 2, 0.6), smoothed),
    "GraphUNet": (lambda: pyg.GraphUNet(NODE, 6, 3, 2), edges_of),
    "LINKX": (lambda: pyg.LINKX(24, NODE, 6, 3, 2), edges_of),
}


def cases():
    return EXACT | REFUSED


def test_models_are_exact_or_refused(worlds):
    expected = dict.fromkeys(EXACT, "exact") | dict.fromkeys(REFUSED, "refused")
    assert_verdicts(worlds, cases, expected)


COPIED = ["SchNet", "PMLP", "NeuralFingerprint", "SignedGCN", "MaskLabel", "RECT_L"]
COPIED_AND_REFUSED = ["AttentiveFP", "LightGCN", "GraphUNet", "LINKX"]


def copied(rank, paths):
    """Return the verdicts of copies of PyG's files, whose classes stand in place of PyG's."""
    data, found = data_of(), {}
    graph = graph_of(data)
    for name, path in paths.items():
        spec = importlib.util.spec_from_file_location(f"own_{name.lower()}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where PyG looks for types
        spec.loader.exec_module(module)
        make, call, *by = (EXACT | REFUSED)[name]
        place = pyg if hasattr(pyg, name) else pyg.models
        pygs = getattr(place, name)
        setattr(place, name, getattr(module, name))
        try:
            found[name] = verdict(make, call, data, graph, by=by or ("x",))
        finally:
            setattr(place, name, pygs)
    return found


def test_copies_of_classes_get_the_same_answer(worlds, tmp_path):
    paths = {}
    for name in COPIED + COPIED_AND_REFUSED:
        kind = getattr(pyg, name, None) or getattr(pyg.models, name)
        paths[name] = tmp_path / f"own_{name.lower()}.py"
        paths[name].write_text(Path(inspect.getfile(kind)).read_text())
    expected = dict.fromkeys(COPIED, "exact") | dict.fromkeys(COPIED_AND_REFUSED, "refused")
    assert worlds.run(3, copied, paths)[0] == expected


class Changing(Parts):
    def forward(self, x, edge_index):
        return self.head(self.conv(x, edge_index))


@on_ranks(3)
def test_a_model_that_changes_after_distribute(rank):
    """Explained, and with a part put in: refused on all ranks, and right again afterwards."""
    data = data_of()
    graph = graph_of(data)
    torch.manual_seed(0)
    model = Changing(conv=gcn(), head=nn.Identity()).double()
    expected = model(data.x, data.edge_index)[graph.owned_ids]
    model = distribute(model, graph)
    set_masks(model, torch.ones(graph.edge_index.shape[1]).double(), graph.edge_index)
    with pytest.raises(ArgumentError, match="is being explained"):
        model(graph.x, graph.edge_index)
    clear_masks(model)
    torch.testing.assert_close(model(graph.x, graph.edge_index), expected)
    for part in (pyg.BatchNorm(NODE), gcn(), pyg.MeanAggregation(), nn.MultiheadAttention(4, 1)):
        model.head = part.double()
        with pytest.raises(ArgumentError, match=r"head \(.*put into the model after distribute"):
            model(graph.x, graph.edge_index)
    model.head = nn.Identity()
    for norm in (pyg.BatchNorm(NODE), pyg.PairNorm(), pyg.LayerNorm(NODE, mode="graph")):
        for model.norms in ([norm], {"last": [nn.Sequential(norm)]}):
            with pytest.raises(ArgumentError, match="norms in a list"):
                distribute(model, graph)(graph.x, graph.edge_index)
    model.norms = [mean := pyg.MeanAggregation()]
    distribute(model, graph)(graph.x, graph.edge_index)
    pooled = pyg.MeanAggregation()(data.x, data.batch)
    torch.testing.assert_close(mean(graph.x, graph.batch), pooled)
    with pytest.raises(ArgumentError, match="this rank's rows alone"):
        mean(graph.x)
    model.norms, model.head = None, pyg.BatchNorm(NODE).double()
    out = distribute(model, graph)(graph.x, graph.edge_index)
    assert varcomm.all_reduce(out.sum(0)).abs().max() < 1e-10
