"""Embeddings with a sharded table against torch's on one process: values and derivatives."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F

from tests.ops.comparing import Failures, assert_none
from tests.tensor_parallel.embeddings import (
    PAD,
    PATTERNS,
    H,
    V,
    derivatives,
    draw,
    drawn_ids,
    on_one_process,
    own_rows,
)
from tests.worlds import WORLDS
from varcomm import ShardSizes
from varcomm.tensor_parallel import scatter_to_sequence_parallel_region
from varcomm.tensor_parallel.embedding import (
    feature_parallel_embedding,
    vocab_parallel_embedding,
)
from varcomm.testing import gradcheck, gradgradcheck

METHODS = ("auto", "masked", "indexed")
LAYOUTS = ("replicated", "part", "parallel")


def loss_of(rows, first=0):
    """A loss whose gradient depends on rows and places; of parts, it adds up to that of all."""
    steps = torch.arange(first, first + len(rows), dtype=rows.dtype).view(
        -1, *[1] * (rows.dim() - 1)
    )
    return ((rows + steps / 7) ** 3 * torch.linspace(1, 2, H, dtype=rows.dtype)).sum()


def call(layout, method, ids, weight, sizes, parts, rank, padding, group=None):
    """Return the rows, and the first of the sequence among them."""
    if layout == "replicated":
        rows = vocab_parallel_embedding(ids, weight, sizes, padding, None, method, group=group)
        return rows, 0
    first = ShardSizes(parts).offsets[rank]
    if layout == "part":
        rows = vocab_parallel_embedding(ids, weight, sizes, padding, parts, method, group=group)
        return rows, first
    own = ids[first : first + parts[rank]]
    return (
        vocab_parallel_embedding(own, weight, sizes, padding, parts, method, True, group),
        first,
    )


def compare(failures, words, layout, method, pattern, padding, rank, group=None, shape=(2,)):
    sizes, parts = pattern
    whole, ids = draw(V, H, seed=1), drawn_ids(sum(parts), *shape, seed=len(parts))
    weight = own_rows(whole, sizes, rank).requires_grad_()
    rows, first = call(layout, method, ids.int(), weight, sizes, parts, rank, padding, group)
    got = (rows.detach(), *derivatives(loss_of(rows, first), weight))

    whole.requires_grad_()
    want = on_one_process(ids, whole, padding)
    wanted = [own_rows(d, sizes, rank) for d in derivatives(loss_of(want), whole)]
    with failures.named(*words, layout, method, padding):
        assert torch.equal(got[0], want[first : first + len(rows)])
        for mine, theirs in zip(got[1:], wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def compare_all(rank, ranks, layout):
    failures = Failures()
    for name, pattern in PATTERNS[ranks].items():
        for method in METHODS:
            for padding in (None, PAD, PAD - V):
                compare(failures, (name,), layout, method, pattern, padding, rank)
        compare(failures, (name, "one dimension"), layout, "auto", pattern, PAD, rank, shape=())
        compare(failures, (name, "none"), layout, "auto", pattern, PAD, rank, shape=(0, 2))
    return failures


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", WORLDS[:3])
def test_values_and_derivatives(worlds, ranks, layout):
    assert_none(worlds.run(ranks, compare_all, ranks, layout))


def finite_differences(rank, ranks):
    sizes, parts = PATTERNS[ranks]["empty" if ranks == 3 else "uneven"]
    ids = drawn_ids(sum(parts), seed=3)
    weight = own_rows(draw(V, 2, seed=2), sizes, rank)
    columns = ShardSizes.balanced(4, ranks)

    def on_all(method):
        def fn(weight):
            rows = vocab_parallel_embedding(ids, weight, sizes, method=method)
            # the replicated result is one value: who tests it counts it once
            return scatter_to_sequence_parallel_region(rows, parts)

        return fn

    def on_parts(method):
        return lambda w: vocab_parallel_embedding(ids, w, sizes, None, parts, method)

    own = ids[ShardSizes(parts).offsets[rank] :][: parts[rank]]
    fns = [on_all("masked"), on_all("indexed"), on_parts("masked"), on_parts("indexed")]
    fns.append(lambda w: vocab_parallel_embedding(own, w, sizes, input_is_parallel=True))
    for fn in fns:
        gradcheck(fn, weight, fast_mode=True)
        gradgradcheck(lambda w, fn=fn: fn(w) ** 3, weight, fast_mode=True)

    def by_features(weight):
        rows = feature_parallel_embedding(ids, weight, columns)
        return scatter_to_sequence_parallel_region(rows, parts) ** 3

    gradgradcheck(by_features, draw(V, columns[rank], seed=rank), fast_mode=True)
    return True


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_adjoints_and_forward_mode(worlds, ranks):
    assert worlds.run(ranks, finite_differences, ranks) == [True] * ranks


def constant_row(rank):
    """The padding's row is a constant in forward mode as well: its tangent goes nowhere."""
    return [
        tangent_of(rank, layout, method) for layout in LAYOUTS for method in ("masked", "indexed")
    ]


def tangent_of(rank, layout, method):
    sizes, parts = PATTERNS[2]["uneven"]
    ids = drawn_ids(6, 2, seed=4)
    weight, tangent = (own_rows(draw(V, H, seed=s), sizes, rank) for s in (1, 2))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weight, tangent)
        rows, first = call(layout, method, ids, dual, sizes, parts, rank, PAD)
        value, moving = forward_ad.unpack_dual(rows)
    kept = F.embedding(ids, draw(V, H, seed=2)) * (ids != PAD).unsqueeze(-1)
    at = slice(first, first + len(rows))
    return torch.equal(moving, kept[at]), torch.equal(
        value, F.embedding(ids, draw(V, H, seed=1))[at]
    )


def test_tangent_of_the_padding(worlds):
    assert worlds.run(2, constant_row) == [[(True, True)] * 6] * 2


def features(rank, ranks):
    failures = Failures()
    for sizes in [ShardSizes.balanced(5, ranks), [0] * (ranks - 1) + [5]]:
        for padding in (None, PAD):
            for ids in (drawn_ids(4, 2), drawn_ids(3), torch.tensor(PAD), drawn_ids(0, 3)):
                whole = draw(V, 5, seed=1).requires_grad_()
                scale = torch.linspace(1, 2, 5, dtype=torch.float64)
                want = on_one_process(ids, whole, padding)
                wanted = derivatives((want**3 * scale).sum(), whole)
                own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
                weight = whole.detach()[:, own].clone().requires_grad_()
                rows = feature_parallel_embedding(ids, weight, sizes, padding)
                got = derivatives((rows**3 * scale).sum(), weight)
                part = feature_parallel_embedding(ids, weight, sizes, padding, False)
                asked = feature_parallel_embedding(ids, weight)
                left = derivatives((part**3 * scale[own]).sum(), weight)
                with failures.named(sizes, padding, ids.shape):
                    assert torch.equal(rows, want)
                    assert torch.equal(asked, want)
                    assert torch.equal(part, want[..., own])
                    for a, b, c in zip(got, left, wanted, strict=True):
                        torch.testing.assert_close(a, c[:, own], rtol=1e-12, atol=1e-12)
                        torch.testing.assert_close(b, c[:, own], rtol=1e-12, atol=1e-12)
    return failures


@pytest.mark.parametrize("ranks", WORLDS[:3])
def test_sharded_by_features(worlds, ranks):
    assert_none(worlds.run(ranks, features, ranks))
