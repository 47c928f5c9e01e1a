"""Seconds by the model against numbers computed by hand, and counts of a rank's work."""

from dataclasses import replace

import pytest
import torch

import varcomm as vc
from tests.worlds import on_ranks
from varcomm import GroupError
from varcomm.simulate import Machine
from varcomm.transport.engines.simulated import Transfer

RATES = {"flops": 1e9, "memory_bandwidth": 1e8, "launch": 1e-3, "memory": 1e9}
LINKS = {"bandwidth_within": 1e9, "bandwidth_between": 1e8, "gap": 1e-7, "call": 1e-4}
LATENCIES = {"latency_within": 1e-6, "latency_between": 1e-5}
M = Machine(name="round", ranks_per_node=2, source="none", **RATES, **LINKS, **LATENCIES)


def test_roofline():
    # products: 2 s of arithmetic, 1 s of memory; others: 0.5 s; 100 kernels of 1 ms
    assert M.compute(2e9, 1e8, 5e7, 100.0) == pytest.approx(2.5)
    # products: 0.1 s of arithmetic, 1 s of memory
    assert M.compute(1e8, 1e8, 5e7, 100.0) == pytest.approx(1.5)
    # 4000 kernels take 4 s to start
    assert M.compute(2e9, 1e8, 5e7, 4000.0) == pytest.approx(4.0)
    # on a CPU an operator starts after the one before
    assert replace(M, runs_ahead=False).compute(2e9, 1e8, 5e7, 100.0) == pytest.approx(2.6)
    many = M.compute(*(torch.tensor([x, x]).double() for x in (2e9, 1e8, 5e7, 100.0)))
    assert many.tolist() == pytest.approx([2.5, 2.5])


SHARDS = [0] + [1000] * 7
ONE_NODE, FOUR_NODES = 1e-4 + 1e-6, 1e-4 + 1e-6 + 2 * 1e-5
# schedule, rank, bytes sent to and received from each rank, seconds
TRANSFERS = {
    # rank 0 sends 3000 B within its node, and 1000 and 2000 B beyond; it receives 5000 B from 3
    "exchange": (
        *("neighbours", 0, [0, 3000, 1000, 2000], [0, 0, 0, 5000]),
        1e-4 + max(1e-6 + 3000 / 1e9, 1e-5 + 1e-7 + 5000 / 1e8),
    ),
    "one node": ("all", 1, [4000, 0], [100, 0], ONE_NODE + 4000 / 1e9),
    "no message": ("one", 0, [0, 0], [0, 0], 1e-4),
    "one rank": ("all", 0, [0], [0], 0.0),
    # 8 ranks on 4 nodes; 6 of the 7 shards come from other nodes over two links
    "even all-gather": ("all_gather", 0, SHARDS, SHARDS, FOUR_NODES + 6000 / (2 * 1e8)),
    # the last shard has another size, so each shard is a broadcast
    "uneven all-gather": (
        *("all_gather", 0, SHARDS, [*SHARDS[:-1], 500]),
        FOUR_NODES + 7 * 1e-7 + 5500 / (2 * 1e8),
    ),
    "all-gather of a node": ("all_gather", 1, [4000, 0], [4000, 0], ONE_NODE + 4000 / 1e9),
    "broadcast, root": (
        *("broadcast", 1, [6000, 0, 6000, 6000], [0] * 4),
        ONE_NODE + 1e-5 + 6000 / (2 * 1e8),
    ),
    "broadcast": ("broadcast", 3, [0] * 4, [0, 6000, 0, 0], ONE_NODE + 1e-5 + 6000 / (2 * 1e8)),
}


@pytest.mark.parametrize("name", TRANSFERS)
def test_calls(name):
    schedule, rank, send, recv, expected = TRANSFERS[name]
    call = Transfer(schedule, rank, tuple(range(len(send))), tuple(send), tuple(recv))
    assert M.transfer(call) == pytest.approx(expected)


def test_ranks_of_a_subgroup_are_on_their_nodes():
    far = Transfer("all", 0, (0, 2), (0, 1000), (0, 1000))
    assert M.transfer(far) == pytest.approx(1e-4 + 1e-5 + 1000 / 1e8)


def test_work_of_a_rank():
    with vc.simulate.world(4):
        layer, x = torch.nn.Linear(64, 32, bias=False), torch.ones(10, 64)
        work = vc.simulate.count(lambda: vc.all_gather_v(layer(x), [10] * 4))
    assert work.flops == 2 * 10 * 64 * 32
    # input, weight and product; then four shards that are zeroed or copied
    assert work.matmul_bytes == 4 * (10 * 64 + 64 * 32 + 10 * 32)
    assert work.other_bytes >= 4 * 4 * 10 * 32
    # weight and input existed; a product and the full tensor are made
    assert work.memory == 4 * (64 * 32 + 10 * 64) + 4 * (10 * 32 + 4 * 10 * 32)
    seconds, ((name, call),) = M.seconds(work), work.transfers
    assert name == "all_gather_v"
    assert seconds.communication == {name: pytest.approx(M.transfer(call))}
    assert seconds.total == pytest.approx(seconds.compute + M.transfer(call))


def test_memory_views_and_picked_rows():
    def step():
        for _ in range(3):
            torch.ones(1000).sum()
        x = torch.ones(5000)
        return (x + x).view(50, 100).t()

    x, index = torch.ones(1000, 4), torch.tensor([3, 5])
    with vc.simulate.world(1):
        assert vc.simulate.count(step).memory == 2 * 5000 * 4
        views = vc.simulate.count(lambda: x.t()[1:].reshape(3, 10, 100)[0].detach())
        picked = vc.simulate.count(lambda: x.index_select(0, index))
        added = vc.simulate.count(lambda: x.add_(1))
    assert views.kernels <= 1  # reshape copies a tensor that is not contiguous
    assert picked.other_bytes == 2 * 4 * 4 + 2 * 4 * 4 + 2 * 8
    assert (added.other_bytes, added.memory) == (2 * 4000 * 4, 4000 * 4)


@on_ranks(3)
def test_messages_of_real_ranks_are_not_counted(rank):
    with pytest.raises(GroupError, match="with ranks that exist"):
        vc.simulate.count(lambda: vc.all_reduce(torch.ones(1)))
