"""Every primitive in a recorded graph: no graph break, the same numbers, few compilations."""

import copy
import re
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import varcomm
from tests.ops.primitives import PRIMITIVES, case
from tests.worlds import on_ranks, refused_alike
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
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(fn, fullgraph=True, backend=counter, dynamic=dynamic), counter


def check_compiled(rank, ranks, name, settings, backend="aot_eager", is_async=False):
    for pattern, dim, dynamic in settings:
        made = case(name, pattern, ranks, dim)
        op, x = made.bind(), made.filled(torch.float64)[rank].requires_grad_()

        def fn(x, op=op):
            y = 2 * x
            return op(y, async_op=True).wait() if is_async else op(y)

        compiled, counter = counted(fn, backend, dynamic)
        assert same(compiled, fn, x), (pattern, dim)
        assert counter.frame_count == 1


STATIC = [("off by one", 0, None), ("one empty", 1, None)]
QUICK = ("all_gather_v", "plan_from_needed", "reduce")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=SLOW) for n in PRIMITIVES]
)
@pytest.mark.parametrize("is_async", [False, True])
@on_ranks(2)
def test_primitives(rank, name, is_async):
    if is_async and not case(name, "even", 1).has_async:
        return
    settings = STATIC[:1] if is_async else [*STATIC, ("even", -1, True)]
    check_compiled(rank, 2, name, settings, is_async=is_async)


@SLOW
@pytest.mark.parametrize(
    ("ranks", "name", "backend"),
    [(1, name, "aot_eager") for name in PRIMITIVES] + [(2, name, "inductor") for name in QUICK],
)
@on_ranks(timeout=120)
def test_primitives_on_one_rank_and_on_inductor(rank, ranks, name, backend):
    check_compiled(rank, ranks, name, STATIC[1:] if ranks == 1 else STATIC[:1], backend)


class Calls(TorchDispatchMode):
    """Keeps the calls of varcomm's operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "varcomm":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@SLOW
@pytest.mark.parametrize("name", [name for name in PRIMITIVES if name != "shard_v"])
@on_ranks(2)
def test_operators_pass_opcheck(rank, name):
    """The two operators of a call and its backward."""
    made = case(name, "off by one", 2, 0)
    op, x = made.bind(), made.filled(torch.float64)[rank].requires_grad_()
    with patch("torch.compiler.is_compiling", lambda: True), Calls() as recorder:
        op(x).sum().backward()
    for func, args in recorder.calls:
        own = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
        own[0].requires_grad_()
        torch.library.opcheck(func, tuple(own))
    assert len(recorder.calls) == 2


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=SLOW)])
@on_ranks(2, timeout=120)
def test_order_of_calls_in_compiled_code(rank, backend):
    """Calls keep their order, and a result that one rank does not use is not dropped.

    Nothing but the order of the calls relates these operators, in forward and in backward.
    """
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
        (got,) = torch.autograd.grad(counted(fn, backend)[0](x), x)
    assert torch.allclose(got, want)
    gather, scatter = "all_gather_v", "reduce_scatter_v"
    names = [gather, "all_reduce", gather, gather, scatter]
    names += [gather, scatter, "all_reduce", scatter]
    assert [call.name for call in trace] == names


@SLOW
@pytest.mark.parametrize(("dynamic", "times"), [(True, 1), (None, 2)])
@on_ranks(2)
def test_other_sizes_do_not_compile_again(rank, dynamic, times):
    """Torch makes sizes dynamic at once, or when they change for the first time."""

    def fn(x, sizes):
        return varcomm.reduce_scatter_v(varcomm.all_gather_v(x * 2, sizes) ** 2, sizes)

    compiled, counter = counted(fn, dynamic=dynamic)
    for sizes in SIZES:
        x = torch.randn(sizes[rank], 11, dtype=torch.float64, requires_grad=True)
        assert same(lambda x, s=sizes: compiled(x, s), lambda x, s=sizes: fn(x, s), x)
    assert counter.frame_count == times


class Exchanging(torch.nn.Module):
    """Holds its plan, whose ints the compiler takes for constants."""

    def __init__(self, plan):
        super().__init__()
        self.plan = plan

    def forward(self, x):
        return self.plan(x) * 2


@SLOW
@on_ranks(2)
def test_other_plans_do_not_compile_again(rank):
    compiled, counter = counted(lambda x, plan: plan(x) * 2, dynamic=True)
    for n in (3, 5, 8):
        # other neighbours in each: one has no rows for others, one none for itself
        counts = [n + i if (i + n) % 2 else 0 for i in range(2)]
        indices = [torch.randint(0, n + rank, (count,)) for count in counts]
        plan = varcomm.ExchangePlan.from_indices(indices, n + rank)
        x = torch.randn(n + rank, 2, dtype=torch.float64, requires_grad=True)
        assert same(lambda x, plan=plan: compiled(x, plan), Exchanging(plan), x)
    x = torch.ones(2, requires_grad=True)  # a graph keeps the routes that its backward needs
    y = compiled(x, varcomm.ExchangePlan.from_indices([torch.tensor([0, 0])] * 2, 2))
    (y**2).sum().backward()
    assert counter.frame_count <= 3  # an empty tensor, and one of one dimension, by themselves
    assert x.grad.tolist() == [32.0, 0.0]


@SLOW
@on_ranks(2, timeout=120)
def test_compiled_code_is_not_mistaken_for_another_ranks(rank):
    """The shape of a result depends on the rank; the caller's code and inputs do not."""

    def fn(x):
        return varcomm.reduce_scatter_v(x, [2, 3]) * 2

    torch._dynamo.reset()
    for turn in range(2):  # one rank after the other, so that the second finds the first's code
        if rank == turn:
            torch.compile(fn, fullgraph=True)  # nothing is compiled before the call
        assert torch.compile(fn, fullgraph=True)(torch.ones(5, 2)).shape == (2 + rank, 2)
        torch._dynamo.reset()


