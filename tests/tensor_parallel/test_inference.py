"""Fused paths of inference against the layers one after the other: bits, memory, what travels."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import varcomm
from tests.ops.comparing import Failures, assert_none
from tests.tensor_parallel.twins import SPLITS, drawn, split
from tests.worlds import WORLDS
from varcomm import ArgumentError
from varcomm.tensor_parallel import column_parallel_linear, row_parallel_linear
from varcomm.tensor_parallel.inference import Buffers, norm_column_linear, row_linear_norm

WIDTH, OUT = 12, 5
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def norms(width, dtype):
    """Of both kinds, with weights that are not ones."""
    found = {
        "layer norm": nn.LayerNorm(width, dtype=dtype),
        "layer norm, no bias": nn.LayerNorm(width, bias=False, dtype=dtype),
        "layer norm, plain": nn.LayerNorm(width, elementwise_affine=False, dtype=dtype),
        "rms norm": nn.RMSNorm(width, dtype=dtype),
        "rms norm, plain": nn.RMSNorm(width, eps=1e-3, elementwise_affine=False, dtype=dtype),
    }
    for i, norm in enumerate(found.values()):
        for j, param in enumerate(norm.parameters()):
            param.data.copy_(drawn(40 + 2 * i + j, width))
    return found


def plain_row(x, weight, bias, residual, norm, rows, gather):
    """The separate steps that `row_linear_norm` fuses."""
    total = residual + row_parallel_linear(x, weight, bias, sequence_sizes=rows)
    normed = norm(total)
    return (varcomm.all_gather_v(normed, rows) if gather else normed), total


@torch.inference_mode()
def compared(rank, pattern):
    """Every way of calling, once with new memory and once with one that all calls share."""
    failures, shared, ranks = Failures(), Buffers(), torch.distributed.get_world_size()
    sizes, rows = split(pattern, ranks), split("uneven", ranks)
    if pattern == "uneven":  # the sequence has empty parts where the features have none
        rows = split("one empty", ranks)
    for dtype, inner in zip(DTYPES, ((2,), (), ()), strict=True):
        x = drawn(1, sum(rows), *inner, WIDTH, dtype=dtype)
        own = x.split(list(rows))[rank]
        weight = drawn(2, sum(sizes), WIDTH, dtype=dtype).split(list(sizes))[rank]
        bias = drawn(3, sum(sizes), dtype=dtype).split(list(sizes))[rank]
        part = drawn(4, sum(rows), *inner, sum(sizes), dtype=dtype).split(list(sizes), -1)[rank]
        across = drawn(5, WIDTH, sum(sizes), dtype=dtype).split(list(sizes), 1)[rank]
        added = drawn(6, WIDTH, dtype=dtype)
        for (name, norm), buffers in product(norms(WIDTH, dtype).items(), (None, shared)):
            for b, s in product((bias, None), (None, rows)):
                given, options = x if s is None else own, {"sequence_sizes": s}
                want = column_parallel_linear(norm(given), weight, b, **options)
                got = norm_column_linear(given, norm, weight, b, buffers=buffers, **options)
                with failures.named("column", name, dtype, s is None, b is None):
                    assert torch.equal(got, want), (got, want)
            for b, gather in ((added, True), (None, True), (added, False)):
                operands, residual = (part, across, b), own.clone()
                want = plain_row(*operands, residual, norm, rows, gather)
                options = {"sequence_sizes": rows, "gather": gather, "buffers": buffers}
                got = row_linear_norm(*operands, residual, norm, **options)
                with failures.named("row", name, dtype, gather, b is None):
                    assert all(map(torch.equal, got, want)), (got, want)
                    assert torch.equal(residual, own)
    return failures


@pytest.mark.parametrize(("ranks", "pattern"), SPLITS)
def test_equal_bit_for_bit(worlds, pattern, ranks):
    assert_none(worlds.run(ranks, compared, pattern))


# Rows that take several pieces, of which the last is shorter.
LONG, WIDE = 1030, 512


def long_rows(rank, dtype):
    rows = [LONG, 7, 0]
    norm = nn.RMSNorm(WIDE, dtype=dtype)
    x, residual = drawn(1, rows[rank], WIDE, dtype=dtype), drawn(2, rows[rank], WIDE, dtype=dtype)
    weight = drawn(3 + rank, 3, WIDE, dtype=dtype)
    columns = drawn(6 + rank, sum(rows), 3, dtype=dtype)
    with torch.inference_mode():
        options = {"sequence_sizes": rows}
        column = norm_column_linear(x, norm, weight, **options)
        row = row_linear_norm(columns, weight.T, None, residual, norm, **options)
        want = plain_row(columns, weight.T, None, residual, norm, rows, True)
        expected = column_parallel_linear(norm(x), weight, **options), *want
    return all(map(torch.equal, (column, *row), expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_several_pieces(worlds, dtype):
    assert worlds.run(3, long_rows, dtype) == [True] * 3


def allocations(fn):
    """Bytes of every single allocation of torch's, also of those that it frees at once."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        fn()
    events = profiled.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]


