"""Owners of elements: exact sums, no element twice or left out, no more than the share."""

from itertools import pairwise

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.data_parallel.sharded_cases import plain
from varcomm import ShardSizes
from varcomm.data_parallel import ShardedGradients

RANKS = 3
SHAPES = st.tuples(st.integers(0, 5), st.integers(0, 6), st.booleans())


@st.composite
def models(draw):
    """Shapes and dtypes of parameters, sizes of pieces, and bytes of a bucket."""
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=6))
    total = sum(rows * columns for rows, columns, _ in shapes)
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=RANKS - 1, max_size=RANKS - 1)))
    listed = [b - a for a, b in pairwise([0, *cuts, total])]
    sizes = draw(st.sampled_from(["balanced", "whole-parameters", listed]))
    return shapes, sizes, draw(st.integers(1, 400))


def owned(rank, drawn):
    """Of each model, the pieces of this rank by name."""
    found = []
    for shapes, sizes, bucket_bytes in drawn:
        model = nn.ParameterList(
            torch.zeros(rows, columns, dtype=torch.float64 if wide else torch.bfloat16)
            for rows, columns, wide in shapes
        )
        own = ShardedGradients(model, plain, sizes=sizes, bucket_bytes=bucket_bytes)
        found.append({name: (p.start, p.stop) for name, p in own.pieces.items()})
        own.close()
    return found


def check(shapes, sizes, pieces):
    numbers = [rows * columns for rows, columns, _ in shapes]
    counts = [torch.zeros(number, dtype=torch.int64) for number in numbers]
    homes = [0] * len(numbers)
    for own in pieces:
        for name, (start, stop) in own.items():
            counts[int(name)][start:stop] += 1
            homes[int(name)] += 1
            assert sizes != "whole-parameters" or stop - start == numbers[int(name)]
    assert all(bool((count == 1).all()) for count in counts)
    # optimizers have states of parameters without elements too, which one rank keeps
    assert all(home == 1 for home, number in zip(homes, numbers, strict=True) if not number)
    load = [sum(stop - start for start, stop in own.values()) for own in pieces]
    if sizes == "balanced":
        assert tuple(load) == tuple(ShardSizes.balanced(sum(numbers), RANKS))
    elif sizes == "whole-parameters":  # Graham's bound
        assert max(load) <= sum(numbers) / RANKS + (1 - 1 / RANKS) * max(numbers)
    else:
        assert load == sizes


def test_every_element_has_one_owner(worlds):
    @settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(models(), min_size=1, max_size=12))
    def run(drawn):
        results = worlds.run(RANKS, owned, drawn)
        for (shapes, sizes, _), *pieces in zip(drawn, *results, strict=True):
            check(shapes, sizes, pieces)

    run()
