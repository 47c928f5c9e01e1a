"""A simulated rank counts what a real one does: call by call, peer by peer, byte by byte."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch_geometric.nn import GATConv

import varcomm as vc
from tests.graph.graphs import wild
from tests.worlds import WORLDS
from varcomm.cli.simulate import prepare


def calls_of_primitives(rank):
    size = dist.get_world_size()
    sizes = [3 * (other % 2) + other for other in range(size)]
    counts = [[(2 * i + j) % 3 for j in range(size)] for i in range(size)]
    send, recv = counts[rank], [counts[other][rank] for other in range(size)]
    rows = [[(i + 2 * j) % 4 * (i != j) for j in range(size)] for i in range(size)]
    plan = vc.ExchangePlan.from_indices([torch.arange(count) for count in rows[rank]], 3, rows)
    with vc.trace() as calls:
        x = torch.ones(sizes[rank], 2, requires_grad=True)
        vc.all_gather_v(x, sizes).sum().backward()
        vc.gather_v(x, sizes, dst=1)
        # non-root ranks do not read it; a simulated root is taken to have it
        vc.scatter_v(torch.ones(sum(sizes), 2), sizes, src=1)
        vc.broadcast(torch.ones(5), src=1)
        vc.reduce(torch.ones(9000), dst=0)
        vc.all_reduce(torch.ones(9001)).sum()
        vc.all_reduce(torch.ones(3).bfloat16())
        vc.reduce_scatter_v(torch.ones(sum(sizes), 2), sizes, async_op=True).wait()
        vc.all_to_all_v(torch.ones(sum(send)), send, recv)
        nodes = torch.ones(3, 4, requires_grad=True)
        plan(nodes).sum().backward()
        plan.start(nodes.detach(), dim=0).wait()
    return calls


@pytest.mark.parametrize("size", WORLDS[1:])
def test_calls_are_those_of_real_ranks(worlds, size):
    real = worlds.run(size, calls_of_primitives)
    for rank in range(size):
        with vc.simulate.world(size, rank):
            assert calls_of_primitives(rank) == real[rank]


def whole_graph():
    data = wild(60, torch.float32)
    data.x = data.x.repeat(1, 2)
    return data


def trained(graph, kind):
    torch.manual_seed(0)
    if kind == "mesh graph net":
        step = prepare(16, 2)(graph)
    else:
        model = vc.graph.distribute(GATConv(8, 2), graph)

        def step():
            loss = mse_loss(model(graph.x, graph.edge_index), graph.y, reduction="none")
            graph.mean(loss).backward()
            vc.data_parallel.sum_gradients(model)

    step()
    with vc.trace() as calls:
        step()
    return calls


def training(rank, kind):
    return trained(vc.graph.partition(whole_graph(), method="rcb"), kind)


@pytest.mark.parametrize("kind", ["mesh graph net", "gat"])
def test_training_steps_are_those_of_real_ranks(worlds, kind):
    real = worlds.run(3, training, kind)
    parts = vc.simulate.partition(whole_graph(), 3, "rcb")
    for rank in range(3):
        with vc.simulate.world(3, rank):
            calls = trained(parts.part(), kind)
        assert calls == real[rank]
        assert calls.total.sent > 0
