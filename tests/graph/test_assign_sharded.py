"""``assign_sharded``: ranks with pieces decide as one process with all positions."""

import pytest
import torch
import torch.distributed as dist

import varcomm
from tests.graph.naive_assign import at, awkward_positions, some_weights
from tests.worlds import WORLDS
from varcomm import ArgumentError, DisagreementError, GroupError
from varcomm.graph import assign, assign_sharded

METHODS = ("hilbert", "rcb")


def cases():
    """Yield positions and weights of all nodes, parts, and the bounds of ranks' shards."""
    for seed in range(15):
        nodes = (0, 1, 2, 7, 60, 113)[seed % 6]
        generator = torch.Generator().manual_seed(seed)
        pos = awkward_positions(seed, nodes, 1 + seed % 3)
        if seed % 5 == 0:
            pos[nodes // 3 :] = pos[:1]  # most of them at one place
        weights = some_weights(seed, nodes) if seed % 2 else None
        starts = torch.randint(0, nodes + 1, (4,), generator=generator)
        if seed % 7 == 0:
            starts = starts[:1].expand(4)  # all but two ranks, or one, have no nodes
        yield pos, weights, 1 + seed % 9, starts
    pos = torch.rand(5011, 3, generator=torch.Generator().manual_seed(0))
    pos[500:900] = pos[:400]
    yield pos, None, 97, torch.tensor([1000, 1001, 4000, 4500])
    line = torch.tensor([3.0, 0.0, 2.0, 1.0])
    for column in (line, line[:, None], line.half(), line.int()):
        yield column, None, 2, torch.tensor([2, 2, 3, 4])


def owners(rank):
    ranks = dist.get_world_size()
    found = []
    for method in METHODS:
        for pos, weights, parts, starts in cases():
            bounds = starts[: ranks - 1].sort().values.tolist()
            mine = pos.tensor_split(bounds)[rank]
            weight = None if weights is None else weights.tensor_split(bounds)[rank]
            before = mine.clone()
            if mine.is_floating_point():
                mine.requires_grad_()
            owner = assign_sharded(mine, parts, method, node_weight=weight)
            assert torch.equal(mine, before), "the positions have changed"
            assert (owner.dtype, owner.requires_grad) == (torch.int64, False)
            found.append(owner)
    return found


@pytest.mark.parametrize("ranks", WORLDS)
def test_as_one_process_with_all_positions(worlds, ranks):
    got = worlds.run(ranks, owners)
    number = 0
    for method in METHODS:
        for pos, weights, parts, _ in cases():
            together = torch.cat([found[number] for found in got])
            assert torch.equal(together, assign(at(pos), parts, method, node_weight=weights))
            number += 1


def in_a_group(rank):
    group = dist.new_group([2, 1])  # all ranks create it, and the last rank is its first
    if rank == 0:
        return None
    pos = torch.tensor([0.0, 2.0, 4.0]) if rank == 1 else torch.tensor([3.0, 1.0])
    return assign_sharded(pos, 2, "rcb", group).tolist()


def test_ranks_of_a_group(worlds):
    # equal shares, the larger one first: 0, 1, 2 and 3, 4
    assert worlds.run(3, in_a_group) == [None, [0, 0, 1], [1, 0]]


def received(rank):
    cost = {}
    for method in METHODS:
        for parts, nodes in ((4, 30), (4, 3000), (16, 3000)):
            pos = torch.rand(nodes, 2, generator=torch.Generator().manual_seed(rank))
            with varcomm.trace() as calls:
                assign_sharded(pos, parts, method)
            cost[method, parts, nodes] = len(calls), sum(call.received for call in calls)
    return cost


def test_messages_depend_on_parts_and_not_on_positions(worlds):
    costs = worlds.run(3, received)
    for case in costs[0]:
        method, parts, nodes = case
        assert len({cost[case][0] for cost in costs}) == 1
        most = max(cost[case][1] for cost in costs)
        levels = 1 if method == "hilbert" else {4: 2, 16: 4}[parts]
        # at most 8 rounds of 2 KiB per cut, which other ranks send twice; and a little more
        if nodes == 3000:
            assert most <= 8 * 2048 * 2 * (parts - 1) + 1000 * levels + 100 * parts
        assert parts == 4 or most < 24 * 16 * 3000, "all positions would have been less"


def call(pos=((0.0, 1.0), (2.0, 3.0)), parts=2, method="rcb", **options):
    pos = torch.tensor(pos) if isinstance(pos, tuple) else pos
    return (pos, parts, method), options


POS, NONE = torch.tensor([[0.0, 1.0], [2.0, 3.0]]), torch.zeros(0, 2)
ONES = torch.ones(2, dtype=torch.int64)
# the call of one rank, where the others pass no rows, and the argument that the message names
WRONG = [
    (call(method="metis"), "method"),
    (call(parts=0), "parts"),
    (call(parts=2.0), "parts"),
    (call([[0.0, 1.0]]), "pos"),
    (call(POS + 0j), "pos"),
    (call(POS[None]), "pos"),
    (call(POS[0, 0]), "pos"),
    (call(POS[:, :0]), "pos"),
    (call(torch.zeros(0, 64), method="hilbert"), "63"),
    (call(((0.0, 0.0), (float("nan"), 0.0))), "pos"),
    (call(POS / 0), "pos"),
    (call(POS.to("meta")), "meta"),
    (call(node_weight=torch.tensor([1, 2, 3])), "node_weight"),
    (call(node_weight=torch.tensor([1.0, 2.0])), "node_weight"),
    (call(node_weight=torch.tensor([1, -2])), "node_weight"),
    (call(node_weight=ONES.to("meta")), "node_weight"),
]
# the call of rank 1, where the others call it with `call()`, and the difference
DIFFERENT = [
    (call(torch.zeros(0, 3)), "coordinates"),
    (call(torch.zeros(0)), "coordinates"),
    (call(NONE.double()), "dtype"),
    (call(method="hilbert"), "method"),
    (call(parts=3), "parts"),
    (call(node_weight=ONES), "node_weight"),
]


def refusals(rank, culprit):
    def error(calls, kind):
        args, options = calls
        with pytest.raises(kind) as caught:
            assign_sharded(*args, **options)
        return str(caught.value)

    other = call(NONE)
    found = [
        (word, error(wrong if rank == culprit else other, (ArgumentError, GroupError)))
        for wrong, word in WRONG
    ]
    found += [
        (word, error(wrong if rank == culprit else call(), DisagreementError))
        for wrong, word in DIFFERENT
    ]
    for total in (0, 2**59):  # only the sum over ranks is refused
        found.append(("node_weight", error(call(node_weight=ONES * total), ArgumentError)))
    return found


@pytest.mark.parametrize("culprit", [0, 2])
def test_refused_on_all_ranks(worlds, culprit):
    told, *others = worlds.run(3, refusals, culprit)
    assert others == [told] * 2
    for word, message in told:
        assert message.startswith("graph.assign_sharded: ")
        assert word in message
    assert all(f"rank {culprit}" in message for _, message in told[: len(WRONG)])


def weights_of_zero(rank):
    pos = torch.tensor([2.0 * rank, 2.0 * rank + 1])
    weight = torch.tensor([0, 0] if rank != 1 else [1, 1])
    empty = assign_sharded(pos[:0], 2, "rcb", node_weight=weight[:0])
    return assign_sharded(pos, 2, "rcb", node_weight=weight).tolist(), empty.tolist()


def test_weights_may_be_zero_on_a_rank_and_there_may_be_no_nodes(worlds):
    assert worlds.run(3, weights_of_zero) == [([0, 0], []), ([0, 1], []), ([1, 1], [])]
