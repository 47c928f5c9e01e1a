"""How parameters are sharded, marks that stay, and pieces of uneven sizes."""

from itertools import product

import pytest
import torch

from tests.ops.comparing import Failures, assert_none
from tests.tensor_parallel.twins import drawn
from tests.worlds import WORLDS
from varcomm import ShardSizes
from varcomm.sharding import ShardSpec
from varcomm.tensor_parallel.mappings import (
    gather_split_1d_tensor,
    split_tensor_along_last_dim,
    split_tensor_into_1d_chunks,
    vocab_range,
)
from varcomm.testing import gradgradcheck

BLOCKS = {
    1: [[[4]], [[3], [0], [2]]],
    2: [[[2, 2]], [[3, 0], [1, 2]], [[0, 4]]],
    3: [[[2, 2, 1]], [[2, 0, 1], [0, 0, 3], [1, 1, 1]], [[0, 5, 0], [1, 0, 0]]],
    5: [[[1, 1, 1, 1, 1]], [[0, 2, 0, 3, 1], [1, 0, 0, 0, 4]]],
}


def by_hand(whole, blocks, rank, dim):
    """This rank's part, by cutting the whole into blocks and each into parts."""
    parts, first = [], 0
    for block in blocks:
        begin = first + sum(block[:rank])
        parts += [whole.select(dim, row) for row in range(begin, begin + block[rank])]
        first += sum(block)
    return torch.stack(parts, dim) if parts else whole.narrow(dim, 0, 0)


def sharded_and_back(rank, ranks):
    failures = Failures()
    for blocks, dim in product(BLOCKS[ranks], (0, 2)):
        spec = ShardSpec.of(blocks if len(blocks) > 1 else blocks[0], dim)
        shape = [2, 3, 2]
        shape[dim] = spec.total
        whole = drawn(1, *shape)
        own = spec.shard(whole)
        with failures.named(blocks, dim):
            assert torch.equal(spec.gather(own), whole)
            gradgradcheck(lambda x, spec=spec: spec.gather(x) ** 2, own, fast_mode=True)
            assert torch.equal(own, by_hand(whole, blocks, rank, dim))
            assert spec.local == own.shape[dim]
            assert [stop - start for start, stop in spec.ranges(rank)] == [b[rank] for b in blocks]
            assert spec.blocks == tuple(map(ShardSizes, blocks))
            own += 1  # a copy: the whole does not change with it
            assert torch.equal(whole, drawn(1, *shape))
    return failures


@pytest.mark.parametrize("ranks", WORLDS)
def test_shard_and_gather(worlds, ranks):
    assert_none(worlds.run(ranks, sharded_and_back, ranks))


def pieces(rank, ranks):
    answers = []
    for shape in ((), (0,), (2, 3), (7, 1, 2)):
        x = drawn(2, *shape).requires_grad_()
        piece = split_tensor_into_1d_chunks(x)
        whole = gather_split_1d_tensor(piece, x.numel()).view(shape)
        asked = gather_split_1d_tensor(piece).view(shape)
        (grad,) = torch.autograd.grad((whole**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        answers += [
            torch.equal(whole, x),
            torch.equal(asked, x),
            piece.shape == (ShardSizes.balanced(x.numel(), ranks)[rank],),
            piece.untyped_storage().nbytes() <= 8 * max(len(piece), 1),
            torch.allclose(grad, 3 * x**2),
            torch.allclose(second, 6 * x),
        ]
    return answers


@pytest.mark.parametrize("ranks", WORLDS)
def test_pieces_of_elements(worlds, ranks):
    for answers in worlds.run(ranks, pieces, ranks):
        assert answers == [True] * 24


def test_parts_of_the_last_dimension():
    x = torch.arange(12).view(2, 6)
    a, b, c = split_tensor_along_last_dim(x, [1, 0, 5])
    assert (a.tolist(), b.shape, c.tolist()) == ([[0], [6]], (2, 0), x[:, 1:].tolist())
    assert c.data_ptr() == x[:, 1:].data_ptr()
    copied = split_tensor_along_last_dim(x, (1, 5), contiguous=True)[1]
    assert copied.is_contiguous()
    assert copied.data_ptr() != x[:, 1:].data_ptr()


def test_ranges_of_ids():
    assert [vocab_range([5, 0, 3], rank) for rank in range(3)] == [(0, 5), (5, 5), (5, 8)]
