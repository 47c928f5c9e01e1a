"""Every primitive in a recorded graph: no graph break, the same numbers, few compilations."""

import copy
import re
from unittest.mock import patch

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import varcomm
from tests.ops.primitives import PRIMITIVES, case
from varcomm import ArgumentError, DisagreementError, GroupError

# Rows of two ranks, none of them 0 or 1, which torch.compile takes for constants.
SIZES = ([2, 3], [4, 2], [5, 7])
SLOW = pytest.mark.slow


def differentiated(fn, x):
    """Return result and gradient of a loss that is linear in neither."""
    y = fn(x)
    (gradient,) = torch.autograd.grad((y**3).sum(), x)
    return y.detach(), gradient


def same(fn, other, x):
    pairs = zip(differentiated(fn, x), differentiated(other, x), strict=True)
    return all(torch.allclose(*pair, rtol=1e-12, atol=1e-12) for pair in pairs)


def counted(fn, backend="aot_eager", dynamic=None):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(fn, fullgraph=True, backend=counter, dynamic=dynamic), counter


def compiled_like_eager(rank, ranks, name, settings, backend, is_async):
    answers = []
    for pattern, dim, dynamic in settings:
        torch._dynamo.reset()
        made = case(name, pattern, ranks, dim)
        op, x = made.bind(), made.filled(torch.float64)[rank].requires_grad_()

        def fn(x, op=op):
            y = 2 * x
            return op(y, async_op=True).wait() if is_async else op(y)

        compiled, counter = counted(fn, backend, dynamic)
        answers.append((same(compiled, fn, x), counter.frame_count))
    return answers


STATIC = [("off by one", 0, None), ("one empty", 1, None)]
QUICK = ("all_gather_v", "plan_from_needed", "reduce")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=SLOW) for n in PRIMITIVES]
)
@pytest.mark.parametrize("is_async", [False, True])
def test_primitives(compiling, name, is_async):
    if is_async and not case(name, "even", 1).has_async:
        return
    settings = [STATIC[0]] if is_async else [*STATIC, ("even", -1, True)]
    answers = compiling(2, compiled_like_eager, 2, name, settings, "aot_eager", is_async)
    assert answers == [[(True, 1)] * len(settings)] * 2


@SLOW
@pytest.mark.parametrize(
    ("ranks", "name", "backend"),
    [(1, name, "aot_eager") for name in PRIMITIVES] + [(2, name, "inductor") for name in QUICK],
)
def test_primitives_on_one_rank_and_on_inductor(compiling, ranks, name, backend):
    settings = STATIC[1:] if ranks == 1 else STATIC[:1]
    answers = compiling(ranks, compiled_like_eager, ranks, name, settings, backend, False)
    assert answers == [[(True, 1)]] * ranks


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
    """Return the number of operators of a call and its backward, once each passes opcheck."""
    made = case(name, "off by one", 2, 0)
    op, x = made.bind(), made.filled(torch.float64)[rank].requires_grad_()
    with patch("torch.compiler.is_compiling", lambda: True), Calls() as recorder:
        op(x).sum().backward()
    for func, args in recorder.calls:
        own = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
        own[0].requires_grad_()
        torch.library.opcheck(func, tuple(own))
    return len(recorder.calls)


@SLOW
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


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=SLOW)])
def test_order_of_calls_in_compiled_code(compiling, backend):
    """Calls keep their order, and a result that one rank does not use is not dropped."""
    gather, scatter = "all_gather_v", "reduce_scatter_v"
    names = [gather, "all_reduce", gather, gather, scatter]
    names += [gather, scatter, "all_reduce", scatter]
    assert compiling(2, ordered, backend) == [(True, names)] * 2


def other_sizes(rank, dynamic):
    def fn(x, sizes):
        return varcomm.reduce_scatter_v(varcomm.all_gather_v(x * 2, sizes) ** 2, sizes)

    compiled, counter = counted(fn, dynamic=dynamic)
    right = []
    for sizes in SIZES:
        x = torch.randn(sizes[rank], 11, dtype=torch.float64, requires_grad=True)
        right.append(same(lambda x, s=sizes: compiled(x, s), lambda x, s=sizes: fn(x, s), x))
    return right, counter.frame_count


@SLOW
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
        return self.plan(x) * 2


def other_plans(rank, ranks):
    compiled, counter = counted(lambda x, plan: plan(x) * 2, dynamic=True)
    right = []
    for n in (3, 5, 8):
        # other neighbours in each: one has no rows for others, one none for itself
        counts = [n + i if (i + n) % 2 else 0 for i in range(ranks)]
        indices = [torch.randint(0, n + rank, (count,)) for count in counts]
        plan = varcomm.ExchangePlan.from_indices(indices, n + rank)
        x = torch.randn(n + rank, 2, dtype=torch.float64, requires_grad=True)
        right.append(same(lambda x, plan=plan: compiled(x, plan), Exchanging(plan), x))
    x = torch.ones(2, requires_grad=True)  # a graph keeps the routes that its backward needs
    y = compiled(x, varcomm.ExchangePlan.from_indices([torch.tensor([0, 0])] * 2, 2))
    (y**2).sum().backward()
    return right, counter.frame_count, x.grad.tolist()


