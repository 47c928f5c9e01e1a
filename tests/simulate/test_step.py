"""Predictions of ranks that were not simulated, against their own simulation; refused calls."""

from functools import cache

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import HeteroConv, SAGEConv

import varcomm as vc
from tests.graph.graphs import grid, wild
from tests.simulate.test_partition import papers
from varcomm import ArgumentError, DisagreementError, GroupError, simulate
from varcomm.cli.simulate import columns_of, table
from varcomm.cli.simulate import prepare as prepared

H100 = simulate.MACHINES["h100-ndr"]


prepare = prepared(8, 2)


@cache
def parts_of_grid():
    return simulate.partition(grid(14, 15), 12, "rcb")


@cache
def step_of_grid():
    return simulate.step(prepare, parts_of_grid())


@pytest.mark.slow
def test_other_ranks_are_predicted():
    found = step_of_grid()
    others = [rank for rank in range(12) if rank not in found.works]
    assert others
    for rank, work in simulate.step(prepare, parts_of_grid(), others[:2]).works.items():
        assert float(found.sent[rank]) == work.calls.total.sent
        assert float(found.messages[rank]) == work.calls.total.messages_sent
        for name, bound in (("flops", 1e-9), ("matmul_bytes", 1e-9), ("other_bytes", 1e-3)):
            assert float(found.counts[name][rank]) == pytest.approx(getattr(work, name), rel=bound)
        assert float(found.memory[rank]) == pytest.approx(work.memory, rel=0.05)
        seconds = H100.seconds(work)
        assert float(found.times(H100).total[rank]) == pytest.approx(seconds.total, rel=1e-3)


def test_simulated_ranks_are_exact():
    found = step_of_grid()
    for rank, work in found.works.items():
        assert float(found.sent[rank]) == work.calls.total.sent
        assert float(found.counts["flops"][rank]) == work.flops
        assert float(found.memory[rank]) == work.memory
    times = found.times(H100)
    names = {"exchange", "exchange_adjoint", "replicated_sum", "all_reduce"}
    assert set(times.communication) == names
    assert times.step == float(times.total.max())
    lines = str(found).splitlines()
    assert lines[0].split() == ["12", "ranks,", "a", "step", "least", "mean", "most"]
    assert [line.split("  ")[0] for line in lines[1:4]] == ["nodes", "edges", "halo rows"]


def test_a_sample_predicts_larger_graphs():
    sample = simulate.sample(prepare, grid(9, 10), [1, 4], "rcb")
    large = simulate.partition(grid(20, 21), 4, "rcb")
    step = sample.step(large.without_graph())
    for rank, work in simulate.step(prepare, large, [0, 2]).works.items():
        assert float(step.sent[rank]) == work.calls.total.sent
        assert float(step.counts["flops"][rank]) == pytest.approx(work.flops, rel=1e-6)
        assert float(step.counts["other_bytes"][rank]) == pytest.approx(work.other_bytes, rel=0.02)
    one = simulate.partition(grid(20, 21), 1)
    columns = columns_of([sample.step(one), step], H100)
    for name in ("sent", "halos", "sums"):
        assert columns[name][0] == 0 < columns[name][1]
    assert columns["step"][1] == pytest.approx(step.times(H100).step)
    rows = table(columns, H100).splitlines()
    assert len(rows) == 3
    assert rows[2].split()[:2] == ["4", "420"]


def exchange(graph):
    """Prepare a step that exchanges the halos of all types of edges, in rows of its own width."""
    plans = [graph[key].plan for key in graph.edge_types]
    return lambda: [plan(torch.ones(plan.num_rows, w)) for w, plan in enumerate(plans, 1)]


def prepare_layer(graph):
    model = vc.graph.distribute(SAGEConv(4, 4), graph)
    x = graph.x.clone().requires_grad_()

    def step():
        graph.sum(model(x, graph.edge_index)).backward()
        vc.data_parallel.sum_gradients(model)

    return step


