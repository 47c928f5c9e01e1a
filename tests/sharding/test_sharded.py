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


def put_together(shape, boxes):
    """What boxes say together; each element must be said once."""
    whole, times = torch.full(shape, -1), torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        ends = zip(box.offsets, box.tensor.shape, strict=True)
        place = tuple(slice(first, first + size) for first, size in ends)
        whole[place] = box.tensor
        times[place] += 1
    assert bool((times == 1).all())
    return whole


@settings(deadline=None)
@given(SHAPES, st.lists(st.integers(0, 100), max_size=4))
def test_elements_cut_anywhere_cover_the_whole_once(shape, cuts):
    n = prod(shape)
    bounds = [0, *sorted(cut % (n + 1) for cut in cuts), n]
    values = torch.arange(n)
    parts = [Sharded.elements(values[a:b], shape, a) for a, b in itertools.pairwise(bounds)]
    whole = put_together(shape, [box for part in parts for box in part.boxes])
    assert torch.equal(whole, values.view(shape))
    assert all(len(part.boxes) <= max(1, 2 * len(shape) - 1) for part in parts)
    assert all(part.shape == shape for part in parts)


def fused_elements(rank):
    """The boxes of shards, and of two pieces of each, for blocks and dimensions."""
    found = []
    for blocks in ([[2, 0, 3]], [[2, 0, 1], [0, 0, 3], [1, 1, 1]]):
        for dim in range(3):
            spec = ShardSpec.of(blocks, dim)
            shape = (*[3] * dim, spec.total, *[3] * (2 - dim))
            own = spec.shard(torch.arange(prod(shape)).view(shape))
            flat, cut = own.reshape(-1).clone(), own.numel() // 3
            pieces = (flat[:cut], 0), (flat[cut:], cut)
            parts = [Sharded.elements(piece, own.shape, at, spec) for piece, at in pieces]
            found.append((shape, Sharded.of(own, spec).boxes, parts[0].boxes + parts[1].boxes))
    spec = ShardSpec.of([2, 1, 0], dim=1)
    for call, words in (
        (lambda: Sharded.of(torch.zeros(2, 4), spec), "rows along dim 1; got a tensor of shape (2"),
        (lambda: Sharded.elements(torch.zeros(8), (2, 4), 0, spec), "rows along dim 1; got 4"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(words)):
            call()
    return found


def test_pieces_of_shards_with_fused_blocks(worlds):
    for cases in zip(*worlds.run(3, fused_elements), strict=True):
        shape = cases[0][0]
        for by_shards in (1, 2):
            boxes = [box for case in cases for box in case[by_shards]]
            assert torch.equal(put_together(shape, boxes), torch.arange(prod(shape)).view(shape))


def test_boxes_are_views_and_copies_have_their_own():
    flat = torch.zeros(5)
    piece = Sharded.elements(flat, (2, 4), 1)
    for box in piece.boxes:
        box.tensor.fill_(1)
    assert flat.eq(1).all()
    assert piece.local is flat
    mapped, copied = piece.map(torch.clone), copy.deepcopy({"piece": piece})["piece"]
    for other in (mapped, copied):
        other.boxes[0].tensor.zero_()
        assert [box.offsets for box in other.boxes] == [(0, 1), (1, 0)]
    assert copied.local.tolist() == [0, 0, 0, 1, 1]  # of which the boxes are views, as before
    assert flat.eq(1).all()
    assert piece.map(torch.Tensor.double).dtype == torch.float64
    empty = Sharded((2,), [], torch.int8)
    assert empty.map(torch.clone).dtype == copy.deepcopy(empty).dtype == torch.int8
    assert repr(piece).startswith("Sharded(shape=(2, 4), dtype=torch.float32, boxes=[((0, 1), (1, ")


PIECE = Sharded.elements(torch.zeros(2), (2,), 0)
REFUSED = [
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
    (lambda: PIECE + 1, "cannot be applied to a Sharded tensor"),
    (lambda: pickle.dumps(PIECE), "a Sharded tensor cannot be pickled, as by "),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_is_no_part_is_refused(call, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        call()
