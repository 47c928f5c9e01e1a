"""Every primitive inside torch.compile: no graph break, the same numbers, few compilations."""

import re
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import varcomm
from tests.ops.primitives import PRIMITIVES, case

# Rows of two ranks, none of them 0 or 1, which torch.compile takes for constants.
SIZES = ([2, 3], [4, 2], [5, 7])


def input_of(made, rank, ranks, seed=0):
    """Draw this rank's input; off the root one like the root's, as a graph needs it."""
    drawn = made.draw(torch.float64, seed)
    x = drawn[rank]
    if x is None:
        x = torch.zeros_like(next(x for x in drawn if x is not None))
    return x.requires_grad_()


def differentiated(fn, x):
    """Return result and gradient of a loss that is linear in neither."""
    y = fn(x)
    (gradient,) = torch.autograd.grad((y**3).sum(), x)
    return y.detach(), gradient


def compiled_like_eager(rank, ranks, name, settings, backend, is_async):
    told = []
    for pattern, dim, dynamic in settings:
        torch._dynamo.reset()
        made = case(name, pattern, ranks, dim)
        op, x = made.bind(), input_of(made, rank, ranks)

        def fn(x, op=op):
            y = 2 * x
            return op(y, async_op=True).wait() if is_async else op(y)

        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(fn, fullgraph=True, backend=counter, dynamic=dynamic)
        got, want = differentiated(compiled, x), differentiated(fn, x)
        equal = all(
            torch.allclose(*pair, rtol=1e-12, atol=1e-12) for pair in zip(got, want, strict=True)
        )
        told.append((equal, counter.frame_count))
    return told


STATIC = [("off by one", 0, None), ("one empty", 1, None)]


def some(*names):
    """Mark all primitives but these as slow."""
    return [n if n in names else pytest.param(n, marks=pytest.mark.slow) for n in PRIMITIVES]