@SLOW
def test_other_plans_do_not_compile_again(compiling):
    for right, times, gradient in compiling(2, other_plans, 2):
        assert right == [True] * 3
        assert times <= 3  # an empty tensor, and one of one dimension, are compiled by themselves
        assert gradient == [32.0, 0.0]


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


@SLOW
def test_compiled_code_is_not_mistaken_for_another_ranks(compiling):
    assert compiling(2, same_code_on_both_ranks) == [[(2, 2)] * 2, [(3, 2)] * 2]


def compared(rank):
    compiled, _ = counted(lambda x, dim: varcomm.all_gather_v(x, [2, 2], dim))
    x = torch.ones(2, 2)
    with varcomm.debug():
        right = compiled(x, 0).shape
        with pytest.raises(DisagreementError) as caught:
            compiled(x, rank)
    return tuple(right), str(caught.value)


@SLOW
def test_ranks_compare_compiled_calls_in_debug_mode(compiling):
    one, other = compiling(2, compared)
    assert one == other
    shape, message = one
    assert shape == (4, 2)
    assert "ranks disagree on dim: rank 0 has 0; rank 1 has 1." in message
    assert re.search(r"test_compiled\.py:\d+, in <lambda>", message), "the user's line"


def messages(rank):
    found = []

    def note(fn, *args):
        torch._dynamo.reset()
        try:
            fn(*args)
        except Exception as error:
            found.append((isinstance(error, GroupError), str(error)))

    x = torch.ones(2)
    indices = [torch.tensor([0]), torch.tensor([5])]
    gather = torch.ops.varcomm.all_gather_v
    if rank:
        note(counted(lambda: varcomm.broadcast(None))[0])
    note(counted(lambda x, i: varcomm.indexed_all_to_all_v(x, i, [[1, 1]] * 2))[0], x, indices)
    note(counted(lambda x: varcomm.all_gather_v(x, [3, 3]))[0], x)
    note(gather, x, None, None, "0", 1 - rank, [2, 2], 0, True)
    note(gather, x, None, None, "no such group", rank, [2, 2], 0, True)
    return found


def test_wrong_use_is_an_error(compiling):
    for rank, found in enumerate(compiling(2, messages)):
        here = f"on rank {rank} of 2: "
        parts = [
            f"{here}indices spans 0...5, out of range for 2 own rows.",
            f"{here}the tensor of shape (2,) has 2 rows along dim 0, but sizes[{rank}] is 3",
            f"a graph traced on rank {1 - rank} runs on rank {rank} of 2. Trace on each rank.",
            "the group 'no such group' of a traced or compiled graph does not exist",
        ]
        if rank:
            parts.insert(0, f"{here}a graph is compiled before rank 0 can describe its tensor")
        for part, (of_group, text) in zip(parts, found, strict=True):
            assert part in text
            assert of_group == ("a graph traced" in part or "no such group" in part)


# --- recorded graphs: copied, saved, differentiated, run later


def cross_plan(rank):
    """A plan by which each of two ranks gets a row of the other."""
    indices = [torch.tensor([0] if other != rank else []).long() for other in range(2)]
    return varcomm.ExchangePlan.from_indices(indices, 3)


def copies(rank):
    x = torch.arange(3.0) + 10 * rank  # a graph has the routes of a plan that is gone
    traced = make_fx(Exchanging(cross_plan(rank)))(x)
    program = torch.export.export(Exchanging(cross_plan(rank)), (x,), strict=False)
    return [copy.deepcopy(each)(x).tolist() for each in (traced, program.module())]


@SLOW
def test_copies_of_a_graph_have_the_routes_of_its_plan(compiling):
    assert compiling(2, copies) == [[[20.0]] * 2, [[0.0]] * 2]


def forward_mode(rank):
    x, t = torch.arange(3.0), torch.ones(3)

    def fn(x):
        return varcomm.all_gather_v(x * x, [3, 3])

    def dual(call):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(call(forward_ad.make_dual(x, t))).tangent

    for call in (
        lambda: torch.func.jvp(make_fx(fn)(x), (x,), (t,)),
        lambda: dual(make_fx(fn)(x)),
        lambda: dual(counted(fn)[0]),
    ):
        with pytest.raises(ArgumentError, match="all_gather_v: a recorded operator has no forward"):
            call()


@SLOW
def test_forward_mode_of_a_recorded_call_is_refused(compiling):
    compiling(2, forward_mode)


def transformed(rank):
    """torch.func around collectives in compiled code breaks the graph, and is right."""
    x, t = torch.arange(3.0) + 1, torch.ones(3)

    def fn(x):
        return varcomm.all_gather_v(x**2, [3, 3]) ** 2

    calls = (
        lambda x: torch.func.grad(lambda x: fn(x).sum())(x),
        lambda x: torch.func.jvp(fn, (x,), (t,))[1],
    )
    return [torch.equal(torch.compile(f, backend="aot_eager")(x), f(x)) for f in calls]


@SLOW
def test_transforms_in_compiled_code(compiling):
    assert compiling(2, transformed) == [[True, True]] * 2
