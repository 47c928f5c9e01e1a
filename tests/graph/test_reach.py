"""PyG's and torch's functions are exact on a partitioned graph's vectors, however reached."""

import pickle

import numpy
import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric import utils
from torch_geometric.nn import global_add_pool
from torch_geometric.nn.resolver import aggregation_resolver

from tests.graph.against_one import assert_verdicts, data_of
from tests.ops.comparing import Failures
from tests.worlds import WORLDS, on_ranks
from varcomm import ArgumentError
from varcomm.graph import partition

GRAPHS = 3


class Encoder(nn.Module):
    """Only this part of a model is distributed."""

    def __init__(self):
        super().__init__()
        self.conv = pyg.SAGEConv(4, 4)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index).tanh()


def in_place(x, batch):
    out = x.new_zeros(GRAPHS, x.shape[1])
    out.index_add_(0, batch, x)
    return out


def of_any_dimensions(x, batch):
    """PyG's pools of single numbers, and of a batch of two values on the same nodes."""
    pools = pyg.global_add_pool, pyg.global_mean_pool, pyg.global_max_pool
    given = x[:, 0], torch.stack([x, x.cos()])
    return tuple(f(rows, batch, n) for f in pools for rows in given for n in (None, GRAPHS + 1))


# each is a function of rows of nodes and the batch vector
READ = {
    "an aggregation": lambda x, batch: aggregation_resolver("mean")(x, batch),
    "several": lambda x, batch: aggregation_resolver(["sum", "min", "var"])(x, batch),
    "index_add_": in_place,
    "scatter_add": lambda x, batch: x.new_zeros(GRAPHS, 4).scatter_add(
        0, batch.view(-1, 1).expand_as(x), x
    ),
    "some nodes": lambda x, batch: global_add_pool(x[x[:, 0] > 0], batch[x[:, 0] > 0], GRAPHS),
    "a copy": lambda x, batch: global_add_pool(x, batch.clone().contiguous()),
    "values of graphs": lambda x, batch: global_add_pool(
        x * x.new_tensor([1.0, 2.0, 3.0, 4.0])[batch].view(-1, 1), batch
    ),
    "of any dimensions": of_any_dimensions,
    "counts": lambda x, batch: global_add_pool(x, batch) / batch.bincount().view(-1, 1),
}


def reads():
    """The encoder alone is distributed, and what reads out stands around it."""
    return {
        name: (Encoder, lambda m, g, read=read: read(m(g.x, g.edge_index), g.batch))
        for name, read in READ.items()
    }


@pytest.mark.parametrize("ranks", WORLDS)
def test_readouts_are_over_all_ranks(worlds, ranks):
    assert_verdicts(worlds, reads, dict.fromkeys(READ, "exact"), ranks=ranks)


def by_hand(x, edge_index):
    row, col = edge_index
    return torch.zeros_like(x).index_add(0, col, (x[row] - x[col]).sin())


def by_hand_with_halo(x, edge_index):
    row, col = edge_index
    rows = x if type(edge_index) is torch.Tensor else edge_index.of.with_halo(x)
    return torch.zeros_like(x).index_add(0, col, (rows.sin()[row] - x[col]).sin())


# each is a function of rows of nodes and edges
AT_NODES = {
    "by hand": by_hand,
    "both ends at once": lambda x, e: utils.scatter(
        x[e].prod(0), e[1], dim_size=len(x), reduce="mean"
    ),
    "the largest neighbour it leads to": lambda x, e: utils.scatter(
        x[e[1]], e[0], dim_size=len(x), reduce="max"
    ),
    "reversed": lambda x, e: by_hand(x, e.flip(0)),
    "stacked the other way": lambda x, e: by_hand(x, torch.stack([e[1], e[0]])),
    "normalised": lambda x, e: utils.scatter(
        x[e[0]] * gcn_weight(x, e).view(-1, 1), e[1], dim_size=len(x)
    ),
    "rows with a halo": lambda x, e: by_hand_with_halo(x, e),
    "by functions": lambda x, e: torch.scatter_add(
        torch.zeros_like(x),
        0,
        e[1].view(-1, 1).expand(-1, 4),
        torch.index_select(x, 0, e[0]).sin() - torch.index_select(input=x, dim=0, index=e[1]),
    ),
    "a start that stays": lambda x, e: at_sources(x, e, "amax") + at_sources(x, e, "amin"),
    "a start that goes": lambda x, e: (
        at_sources(x, e, "amax", include_self=False)
        + at_sources(x, e, "sum", include_self=False)
        + at_sources(x, e, "mean", include_self=False)
    ),
    "exchanged": lambda x, e: by_hand(x, e[[1, 0]]),
    "sorted": lambda x, e: by_hand(x, e[:, e[1].argsort()]),
}


def at_sources(x, edge_index, how, **options):
    """Reduce at the sources of edges, of which some nodes have none."""
    rows = edge_index[0].view(-1, 1).expand(-1, 4)
    return (x - 1).scatter_reduce(0, rows, x[edge_index[1]].sin(), how, **options)


def gcn_weight(x, edge_index):
    degree = utils.degree(edge_index[1], len(x), dtype=x.dtype).clamp(min=1).rsqrt()
    return degree[edge_index[0]] * degree[edge_index[1]]


def sums():
    return {n: (None, lambda m, g, f=f: f(g.x, g.edge_index)) for n, f in AT_NODES.items()}


@pytest.mark.parametrize("ranks", WORLDS)
def test_code_by_hand_reads_other_ranks_nodes(worlds, ranks):
    assert_verdicts(worlds, sums, dict.fromkeys(AT_NODES, "exact"), ranks=ranks)


# each has no meaning on a part of a graph
REFUSED = {
    "an array": lambda g: numpy.asarray(g.edge_index),
    "numpy": lambda g: g.edge_index.numpy(),
    "a list": lambda g: g.batch.tolist(),
    "a pickle": lambda g: pickle.dumps(g.edge_index),
    "offsets in place": lambda g: g.edge_index[0].__iadd__(1),
    "half of the edges": lambda g: g.edge_index[:, g.edge_index[0] < g.edge_index[1]],
    "computed ids": lambda g: g.x[g.edge_index[0] * 1],
    "floats": lambda g: g.edge_index.float(),
    "other edges": lambda g: torch.cat([g.edge_index, torch.tensor([[0], [1]])], dim=1),
    "ids in place": lambda g: g.edge_index[0].clamp_(max=1),
    "a mask of ids": lambda g: g.edge_index[:, g.edge_index[0] < 5],
    "a list of vectors": lambda g: g.x.index_add(0, torch.hstack([g.batch, g.batch]), g.x[[0, 0]]),
    "a start that stays, of groups": lambda g: (g.x[:3] + 9).scatter_reduce(
        0, g.batch.view(-1, 1).expand(-1, 4), g.x, "amax"
    ),
    "a table of all nodes": lambda g: torch.arange(24.0)[g.edge_index[1]],
    "a number of all nodes": lambda g: utils.degree(g.edge_index[1], 24),
    "products against the edges": lambda g: utils.scatter(
        g.x[g.edge_index[1]], g.edge_index[0], dim_size=len(g.x), reduce="mul"
    ),
}


@on_ranks(3)
def test_local_numbers_are_refused(rank):
    failures, graph = Failures(), partition(data_of(), method="random")
    for name, call in REFUSED.items():
        with failures.named(name), pytest.raises(ArgumentError):
            call(graph)
    assert repr(graph.edge_index) == repr(graph.edges.local_ids)
    return failures