def prepare_types(graph):
    convs = {key: SAGEConv((4, 4), 4) for key in graph.edge_types}
    model = vc.graph.distribute(HeteroConv(convs), graph)
    x = {key: value.clone().requires_grad_() for key, value in graph.x_dict.items()}

    def step():
        out = model(x, graph.edge_index_dict)
        sum(graph[key].sum(value) for key, value in out.items()).backward()
        vc.data_parallel.sum_gradients(model)

    return step


def both_types():
    """Return a graph whose two types of edges have the same halo on rank 0 and on no other."""
    data = HeteroData()
    data["a"].x, data["b"].x = torch.ones(6, 4), torch.ones(6, 4)
    data["a", "to", "b"].edge_index = torch.tensor([[0, 2, 4], [2, 4, 2]])
    data["b", "to", "a"].edge_index = torch.tensor([[0, 2, 3, 4, 5], [2, 4, 4, 2, 2]])
    return simulate.partition(data, 3, "block")


def swapping_pairs():
    """Return a graph of 3 ranks: rank 0 has no halo, and the others swap rows."""
    edge_index = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 0, 4, 5, 2, 3]])
    return simulate.partition(Data(x=torch.ones(6, 4), edge_index=edge_index), 3, "block")


@pytest.mark.parametrize(
    ("prepare", "parts", "ranks"),
    [
        (prepare_layer, swapping_pairs, None),
        (prepare_layer, swapping_pairs, [1]),
        (prepare_types, both_types, [1]),
        (exchange, lambda: simulate.partition(papers(), 3, "random"), [0]),
    ],
)
def test_a_few_ranks_determine_all_messages(prepare, parts, ranks):
    found = simulate.step(prepare, parts(), ranks)
    right = simulate.step(prepare, parts(), range(found.parts.size))
    assert found.sent.tolist() == right.sent.tolist()
    assert found.messages.tolist() == right.messages.tolist()


def parts(size=2):
    return simulate.partition(wild(), size, "block")


def inside(size, fn):
    with simulate.world(size):
        return fn()


def uneven(graph):
    return lambda: [vc.all_reduce(torch.ones(1)) for _ in range(graph.group.rank)]


def sample(data, sizes):
    return simulate.sample(prepare_layer, data, sizes, "block")


APART = Data(x=torch.ones(4, 4), edge_index=torch.tensor([[0, 1], [1, 0]]))
SMALL = Data(x=torch.ones(90, 4), edge_index=grid(9, 10).edge_index)

# call, error, and a part of its message
REFUSED = [
    (lambda: parts(0), ArgumentError, "size"),
    (lambda: simulate.partition(wild(), 2, torch.arange(24) % 4), ArgumentError, "spans 0...3"),
    (lambda: inside(0, list), ArgumentError, "size"),
    (lambda: inside(2, lambda: inside(2, list)), GroupError, "initialised"),
    (lambda: inside(3, parts().part), ArgumentError, "2 ranks"),
    (lambda: inside(2, lambda: vc.graph.partition(wild())), GroupError, "partition"),
    (lambda: simulate.step(prepare_layer, parts(), [2]), ArgumentError, "ranks"),
    (lambda: simulate.step(uneven, parts(3)), DisagreementError, "same calls"),
    (lambda: simulate.step(prepare_layer, swapping_pairs(), [0]), ArgumentError, "halo: 1."),
    (lambda: simulate.step(prepare_types, both_types(), [0]), ArgumentError, "other ranks"),
    (lambda: sample(APART, [2]), ArgumentError, "halos"),
    (lambda: sample(SMALL, [2]).step(parts(3)), KeyError, "3"),
    (lambda: parts().plot("none/a.png"), ArgumentError, "folder"),
]


@pytest.mark.parametrize("row", range(len(REFUSED)))
def test_refused(row):
    call, kind, named = REFUSED[row]
    with pytest.raises(kind) as raised:
        call()
    assert named in str(raised.value)