def allocated(rank, dtype):
    """The largest allocation of each of two calls."""
    rows, width = [1500, 548], 1024
    own, total = rows[rank], sum(rows)
    x, residual = torch.ones(own, width, dtype=dtype), torch.ones(own, width, dtype=dtype)
    weight, columns = torch.ones(width, width, dtype=dtype), torch.ones(total, width, dtype=dtype)
    bias, told = torch.ones(width, dtype=dtype), {}
    for name, norm in (("layer", nn.LayerNorm(width, dtype=dtype)), ("rms", nn.RMSNorm(width))):
        norm = norm.to(dtype)
        rest, parts = (columns, weight, bias, residual, norm), {"sequence_sizes": rows}
        calls = {
            "column": partial(norm_column_linear, columns, norm, weight, bias),
            "column of a sequence": partial(norm_column_linear, x, norm, weight, bias, **parts),
            "row": partial(row_linear_norm, *rest, **parts),
            "row, not gathered": partial(row_linear_norm, *rest, **parts, gather=False),
        }
        for what, call in calls.items():
            buffers = Buffers()
            with torch.inference_mode():
                counts = [allocations(partial(call, buffers=buffers)) for _ in range(3)]
                alone = allocations(call)
            large = sum(n for n in alone if n > total // 16 * width * 4)
            told[name, what] = [max(sizes) for sizes in counts], max(alone), large
    return told, workspace(columns, weight, bias)


def workspace(x, weight, bias):
    """Bytes that torch's own product takes beside its result: some processors need them."""
    with torch.inference_mode():
        result, *others = sorted(allocations(lambda: functional.linear(x, weight, bias)))[::-1]
    assert result == x.numel() * x.itemsize
    return sum(others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_second_call_allocates_nothing_of_the_size_of_activations(worlds, dtype):
    """On the way it takes a sixteenth of the rows, for what is computed in fp32 in that."""
    row, rows = 1024 * dtype.itemsize, [1500, 548]
    whole = sum(rows) * row
    piece = sum(rows) // 16 * 1024 * 4
    for rank, (told, beside) in enumerate(worlds.run(2, allocated, dtype)):
        assert len(told) == 8
        for (norm, what), ((first, second, third), alone, large) in told.items():
            parts = 2 * rows[rank] * row
            if "row" in what:  # the product, what arrives of it, and the sum
                expected = max(whole, parts), whole + parts + rows[rank] * row
            else:  # the normed rows and the product
                expected = whole, 2 * whole
            assert first == alone == expected[0], (norm, what)
            assert expected[1] <= large <= expected[1] + beside, (norm, what)
            assert max(second, third) <= max(piece, beside), (norm, what)


def living(rank):
    """Results live in the buffers, and the next call overwrites them."""
    rows, norm, buffers = [2, 1, 0], nn.RMSNorm(4), Buffers()
    weight, columns = torch.ones(3, 4), torch.ones(3, 3)

    def column(x, b=buffers):
        return norm_column_linear(x, norm, weight, buffers=b)

    with torch.inference_mode():
        first = column(torch.ones(4, 4))
        kept = first.clone()
        second = column(-torch.ones(4, 4))
        assert first.data_ptr() == second.data_ptr()
        assert torch.equal(first, -kept)
        large = column(torch.ones(9, 4))  # new memory, and the old one is left alone
        assert large.data_ptr() != first.data_ptr()
        assert torch.equal(first, -kept)
        assert column(torch.ones(4, 4), None).data_ptr() != large.data_ptr()
    with torch.no_grad():
        assert not column(torch.ones(9, 4)).is_inference()
    # a residual that was returned is added to in place
    buffers, residual = Buffers(), torch.ones(rows[rank], 4)
    places, expected = set(), residual
    with torch.inference_mode():
        for _ in range(3):
            _, residual = row_linear_norm(
                columns, weight.T, None, residual, norm, sequence_sizes=rows, buffers=buffers
            )
            expected = expected + row_parallel_linear(columns, weight.T, sequence_sizes=rows)
            places.add(residual.data_ptr())
    return len(places) == 1 and torch.equal(residual, expected)


def test_results_live_in_the_buffers(worlds):
    assert worlds.run(3, living) == [True] * 3


def refused_places(rank):
    rows, norm, buffers, told = [2, 1, 1], nn.RMSNorm(4, elementwise_affine=False), Buffers(), []
    weight, columns, residual = torch.ones(4, 4), torch.ones(4, 4), torch.ones(rows[rank], 4)
    options = {"sequence_sizes": rows, "buffers": buffers}
    with torch.inference_mode():
        normed, total = row_linear_norm(columns, weight, None, residual, norm, **options)
        for name, operands in {
            "x": (normed, weight, None, residual),
            "weight": (columns, normed, None, residual),
            "bias": (columns, weight, normed[0], residual),
            "residual": (columns, weight, None, normed[: rows[rank]]),
            "wider residual": (columns.double(), weight.double(), None, total),
        }.items():
            with pytest.raises(ArgumentError, match=f"{name.split()[-1]} is in the memory of buf"):
                row_linear_norm(*operands, norm, **options)
            told.append(name)
    return len(told)


def test_what_a_call_would_overwrite_is_refused(worlds):
    assert worlds.run(3, refused_places) == [5] * 3


def travelled(rank, ranks):
    rows, width, told = split("uneven", ranks), 4, {}
    norm, weight = nn.RMSNorm(width), torch.ones(3, width)
    x, columns = torch.ones(rows[rank], width), torch.ones(sum(rows), 3)
    with torch.inference_mode():
        rest, parts = (columns, weight.T, None, x, norm), {"sequence_sizes": rows}
        for name, call in {
            "column": partial(norm_column_linear, x, norm, weight),
            "column of a sequence": partial(norm_column_linear, x, norm, weight, **parts),
            "row": partial(row_linear_norm, *rest, **parts),
            "row, not gathered": partial(row_linear_norm, *rest, **parts, gather=False),
        }.items():
            with varcomm.trace() as calls:
                call()
            told[name] = [(c.name, c.sent // (4 * width), c.received // (4 * width)) for c in calls]
    return told


@pytest.mark.parametrize("ranks", WORLDS)
def test_rows_that_travel_are_the_fewest_possible(worlds, ranks):
    rows = split("uneven", ranks)
    for rank, told in enumerate(worlds.run(ranks, travelled, ranks)):
        mine, others = rows[rank] * (ranks - 1), sum(rows) - rows[rank]
        gather, scatter = ("all_gather_v", mine, others), ("reduce_scatter_v", others, mine)
        assert told == {
            "column": [],
            "column of a sequence": [gather],
            "row": [scatter, gather],
            "row, not gathered": [scatter],
        }
