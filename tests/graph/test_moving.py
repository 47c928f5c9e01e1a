"""A distributed model that is moved to another graph: what stays where it is, and what is kept."""

import copy

import torch
from torch_geometric import nn as pyg

from tests.graph.graphs import wild
from varcomm.graph import distribute, partition
from varcomm.graph.adapt.rebind import Rebinding
from varcomm.ops.extent import counts_in, extent_of

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def moved(rank):
    data, other = wild(), wild(31)
    torch.manual_seed(0)
    model = pyg.Sequential(
        "x, e", [(pyg.GCNConv(4, 4), "x, e -> x"), (pyg.GCNConv(4, 4), "x, e -> x")]
    ).double()
    alone = copy.deepcopy(model)
    here, there = partition(data, method="random"), partition(other, method="block")

    def is_right(model, graph, whole):
        want = alone(whole.x, whole.edge_index)[graph.owned_ids]
        torch.testing.assert_close(model(graph.x, graph.edge_index), want, **CLOSE)

    distribute(model, here)
    kind, place = type(model[0]), model[0].propagate.place
    distribute(model, there)
    assert type(model[0]) is kind
    assert model[0].propagate.place is place
    is_right(model, there, other)
    # a copy stays where it is
    twin = copy.deepcopy(model)
    distribute(model, here)
    is_right(model, here, data)
    is_right(twin, there, other)
    assert twin[0].propagate.place is not model[0].propagate.place
    # and so do other parts of a model
    before = model[1].propagate.place
    distribute(model[0], there)
    assert model[1].propagate.place is before
    assert before.graph is here
    distribute(model, there)
    is_right(model, there, other)


def test_copies_and_other_parts_stay(worlds):
    assert worlds.run(2, moved) == [None] * 2


def whole():
    return "whole"


def ours():
    return "ours"


def named():
    return "named"


class Named(torch.nn.Module):
    def forward(self):
        return whole(), named()


def test_names_that_mean_something_else_by_now(monkeypatch):
    rebind, module = Rebinding({whole: ours}), Named()
    rebind(module)
    assert module() == ("ours", "named")
    assert rebind.is_current()
    monkeypatch.setitem(globals(), "named", lambda: "another")
    assert not rebind.is_current()
    monkeypatch.undo()
    assert rebind.is_current()
    monkeypatch.setattr(Named, "forward", lambda self: whole())
    assert not rebind.is_current()


def test_extents_have_no_elements():
    extent = extent_of(0, 1, 10**12)
    assert counts_in(extent) == (0, 1, 10**12)
    assert extent.numel() == extent.untyped_storage().nbytes() == 0
