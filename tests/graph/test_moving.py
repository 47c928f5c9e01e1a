"""A distributed model that moves to another graph, its copies and its parts."""

import copy

import torch
from torch_geometric import nn as pyg

from tests.graph.graphs import wild
from varcomm.graph import distribute, partition

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def moved(rank):
    data, other = wild(), wild(31)
    torch.manual_seed(0)
    model = pyg.Sequential(
        "x, e", [(pyg.GCNConv(4, 4), "x, e -> x"), (pyg.GCNConv(4, 4), "x, e -> x")]
    ).double()
    alone = copy.deepcopy(model)
    here, there = partition(data, method="random"), partition(other, method="block")

    def is_right(model, alone, graph, whole):
        want = alone(whole.x, whole.edge_index)[graph.owned_ids]
        torch.testing.assert_close(model(graph.x, graph.edge_index), want, **CLOSE)

    distribute(model, here)
    kind = type(model[0])
    distribute(model, there)
    assert type(model[0]) is kind  # so that compiled code stays valid
    is_right(model, alone, there, other)
    # a copy stays where it is, with parameters of its own
    twin = copy.deepcopy(model)
    distribute(model, here)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    is_right(twin, alone, there, other)
    model.load_state_dict(twin.state_dict())
    is_right(model, alone, here, data)
    # and so do other parts of a model
    distribute(model[0], there)
    is_right(model[0], alone[0], there, other)
    is_right(model[1], alone[1], here, data)
    distribute(model, there)
    is_right(model, alone, there, other)


def test_copies_and_other_parts_stay(worlds):
    assert worlds.run(3, moved) == [None] * 3
