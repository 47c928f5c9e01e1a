"""Sizes of shards: arithmetic against naive loops, and every way to get them wrong."""

import copy
import pickle
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from varcomm import ArgumentError, ShardSizes

some_sizes = st.lists(st.integers(0, 6), min_size=1, max_size=8)


def holders(sizes):
    """List the rank of each global row."""
    return [rank for rank, rows in enumerate(sizes) for _ in range(rows)]


@given(some_sizes)
def test_total_offsets_and_ranges_cover_all_rows_in_order(sizes):
    shards = ShardSizes(sizes)
    rows = [row for rank in range(len(sizes)) for row in shards.range(rank)]
    assert rows == list(range(shards.total))
    assert shards.total == sum(sizes)
    assert shards.offsets == tuple(sum(sizes[:rank]) for rank in range(len(sizes)))
    assert [len(shards.range(rank)) for rank in range(len(sizes))] == sizes


@given(some_sizes)
def test_owner_of_every_row(sizes):
    shards, want = ShardSizes(sizes), holders(sizes)
    assert [shards.owner(row) for row in range(shards.total)] == want
    rows = torch.arange(shards.total)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        ranks = shards.owner(rows.to(dtype))
        assert ranks.dtype == torch.int64
        assert ranks.tolist() == want


def test_owner_keeps_the_shape_of_a_tensor():
    shards = ShardSizes([2, 0, 1])
    assert shards.owner(torch.tensor([[2, 0], [1, 2]])).tolist() == [[2, 0], [0, 2]]
    assert shards.owner(torch.tensor(2)).shape == ()
    assert shards.owner(torch.zeros(3, 0, dtype=torch.int32)).shape == (3, 0)
    assert ShardSizes().owner(torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("row", [-1, 5])
def test_owner_of_a_row_that_is_not_there(row):
    shards = ShardSizes([2, 0, 3])
    message = f"index {row} is out of range for 5 rows (sizes [2, 0, 3])."
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        shards.owner(row)
    low, high = sorted((1, row))
    message = f"index spans {low}...{high}, but there are 5 rows (sizes [2, 0, 3])."
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        shards.owner(torch.tensor([1, row]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_owner_of_a_tensor_of_no_integers(dtype):
    with pytest.raises(ArgumentError, match=f"^index must be a tensor of integers; got {dtype}"):
        ShardSizes([2, 3]).owner(torch.ones(2, dtype=dtype))


@pytest.mark.parametrize("index", [1.5, True, "1", None])
def test_owner_of_no_integer(index):
    message = f"^index must be an integer or a tensor of integers; got {index!r}"
    with pytest.raises(ArgumentError, match=message):
        ShardSizes([2, 3]).owner(index)


@pytest.mark.parametrize("rank", [-1, 2, 0.0, True])
def test_range_of_no_rank(rank):
    message = re.escape(f"rank must be a rank of the group, 0...1; got {rank!r}.")
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        ShardSizes([2, 3]).range(rank)


@given(st.integers(0, 500), st.integers(1, 12), st.integers(1, 9))
def test_balanced(n, parts, multiple_of):
    sizes = ShardSizes.balanced(n, parts, multiple_of)
    assert len(sizes) == parts
    assert sum(sizes) == n
    assert max(sizes) - min(sizes) <= multiple_of
    assert sum(size % multiple_of != 0 for size in sizes) == (n % multiple_of != 0)
    assert list(sizes) == sorted(sizes, reverse=True)


def test_balanced_does_not_leave_the_rest_to_the_last():
    assert ShardSizes.balanced(14, 8) == (2, 2, 2, 2, 2, 2, 1, 1)
    assert ShardSizes.balanced(32003, 4) == (8001, 8001, 8001, 8000)
    assert ShardSizes.balanced(100, 3, multiple_of=8) == (36, 32, 32)
    assert ShardSizes.balanced(2, 4) == (1, 1, 0, 0)


@given(st.integers(0, 60), st.integers(1, 12))
def test_chunked_is_the_rule_of_torch_chunk(n, parts):
    chunks = [len(chunk) for chunk in torch.arange(n).chunk(parts)]
    assert ShardSizes.chunked(n, parts) == (*chunks, *[0] * (parts - len(chunks)))


@pytest.mark.parametrize(("arguments", "name", "least"), [((-1, 2), "n", 0), ((3, 0), "parts", 1)])
def test_chunked_refuses(arguments, name, least):
    with pytest.raises(ArgumentError, match=f"^{name} must be an integer of at least {least}"):
        ShardSizes.chunked(*arguments)


@pytest.mark.parametrize("integer", [np.int32, np.uint8, torch.tensor])
def test_balanced_takes_integers_of_any_library(integer):
    sizes = ShardSizes.balanced(integer(200), integer(3), integer(4))
    assert sizes == (68, 68, 64)
    assert {type(size) for size in sizes} == {int}


@pytest.mark.parametrize(
    ("arguments", "name", "least"),
    [
        ((-1, 2), "n", 0),
        ((3.0, 2), "n", 0),
        ((3, 0), "parts", 1),
        ((3, True), "parts", 1),
        ((3, 2, 0), "multiple_of", 1),
        ((3, 2, "8"), "multiple_of", 1),
    ],
)
def test_balanced_refuses(arguments, name, least):
    message = f"^{name} must be an integer of at least {least}; got "
    with pytest.raises(ArgumentError, match=message):
        ShardSizes.balanced(*arguments)


@pytest.mark.parametrize(
    "given",
    [
        [3, 0, 5],
        (3, 0, 5),
        iter([3, 0, 5]),
        np.array([3, 0, 5]),
        [np.uint8(3), np.int64(0), np.int32(5)],
        torch.tensor([3, 0, 5]),
        torch.tensor([3, 0, 5], dtype=torch.int32),
        torch.Size([3, 0, 5]),
    ],
    ids=lambda given: type(given).__name__,
)
def test_sizes_are_plain_ints_whatever_they_are_made_of(given):
    sizes = ShardSizes(given)
    assert sizes == (3, 0, 5)
    assert {type(size) for size in sizes} == {int}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (5, "sizes must be a list or tuple of ints, one a rank; got 5."),
        ("35", "sizes must be a list or tuple of ints, one a rank; got '35'."),
        (b"35", "sizes must be a list or tuple of ints, one a rank; got b'35'."),
        (torch.tensor(5), "sizes must be a list or tuple of ints, one a rank; got tensor(5)."),
        (np.array(5), "sizes must be a list or tuple of ints, one a rank; got array(5)."),
        (
            [3, 2.0],
            "sizes must hold ints; got [3, 2.0], where entry 1 is 2.0 of type float.",
        ),
        ([True], "sizes must hold ints; got [True], where entry 0 is True of type bool."),
        (["3"], "sizes must hold ints; got ['3'], where entry 0 is '3' of type str."),
        (
            [1, None],
            "sizes must hold ints; got [1, None], where entry 1 is None of type NoneType.",
        ),
        ([4, -1], "sizes must not be negative; got [4, -1]."),
    ],
)
def test_sizes_refused(given, message):
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        ShardSizes(given)


def test_a_tuple_among_tuples():
    sizes = ShardSizes([3, 0, 5])
    assert sizes == (3, 0, 5)
    assert sizes in {(3, 0, 5)}
    assert sizes != (3, 5, 0)
    assert hash(sizes) == hash((3, 0, 5))
    assert ShardSizes(sizes) is sizes
    assert repr(sizes) == "ShardSizes(3, 0, 5)"
    assert torch.zeros(8, 2).split(sizes)[2].shape == (5, 2)
    assert ShardSizes() == ()
    assert ShardSizes().total == 0


def test_sizes_cannot_be_changed():
    sizes = ShardSizes([3, 0, 5])
    with pytest.raises(TypeError, match="item assignment"):
        sizes[0] = 4


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda sizes: pickle.loads(pickle.dumps(sizes))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies(copied):
    sizes = ShardSizes([3, 0, 5])
    assert sizes.offsets == (0, 3, 3)  # what is cached does no harm
    again = copied(sizes)
    assert type(again) is ShardSizes
    assert again == sizes
    assert (again.total, again.offsets) == (8, (0, 3, 3))


def collected(rank, rows):
    sizes = ShardSizes.from_local(rows[rank])
    return type(sizes).__name__, sizes, {type(size).__name__ for size in sizes}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_from_local(worlds, ranks):
    rows = [(7 * rank) % 5 for rank in range(ranks)]
    for own in (rows, [np.int32(n) for n in rows]):
        assert worlds.run(ranks, collected, own) == [("ShardSizes", tuple(rows), {"int"})] * ranks


def refused(rank, rows):
    with pytest.raises(ArgumentError) as caught:
        ShardSizes.from_local(rows[rank])
    return str(caught.value), ShardSizes.from_local(rank)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (-1, "n must not be negative; got [-1]."),
        (2.5, "n must hold ints; got [2.5], where entry 0 is 2.5 of type float."),
    ],
)
def test_from_local_refused_on_one_rank_is_refused_on_all(worlds, wrong, said):
    message = f"ShardSizes.from_local: refused on rank 1 of 3: {said}"
    assert worlds.run(3, refused, [4, wrong, 4]) == [(message, (0, 1, 2))] * 3


def collected_in_a_part(rank):
    """Ranks 1 and 2 of 3 make a group of their own, in which they are 0 and 1."""
    group = dist.new_group([1, 2])
    sizes = ShardSizes.from_local(10 * rank, group) if rank else None
    dist.barrier()
    return sizes


def test_from_local_in_a_subgroup(worlds):
    assert worlds.run(3, collected_in_a_part) == [None, (10, 20), (10, 20)]


def test_sizes_of_rows_that_are_several_of_others():
    heads = ShardSizes.balanced(14, 4)
    assert heads * 8 == 8 * heads == ShardSizes(8 * n for n in heads) == (32, 32, 24, 24)
    assert (heads * 0).total == 0
    for wrong in (-1, 1.5, True):
        with pytest.raises(ArgumentError, match="the factor of sizes must be an integer of at lea"):
            heads * wrong
