"""Boxes of a tensor: elements of the flat order, fused blocks, and what torch asks of them."""

import copy
import itertools
import pickle
import re
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from varcomm import ArgumentError
from varcomm.sharding import Box, Sharded, ShardSpec

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def put_together(shape, parts):
    """What the boxes of all parts say together; each element must be said once."""
    whole, times = torch.full(shape, -1), torch.zeros(shape, dtype=torch.int64)
    for part in parts:
        assert tuple(part.shape) == tuple(shape)
        for box in part.boxes:
            place = tuple(
                slice(first, first + size)
                for first, size in zip(box.offsets, box.tensor.shape, strict=True)
            )
            whole[place] = box.tensor
            times[place] += 1
    return whole, times


@settings(deadline=None)
@given(SHAPES, st.lists(st.integers(0, 100), max_size=4))
def test_elements_cut_anywhere_cover_the_whole_once(shape, cuts):
    n = prod(shape)
    bounds = [0, *sorted(cut % (n + 1) for cut in cuts), n]
    values = torch.arange(n)
    parts = [
        Sharded.elements(values[low:high], shape, low) for low, high in itertools.pairwise(bounds)
    ]
    whole, times = put_together(shape, parts)
    assert torch.equal(whole, values.view(shape))
    assert bool((times == 1).all())
    assert all(len(part.boxes) <= max(1, 2 * len(shape) - 1) for part in parts)


def test_boxes_are_views_that_can_be_loaded_into():
    flat = torch.zeros(7)
    piece = Sharded.elements(flat, (3, 4), 2)
    for box in piece.boxes:
        box.tensor.fill_(1)
    assert flat.eq(1).all()
    assert piece.local is flat


def fused_elements(rank, ranks, blocks, dim):
    spec = ShardSpec.of(blocks, dim)
    shape = [3, 3, 3]
    shape[dim] = spec.total
    whole = torch.arange(prod(shape)).view(shape)
    own = spec.shard(whole)
    flat = own.reshape(-1).clone()
    cut = len(flat) // 3
    return [
        [(box.offsets, box.tensor) for box in part.boxes]
        for part in (
            Sharded.of(own, spec),
            Sharded.elements(flat[:cut], own.shape, 0, spec),
            Sharded.elements(flat[cut:], own.shape, cut, spec),
        )
    ], tuple(shape)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("blocks", [[[2, 0, 3]], [[2, 0, 1], [0, 0, 3], [1, 1, 1]]])
def test_pieces_of_shards_with_fused_blocks(worlds, blocks, dim):
    ranks = worlds.run(3, fused_elements, 3, blocks, dim)
    shape = ranks[0][1]
    expected = torch.arange(prod(shape)).view(shape)

    def sharded(boxes):
        return Sharded(shape, [Box(*box) for box in boxes], torch.int64)

    by_shards = put_together(shape, [sharded(parts[0]) for parts, _ in ranks])
    by_pieces = put_together(shape, [sharded(part) for parts, _ in ranks for part in parts[1:]])
    for whole, times in (by_shards, by_pieces):
        assert torch.equal(whole, expected)
        assert bool((times == 1).all())


def test_nothing_is_computed_with_it():
    piece = Sharded.elements(torch.zeros(2), (2,), 0)
    with pytest.raises(ArgumentError, match="cannot be applied to a Sharded tensor"):
        piece + 1
    assert repr(piece) == "Sharded(shape=(2,), dtype=torch.float32, boxes=[((0,), (2,))])"


def test_a_copy_has_the_same_boxes():
    piece = Sharded.elements(torch.ones(5), (2, 4), 1)
    copy = piece.map(torch.clone)
    copy.boxes[0].tensor.zero_()
    assert [box.offsets for box in copy.boxes] == [(0, 1), (1, 0)]
    assert piece.local.eq(1).all()
    assert piece.map(torch.Tensor.double).dtype == torch.float64
    assert Sharded((2,), [], torch.int8).map(torch.clone).dtype == torch.int8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Sharded((2,), [Box((1,), torch.zeros(2))]), "shape (2,) at (1,) is not inside"),
        (lambda: Sharded((2, 2), [Box((0,), torch.zeros(2))]), "is not inside a tensor"),
        (
            lambda: Sharded((2,), [Box((0,), torch.zeros(2))], torch.int64),
            "one dtype; got ['torch.float32', 'torch.int64']",
        ),
        (lambda: Sharded.elements(torch.zeros(1, 1), (2,), 0), "got shape (1, 1) from element 0"),
        (lambda: Sharded.elements(torch.zeros(2), (2,), 1), "must be of one dimension and lie"),
        (lambda: Sharded.elements(torch.zeros(2), (2,), -1), "must be of one dimension and lie"),
        (lambda: Sharded.elements(torch.zeros(2), (2,), "0"), "from element '0' on"),
        (lambda: Sharded.elements([0.0], (2,), 0), "flat must be"),
    ],
)
def test_what_is_no_part_is_refused(call, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        call()


def parts_that_do_not_fit(rank):
    spec = ShardSpec.of([2, 1, 0], dim=1)
    messages = []
    for call in (
        lambda: Sharded.of(torch.zeros(2, 4), spec),
        lambda: Sharded.elements(torch.zeros(8), (2, 4), 0, spec),
        lambda: Sharded.elements(torch.zeros(2), (2,), 0, spec),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_what_is_no_part_of_the_spec_is_refused(worlds):
    rows, elements, flat = worlds.run(3, parts_that_do_not_fit)[0]
    assert "has 2 rows along dim 1; got a tensor of shape (2, 4)" in rows
    assert "this rank's part has 2 rows along dim 1; got 4" in elements
    assert "a tensor of 1 dimensions has no dimension 1" in flat


def test_a_deep_copy_has_boxes_of_its_own_and_pickle_is_refused():
    piece = Sharded.elements(torch.ones(5), (2, 4), 1)
    again = copy.deepcopy({"piece": piece})["piece"]
    again.boxes[0].tensor.zero_()
    assert [box.offsets for box in again.boxes] == [(0, 1), (1, 0)]
    assert again.local.tolist() == [0, 0, 0, 1, 1]  # of which the boxes are views, as before
    assert piece.local.eq(1).all()
    assert copy.deepcopy(Sharded((2,), [], torch.int8)).dtype == torch.int8
    with pytest.raises(ArgumentError, match="a Sharded tensor cannot be pickled, as by "):
        pickle.dumps(piece)
