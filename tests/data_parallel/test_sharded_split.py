"""Who owns what: exact sums, no element twice or left out, no more than its share."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from varcomm import ShardSizes
from varcomm.data_parallel.sharded.split import WHOLE, Split, apportion, owners, splits

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=9)


@st.composite
def shares(draw):
    """Lengths of rows, and sizes of ranks that have the same sum."""
    lengths = draw(LENGTHS)
    total = sum(lengths)
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=0, max_size=6)))
    bounds = [0, *cuts, total]
    return lengths, [b - a for a, b in pairwise(bounds)]


@given(shares())
def test_shares_of_rows_add_up_to_the_sizes(drawn):
    lengths, sizes = drawn
    found = apportion(lengths, sizes)
    assert [sum(row) for row in found] == lengths
    assert [sum(column) for column in zip(*found, strict=True)] == sizes
    total = max(sum(lengths), 1)
    left = list(sizes)
    for length, row in zip(lengths, found, strict=True):
        # never more than one element off what is in proportion to what is left
        assert all(abs(part - length * n / total) < 1 for part, n in zip(row, left, strict=True))
        left = [n - part for n, part in zip(left, row, strict=True)]
        total = max(total - length, 1)


def test_what_has_no_elements_is_on_one_rank():
    split = Split.of([3, 2, 1, 0], [0, 4, 0, 0], [1, 3, 0])
    assert [[segment.index for segment in own] for own in split.segments] == [[3, 2, 1, 0], [2], []]
    assert [[len(segment) for segment in own] for own in split.segments] == [[0, 1, 0, 0], [3], []]


def test_the_rest_does_not_go_to_the_last_rank():
    """14 // 8 is 1, and the last would get 7."""
    assert apportion([14], ShardSizes.balanced(14, 8)) == [(2, 2, 2, 2, 2, 2, 1, 1)]
    assert sorted(apportion([1] * 8, [1] * 8)) == sorted(
        tuple(int(i == r) for i in range(8)) for r in range(8)
    )


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6), st.booleans()), min_size=1),
    st.integers(1, 6),
    st.integers(1, 400),
    st.booleans(),
)
def test_every_element_has_one_owner(shapes, ranks, bucket_bytes, whole):
    values = [
        torch.zeros(rows, columns, dtype=torch.float64 if wide else torch.bfloat16)
        for rows, columns, wide in shapes
    ]
    found = splits(values, WHOLE if whole else "balanced", ranks, bucket_bytes)
    counts = [torch.zeros(value.numel(), dtype=torch.int64) for value in values]
    for split in found:
        assert len({values[index].dtype for index in split.members}) == 1
        for size, segments in zip(split.sizes, split.segments, strict=True):
            assert size == sum(map(len, segments))
            for segment in segments:
                counts[segment.index][segment.start : segment.stop] += 1
                assert not whole or len(segment) == values[segment.index].numel()
    assert sorted(i for split in found for i in split.members) == list(range(len(values)))
    assert all(bool((count == 1).all()) for count in counts)
    if not whole:
        owned = [sum(split.sizes[rank] for split in found) for rank in range(ranks)]
        assert max(owned) - min(owned) <= 1


@given(st.lists(st.integers(0, 100), min_size=1, max_size=40), st.integers(1, 6))
def test_whole_parameters_are_shared_out_evenly(numbers, ranks):
    """By Graham's bound, on what cannot be undercut: the mean, the largest, two of the largest."""
    owner = owners(numbers, ranks)
    load = [sum(n for n, o in zip(numbers, owner, strict=True) if o == r) for r in range(ranks)]
    # a rank that got its last when it had least has no more than the mean and that one
    assert max(load) <= sum(numbers) / ranks + (1 - 1 / ranks) * max(numbers)
    assert sum(load) == sum(numbers)
