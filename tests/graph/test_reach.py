"""PyG's and torch's functions are exact on a partitioned graph's vectors, however reached."""

import functools
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch_geometric
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric import utils
from torch_geometric.nn import global_add_pool
from torch_geometric.nn.resolver import aggregation_resolver

import varcomm
from tests.graph.graphs import split_by, wild
from tests.ops.comparing import Failures, assert_none
from tests.worlds import WORLDS
from varcomm import ArgumentError
from varcomm.graph import distribute, partition, replicated

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
GRAPHS = 4
CONFIG = SimpleNamespace(pool=global_add_pool, kinds=[pyg.global_mean_pool])


def data_of():
    data = wild()
    data.batch = (torch.arange(data.num_nodes) * 5) % GRAPHS
    return data


class Helper:
    def __init__(self):
        self.pool = functools.partial(pyg.global_max_pool)

    def __call__(self, x, batch):
        return self.pool(x, batch)


class Encoder(nn.Module):
    """Only this part of a model is distributed."""

    def __init__(self):
        super().__init__()
        self.conv = pyg.SAGEConv(4, 4)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index).tanh()


def attention(x, batch):
    return utils.softmax(x, batch) * x


def in_place(x, batch):
    out = x.new_zeros(GRAPHS, x.shape[1])
    out.index_add_(0, batch, x)
    return out


def by_name(name):
    return aggregation_resolver(name)


# each is a function of rows of nodes and the batch vector
READ = {
    "by name": global_add_pool,
    "a configuration": lambda x, batch: CONFIG.pool(x, batch),
    "a list": lambda x, batch: CONFIG.kinds[0](x, batch),
    "getattr": lambda x, batch: getattr(pyg, "global_" + "mean_pool")(x, batch),
    "a module": lambda x, batch: torch_geometric.nn.pool.global_add_pool(x, batch),
    "a helper": Helper(),
    "an import inside": lambda x, batch: __import__("torch_geometric").nn.global_max_pool(x, batch),
    "an aggregation": lambda x, batch: by_name("mean")(x, batch),
    "a median": lambda x, batch: by_name("std")(x, batch),
    "several": lambda x, batch: by_name(["sum", "min", "var"])(x, batch),
    "multiplied": lambda x, batch: by_name("mul")(x, batch),
    "Set2Set": lambda x, batch: made(pyg.Set2Set, 4, 2)(x, batch),
    "scatter": lambda x, batch: utils.scatter(x, batch, reduce="mean"),
    "scatter max": lambda x, batch: utils.scatter(x, batch, reduce="max"),
    "scatter of graphs": lambda x, batch: utils.scatter(x, batch, dim_size=GRAPHS),
    "softmax": lambda x, batch: global_add_pool(attention(x, batch), batch),
    "index_add_": in_place,
    "scatter_add": lambda x, batch: x.new_zeros(GRAPHS, 4).scatter_add(
        0, batch.view(-1, 1).expand_as(x), x
    ),
    "some nodes": lambda x, batch: global_add_pool(x[x[:, 0] > 0], batch[x[:, 0] > 0], GRAPHS),
    "a copy": lambda x, batch: global_add_pool(x, batch.clone().contiguous()),
    "values of graphs": lambda x, batch: global_add_pool(
        x * x.new_tensor([1.0, 2.0, 3.0, 4.0])[batch].view(-1, 1), batch
    ),
    "counts": lambda x, batch: global_add_pool(x, batch) / batch.bincount().view(-1, 1),
}


def made(kind, *args):
    torch.manual_seed(1)
    return kind(*args).double()


