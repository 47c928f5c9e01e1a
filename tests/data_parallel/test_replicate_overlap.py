"""Sums are begun while backward goes on, and meet nothing else that ranks exchange meanwhile."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import varcomm
from tests.data_parallel.cases import DOUBLE, square
from tests.data_parallel.comparing import assert_same_gradients, replicated, seeded
from tests.graph.graphs import split_by, wild
from varcomm.data_parallel import GlobalCount, no_sync, replicate
from varcomm.graph import distribute, partition


class Look(torch.autograd.Function):
    """Identity, whose backward calls something."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.call()
        return gradient, None


class Looking(nn.Module):
    """Two layers; between their backwards it notes what ranks have exchanged."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.calls, self.seen = [], []

    def forward(self, x):
        h = Look.apply(self.first(x), lambda: self.seen.append([c.name for c in self.calls]))
        return self.last(h)


def begun(rank, debug):
    model = replicate(Looking(), bucket_bytes=1)
    with varcomm.trace() as model.calls:
        loss = model(torch.ones(2, 3)).sum()
        with varcomm.debug() if debug else nullcontext():
            loss.backward()
    return model.seen, [call.name for call in model.calls]


def test_sums_are_begun_while_backward_goes_on(worlds):
    """For bias and weight of the last layer; for those of the first when it is done."""
    sums = ["all_reduce"]
    assert worlds.run(2, begun, False) == [([2 * sums], 4 * sums)] * 2
    # to compare is to wait, for ranks that are elsewhere
    assert worlds.run(2, begun, True) == [([[]], 4 * sums)] * 2


def begun_in_a_part(rank):
    """Ranks 1 and 2 of three, on a group that they alone have made."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    model = replicate(Looking(), group, bucket_bytes=1)
    with varcomm.trace() as model.calls:
        model(torch.ones(2, 3)).sum().backward()
    return model.seen, [call.name for call in model.calls]


def test_so_they_are_on_a_part_of_the_world(worlds):
    sums = ["all_reduce"]
    assert worlds.run(3, begun_in_a_part) == [None, *[([2 * sums], 4 * sums)] * 2]


def counted(rank):
    """The count travels before the first bucket, and both dimensions of a mesh sum meanwhile."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "graph"))
    count = GlobalCount()
    model = replicate(Looking(), mesh["data"], bucket_bytes=1, reduce=count)
    replicate(model.first, mesh["graph"])
    count.add(rank)
    with varcomm.trace() as model.calls:
        model(torch.ones(2, 3)).sum().backward()
    return model.seen, [call.sent for call in model.calls]


def test_counts_travel_while_backward_goes_on(worlds):
    bias, weight = (3 + 1) * 4, (9 + 1) * 4
    for seen, sent in worlds.run(4, counted):
        assert seen == [3 * ["all_reduce"]]
        assert sent == [16, bias, weight, bias, weight, bias, weight]


class Exchanging(nn.Module):
    """Ranks exchange between layers, of which a rank uses those that its number says."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(5)).double()

    def forward(self, x, rank, exchange):
        x = x.requires_grad_()  # on all ranks, or not all would exchange gradients
        for number, layer in enumerate(self.layers):
            x = (layer(x) if (number + rank) % 3 else x).tanh()
            x = x + exchange(x)
        return x


def among_exchanges(rank, ranks, group=None):
    """One process exchanges by a sum over what would be the ranks."""
    model, twin = replicated(Exchanging, group, bucket_bytes=1)
    exchange = partial(varcomm.all_reduce, group=group)
    for step in range(3):
        x = torch.full((1, 2), rank + step + 1.0, dtype=DOUBLE)
        square(model(x, rank, exchange)).backward()
        xs = [torch.full((1, 2), r + step + 1.0, dtype=DOUBLE) for r in range(ranks)]
        for number, layer in enumerate(twin.layers):
            xs = [(layer(x) if (number + r) % 3 else x).tanh() for r, x in enumerate(xs)]
            total = sum(xs)
            xs = [x + total for x in xs]
        sum(map(square, xs)).backward()
        assert_same_gradients(model, twin)
    return model.layers[0].weight.grad.abs().sum().item() > 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_do_not_meet_the_exchanges_of_a_model(worlds, ranks):
    """Ranks come to a bucket at other places of their backward, since they use other layers."""
    assert worlds.run(ranks, among_exchanges, ranks) == [True] * ranks


def among_exchanges_of_a_part(rank):
    group = dist.new_group([0, 2])
    return None if rank == 1 else among_exchanges(rank // 2, 2, group)


def test_nor_do_they_on_a_part_of_the_world(worlds):
    assert worlds.run(3, among_exchanges_of_a_part) == [True, None, True]


def in_any_order(rank, pause, in_debug):
    """Ranks come to two modules in opposite orders; both are then done in the same one."""
    group = dist.new_group([0, 1])
    modules = [replicated(lambda: nn.Linear(3, 3).double(), group) for _ in range(2)]
    x = torch.ones(1, 3, dtype=DOUBLE)
    for step in range(2):
        first, last = [model for model, _ in modules][:: 1 if (rank + step) % 2 else -1]
        paused = no_sync(modules[pause][0]) if step == 0 else nullcontext()
        with varcomm.debug() if in_debug else nullcontext(), paused:
            square(last(first(x).tanh())).backward()
        a, b = (twin for _, twin in modules)
        (square(a(b(x).tanh())) + square(b(a(x).tanh()))).backward()
    for model, twin in modules:
        assert_same_gradients(model, twin)
    return True


@pytest.mark.parametrize("pause", [0, 1])
def test_modules_in_another_order_on_another_rank(worlds, pause):
    assert worlds.run(2, in_any_order, pause, False) == [True, True]
    assert worlds.run(2, in_any_order, pause, True) == [True, True]


class Graphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = pyg.SAGEConv(4, 6), pyg.SAGEConv(6, 2)
        self.double()

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index).tanh(), edge_index)


def on_a_graph(rank, method, distributed_first):
    data = wild()
    graph = partition(data, method=method)
    model, twin = seeded(Graphs), seeded(Graphs)
    if distributed_first:
        model = replicate(distribute(model, graph), bucket_bytes=100)
    else:
        model = distribute(replicate(model, bucket_bytes=100), graph)
    for _ in range(2):
        square(model(graph.x, graph.edge_index) - graph.y).backward()
        square(twin(data.x, data.edge_index) - data.y).backward()
        assert_same_gradients(model, twin, 1e-11)
    return graph.num_owned


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("distributed_first", [True, False])
def test_a_distributed_model(worlds, ranks, distributed_first):
    method = split_by("a rank owns nothing", 24, ranks)
    owned = worlds.run(ranks, on_a_graph, method, distributed_first)
    assert (sum(owned), min(owned)) == (24, 0)
