"""Halo exchanges and layers as cases like those of the primitives, beside one process."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn

import varcomm
from tests.graph.graphs import split_by, wild
from tests.ops.primitives import Case
from varcomm.graph import distribute, partition
from varcomm.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from varcomm.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy


class OnGraph(nn.Module):
    """A model with its graph, as a function of features."""

    def __init__(self, model, edge_index):
        super().__init__()
        self.model, self.edge_index = model, edge_index

    def forward(self, x):
        return self.model(x, self.edge_index)


def on_nodes(ranks, layer=None):
    """Return the case of a model of one layer; without a layer, that of the halo exchange."""
    data, ids = wild(10), [None] * ranks
    graph = partition(data, method=split_by("block", data.num_nodes, ranks))
    dist.all_gather_object(ids, (graph.owned_ids.tolist(), graph.halo_ids.tolist()))
    places = torch.argsort(torch.tensor([node for owned, _ in ids for node in owned]))
    shapes = tuple((len(owned), 4) for owned, _ in ids)
    if layer is None:

        def with_halo(xs):
            x = torch.cat(xs)[places]
            return [x[owned + halo] for owned, halo in ids]

        return Case(shapes, lambda group=None: graph.with_halo, with_halo)
    torch.manual_seed(3)
    parts = [(layer(), "x, edge_index -> x"), nn.Tanh(), nn.Linear(6, 2)]
    alone = pyg.Sequential("x, edge_index", parts).double()
    module = OnGraph(distribute(copy.deepcopy(alone), graph), graph.edge_index)

    def reference(xs):
        y = alone(torch.cat(xs)[places], data.edge_index)
        return [y[owned] for owned, _ in ids]

    return Case(shapes, lambda group=None: module, reference)


def linear(ranks, cls, **options):
    torch.manual_seed(3)
    alone = nn.Linear(4, 5).double()
    module = cls.from_linear(alone, **options)
    return Case(
        ((3, 4),) * ranks, lambda group=None: module, lambda xs: [*map(alone, xs)], losses="alike"
    )


def cross_entropy(ranks):
    sizes, classes = varcomm.ShardSizes.balanced(5, ranks), [4, 0, 2]

    def call(x):  # with a target made in the call: it is a fake tensor where x is
        return vocab_parallel_cross_entropy(x, torch.tensor(classes), sizes)

    def reference(xs):
        loss = F.cross_entropy(torch.cat(xs, -1), torch.tensor(classes), reduction="none")
        return [loss] * ranks

    shapes = tuple((3, size) for size in sizes)
    return Case(shapes, lambda group=None: call, reference, losses="one")


# by the columns of the page
LAYERS = {
    "halo exchange": {"with_halo": on_nodes},
    "distributed models": {
        "SAGEConv": lambda ranks: on_nodes(ranks, lambda: pyg.SAGEConv(4, 6)),
        "GATConv": lambda ranks: on_nodes(ranks, lambda: pyg.GATConv(4, 3, heads=2)),
    },
    "parallel linear layers": {
        "ColumnParallelLinear": lambda ranks: linear(
            ranks, ColumnParallelLinear, gather_output=True
        ),
        "RowParallelLinear": lambda ranks: linear(
            ranks, RowParallelLinear, input_is_parallel=False
        ),
    },
    "cross entropy": {"vocab_parallel_cross_entropy": cross_entropy},
}