def check_reads(rank, ranks):
    failures, data = Failures(), data_of()
    graph = partition(data, method=split_by("a rank owns nothing", data.num_nodes, ranks))
    alone = made(Encoder)
    together = distribute(made(Encoder), graph)
    for name, read in READ.items():
        alone.zero_grad()
        together.zero_grad()
        expected = read(alone(data.x, data.edge_index), data.batch)
        expected.square().sum().backward()
        with failures.named(name):
            out = read(together(graph.x, graph.edge_index), graph.batch)
            torch.testing.assert_close(out, expected, **CLOSE)
            replicated(out.square().sum(), graph).backward()
            varcomm.data_parallel.sum_gradients(together)
            for got, want in zip(together.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(got.grad, want.grad, **CLOSE)
    return failures


@pytest.mark.parametrize("ranks", WORLDS)
def test_readouts_are_over_all_ranks(worlds, ranks):
    assert_none(worlds.run(ranks, check_reads, ranks))


def by_hand(x, edge_index):
    row, col = edge_index
    return torch.zeros_like(x).index_add(0, col, (x[row] - x[col]).sin())


def with_halo(graph):
    def message(x, edge_index):
        row, col = edge_index
        rows = graph.with_halo(x) if graph is not None else x
        return torch.zeros_like(x).index_add(0, col, (rows.sin()[row] - x[col]).sin())

    return message


# each is a function of rows of nodes and edges
AT_NODES = {
    "by hand": by_hand,
    "both ends at once": lambda x, e: utils.scatter(
        x[e].prod(0), e[1], dim_size=len(x), reduce="mean"
    ),
    "out-degrees": lambda x, e: x * utils.degree(e[0], len(x)).view(-1, 1),
    "the largest neighbour it leads to": lambda x, e: utils.scatter(
        x[e[1]], e[0], dim_size=len(x), reduce="max"
    ),
    "reversed": lambda x, e: by_hand(x, e.flip(0)),
    "stacked the other way": lambda x, e: by_hand(x, torch.stack([e[1], e[0]])),
    "loops": lambda x, e: by_hand(x, utils.add_self_loops(e, num_nodes=len(x))[0]),
    "without loops": lambda x, e: by_hand(x, utils.remove_self_loops(e)[0]),
    "normalised": lambda x, e: utils.scatter(
        x[e[0]] * gcn_weight(x, e).view(-1, 1), e[1], dim_size=len(x)
    ),
    "by functions": lambda x, e: torch.scatter_add(
        torch.zeros_like(x),
        0,
        e[1].view(-1, 1).expand(-1, 4),
        torch.index_select(x, 0, e[0]).sin() - torch.index_select(input=x, dim=0, index=e[1]),
    ),
    "sorted": lambda x, e: by_hand(x, e[:, e[1].argsort()]),
}


def gcn_weight(x, edge_index):
    degree = utils.degree(edge_index[1], len(x), dtype=x.dtype).clamp(min=1).rsqrt()
    return degree[edge_index[0]] * degree[edge_index[1]]


def check_nodes(rank, ranks):
    failures, data = Failures(), data_of()
    graph = partition(data, method=split_by("a rank owns nothing", data.num_nodes, ranks))
    ids = graph.owned_ids
    for name, function in {**AT_NODES, "with_halo": None}.items():
        whole, own = (g.x.clone().requires_grad_() for g in (data, graph))
        expected = (function or with_halo(None))(whole, data.edge_index)
        (want,) = torch.autograd.grad(expected.square().sum(), whole)
        with failures.named(name):
            out = (function or with_halo(graph))(own, graph.edge_index)
            torch.testing.assert_close(out, expected[ids], **CLOSE)
            (got,) = torch.autograd.grad(out.square().sum(), own)
            torch.testing.assert_close(got, want[ids], **CLOSE)
    return failures


@pytest.mark.parametrize("ranks", WORLDS)
def test_code_by_hand_reads_other_ranks_nodes(worlds, ranks):
    assert_none(worlds.run(ranks, check_nodes, ranks))


# each has no meaning on a part of a graph
REFUSED = {
    "to_dense_batch": lambda g: utils.to_dense_batch(g.x, g.batch),
    "top k": lambda g: pyg.TopKPooling(4)(g.x.float(), g.edge_index, batch=g.batch),
    "one-hot": lambda g: nn.functional.one_hot(g.batch).double(),
    "an array": lambda g: numpy.asarray(g.edge_index),
    "half of the edges": lambda g: g.edge_index[:, g.edge_index[0] < g.edge_index[1]],
    "computed ids": lambda g: g.x[g.edge_index[0] * 1],
    "floats": lambda g: g.edge_index.float(),
    "coalesce": lambda g: utils.coalesce(g.edge_index),
    "to_undirected": lambda g: utils.to_undirected(g.edge_index),
    "other edges": lambda g: torch.cat([g.edge_index, torch.tensor([[0], [1]])], dim=1),
    "negative samples": lambda g: utils.negative_sampling(g.edge_index, len(g.x)),
    "ids in place": lambda g: g.edge_index[0].clamp_(max=1),
    "a mask of ids": lambda g: g.edge_index[:, g.edge_index[0] < 5],
    "a list of vectors": lambda g: g.x.index_add(0, torch.hstack([g.batch, g.batch]), g.x[[0, 0]]),
    "a start that stays": lambda g: (g.x + 9).scatter_reduce(
        0, g.edge_index[0].view(-1, 1).expand(-1, 4), g.x[g.edge_index[1]], "amax"
    ),
    "a table of all nodes": lambda g: torch.arange(24.0)[g.edge_index[1]],
    "a number of all nodes": lambda g: utils.degree(g.edge_index[1], 24),
    "products against the edges": lambda g: utils.scatter(
        g.x[g.edge_index[1]], g.edge_index[0], dim_size=len(g.x), reduce="mul"
    ),
}


def check_refused(rank):
    failures, graph = Failures(), partition(data_of(), method="random")
    for name, call in REFUSED.items():
        with failures.named(name), pytest.raises(ArgumentError):
            call(graph)
    return failures


def test_local_numbers_are_refused(worlds):
    assert_none(worlds.run(3, check_refused))
