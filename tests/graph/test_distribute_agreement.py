"""``distribute`` is collective: the same model on every rank, or the same error."""

import re

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

from tests.graph.graphs import wild
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import distribute, partition


def seeded(seed, make):
    torch.manual_seed(seed)
    return make()


def sage(**settings):
    return pyg.SAGEConv(4, 4, **settings)


def with_buffer(value):
    model = sage()
    model.register_buffer("scale", torch.tensor(value), persistent=False)
    return model


def frozen():
    model = sage()
    model.lin_r.weight.requires_grad_(False)
    return model


LIN_L, LIN_R = "lin_l.weight, lin_l.bias", "lin_r.weight"

# the model of rank 1, that of the others, and where they differ
DIFFERENT = {
    "values": (lambda: seeded(1, sage), lambda: seeded(0, sage), f"{LIN_L}, {LIN_R}"),
    "shapes": (
        lambda: pyg.SAGEConv(4, 5),
        lambda: pyg.SAGEConv(4, 4),
        f"{LIN_L}, {LIN_R} and 3 more",  # layers that were told of them
    ),
    "dtypes": (lambda: sage().double(), sage, f"{LIN_L}, {LIN_R}"),
    "names": (lambda: sage(root_weight=False), sage, f"{LIN_L}, {LIN_R} and 2 more"),
    "buffers": (lambda: with_buffer(1.0), lambda: with_buffer(2.0), "scale"),
    "aggregation": (lambda: sage(aggr="max"), sage, "the model (SAGEConv)"),
    "an option": (lambda: sage(normalize=True), sage, "the model (SAGEConv)"),
    "a layer of torch": (
        lambda: nn.Sequential(sage(), nn.Dropout(0.5)),
        lambda: nn.Sequential(sage(), nn.Dropout(0.1)),
        "1 (Dropout)",
    ),
    "what is trained": (frozen, sage, LIN_R),
    "many": (
        lambda: seeded(1, lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])),
        lambda: seeded(0, lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])),
        "0.weight, 0.bias, 1.weight and 3 more",
    ),
}


def message_of(rank, name):
    torch.manual_seed(0)
    mine, others, _ = DIFFERENT[name]
    model = (mine if rank == 1 else others)()
    with pytest.raises(DisagreementError) as caught:
        distribute(model, partition(wild(), method="block"))
    return str(caught.value), "propagate" in vars(model)


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_with_different_models(worlds, name):
    told = (
        "graph.distribute: ranks [1] have other parameters or buffers than rank 0, or layers with "
        f"other settings; they differ in {DIFFERENT[name][2]}. Make the same model on all; seed "
        "the ranks alike before, or broadcast what one rank has."
    )
    assert worlds.run(3, message_of, name) == [(told, False)] * 3


def one_refused(rank, culprit):
    model = pyg.SAGEConv(4, 4) if rank != culprit else pyg.WLConv()
    with pytest.raises(ArgumentError) as caught:
        distribute(model, partition(wild(), method="block"))
    return str(caught.value), "propagate" in vars(model)


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_model_refused_on_one_rank_is_refused_on_all(worlds, culprit):
    told = worlds.run(3, one_refused, culprit)
    start = f"graph.distribute: refused on rank {culprit} of 3: cannot distribute the model (WL"
    assert told[0][0].startswith(start)
    assert told == [(told[0][0], False)] * 3


def lazy(rank):
    """Only what there is can be compared; the rest is made in the first call, from equal seeds."""
    graph = partition(wild(), method="block")
    torch.manual_seed(0)
    model = distribute(pyg.SAGEConv(-1, 4).double(), graph)
    model(graph.x, graph.edge_index)
    assert distribute(model, graph) is model
    torch.manual_seed(rank)
    mixed = nn.ModuleList([pyg.SAGEConv(-1, 4), nn.Linear(2, 2)])
    with pytest.raises(DisagreementError, match=r"they differ in 1\.weight, 1\.bias\. Make"):
        distribute(mixed, graph)


def test_lazy_parameters(worlds):
    assert worlds.run(2, lazy) == [None] * 2


class Mine(pyg.SAGEConv):
    """A layer that knows its rank."""

    def __init__(self, rank):
        super().__init__(4, 4)
        self.rank = rank


def of_ones_own(rank):
    torch.manual_seed(0)
    model = Mine(rank).train(rank == 0)
    return distribute(model, partition(wild(), method="block")) is model


def test_what_modules_of_ones_own_hold_is_not_compared(worlds):
    assert worlds.run(2, of_ones_own) == [True, True]


def misused(rank):
    graph, model = partition(wild(), method="block"), pyg.SAGEConv(4, 4)
    wrong = {"NoneType": (None, None), "Data": (model, wild()), "SAGEConv": (graph, model)}
    for kind, arguments in wrong.items():
        message = f"must be a PartitionedGraph, as graph.partition gives; got {kind}. The order is"
        with pytest.raises(ArgumentError, match=re.escape(message)):
            distribute(*arguments)
    with pytest.raises(ArgumentError, match=r"model must be a torch\.nn\.Module; got list"):
        distribute([model], graph)


def test_something_else_in_place_of_a_model_or_a_graph(worlds):
    assert worlds.run(2, misused) == [None] * 2
