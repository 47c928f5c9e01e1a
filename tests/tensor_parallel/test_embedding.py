"""Embeddings with a sharded table against torch's on one process: values and derivatives."""

from itertools import product

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F

from tests.ops.comparing import Failures
from tests.tensor_parallel.embeddings import (
    PAD,
    PATTERNS,
    H,
    V,
    derivatives,
    drawn_ids,
    on_one_process,
    own_rows,
)
from tests.tensor_parallel.twins import drawn
from tests.worlds import WORLDS, on_ranks
from varcomm import ShardSizes
from varcomm.tensor_parallel.embedding import feature_parallel_embedding, vocab_parallel_embedding

LAYOUTS = ("replicated", "part")
EXCHANGES = ("rows", "sum")


def loss_of(rows, first=0):
    """A loss whose gradient depends on rows and places; of parts, it adds up to that of all."""
    steps = torch.arange(first, first + len(rows), dtype=rows.dtype)
    steps = steps.view(-1, *[1] * (rows.dim() - 1))
    return ((rows + steps / 7) ** 3 * torch.linspace(1, 2, H, dtype=rows.dtype)).sum()


def call(layout, ids, weight, pattern, rank, padding, exchange):
    """Return the rows, and the first of the sequence among them."""
    sizes, parts = pattern
    if layout == "replicated":
        return vocab_parallel_embedding(ids, weight, sizes, padding, exchange=exchange), 0
    first = ShardSizes(parts).offsets[rank]
    return vocab_parallel_embedding(ids, weight, sizes, padding, parts, exchange=exchange), first


def compare(failures, layout, pattern, padding, rank, shape=(2,)):
    sizes, parts = pattern
    whole, ids = drawn(1, V, H), drawn_ids(sum(parts), *shape, seed=len(parts))
    weight = own_rows(whole, sizes, rank).requires_grad_()
    want = on_one_process(ids, whole.requires_grad_(), padding)
    wanted = [own_rows(d, sizes, rank) for d in derivatives(loss_of(want), whole)]
    found = {}
    for exchange in EXCHANGES:
        rows, first = call(layout, ids.int(), weight, pattern, rank, padding, exchange)
        found[exchange] = derivatives(loss_of(rows, first), weight)
        with failures.named(pattern, layout, padding, shape, exchange):
            assert torch.equal(rows, want[first : first + len(rows)])
            for mine, theirs in zip(found[exchange], wanted, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    with failures.named(pattern, layout, padding, shape, "the same bits"):
        assert all(map(torch.equal, found["rows"], found["sum"]))


@on_ranks(*WORLDS[:3])
def test_values_and_derivatives(rank, ranks):
    failures = Failures()
    for pattern, layout in product(PATTERNS[ranks], LAYOUTS):
        for padding in (None, PAD, PAD - V):
            compare(failures, layout, pattern, padding, rank)
        for shape in ((), (0, 2)):
            compare(failures, layout, pattern, PAD, rank, shape)
    return failures


KINDS = (torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int16)


@on_ranks(3)
def test_dtypes(rank):
    """Lookups move rows exactly, whatever their dtype."""
    failures, ids = Failures(), drawn_ids(6, 2)
    for kind, (pattern, layout, exchange) in product(
        KINDS, product(PATTERNS[3], LAYOUTS, EXCHANGES)
    ):
        whole = (8 * drawn(1, V, H)).to(kind)
        weight = own_rows(whole, pattern[0], rank)
        rows, first = call(layout, ids, weight, pattern, rank, None, exchange)
        want = whole[ids][first : first + len(rows)]
        with failures.named(kind, pattern, layout, exchange):
            assert torch.equal(rows.view(torch.int8), want.contiguous().view(torch.int8))
    return failures


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("exchange", EXCHANGES)
@on_ranks(2)
def test_tangent_of_the_padding(rank, layout, exchange):
    """The padding's row is a constant in forward mode as well."""
    sizes, parts = PATTERNS[2][0]
    ids = drawn_ids(6, 2, seed=4)
    weight, tangent = (own_rows(drawn(s, V, H), sizes, rank) for s in (1, 2))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weight, tangent)
        rows, first = call(layout, ids, dual, (sizes, parts), rank, PAD, exchange)
        value, moving = forward_ad.unpack_dual(rows)
    kept = F.embedding(ids, drawn(2, V, H)) * (ids != PAD).unsqueeze(-1)
    at = slice(first, first + len(rows))
    assert torch.equal(moving, kept[at])
    assert torch.equal(value, F.embedding(ids, drawn(1, V, H))[at])


@on_ranks(*WORLDS[:3])
def test_sharded_by_features(rank, ranks):
    failures, scale = Failures(), torch.linspace(1, 2, 5, dtype=torch.float64)
    for sizes, padding, ids in product(
        [ShardSizes.balanced(5, ranks), [0] * (ranks - 1) + [5]],
        [None, PAD],
        [drawn_ids(4, 2), torch.tensor(PAD), drawn_ids(0, 3)],
    ):
        whole = drawn(1, V, 5).requires_grad_()
        want = on_one_process(ids, whole, padding)
        wanted = derivatives((want**3 * scale).sum(), whole)
        weight = whole.detach().split(list(sizes), 1)[rank].clone().requires_grad_()
        rows = feature_parallel_embedding(ids, weight, sizes, padding)
        found = derivatives((rows**3 * scale).sum(), weight)
        with failures.named(sizes, padding, ids.shape):
            assert torch.equal(rows, want)
            assert torch.equal(feature_parallel_embedding(ids, weight), want)
            for got, expected in zip(found, wanted, strict=True):
                expected = expected.split(list(sizes), 1)[rank]
                torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    return failures
