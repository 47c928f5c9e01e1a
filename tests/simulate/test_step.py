"""Predictions of ranks that were not simulated, against their own simulation."""

import pytest
import torch
from torch.nn.functional import mse_loss
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import HeteroConv, SAGEConv

import varcomm as vc
from tests.graph.graphs import grid
from varcomm.models import MeshGraphNet

H100 = vc.simulate.MACHINES["h100-ndr"]


def prepare(graph):
    torch.manual_seed(0)
    model = MeshGraphNet(2, 2, 1, hidden_channels=8, num_blocks=2)
    model = vc.graph.distribute(model, graph)
    optimizer = torch.optim.Adam(model.parameters())
    x, edge_attr = torch.ones(graph.num_owned, 2), torch.ones(graph.num_edges, 2)

    def step():
        optimizer.zero_grad()
        prediction = model(x, graph.edge_index, edge_attr)
        graph.mean(mse_loss(prediction, x[:, :1], reduction="none")).backward()
        vc.data_parallel.sum_gradients(model)
        optimizer.step()

    return step


@pytest.fixture(scope="module")
def parts():
    return vc.simulate.partition(grid(14, 15), 12, "rcb")


@pytest.fixture(scope="module")
def found(parts):
    return vc.simulate.step(prepare, parts)


def test_other_ranks_are_predicted(parts, found):
    others = [rank for rank in range(12) if rank not in found.works]
    assert others
    for rank, work in vc.simulate.step(prepare, parts, others[:2]).works.items():
        assert float(found.sent[rank]) == work.calls.total.sent
        assert float(found.messages[rank]) == work.calls.total.messages_sent
        for name, bound in (("flops", 1e-9), ("matmul_bytes", 1e-9), ("other_bytes", 1e-3)):
            assert float(found.counts[name][rank]) == pytest.approx(getattr(work, name), rel=bound)
        assert float(found.memory[rank]) == pytest.approx(work.memory, rel=0.05)
        seconds = H100.seconds(work)
        assert float(found.times(H100).total[rank]) == pytest.approx(seconds.total, rel=1e-3)


def test_simulated_ranks_are_exact(found):
    for rank, work in found.works.items():
        assert float(found.sent[rank]) == work.calls.total.sent
        assert float(found.counts["flops"][rank]) == work.flops
        assert float(found.memory[rank]) == work.memory
    times = found.times(H100)
    names = {"exchange", "exchange_adjoint", "replicated_sum", "all_reduce"}
    assert set(times.communication) == names
    assert times.step == float(times.total.max())


def test_table(found):
    lines = str(found).splitlines()
    assert lines[0].split() == ["12", "ranks,", "a", "step", "least", "mean", "most"]
    assert [line.split("  ")[0] for line in lines[1:4]] == ["nodes", "edges", "halo rows"]


def test_a_sample_tells_of_larger_graphs():
    sample = vc.simulate.sample(prepare, grid(9, 10), [1, 4], "rcb")
    large = vc.simulate.partition(grid(20, 21), 4, "rcb")
    step = sample.step(large.without_graph())
    for rank, work in vc.simulate.step(prepare, large, [0, 2]).works.items():
        assert float(step.sent[rank]) == work.calls.total.sent
        assert float(step.counts["flops"][rank]) == pytest.approx(work.flops, rel=1e-6)
        assert float(step.counts["other_bytes"][rank]) == pytest.approx(work.other_bytes, rel=0.02)
    one = vc.simulate.partition(grid(20, 21), 1)
    scaling = vc.simulate.scaling(sample, [one, large], H100)
    assert scaling.efficiency[0] == 1
    first, second = scaling.points
    assert first.sent == first.halo_seconds == first.sum_seconds == 0
    assert second.seconds == pytest.approx(step.times(H100).step)
    assert second.halo_seconds > 0
    assert second.sum_seconds > 0
    rows = str(scaling).splitlines()
    assert len(rows) == 3
    assert rows[2].split()[:2] == ["4", "420"]


def test_types_of_edges_have_halos_of_their_own():
    from tests.simulate.test_partition import papers

    parts = vc.simulate.partition(papers(), 3, "random")

    def exchange(graph):
        plans = [graph[key].plan for key in graph.edge_types]

        def step():
            for width, plan in enumerate(plans, 1):
                plan(torch.ones(plan.num_rows, width))

        return step

    found = vc.simulate.step(exchange, parts, [0])
    for rank, work in vc.simulate.step(exchange, parts).works.items():
        assert float(found.sent[rank]) == work.calls.total.sent


def one_way():
    """Return a graph of 12 ranks: two swap rows, and of the others each second only sends."""
    ranks, each = 12, 10
    edges = [(i, each + i) for i in range(each)] + [(each + i, i) for i in range(each)]
    edges += [(a * each + i, (a + 1) * each + i) for a in range(2, ranks, 2) for i in range(3)]
    edge_index = torch.tensor(edges).T
    return vc.simulate.partition(
        Data(x=torch.ones(ranks * each, 4), edge_index=edge_index), ranks, "block"
    )


def prepare_layer(graph):
    model = vc.graph.distribute(SAGEConv(4, 4), graph)
    x = graph.x.clone().requires_grad_()

    def step():
        graph.sum(model(x, graph.edge_index)).backward()
        vc.data_parallel.sum_gradients(model)

    return step


@pytest.mark.parametrize("ranks", [None, [0, 2], [3]])
def test_halos_that_go_one_way(ranks):
    found = vc.simulate.step(prepare_layer, one_way(), ranks)
    right = vc.simulate.step(prepare_layer, one_way(), range(12))
    assert found.sent.tolist() == right.sent.tolist()
    assert found.messages.tolist() == right.messages.tolist()


def both_types():
    """Return a graph whose two types of edges have the same halo on rank 0 and on no other."""
    data = HeteroData()
    data["a"].x, data["b"].x = torch.ones(6, 4), torch.ones(6, 4)
    data["a", "to", "b"].edge_index = torch.tensor([[0, 2, 4], [2, 4, 2]])
    data["b", "to", "a"].edge_index = torch.tensor([[0, 2, 3, 4, 5], [2, 4, 4, 2, 2]])
    return vc.simulate.partition(data, 3, "block")


def prepare_types(graph):
    convs = {key: SAGEConv((4, 4), 4) for key in graph.edge_types}
    model = vc.graph.distribute(HeteroConv(convs), graph)
    x = {key: value.clone().requires_grad_() for key, value in graph.x_dict.items()}

    def step():
        out = model(x, graph.edge_index_dict)
        sum(graph[key].sum(value) for key, value in out.items()).backward()
        vc.data_parallel.sum_gradients(model)

    return step
