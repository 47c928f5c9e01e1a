"""Seconds by the model, against numbers computed by hand."""

from dataclasses import replace

import pytest
import torch

import varcomm as vc
from varcomm import ArgumentError, GroupError
from varcomm.simulate import MACHINES, Machine
from varcomm.transport.simulated import Transfer

# Numbers that are easy to compute with: two ranks on a node.
M = Machine(
    name="round",
    ranks_per_node=2,
    flops=1e9,
    memory_bandwidth=1e8,
    launch=1e-3,
    memory=1e9,
    latency_within=1e-6,
    latency_between=1e-5,
    bandwidth_within=1e9,
    bandwidth_between=1e8,
    gap=1e-7,
    call=1e-4,
    source="none",
)


def transfer(schedule, rank, send, recv, ranks=None):
    return Transfer(schedule, rank, tuple(ranks or range(len(send))), tuple(send), tuple(recv))


def test_roofline():
    # products: 2 s of arithmetic, 1 s of memory; others: 0.5 s; 100 kernels of 1 ms
    assert M.compute(2e9, 1e8, 5e7, 100.0) == pytest.approx(2.5)
    # products: 0.1 s of arithmetic, 1 s of memory
    assert M.compute(1e8, 1e8, 5e7, 100.0) == pytest.approx(1.5)
    # 4000 kernels take 4 s to start
    assert M.compute(2e9, 1e8, 5e7, 4000.0) == pytest.approx(4.0)
    # on a CPU each is started when the one before is done
    assert replace(M, runs_ahead=False).compute(2e9, 1e8, 5e7, 100.0) == pytest.approx(2.6)
    many = M.compute(*(torch.tensor([x, x]).double() for x in (2e9, 1e8, 5e7, 100.0)))
    assert many.tolist() == pytest.approx([2.5, 2.5])


def test_an_exchange_within_a_node_and_beyond():
    # ranks 0 and 1 are a node; rank 0 sends 3000 B to 1, and 1000 and 2000 B to 2 and 3,
    # and receives 5000 B from 3
    one = transfer("neighbours", 0, [0, 3000, 1000, 2000], [0, 0, 0, 5000])
    inside = 1e-6 + 3000 / 1e9
    outside = 1e-5 + 1e-7 + 5000 / 1e8  # two messages; receiving is more than sending
    assert M.transfer(one) == pytest.approx(1e-4 + max(inside, outside))
    two = transfer("all", 1, [4000, 0], [100, 0])
    assert M.transfer(two) == pytest.approx(1e-4 + 1e-6 + 4000 / 1e9)
    assert M.transfer(transfer("one", 0, [0, 0], [0, 0])) == pytest.approx(1e-4)
    assert M.transfer(transfer("all", 0, [0], [0])) == 0.0


def test_places_of_a_part_of_the_world():
    # ranks 0 and 2 of the world are on different nodes
    far = transfer("all", 0, [0, 1000], [0, 1000], ranks=(0, 2))
    assert M.transfer(far) == pytest.approx(1e-4 + 1e-5 + 1000 / 1e8)


def test_an_all_gather():
    # 8 ranks on 4 nodes of 2: one step within, two between; 6 of the 7 shards come from other
    # nodes, by two links
    even = transfer("all_gather", 0, [0] + [1000] * 7, [0] + [1000] * 7)
    between = 6000 / (2 * 1e8)
    assert M.transfer(even) == pytest.approx(1e-4 + 1e-6 + 2 * 1e-5 + between)
    # the last shard is of another size: each is a broadcast
    uneven = transfer("all_gather", 0, [0] + [1000] * 7, [0] + [1000] * 6 + [500])
    between = 5500 / (2 * 1e8)
    assert M.transfer(uneven) == pytest.approx(1e-4 + 1e-6 + 2 * 1e-5 + 7 * 1e-7 + between)
    alone = transfer("all_gather", 1, [4000, 0], [4000, 0])
    assert M.transfer(alone) == pytest.approx(1e-4 + 1e-6 + 4000 / 1e9)


def test_a_broadcast():
    root = transfer("broadcast", 1, [6000, 0, 6000, 6000], [0] * 4)
    assert M.transfer(root) == pytest.approx(1e-4 + 1e-6 + 1e-5 + 6000 / (2 * 1e8))
    other = transfer("broadcast", 3, [0] * 4, [0, 6000, 0, 0])
    assert M.transfer(other) == pytest.approx(M.transfer(root))


def test_work_of_a_rank():
    with vc.simulate.world(4):
        layer = torch.nn.Linear(64, 32, bias=False)
        x = torch.ones(10, 64)
        work = vc.simulate.count(lambda: vc.all_gather_v(layer(x), [10] * 4))
    assert work.flops == 2 * 10 * 64 * 32
    # input, weight and product; then four shards that are zeroed or copied
    assert work.matmul_bytes == 4 * (10 * 64 + 64 * 32 + 10 * 32)
    assert work.other_bytes >= 4 * 4 * 10 * 32
    # weight and input were there; a product and the whole are made
    assert work.memory == 4 * (64 * 32 + 10 * 64) + 4 * (10 * 32 + 4 * 10 * 32)
    seconds = M.seconds(work)
    (name,) = seconds.communication
    expected = M.transfer(work.transfers[0][1])
    assert name == "all_gather_v"
    assert seconds.communication[name] == pytest.approx(expected)
    assert seconds.total == pytest.approx(seconds.compute + expected)


def test_memory_is_that_of_the_worst_moment():
    def step():
        for _ in range(3):
            torch.ones(1000).sum()
        x = torch.ones(5000)
        return (x + x).view(50, 100).t()

    with vc.simulate.world(1):
        work = vc.simulate.count(step)
    assert work.memory == 2 * 5000 * 4


def test_views_cost_nothing_and_rows_are_picked():
    x, index = torch.ones(1000, 4), torch.tensor([3, 5])
    with vc.simulate.world(1):
        views = vc.simulate.count(lambda: x.t()[1:].reshape(3, 10, 100)[0].detach())
        picked = vc.simulate.count(lambda: x.index_select(0, index))
        added = vc.simulate.count(lambda: x.add_(1))
    assert views.kernels <= 1  # reshape of what is not contiguous copies
    assert picked.other_bytes == 2 * 4 * 4 + 2 * 4 * 4 + 2 * 8
    assert added.other_bytes == 2 * 4000 * 4
    assert added.memory == 4000 * 4


def test_known_machines():
    for name, machine in MACHINES.items():
        assert machine.name == name
        assert machine.ranks_per_node > 0
        assert "peak" in machine.source
        assert machine.bandwidth_between < machine.bandwidth_within < machine.memory_bandwidth


def counted_on_real_ranks(rank):
    try:
        vc.simulate.count(lambda: None)
    except GroupError as error:
        return str(error)


def test_real_ranks_are_not_counted(worlds):
    for message in worlds.run(2, counted_on_real_ranks):
        assert "the other ranks are there" in message


def test_the_machine_at_hand():
    machine = vc.simulate.measure(2, width=8)
    assert machine.ranks_per_node == 2
    for number in (machine.flops, machine.memory_bandwidth, machine.latency_within):
        assert number > 0
    assert machine.gap == 0
    with pytest.raises(ArgumentError, match="ranks must be an integer above one; got 1"):
        vc.simulate.measure(1)
