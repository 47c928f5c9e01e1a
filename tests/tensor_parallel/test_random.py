"""Streams of random numbers: which ranks draw alike, and that nothing else is disturbed."""

import io

import pytest
import torch
import torch.distributed as dist

from tests.worlds import WORLDS, on_ranks
from varcomm import ArgumentError
from varcomm.tensor_parallel.checkpoint import checkpoint
from varcomm.tensor_parallel.random import RandomStreams


def draw(streams, name, n=4):
    with streams.fork(name):
        return torch.rand(n).tolist()


def both(rank, seed, coordinates):
    streams = RandomStreams(seed, **coordinates)
    return [[draw(streams, name) for _ in range(2)] for name in ("replicated", "sharded")]


@pytest.mark.parametrize("ranks", WORLDS)
def test_replicated_is_the_same_on_all_ranks_and_sharded_on_none(worlds, ranks):
    drawn = worlds.run(ranks, both, 7, {})
    replicated = {repr(first) for first, _ in drawn}
    sharded = {repr(second) for _, second in drawn}
    assert (len(replicated), len(sharded)) == (1, ranks)
    assert not replicated & sharded
    assert worlds.run(ranks, both, 7, {}) == drawn
    (first, second), _ = drawn[0]
    assert first != second  # a stream continues


def test_seeds_and_coordinates_make_other_streams(worlds):
    calls = [(7, {}), (8, {}), (7, {"data": 0}), (7, {"data": 1}), (7, {"pipe": 1})]
    drawn = [repr(part) for call in calls for part in worlds.run(1, both, *call)[0]]
    assert len(set(drawn)) == 2 * len(calls)


@on_ranks(3)
def test_seed_0_on_rank_1_is_not_seed_1_on_rank_0(rank):
    """Two numbers of each stream of nearby seeds."""
    made, numbers = [RandomStreams(seed) for seed in range(-2, 10)], [None] * 3
    drawn = [[tuple(draw(s, name, 2)) for s in made] for name in ("replicated", "sharded")]
    dist.all_gather_object(numbers, drawn)
    sharded = [values for _, of_rank in numbers for values in of_rank]
    assert len({*sharded, *drawn[0]}) == 4 * 12


@on_ranks(2)
def test_default_generators_are_left_as_they_were(rank):
    """They are as they were, and give numbers that have nothing to do with the streams."""
    streams = RandomStreams(7)
    torch.manual_seed(3)
    expected = torch.rand(4).tolist()
    torch.manual_seed(3)
    with streams.fork("sharded"):
        torch.rand(5)
        with streams.fork("replicated"):
            inner = torch.rand(3).tolist()
    assert expected == torch.rand(4).tolist()
    assert inner == draw(RandomStreams(7), "replicated", 3)


@on_ranks(3)
def test_states_can_be_saved_and_restored(rank):
    """Through a file, with torch's weights_only."""
    streams, other = RandomStreams(7), RandomStreams(7)
    for each in (streams, other):
        each.add("expert", expert=rank // 2)
    draw(streams, "sharded")
    file = io.BytesIO()
    torch.save(streams.state_dict(), file)
    names = ("replicated", "sharded", "expert")
    expected = [draw(streams, name) for name in names]
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert expected == [draw(other, name) for name in names]
    experts = [None] * 3
    dist.all_gather_object(experts, expected[2])
    assert experts[0] == experts[1] != experts[2]


@pytest.mark.parametrize("nesting", ["alone", "around", "inside"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@on_ranks(1)
def test_torchs_own_checkpoint_is_refused(rank, nesting, use_reentrant):
    """It puts default generators back, not streams, and gradients would be of another mask."""
    streams = RandomStreams(7)

    def dropped(x):
        with streams.fork("sharded"):
            return torch.nn.functional.dropout(x.exp(), 0.5)

    def torchs(function, x):
        return torch.utils.checkpoint.checkpoint(function, x, use_reentrant=use_reentrant)

    calls = {
        "alone": lambda x: torchs(dropped, x),
        "around": lambda x: torchs(lambda x: checkpoint(dropped, x).sin(), x),
        "inside": lambda x: checkpoint(lambda x: torchs(dropped, x).sin(), x),
    }
    x = torch.ones(3, requires_grad=True)
    y = calls[nesting](x).sum()
    with pytest.raises(ArgumentError, match=r"torch\.utils\.checkpoint"):
        y.backward()
