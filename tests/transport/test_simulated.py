"""A simulated world: received data, agreement, transfers, refusals."""

import pytest
import torch
import torch.distributed as dist

import varcomm
from varcomm import ArgumentError, DisagreementError, GroupError
from varcomm.transport.agreement import agree, compare, share
from varcomm.transport.auxiliary_group import aside, free_lanes, take_lane
from varcomm.transport.engines.simulated import alone, transfers
from varcomm.transport.group import resolve


def test_received_data_are_zeros_except_the_ranks_own():
    with alone(3, 1):
        results = [
            varcomm.all_gather_v(torch.ones(2), [1, 2, 3]),
            varcomm.all_to_all_v(torch.arange(1.0, 7), [1, 2, 3], [4, 2, 1]),
            varcomm.broadcast(torch.ones(2), src=0),
            varcomm.broadcast(torch.ones(2), src=1),
        ]
        total = varcomm.all_reduce(torch.full((9000,), 2.0))
    wanted = [0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 2, 3, 0], [0, 0], [1, 1]
    assert [result.tolist() for result in results] == [*wanted]
    assert total.tolist() == [0] * 3000 + [2] * 3000 + [0] * 3000
    with alone(4, 2):
        x = torch.ones(3, requires_grad=True)
        varcomm.all_gather_v(x, [3] * 4).square().sum().backward()
        with varcomm.debug():
            handle = varcomm.reduce_scatter_v(torch.ones(8), [2] * 4, async_op=True)
        assert handle.wait().tolist() == [1, 1]
    assert x.grad.tolist() == [2, 2, 2]
    for rank in (0, 1):
        with alone(2, rank):
            data = {"x": torch.ones(2, 3)}
            got = varcomm.tensor_parallel.broadcast_data(["x"], data, torch.float32)["x"]
        assert got.shape == (2, 3)


def refuse():
    raise DisagreementError("no")


def test_every_rank_repeats_the_metadata_of_this_one():
    with alone(5, 3):
        group = resolve(None)
        assert share("test", lambda: {"a": [7]}, group) == [{"a": [7]}] * 5
        with varcomm.debug():
            compare(group, {"operation": "test", "send": [1] * 5, "recv": [2] * 5})
        with pytest.raises(DisagreementError, match="test: refused on rank 0 of 5"):
            agree("test", refuse, group)
    with alone(3, 0):
        indices = [torch.tensor([], dtype=torch.int64), torch.tensor([0, 1]), torch.tensor([1])]
        sizes = [[0, 2, 1], [3, 0, 0], [1, 0, 0]]
        plan = varcomm.ExchangePlan.from_indices(indices, 2, sizes)
        assert plan.recv_counts == (0, 3, 1)
        assert plan(torch.ones(2, 5)).shape == (4, 5)
        assert plan.nbytes(torch.ones(2, 5)) == 60


def test_groups_within_can_be_made():
    with alone(4, 2):
        group = resolve(None)
        assert take_lane(group, [free_lanes(group)] * 4).group().size == 4
        assert aside(group).size == 4
        part = resolve(dist.new_group([0, 2]))
        assert take_lane(part, [free_lanes(part)] * 2).group().rank == 1
        assert varcomm.all_gather_v(torch.ones(1), [1, 1], group=part.process_group).sum() == 1


def test_transfers():
    with alone(3, 0), transfers() as found:
        varcomm.all_gather_v(torch.ones(2), [2, 2, 1])
        varcomm.broadcast(torch.ones(4), src=1)
        varcomm.gather_v(torch.ones(2), [2, 2, 1], dst=1)
    assert [(name, one.schedule, one.send, one.recv) for name, one in found] == [
        ("all_gather_v", "all_gather", (0, 8, 8), (0, 8, 4)),
        ("broadcast", "broadcast", (0, 0, 0), (0, 16, 0)),
        ("gather_v", "one", (0, 8, 0), (0, 0, 0)),
    ]
    assert found[0][1].ranks == (0, 1, 2)


def test_ends_and_refusals():
    with pytest.raises(RuntimeError, match="inside"), alone(2, 0):
        raise RuntimeError("inside")
    for (size, rank), named in (((0, 0), "size .* 0"), ((2, 2), "rank .* 2")):
        with pytest.raises(ArgumentError, match=named), alone(size, rank):
            pass
        assert not dist.is_initialized()
    with alone(3, 0):
        with pytest.raises(GroupError, match="initialised already, as rank 0 of 3"), alone(2, 0):
            pass
        with pytest.raises(GroupError, match="no other rank"):
            varcomm.ExchangePlan.from_needed(torch.tensor([2]), [2, 2, 2])
        assert dist.get_world_size() == 3
    assert not dist.is_initialized()
