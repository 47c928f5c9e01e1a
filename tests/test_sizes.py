"""Sizes of shards: arithmetic against naive loops, and refusals."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import on_ranks, refused_alike
from varcomm import ArgumentError, ShardSizes


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8))
def test_arithmetic(sizes):
    shards = ShardSizes(sizes)
    owners = [rank for rank, rows in enumerate(sizes) for _ in range(rows)]
    assert [row for rank in range(len(sizes)) for row in shards.range(rank)] == [*range(sum(sizes))]
    assert shards.total == sum(sizes)
    assert shards.offsets == tuple(sum(sizes[:rank]) for rank in range(len(sizes)))
    assert [shards.owner(row) for row in range(shards.total)] == owners
    for dtype in (torch.int64, torch.int32, torch.uint8):
        ranks = shards.owner(torch.arange(shards.total).to(dtype))
        assert (ranks.dtype, ranks.tolist()) == (torch.int64, owners)
    assert shards * 3 == 3 * shards == tuple(3 * n for n in sizes)


@given(st.integers(0, 500), st.integers(1, 12), st.integers(1, 9))
def test_balanced_and_chunked(n, parts, multiple_of):
    sizes = ShardSizes.balanced(n, parts, multiple_of)
    assert (len(sizes), sum(sizes)) == (parts, n)
    assert max(sizes) - min(sizes) <= multiple_of
    assert sum(size % multiple_of != 0 for size in sizes) == (n % multiple_of != 0)
    assert list(sizes) == sorted(sizes, reverse=True)
    chunks = [len(chunk) for chunk in torch.arange(n).chunk(parts)]
    assert ShardSizes.chunked(n, parts) == (*chunks, *[0] * (parts - len(chunks)))


SIZES = ShardSizes([2, 3])


def test_plain_ints_from_all_libraries():
    assert ShardSizes.balanced(14, 8) == (2, 2, 2, 2, 2, 2, 1, 1)
    made = [ShardSizes.balanced(i(200), i(3), i(4)) for i in (np.int32, np.uint8, torch.tensor)]
    made += [
        ShardSizes(iter([68, 68, 64])),
        ShardSizes(np.array([68, 68, 64])),
        ShardSizes([np.uint8(68), np.int64(68), torch.tensor(64)]),
        ShardSizes(torch.tensor([68, 68, 64], dtype=torch.int32)),
        ShardSizes(torch.Size([68, 68, 64])),
    ]
    for sizes in made:
        assert sizes == (68, 68, 64)
        assert {type(size) for size in sizes} == {int}
    shards = ShardSizes([2, 0, 1])
    for index, ranks in (
        (torch.tensor([[2, 0], [1, 2]]), [[2, 0], [0, 2]]),
        (torch.tensor(2), 2),
        (torch.zeros(3, 0, dtype=torch.int32), [[], [], []]),
    ):
        assert shards.owner(index).tolist() == ranks
    assert ShardSizes().owner(torch.zeros(0, dtype=torch.int64)).shape == (0,)


REFUSALS = [
    (lambda: ShardSizes(5), "sizes"),
    (lambda: ShardSizes("35"), "sizes"),
    (lambda: ShardSizes(torch.tensor(5)), "sizes"),
    (lambda: ShardSizes({3, 4}), "sizes"),
    (lambda: ShardSizes([3, 2.0]), "sizes .* entry 1 "),
    (lambda: ShardSizes([True]), "sizes .* bool"),
    (lambda: ShardSizes([4, -1]), r"sizes .*\[4, -1\]"),
    (lambda: SIZES.owner(-1), "index .* -1"),
    (lambda: SIZES.owner(5), "index 5 "),
    (lambda: SIZES.owner(torch.tensor([1, 5])), "index .* 5 rows"),
    (lambda: SIZES.owner(torch.ones(2)), "index .* torch.float32"),
    (lambda: SIZES.owner(torch.ones(2, dtype=torch.bool)), "index .* torch.bool"),
    (lambda: SIZES.owner(1.5), "index .* 1.5"),
    (lambda: SIZES.range(-1), "rank .* -1"),
    (lambda: SIZES.range(0.0), "rank .* 0.0"),
    (lambda: SIZES * -1, "factor"),
    (lambda: ShardSizes.balanced(-1, 2), "n .* -1"),
    (lambda: ShardSizes.balanced(3.0, 2), "n .* 3.0"),
    (lambda: ShardSizes.balanced(3, True), "parts .* True"),
    (lambda: ShardSizes.balanced(3, 2, 0), "multiple_of .* 0"),
    (lambda: ShardSizes.chunked(3, 0), "parts .* 0"),
]


def test_refusals():
    for call, message in REFUSALS:
        with pytest.raises(ArgumentError, match=message):
            call()


def test_a_tuple_among_tuples():
    sizes = ShardSizes([3, 0, 5])
    assert sizes == (3, 0, 5)
    assert sizes in {(3, 0, 5)}
    assert ShardSizes(sizes) is sizes
    assert repr(sizes) == "ShardSizes(3, 0, 5)"
    assert torch.zeros(8, 2).split(sizes)[2].shape == (5, 2)
    with pytest.raises(TypeError, match="item assignment"):
        sizes[0] = 4
    for again in (copy.copy(sizes), copy.deepcopy(sizes), pickle.loads(pickle.dumps(sizes))):
        assert type(again) is ShardSizes
        assert (again, again.total, again.offsets) == (sizes, 8, (0, 3, 3))


@on_ranks(1, 3)
def test_from_local(rank, ranks):
    for kind in (int, np.int32):
        sizes = ShardSizes.from_local(kind(7 * rank % 5))
        assert sizes == tuple(7 * other % 5 for other in range(ranks))
        assert {type(size) for size in sizes} == {int}
    if ranks == 3:
        group = dist.new_group([1, 2])  # in which they are 0 and 1
        assert rank == 0 or ShardSizes.from_local(10 * rank, group) == (10, 20)
        dist.barrier()
    wrong = -1 if rank == 0 else 4
    refused_alike(ArgumentError, lambda: ShardSizes.from_local(wrong), "refused on rank 0")
