"""Every primitive inside torch.compile: no graph break, the same numbers, few compilations."""

import itertools
import re
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import varcomm
from tests.ops.primitives import PRIMITIVES, case
from varcomm.graph.reductions import _CopiesToOne, _OneToCopies
from varcomm.ops import library
from varcomm.ops.operator import started
from varcomm.ops.replicated import (
    ReplicatedGather,
    ReplicatedShard,
    ReplicatedSum,
    ReplicatedUse,
)
from varcomm.tensor_parallel.embedding.rows_of_all import OwnRows, RowsOfAll
from varcomm.transport.group import resolve

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


@pytest.mark.parametrize("name", PRIMITIVES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_primitives(compiling, ranks, name):
    settings = [*STATIC, ("even", -1, True)] if ranks == 2 else STATIC[ranks == 1 :]
    told = compiling(ranks, compiled_like_eager, ranks, name, settings, "aot_eager", False)
    assert told == [[(True, 1)] * len(settings)] * ranks


@pytest.mark.parametrize("name", [n for n in PRIMITIVES if not n.startswith("adjoint")])
def test_asynchronous_calls(compiling, name):
    told = compiling(2, compiled_like_eager, 2, name, STATIC[:1], "aot_eager", True)
    assert told == [[(True, 1)]] * 2


@pytest.mark.parametrize("name", ["all_gather_v", "plan_from_needed", "reduce"])
@pytest.mark.parametrize("is_async", [False, True])
def test_on_inductor(compiling, name, is_async):
    told = compiling(2, compiled_like_eager, 2, name, STATIC[:1], "inductor", is_async)
    assert told == [[(True, 1)]] * 2


class Recorder(TorchDispatchMode):
    """Keeps what varcomm's operators are called with."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "varcomm":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


class AlwaysUnderWay(dict):
    """Starts again whatever is waited for: opcheck waits many times for one start."""

    def __init__(self, operator, x):
        super().__init__()
        self.start = lambda: started(operator.in_one_round, x, False)

    def pop(self, number, default):
        return self.start()


def checked_by_torch(rank, name, is_async):
    """Return which operators a call and its backward are made of, once each passes opcheck."""
    made = case(name, "off by one", 2, 0)
    op, x = made.bind(), input_of(made, rank, 2)
    with patch("torch.compiler.is_compiling", lambda: True), Recorder() as recorder:
        y = op(x, async_op=True).wait() if is_async else op(x)
        y.sum().backward()
    check(recorder.calls)
    return [func._opname for func, _ in recorder.calls]


def check(calls):
    kinds = {kind.name: kind for kind in library.KINDS}
    for func, args in calls:
        tensors = [isinstance(a, torch.Tensor) for a in args]
        own = [a.detach().clone() if is_one else a for a, is_one in zip(args, tensors, strict=True)]
        for a, is_one in zip(own, tensors, strict=True):
            if is_one and a.is_floating_point():
                a.requires_grad_()
        what = func._opname.removesuffix("_start").removesuffix("_wait")
        waits = func._opname.endswith("_wait")
        operator = kinds[what].from_arguments(*own[3 if waits else 2 :])
        under_way = AlwaysUnderWay(operator, own[0].detach())
        if not waits:  # what the backward of a start waits for
            result = operator.result(own[0].detach()).fill_(1)
            under_way = AlwaysUnderWay(operator.adjoint, result)
        with (
            patch.object(library, "_under_way", under_way),
            patch.object(library, "_numbers", itertools.repeat(7)),
        ):
            torch.library.opcheck(func, tuple(own))


@pytest.mark.parametrize("name", [name for name in PRIMITIVES if name != "shard_v"])
def test_operators_pass_opcheck(compiling, name):
    told = compiling(2, checked_by_torch, name, False)
    assert [len(names) for names in told] == [2, 2]  # forward and backward


@pytest.mark.parametrize("name", [n for n in PRIMITIVES if n != "shard_v" and "adjoint" not in n])
def test_starts_and_waits_pass_opcheck(compiling, name):
    for names in compiling(2, checked_by_torch, name, True):
        forward, backward = names[0].removesuffix("_start"), names[2].removesuffix("_start")
        assert names == [
            f"{forward}_start",
            f"{forward}_wait",
            f"{backward}_start",
            f"{backward}_wait",
        ]


# What layers are made of, beside the primitives.
OTHERS = {
    "replicated_use": lambda ranks: ReplicatedUse(ranks, True),
    "replicated_sum": lambda ranks: ReplicatedSum(ranks, True),
    "replicated_shard": lambda ranks: ReplicatedShard(ranks, (2, 3), 0),
    "replicated_gather": lambda ranks: ReplicatedGather(ranks, (5, 5), 0, True),
    "replicated": lambda ranks: _CopiesToOne(ranks),
    "replicated_part": lambda ranks: _OneToCopies(ranks),
    "rows_of_all": lambda ranks: RowsOfAll(ranks, (5, 5), torch.tensor([0, 9, 3, 3])),
    "own_rows": lambda ranks: OwnRows(ranks, (2, 3), torch.tensor([4, 0, 1, 1, 2])),
}


def others_checked_by_torch(rank, name):
    operator, x = OTHERS[name](resolve(None)), torch.randn(5, 2, requires_grad=True)
    with Recorder() as recorder:
        library.apply_in_graph(operator, x, None)
        ticket, promise = library.start_in_graph(operator, x, None)
        library.wait_in_graph(operator, x, ticket, promise)
    check(recorder.calls)
    return [func._opname for func, _ in recorder.calls]


@pytest.mark.parametrize("name", OTHERS)
def test_other_operators_pass_opcheck(compiling, name):
    told = compiling(2, others_checked_by_torch, name)
    assert told == [[name, f"{name}_start", f"{name}_wait"]] * 2


def test_order_of_a_ticket_passes_opcheck():
    ticket = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    told = torch.library.opcheck(torch.ops.varcomm.not_before.default, (ticket, torch.ones(2)))
    assert set(told.values()) == {"SUCCESS"}


def test_no_operator_is_forgotten():
    of_primitives = {name for name in PRIMITIVES if "from" not in name} - {"shard_v"}
    of_plans = {"exchange", "exchange_adjoint", "indexed_all_to_all_v_adjoint"}
    # lookups in tables are checked beside them, in tests/tensor_parallel
    kinds = {kind.name for kind in library.KINDS if not kind.__module__.endswith("in_graph")}
    assert kinds == of_primitives | of_plans | set(OTHERS)


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


def test_what_one_rank_does_not_use_is_not_dropped(compiling):
    names = ["all_gather_v", "all_reduce"]
    assert compiling(2, unused_on_one_rank) == [(names, 5.0), (names, 10.0)]


def changed_between(rank, backend):
    def fn(x):
        y = x * 1
        handle = varcomm.all_gather_v(y, [2, 3], async_op=True)
        y.add_(1)
        return handle.wait(), y

    whole, y = torch.compile(fn, fullgraph=True, backend=backend)(torch.full((2 + rank,), 3.0))
    return whole.tolist(), y.tolist()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_changes_after_the_start_is_sent_as_it_was(compiling, backend):
    told = compiling(2, changed_between, backend)
    assert told == [([3.0] * 5, [4.0] * 2), ([3.0] * 5, [4.0] * 3)]


def between(rank, backend):
    """Return what a graph does between start and wait, in forward and in backward."""
    graphs = []

    def keep(module, example):
        graphs.append(
            [
                str(node.args[1] if "effects" in str(node.target) else node.target)
                for node in module.graph.nodes
                if node.op == "call_function"
            ]
        )
        return module

    def fn(x, w):
        handle = varcomm.all_gather_v(x * 2, [2, 3], async_op=True)
        z = (x @ w).relu() @ w
        return (handle.wait() ** 2).sum() + z.sum()

    x = torch.randn(2 + rank, 4, requires_grad=True)
    w = torch.randn(4, 4, requires_grad=True)
    if backend == "inductor":
        from torch._inductor.utils import run_fw_bw_and_get_code

        options = {"reorder_for_peak_memory": False}
        compiled = torch.compile(fn, fullgraph=True, options=options)
        _, codes = run_fw_bw_and_get_code(lambda: compiled(x, w))
        graphs = [
            [
                line
                for line in code.split("\n")
                if "extern_kernels." in line or "torch.ops.varcomm" in line
            ]
            for code in codes
        ]
    else:
        from torch._dynamo.backends.common import aot_autograd

        compiled = torch.compile(fn, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
        compiled(x, w).backward()
    return graphs


@pytest.mark.parametrize("backend", ["aot", "inductor"])
def test_what_is_between_start_and_wait_stays_there(compiling, backend):
    for graphs in compiling(2, between, backend):
        for graph, name in zip(graphs, ("all_gather_v", "reduce_scatter_v"), strict=True):
            (start,) = [i for i, node in enumerate(graph) if f"{name}_start" in node]
            (wait,) = [i for i, node in enumerate(graph) if f"{name}_wait" in node]
            products = [i for i, node in enumerate(graph) if "mm" in node]
            assert sum(start < i < wait for i in products) >= 2


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
            call(x, None, group, of_rank, [2, 2], 0, True)
        except varcomm.GroupError as error:
            told.append(str(error))
    try:
        torch.ops.varcomm.all_reduce_wait(x, torch.tensor(-2.0), None, "0", rank, True, True)
    except varcomm.ArgumentError as error:
        told.append(str(error))
    try:
        torch.ops.varcomm.exchange(x, None, "0", rank, torch.tensor(-1), 2, 2, 0, True)
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
            f"all_reduce_wait on rank {rank}: ticket -2.0 is of nothing under way. Wait once",
            f"{here}the plan of a traced or compiled graph exists no longer, or is of another",
        ]
        if rank:
            parts.insert(0, f"{here}a graph is compiled before rank 0 can tell what it will send")
        assert [part in text for part, text in zip(parts, told, strict=True)] == [True] * len(parts)
