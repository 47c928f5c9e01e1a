"""``distribute`` is collective: the same model on every rank, or the same error."""

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

from tests.graph.graphs import wild
from varcomm import DisagreementError
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


def linears():
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])


LIN_L, LIN_R = "lin_l.weight, lin_l.bias", "lin_r.weight"

# the model of rank 1, that of the others, and the names in which they differ
DIFFERENT = {
    "values": (lambda: seeded(1, sage), lambda: seeded(0, sage), f"{LIN_L}, {LIN_R}"),
    "shapes": (lambda: pyg.SAGEConv(4, 5), sage, f"{LIN_L}, {LIN_R} and 3 more"),
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
    "requires_grad": (frozen, sage, LIN_R),
    "many": (lambda: seeded(1, linears), lambda: seeded(0, linears), "0.bias, 1.weight and 3 more"),
}


def messages(rank):
    told, graph = {}, partition(wild(), method="block")
    for name, (mine, others, _) in DIFFERENT.items():
        torch.manual_seed(0)
        with pytest.raises(DisagreementError) as caught:
            distribute((mine if rank == 1 else others)(), graph)
        told[name] = str(caught.value)
    return told


def test_ranks_with_different_models(worlds):
    told, *others = worlds.run(3, messages)
    assert others == [told] * 2
    for name, message in told.items():
        assert message.startswith("graph.distribute: ranks [1] have other parameters")
        assert f"{DIFFERENT[name][2]}. Make the same model" in message


class Mine(pyg.SAGEConv):
    """A layer with an attribute of its rank, which is not compared."""

    def __init__(self, rank):
        super().__init__(4, 4)
        self.rank = rank


def lazy_and_own(rank):
    """Lazy parameters are made in the first call, from equal seeds."""
    graph = partition(wild(), method="block")
    torch.manual_seed(0)
    model = distribute(pyg.SAGEConv(-1, 4).double(), graph)
    model(graph.x, graph.edge_index)
    assert distribute(model, graph) is model
    distribute(Mine(rank).train(rank == 0), graph)
    torch.manual_seed(rank)
    mixed = nn.ModuleList([pyg.SAGEConv(-1, 4), nn.Linear(2, 2)])
    with pytest.raises(DisagreementError, match=r"they differ in 1\.weight, 1\.bias\. Make"):
        distribute(mixed, graph)


def test_lazy_parameters_and_own_attributes(worlds):
    assert worlds.run(3, lazy_and_own) == [None] * 3
