"""Values of every primitive, against one process that has the inputs of all ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import varcomm
from tests.ops.comparing import LAYOUTS, Failures, assert_none, error_beyond_bound
from tests.ops.primitives import PRIMITIVES, SPLITS, Setting, case
from tests.worlds import WORLDS

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.complex128,
    torch.bool,
)
VIEWS = {"shard_v"}  # documented to return one
MOVES = [name for name, make in PRIMITIVES.items() if not make(Setting((1,), 0, (1,))).sums]


def settings_of(name):
    """Yield dims and the other dimensions: three dimensions, and one where that makes sense."""
    yield from ((dim, (2, 3)) for dim in (0, 1, -1))
    if name != "transpose_v":
        yield 0, ()


def storage(x):
    return x.untyped_storage().data_ptr()


def compare(failures, rank, name, c, op, inputs, words):
    """Call once; collect what is wrong with the result, or with the input afterwards."""
    x = inputs[rank]
    before = None if x is None else x.clone()
    got = op(x)
    with failures.named(*words):
        wrong = error_beyond_bound(c, inputs, rank, got)
        assert not wrong, wrong
        if x is not None:
            assert torch.equal(x, before), "the input has changed"
            shares = bool(got.numel()) and storage(got) == storage(x)
            assert not shares or name in VIEWS, "the output shares memory with the input"


def check_values(rank, name, pattern, ranks):
    failures = Failures()
    for dim, rest in settings_of(name):
        c = case(name, pattern, ranks, dim, rest)
        op = c.bind()
        for dtype in DTYPES:
            if dtype == torch.bool and c.sums:
                continue
            compare(failures, rank, name, c, op, c.draw(dtype), (dim, rest, dtype))
        for layout, laid_out in LAYOUTS.items():
            for dtype in (torch.float64, torch.complex128):
                inputs = [x if x is None else laid_out(x) for x in c.draw(dtype, seed=1)]
                compare(failures, rank, name, c, op, inputs, (dim, rest, dtype, layout))
    return failures


@pytest.mark.parametrize(("ranks", "pattern"), SPLITS)
@pytest.mark.parametrize("name", PRIMITIVES)
def test_values(worlds, name, ranks, pattern):
    assert_none(worlds.run(ranks, check_values, name, pattern, ranks))


def check_drawn(rank, name, sizes, dim, root):
    failures = Failures()
    c = PRIMITIVES[name](Setting(tuple(sizes), dim, (2, 1), root))
    compare(failures, rank, name, c, c.bind(), c.draw(torch.float32), (sizes, dim, root))
    return failures


@pytest.mark.parametrize("name", MOVES)
@given(
    sizes=st.lists(st.integers(0, 7), min_size=3, max_size=3),
    dim=st.integers(-3, 2),
    root=st.integers(0, 2),
)
@settings(max_examples=8, derandomize=True, deadline=None)
def test_moves_of_drawn_sizes(worlds, name, sizes, dim, root):
    assert_none(worlds.run(3, check_drawn, name, sizes, dim, root))


# 3 ranks and more sum these by pieces: 4 times 16 KiB in the narrowest dtype
LARGE = (2731, 3, 4)


def check_large_sums(rank, ranks):
    failures = Failures()
    for name in ("all_reduce", "reduce"):
        c = PRIMITIVES[name](Setting((LARGE[0],) + (0,) * (ranks - 1), 0, LARGE[1:], ranks - 1))
        for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.complex128):
            compare(failures, rank, name, c, c.bind(), c.draw(dtype), (name, dtype))
        inputs = [LAYOUTS["transposed"](x) for x in c.draw(torch.float32)]
        compare(failures, rank, name, c, c.bind(), inputs, (name, "transposed"))
    return failures


@pytest.mark.parametrize("ranks", WORLDS)
def test_large_sums(worlds, ranks):
    assert_none(worlds.run(ranks, check_large_sums, ranks))


def check_order_of_sums(rank, shape):
    failures = Failures()
    xs = [torch.randn(shape, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    got = varcomm.all_reduce(xs[rank])
    with failures.named(shape):
        assert torch.equal(got, (xs[0] + xs[1]) + xs[2])
    return failures


@pytest.mark.parametrize("shape", [(5,), (20_001,)])
def test_sums_are_in_rank_order_bit_for_bit(worlds, shape):
    assert_none(worlds.run(3, check_order_of_sums, shape))


def sum_of_narrow(rank, use_fp32):
    """One bf16 sum by each primitive: 256 + 1 + 1 is 258, but 256 where each step is rounded."""
    x = torch.full((1,), (256.0, 1.0, 1.0)[rank], dtype=torch.bfloat16)
    plan = varcomm.ExchangePlan.from_needed(torch.tensor([0]), [1, 0, 0])
    gathered = torch.zeros(int(rank == 0), dtype=torch.bfloat16, requires_grad=True)
    whole = varcomm.all_gather_v(gathered, [1, 0, 0], use_fp32=use_fp32)
    (gradient,) = torch.autograd.grad(whole, gathered, x)
    sums = (
        varcomm.all_reduce(x, use_fp32=use_fp32),
        varcomm.reduce(x, use_fp32=use_fp32),
        varcomm.reduce_scatter_v(x, [1, 0, 0], use_fp32=use_fp32),
        plan.adjoint(x, use_fp32=use_fp32),
        gradient,
    )
    return [float(total.sum()) for total in sums]


def test_narrow_floats_are_summed_in_fp32_and_rounded_once(worlds):
    assert worlds.run(3, sum_of_narrow, True)[0] == [258.0] * 5
    assert worlds.run(3, sum_of_narrow, False)[0] == [256.0] * 5


def zeros_off_the_root(rank):
    reduced = varcomm.reduce(torch.full((3, 2), torch.nan), dst=1)
    gathered = varcomm.gather_v(torch.full((2, 3), torch.nan), [3, 3], dim=1, dst=1)
    return reduced.tolist(), tuple(gathered.shape)


def test_off_the_root_are_zeros_and_zero_rows(worlds):
    assert worlds.run(2, zeros_off_the_root)[0] == ([[0.0, 0.0]] * 3, (2, 0))