@SLOW
@on_ranks(2)
def test_ranks_compare_compiled_calls_in_debug_mode(rank):
    compiled, _ = counted(lambda x, dim: varcomm.all_gather_v(x, [2, 2], dim))
    x = torch.ones(2, 2)
    with varcomm.debug():
        assert compiled(x, 0).shape == (4, 2)
        error = refused_alike(
            DisagreementError,
            lambda: compiled(x, rank),
            "ranks disagree on dim: rank 0 has 0; rank 1 has 1.",
            match=r"test_compiled\.py:\d+, in <lambda>",  # the user's line
        )
    assert error.on_all_ranks


@on_ranks(2)
def test_wrong_use_is_an_error(rank):
    here = f"on rank {rank} of 2: "

    def refused(fn, *args, words, kind=ArgumentError):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=re.escape(words)) as caught:
            fn(*args)
        assert isinstance(caught.value, GroupError) == (kind is GroupError)

    x = torch.ones(2)
    indices = [torch.tensor([0]), torch.tensor([5])]
    gather = torch.ops.varcomm.all_gather_v
    if rank:
        words = f"{here}a graph is compiled before rank 0 can describe its tensor"
        refused(counted(lambda: varcomm.broadcast(None))[0], words=words)
    exchange = counted(lambda x, i: varcomm.indexed_all_to_all_v(x, i, [[1, 1]] * 2))[0]
    refused(exchange, x, indices, words=f"{here}indices spans 0...5, out of range for 2 own rows.")
    words = f"{here}the tensor of shape (2,) has 2 rows along dim 0, but sizes[{rank}] is 3"
    refused(counted(lambda x: varcomm.all_gather_v(x, [3, 3]))[0], x, words=words)
    words = f"traced on rank {1 - rank} runs on rank {rank} of 2. Trace on each rank."
    given = x, None, None, False, "0", 1 - rank, [2, 2], 0, True
    refused(gather, *given, words=words, kind=GroupError)
    words = "the group 'no such group' of a traced or compiled graph does not exist"
    given = x, None, None, False, "no such group", rank, [2, 2], 0, True
    refused(gather, *given, words=words, kind=GroupError)


# --- recorded graphs: copied, saved, differentiated, run later


def cross_plan(rank):
    """A plan by which each of two ranks gets a row of the other."""
    indices = [torch.tensor([0] if other != rank else []).long() for other in range(2)]
    return varcomm.ExchangePlan.from_indices(indices, 3)


@SLOW
@on_ranks(2)
def test_copies_of_a_graph_have_the_routes_of_its_plan(rank):
    x = torch.arange(3.0) + 10 * rank  # a graph has the routes of a plan that is gone
    traced = make_fx(Exchanging(cross_plan(rank)))(x)
    program = torch.export.export(Exchanging(cross_plan(rank)), (x,), strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, where it copies a graph
        copied = copy.deepcopy([traced, program.module()])
    for graph in copied:
        assert graph(x).tolist() == [0.0 if rank else 20.0]


@SLOW
@on_ranks(2)
def test_forward_mode_of_a_recorded_call_is_refused(rank):
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
@on_ranks(2)
def test_transforms_in_compiled_code(rank):
    """torch.func around collectives in compiled code breaks the graph, and is right."""
    x, t = torch.arange(3.0) + 1, torch.ones(3)

    def fn(x):
        return varcomm.all_gather_v(x**2, [3, 3]) ** 2

    torch._dynamo.reset()
    for call in (
        lambda x: torch.func.grad(lambda x: fn(x).sum())(x),
        lambda x: torch.func.jvp(fn, (x,), (t,))[1],
    ):
        assert torch.equal(torch.compile(call, backend="aot_eager")(x), call(x))