@pytest.mark.parametrize("name", some("all_gather_v", "plan_from_needed", "reduce"))
@pytest.mark.parametrize("is_async", [False, True])
def test_primitives(compiling, name, is_async):
    if is_async and name.startswith("adjoint"):
        return
    settings = [STATIC[0]] if is_async else [*STATIC, ("even", -1, True)]
    told = compiling(2, compiled_like_eager, 2, name, settings, "aot_eager", is_async)
    assert told == [[(True, 1)] * len(settings)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", PRIMITIVES)
def test_primitives_on_one_rank(compiling, name):
    told = compiling(1, compiled_like_eager, 1, name, STATIC[1:], "aot_eager", False)
    assert told == [[(True, 1)]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all_gather_v", "plan_from_needed", "reduce"])
def test_on_inductor(compiling, name):
    told = compiling(2, compiled_like_eager, 2, name, STATIC[:1], "inductor", False)
    assert told == [[(True, 1)]] * 2


class Calls(TorchDispatchMode):
    """Keeps the calls of varcomm's operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "varcomm":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def checked_by_torch(rank, name):
    """Return how many operators a call and its backward are made of, once each passes opcheck."""
    made = case(name, "off by one", 2, 0)
    op, x = made.bind(), input_of(made, rank, 2)
    with patch("torch.compiler.is_compiling", lambda: True), Calls() as recorder:
        op(x).sum().backward()
    for func, args in recorder.calls:
        own = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
        own[0].requires_grad_()
        torch.library.opcheck(func, tuple(own))
    return len(recorder.calls)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PRIMITIVES if name != "shard_v"])
def test_operators_pass_opcheck(compiling, name):
    assert compiling(2, checked_by_torch, name) == [2, 2]


def ordered(rank, backend):
    """Nothing but the order of the calls relates these operators, in forward and in backward."""
    sizes = [3, 1]
    x = torch.randn(sizes[rank], 64, dtype=torch.float64, requires_grad=True)

    def fn(x):
        first = varcomm.all_gather_v(x.sin(), sizes)
        second = varcomm.all_reduce(x.sum()[None].expand(4))
        third = varcomm.all_gather_v(x.cos() * 2, sizes)
        unused = varcomm.all_gather_v(x.tan(), sizes).detach()
        fourth = varcomm.reduce_scatter_v(first * third, sizes)
        loss = (fourth * x).sum() + second.sum() * first.mean()
        return loss + unused.sum() if rank == 0 else loss

    (want,) = torch.autograd.grad(fn(x), x)
    with varcomm.trace() as trace:
        (got,) = torch.autograd.grad(torch.compile(fn, fullgraph=True, backend=backend)(x), x)
    return torch.allclose(got, want), [call.name for call in trace]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_order_of_calls_in_compiled_code(compiling, backend):
    """Pins torch.library's ordered effects, and the dependency that Inductor keeps."""
    gather, scatter = "all_gather_v", "reduce_scatter_v"
    names = [gather, "all_reduce", gather, gather, scatter]
    names += [gather, scatter, "all_reduce", scatter]
    assert compiling(2, ordered, backend) == [(True, names)] * 2


def other_sizes(rank, dynamic):
    def fn(x, sizes):
        return varcomm.reduce_scatter_v(varcomm.all_gather_v(x * 2, sizes) ** 2, sizes)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fn, fullgraph=True, backend=counter, dynamic=dynamic)
    right = []
    for sizes in SIZES:
        x = torch.randn(sizes[rank], 11, dtype=torch.float64, requires_grad=True)
        got = differentiated(lambda x, sizes=sizes: compiled(x, sizes), x)
        want = differentiated(lambda x, sizes=sizes: fn(x, sizes), x)
        right.append(all(torch.allclose(*pair, rtol=1e-12) for pair in zip(got, want, strict=True)))
    return right, counter.frame_count


@pytest.mark.slow
@pytest.mark.parametrize(("dynamic", "times"), [(True, 1), (None, 2)])
def test_other_sizes_do_not_compile_again(compiling, dynamic, times):
    """Torch makes sizes dynamic at once, or when they change for the first time."""
    assert compiling(2, other_sizes, dynamic) == [([True] * 3, times)] * 2


class Exchanging(torch.nn.Module):
    """Holds its plan, whose ints the compiler takes for constants."""

    def __init__(self, plan):
        super().__init__()
        self.plan = plan

    def forward(self, x):
        return self.plan(x * 2) ** 2


def other_plans(rank, ranks):
    counter = CompileCounterWithBackend("aot_eager")
    right = []

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def compiled(x, plan):
        return plan(x * 2) ** 2

    for n in (3, 5, 8):
        # other neighbours in each: one has no rows for others, one none for itself
        counts = [n + i if (i + n) % 2 else 0 for i in range(ranks)]
        indices = [torch.randint(0, n + rank, (count,)) for count in counts]
        plan = varcomm.ExchangePlan.from_indices(indices, n + rank)
        x = torch.randn(n + rank, 2, dtype=torch.float64, requires_grad=True)
        got = differentiated(lambda x, plan=plan: compiled(x, plan), x)
        want = differentiated(Exchanging(plan), x)
        right.append(all(torch.allclose(*pair, rtol=1e-12) for pair in zip(got, want, strict=True)))
    return right, counter.frame_count


@pytest.mark.slow
def test_other_plans_do_not_compile_again(compiling):
    told = compiling(2, other_plans, 2)
    # a rank that receives nothing from anyone has an empty tensor, which torch.compile takes apart
    assert all(right == [True] * 3 and times <= 2 for right, times in told)


def backward_after_the_plan(rank):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x, plan):
        return plan(x) ** 2

    x = torch.ones(2, requires_grad=True)
    y = compiled(x, varcomm.ExchangePlan.from_indices([torch.tensor([0, 0])] * 2, 2))
    y.sum().backward()
    return x.grad.tolist()


@pytest.mark.slow
def test_a_graph_keeps_the_plans_that_its_backward_needs(compiling):
    assert compiling(2, backward_after_the_plan) == [[8.0, 0.0]] * 2


