"""What ranks decide together is what one process would decide that has all positions."""

import pytest
import torch
import torch.distributed as dist

import varcomm
from tests.graph.naive_assign import NAIVE, at, awkward_positions, some_weights
from varcomm.graph import assign
from varcomm.graph.partitioners.assign_sharded import assign_sharded

WORLDS = (1, 2, 3, 5)
METHODS = ("hilbert", "rcb")


def cases(method):
    """Positions and weights of all nodes, parts, and where ranks' shards start, for any world."""
    for seed in range(15):
        nodes = (0, 1, 2, 7, 60, 113)[seed % 6]
        generator = torch.Generator().manual_seed(seed)
        pos = awkward_positions(seed, nodes, 1 + seed % 3)
        if seed % 5 == 0:
            pos[nodes // 3 :] = pos[:1]  # most of them at one place
        weights = some_weights(seed, nodes) if seed % 2 else None
        starts = torch.randint(0, nodes + 1, (4,), generator=generator)
        if seed % 7 == 0:
            starts = starts[:1].expand(4)  # all but two ranks, or one, have nothing
        yield pos, weights, 1 + seed % 9, starts


def shard(whole, starts, ranks, rank):
    bounds = starts[: ranks - 1].sort().values.tolist()
    return whole.tensor_split(bounds)[rank]


def owners(rank, method):
    ranks = dist.get_world_size()
    found = []
    for pos, weights, parts, starts in cases(method):
        mine = shard(pos, starts, ranks, rank)
        weight = None if weights is None else shard(weights, starts, ranks, rank)
        before = mine.clone()
        owner = assign_sharded(mine, parts, method, node_weight=weight)
        assert torch.equal(mine, before), "the positions have changed"
        found.append((owner.dtype, owner.tolist()))
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", WORLDS)
def test_as_one_process_that_has_all(worlds, ranks, method):
    got = worlds.run(ranks, owners, method)
    for number, (pos, weights, parts, _) in enumerate(cases(method)):
        assert {dtype for dtype, _ in (rank[number] for rank in got)} == {torch.int64}
        together = torch.tensor([part for rank in got for part in rank[number][1]]).long()
        assert torch.equal(together, assign(at(pos), parts, method, node_weight=weights))
        each = [1] * len(pos) if weights is None else weights.tolist()
        assert torch.equal(together, NAIVE[method](pos, each, parts))


def many(rank, method, parts):
    generator = torch.Generator().manual_seed(0)
    pos = torch.rand(20_011, 3, generator=generator)
    pos[5000:9000] = pos[:4000]
    mine = pos.tensor_split([6000, 6001])[rank]
    return assign_sharded(mine, parts, method), assign(at(pos), parts, method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("parts", [2, 97])
def test_many_positions(worlds, method, parts):
    got = worlds.run(3, many, method, parts)
    owner = torch.cat([mine for mine, _ in got])
    assert torch.equal(owner, got[0][1])
    counts = torch.bincount(owner)
    assert len(counts) == parts
    assert counts.max() - counts.min() <= 1


def one_column(rank):
    pos = torch.tensor([[3, 0], [2, 1], []][rank])
    found = [
        assign_sharded(pos.to(dtype).view(*shape), 2, method, node_weight=None).tolist()
        for method in METHODS
        for dtype in (torch.float64, torch.float16, torch.int32)
        for shape in ((-1,), (len(pos), 1))
    ]
    learned = pos.float().requires_grad_()
    owner = assign_sharded(learned, 2)
    return [*found, owner.tolist()], owner.requires_grad


def test_one_coordinate_of_any_dtype(worlds):
    got = worlds.run(3, one_column)
    for rank, (found, requires_grad) in enumerate(got):
        assert found == [[[1, 0], [1, 0], []][rank]] * len(found)
        assert not requires_grad


def in_a_group(rank):
    group = dist.new_group([2, 1])  # all ranks make it, and the last is its first
    if rank == 0:
        return None
    pos = torch.tensor([0.0, 2.0, 4.0]) if rank == 1 else torch.tensor([3.0, 1.0])
    return assign_sharded(pos, 2, "rcb", group).tolist(), dist.get_rank(group)


def test_ranks_of_a_group(worlds):
    got = worlds.run(3, in_a_group)
    assert got[0] is None
    # equal shares, but for the larger one first: 0, 1, 2 and 3, 4
    assert [owner for owner, _ in got[1:]] == [[0, 0, 1], [1, 0]]


def received(rank, method, parts, nodes):
    pos = torch.rand(nodes, 2, generator=torch.Generator().manual_seed(rank))
    with varcomm.trace() as calls:
        assign_sharded(pos, parts, method)
    return len(calls), sum(call.received for call in calls)


@pytest.mark.parametrize("method", METHODS)
def test_what_travels_depends_on_parts_and_not_on_positions(worlds, method):
    cost = {}
    for parts in (4, 16):
        for nodes in (30, 3000):
            got = worlds.run(3, received, method, parts, nodes)
            assert len({calls for calls, _ in got}) == 1
            cost[parts, nodes] = max(bytes_ for _, bytes_ in got)
        levels = 1 if method == "hilbert" else {4: 2, 16: 4}[parts]
        # at most 8 rounds of 2 KiB a cut, which other ranks send twice; and some small change
        cuts = parts - 1
        assert cost[parts, 3000] <= 8 * 2048 * 2 * cuts + 1000 * levels + 100 * parts
    assert cost[16, 3000] < 24 * 16 * 3000, "all positions would have been less"
