"""Halo exchanges and layers as cases like those of the primitives, beside one process."""

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data

import varcomm
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


def edges_of(nodes):
    draws = torch.Generator().manual_seed(nodes)
    return torch.randint(max(nodes, 1), (2, 3 * nodes), generator=draws)


def partitioned(s, group=None):
    """Return a graph whose nodes are split as the rows are."""
    nodes, ranks = sum(s.sizes), torch.arange(s.ranks)
    data = Data(edge_index=edges_of(nodes), num_nodes=nodes)
    return partition(data, group=group, method=ranks.repeat_interleave(torch.tensor(s.sizes)))


def on_graph(s, layer):
    nodes = sum(s.sizes)

    def alone():
        torch.manual_seed(nodes)
        return layer().double()

    whole = alone()  # a transform refuses to make a module

    def bind(group=None):
        graph = partitioned(s, group)
        return OnGraph(distribute(alone(), graph), graph.edge_index)

    def reference(xs):
        return list(whole(torch.cat(xs), edges_of(nodes)).split(s.sizes))

    return Case(tuple((rows, 2) for rows in s.sizes), bind, reference, has_async=False)


def with_halo(s):
    src, dst = edges_of(sum(s.sizes))

    def reference(xs):
        whole, results = torch.cat(xs), []
        for owned in torch.arange(len(whole)).split(s.sizes):
            needed = src[torch.isin(dst, owned)].unique()
            results.append(whole[torch.cat([owned, needed[~torch.isin(needed, owned)]])])
        return results

    shapes = tuple((rows, 2) for rows in s.sizes)
    return Case(shapes, lambda group=None: partitioned(s, group).with_halo, reference)


def network(layer):
    parts = [(layer(), "x, edge_index -> x"), nn.Tanh(), nn.Linear(6, 2)]
    return pyg.Sequential("x, edge_index", parts)


def linear(s, cls, **options):
    torch.manual_seed(3)
    alone = nn.Linear(4, 5).double()
    module = cls.from_linear(alone, **options)
    return Case(
        ((3, 4),) * s.ranks, lambda group=None: module, lambda xs: [*map(alone, xs)], losses="alike"
    )


def cross_entropy(s):
    sizes, classes = varcomm.ShardSizes.balanced(5, s.ranks), [4, 0, 2]

    def call(x):  # with a target made in the call: it is a fake tensor where x is
        return vocab_parallel_cross_entropy(x, torch.tensor(classes), sizes)

    def reference(xs):
        loss = F.cross_entropy(torch.cat(xs, -1), torch.tensor(classes), reduction="none")
        return [loss] * s.ranks

    shapes = tuple((3, size) for size in sizes)
    return Case(shapes, lambda group=None: call, reference, losses="one")


# by the columns of the page
LAYERS = {
    "halo exchange": {"with_halo": with_halo},
    "distributed models": {
        "SAGEConv": lambda s: on_graph(s, lambda: network(lambda: pyg.SAGEConv(2, 6))),
        "GATConv": lambda s: on_graph(s, lambda: network(lambda: pyg.GATConv(2, 3, heads=2))),
    },
    "parallel linear layers": {
        "ColumnParallelLinear": lambda s: linear(s, ColumnParallelLinear, gather_output=True),
        "RowParallelLinear": lambda s: linear(s, RowParallelLinear, input_is_parallel=False),
    },
    "cross entropy": {"vocab_parallel_cross_entropy": cross_entropy},
}