def unused_on_one_rank(rank):
    def fn(x):
        unused = varcomm.all_gather_v(x, [2, 3])
        used = varcomm.all_reduce(x.sum())
        return used + unused.sum() if rank else used

    compiled = torch.compile(fn, fullgraph=True, backend="inductor")
    with varcomm.trace() as trace:
        y = compiled(torch.ones(2 + rank))
    return [call.name for call in trace], y.item()


@pytest.mark.slow
def test_what_one_rank_does_not_use_is_not_dropped(compiling):
    names = ["all_gather_v", "all_reduce"]
    assert compiling(2, unused_on_one_rank) == [(names, 5.0), (names, 10.0)]


def same_code_on_both_ranks(rank):
    """The shape of a result depends on the rank; the caller's code and inputs do not."""

    def fn(x):
        return varcomm.reduce_scatter_v(x, [2, 3]) * 2

    shapes = []
    for turn in range(2):  # one rank after the other, so that the second finds the first's code
        if rank == turn:
            torch.compile(fn, fullgraph=True)  # nothing is compiled before the call
        shapes.append(tuple(torch.compile(fn, fullgraph=True)(torch.ones(5, 2)).shape))
        torch._dynamo.reset()
    return shapes


@pytest.mark.slow
def test_compiled_code_is_not_mistaken_for_another_ranks(compiling):
    assert compiling(2, same_code_on_both_ranks) == [[(2, 2)] * 2, [(3, 2)] * 2]


def compared(rank):
    compiled = torch.compile(
        lambda x, dim: varcomm.all_gather_v(x, [2, 2], dim), fullgraph=True, backend="aot_eager"
    )
    x = torch.ones(2, 2)
    with varcomm.debug():
        right = compiled(x, 0).shape
        try:
            compiled(x, rank)
        except varcomm.DisagreementError as error:
            return tuple(right), str(error)


@pytest.mark.slow
def test_ranks_compare_compiled_calls_in_debug_mode(compiling):
    said = "all_gather_v: ranks disagree on dim: rank 0 has 0; rank 1 has 1."
    one, other = compiling(2, compared)
    assert one == other
    shape, told = one
    assert shape == (4, 2)
    assert told.startswith(said)
    assert re.search(r"test_compiled\.py:\d+, in <lambda>", told), "the user's line"


def messages(rank):
    told = []

    def tell(fn, *args):
        torch._dynamo.reset()
        try:
            torch.compile(fn, fullgraph=True, backend="aot_eager")(*args)
        except Exception as error:
            told.append(str(error))

    x = torch.ones(2)
    if rank:
        tell(lambda: varcomm.broadcast(None))
    indices = [torch.tensor([0]), torch.tensor([5])]
    tell(lambda x, i: varcomm.indexed_all_to_all_v(x, i, [[1, 1], [1, 1]]), x, indices)
    tell(lambda x: varcomm.all_gather_v(x, [3, 3]), x)
    call = torch.ops.varcomm.all_gather_v
    for group, of_rank in (("0", 1 - rank), ("no such group", rank)):
        try:
            call(x, None, None, group, of_rank, [2, 2], 0, True)
        except varcomm.GroupError as error:
            told.append(str(error))
    try:
        torch.ops.varcomm.exchange(x, None, None, "0", rank, torch.tensor(-1), 2, 2, 0, True)
    except varcomm.ArgumentError as error:
        told.append(str(error))
    return told


def test_wrong_use_is_an_error(compiling):
    for rank, told in enumerate(compiling(2, messages)):
        here = f"on rank {rank} of 2: "
        parts = [
            f"{here}indices spans 0...5, out of range for 2 own rows.",
            f"{here}the tensor of shape (2,) has 2 rows along dim 0, but sizes[{rank}] is 3",
            f"a graph traced on rank {1 - rank} runs on rank {rank} of 2. Trace on each rank.",
            "the group 'no such group' of a traced or compiled graph does not exist",
            f"{here}the plan of a traced or compiled graph exists no longer, or is of another",
        ]
        if rank:
            parts.insert(0, f"{here}a graph is compiled before rank 0 can tell what it will send")
        assert [part in text for part, text in zip(parts, told, strict=True)] == [True] * len(parts)
