"""Values of every primitive, against one process that has the inputs of all ranks."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import varcomm
from tests.ops.comparing import LAYOUTS, Failures, error_beyond_bound
from tests.ops.primitives import PRIMITIVES, SPLITS, Setting, case
from tests.worlds import WORLDS, on_ranks
from varcomm.testing import dot_test

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex128, torch.bool)
OTHER_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.complex64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
VIEWS = {"shard_v"}  # documented to return one
# 3 ranks and more sum these by pieces: 4 times 16 KiB in the narrowest dtype
LARGE = (2731, 3, 4)


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


@pytest.mark.parametrize(("ranks", "pattern"), SPLITS)
@pytest.mark.parametrize("name", PRIMITIVES)
@on_ranks()
def test_values(rank, name, pattern, ranks):
    failures = Failures()
    for dim, rest in [(0, (2, 3)), (1, (2, 3)), (-1, (2, 3)), (0, ())][
        : 3 + (name != "transpose_v")
    ]:
        c = case(name, pattern, ranks, dim, rest)
        op = c.bind()
        for dtype in DTYPES:
            if not (dtype == torch.bool and c.sums):
                compare(failures, rank, name, c, op, c.draw(dtype), (dim, rest, dtype))
        for layout, laid_out in LAYOUTS.items():
            for dtype in (torch.float64, torch.complex128):
                inputs = [x if x is None else laid_out(x) for x in c.draw(dtype, seed=1)]
                compare(failures, rank, name, c, op, inputs, (dim, rest, dtype, layout))
    return failures


@pytest.mark.parametrize("name", PRIMITIVES)
@given(
    sizes=st.lists(st.integers(0, 7), min_size=3, max_size=3),
    rest=st.sampled_from([(2, 1), (0, 5), (3, 0), (0, 0)]),
    dim=st.integers(-3, 2),
    root=st.integers(0, 2),
)
@settings(max_examples=8, derandomize=True, deadline=None)
@on_ranks(3)
def test_drawn_sizes(rank, name, sizes, rest, dim, root):
    failures = Failures()
    c = PRIMITIVES[name](Setting(tuple(sizes), dim, rest, root))
    compare(failures, rank, name, c, c.bind(), c.draw(torch.float32), (sizes, rest, dim, root))
    return failures


@on_ranks(3)
def test_other_dtypes(rank):
    """All values are small integers, so that only the last step rounds; ranks have odd strides."""
    failures = Failures()
    for name in PRIMITIVES:
        c = case(name, "off by one", 3)
        for dtype in (*OTHER_FLOATS, *INTEGERS, *(() if c.sums else (torch.bool, *UNSIGNED))):
            generator = torch.Generator().manual_seed(4)
            inputs = [
                s if s is None else torch.randint(0, 3, s, generator=generator).double()
                for s in c.shapes
            ]
            x = torch.ones(2).to(dtype) if inputs[rank] is None else inputs[rank].to(dtype)
            if x.dim() > 1 and rank:
                x = LAYOUTS["strided" if rank == 1 else "transposed"](x)
            back = dtype in OTHER_FLOATS and name not in VIEWS
            y = c.bind()(x.requires_grad_(back))
            with failures.named(name, dtype):
                assert y.dtype == dtype
                assert y.requires_grad == back
                want = c.reference(inputs)[rank].to(dtype)
                assert torch.equal(y.detach().to(torch.complex128), want.to(torch.complex128))
            if back:
                (gradient,) = torch.autograd.grad(y, x, torch.ones(y.shape).to(dtype))
                with failures.named(name, dtype, "backward"):
                    assert (gradient.dtype, gradient.shape) == (dtype, x.shape)
    return failures


@on_ranks(3)
def test_contiguous_tensors_of_odd_strides(rank):
    """A column of a transposed row is contiguous at any stride; complex128 travels as halves."""
    failures = Failures()
    for name in PRIMITIVES:
        c = PRIMITIVES[name](Setting((2, 0, 3), 0, (1,)))
        inputs = c.draw(torch.complex128)
        laid_out = [x if x is None else x.resolve_conj().reshape(1, -1).t() for x in inputs]
        if name != "transpose_v":  # of no shape with one column
            compare(failures, rank, name, c, c.bind(), laid_out, (name,))
    return failures


@on_ranks(*WORLDS)
def test_large_sums(rank, ranks):
    failures = Failures()
    for name in ("all_reduce", "reduce", "broadcast"):
        c = PRIMITIVES[name](Setting((LARGE[0],) + (0,) * (ranks - 1), 0, LARGE[1:], ranks - 1))
        for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.complex128):
            compare(failures, rank, name, c, c.bind(), c.draw(dtype), (name, dtype))
            if dtype != torch.int64:
                with failures.named(name, dtype, "adjoint"):
                    dot_test(c.bind(), c.input(rank, dtype), rtol=8 * torch.finfo(dtype).eps)
        inputs = [x if x is None else LAYOUTS["transposed"](x) for x in c.draw(torch.float32)]
        compare(failures, rank, name, c, c.bind(), inputs, (name, "transposed"))
    for shape in ((5,), (20_001,)):
        xs = [torch.randn(shape, generator=torch.Generator().manual_seed(r)) for r in range(ranks)]
        got = varcomm.all_reduce(xs[rank])
        with failures.named("in rank order, bit for bit", shape):
            assert torch.equal(got, sum(xs[1:], xs[0]))
    return failures


def sum_of_narrow(rank, use_fp32):
    """One bf16 sum by each primitive: 256 + 1 + 1 is 258, but 256 where each step is rounded."""
    x = torch.full((1,), (256.0, 1.0, 1.0)[rank], dtype=torch.bfloat16)
    plan = varcomm.ExchangePlan.from_needed(torch.tensor([0]), [1, 0, 0])
    gathered = torch.zeros(int(rank == 0), dtype=torch.bfloat16, requires_grad=True)
    whole = varcomm.all_gather_v(gathered, [1, 0, 0], use_fp32=use_fp32)
    (gradient,) = torch.autograd.grad(whole, gathered, x)
    indices = [torch.zeros(int(rank == 0), dtype=torch.int64)] * 3
    sent = varcomm.indexed_all_to_all_v(gathered, indices, [[1] * 3, [0] * 3, [0] * 3], use_fp32)
    (of_copies,) = torch.autograd.grad(sent, gathered, x)
    sums = (
        varcomm.all_reduce(x, use_fp32=use_fp32),
        varcomm.reduce(x, use_fp32=use_fp32),
        varcomm.reduce_scatter_v(x, [1, 0, 0], use_fp32=use_fp32),
        plan.adjoint(x, use_fp32=use_fp32),
        gradient,
        of_copies,
    )
    return [float(total.sum()) for total in sums]


def test_narrow_floats_are_summed_in_fp32_and_rounded_once(worlds, request):
    of_rows = 256.0 if request.config.getoption("--device") == "cpu" else 258.0  # bags on a GPU
    assert worlds.run(3, sum_of_narrow, True)[0] == [258.0] * 6
    assert worlds.run(3, sum_of_narrow, False)[0] == [*[256.0] * 3, of_rows, 256.0, of_rows]


@on_ranks(3)
def test_result_may_be_changed_in_place(rank):
    """A result may be changed in place, also before backward."""
    failures = Failures()
    for name in [name for name in PRIMITIVES if name not in VIEWS]:
        cases = [case(name, pattern, 3, dim) for pattern in ("even", "one empty") for dim in (0, 1)]
        if name in ("all_reduce", "reduce", "broadcast"):
            cases.append(PRIMITIVES[name](Setting((9000, 0, 0), 0, (1,), 2)))  # by pieces
        for number, c in enumerate(cases):
            op, x = c.bind(), c.input(rank, torch.float64).requires_grad_()
            y, z = op(x), op(x)
            want = y.detach() * 2
            (gradient,) = torch.autograd.grad(y.sum(), x)
            z.mul_(2)
            (doubled,) = torch.autograd.grad(z.sum(), x)
            with failures.named(name, number):
                assert torch.equal(z, want)
                assert torch.equal(doubled, 2 * gradient)
    return failures


@on_ranks(2)
def test_stand_ins_and_scalars(rank):
    """NaN on another rank does not reach the stand-ins; scalars have no rows, and need none."""
    reduced = varcomm.reduce(torch.full((3, 2), torch.nan), dst=1)
    gathered = varcomm.gather_v(torch.full((2, 3), torch.nan), [3, 3], dim=1, dst=1)
    if rank == 0:
        assert reduced.tolist() == [[0.0, 0.0]] * 3
        assert gathered.shape == (2, 0)
    for op, values, gradients in (
        (varcomm.all_reduce, (3, 3), (2, 2)),
        (lambda x: varcomm.reduce(x, dst=1), (0, 3), (1, 1)),
        (lambda x: varcomm.broadcast(x, src=1), (2, 2), (0, 2)),
    ):
        x = torch.tensor(rank + 1.0, requires_grad=True)
        y = op(x)
        y.backward()
        assert (y.item(), x.grad.item()) == (values[rank], gradients[rank])


@on_ranks(2)
def test_handles_and_default_devices(rank):
    """A handle that is done keeps the result alone; the default device does not matter."""
    x = torch.ones(10)
    handle = varcomm.all_gather_v(x, [10, 10], async_op=True)
    gone = weakref.ref(x)
    result = handle.wait()
    del x
    gc.collect()
    plan = varcomm.ExchangePlan.from_needed(torch.tensor([0, 1]), [1, 1])
    sent, one = torch.full((1,), 3.0) if rank == 0 else None, torch.ones(1)
    with torch.device("meta"):
        values = varcomm.broadcast(sent).item(), plan(one).tolist()
    assert gone() is None
    assert handle.wait() is result
    assert values == (3.0, [1.0, 1.0])
