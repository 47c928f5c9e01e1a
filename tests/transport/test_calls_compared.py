"""Outside of debug(), ranks that made other calls all raise at their next sum over ranks."""

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn.parallel import DistributedDataParallel

import varcomm
from tests.gpu.pretended import pretended
from tests.graph.graphs import wild
from tests.transport.strict_nccl import strict_nccl
from tests.worlds import on_ranks
from varcomm import DisagreementError, ExchangePlan
from varcomm.data_parallel import ShardedGradients, sum_gradients, sum_hook
from varcomm.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    grad_norm,
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)
from varcomm.transport.agreement import share
from varcomm.transport.group import resolve

F = torch.zeros
INT, FLOAT, HALF = torch.int32, torch.float32, torch.float16


def plans(rank):
    """Return two plans of equal counts on three ranks, which send other rows."""
    other = [[torch.tensor([row])] * 3 for row in (0, 1)]
    return [ExchangePlan.from_indices(indices, 2) for indices in other]


def swapped(rank, wrong, first, second):
    for call in (second, first) if wrong else (first, second):
        call()


# Two calls that move as many bytes: ranks 0 and 2 make the first, and rank 1 the second.
FAULTS = {
    "dtype": lambda r, w: varcomm.all_gather_v(F(2, dtype=INT if w else FLOAT), [2] * 3),
    "narrow dtype": lambda r, w: varcomm.all_gather_v(
        F(2, dtype=HALF if w else torch.bfloat16), [2] * 3
    ),
    "order": lambda r, w: swapped(
        r,
        w,
        lambda: varcomm.all_gather_v(F(2, 3), [2] * 3),
        lambda: varcomm.all_gather_v(F(2, 3), [2] * 3, dim=0, use_fp32=False),
    ),
    "backward": lambda r, w: (
        varcomm.all_gather_v(F(2, requires_grad=True), [2] * 3, use_fp32=not w).sum().backward()
    ),
    "asynchronous": lambda r, w: varcomm.all_gather_v(
        F(2, dtype=INT if w else FLOAT), [2] * 3, async_op=True
    ).wait(),
    "plan": lambda r, w: plans(r)[w](F(2, 3)),
    "a call without messages": lambda r, w: w and varcomm.broadcast(F(0), like=F(0)),
}


@pytest.mark.parametrize("name", FAULTS)
@on_ranks(3)
def test_other_calls_are_an_error_at_the_next_sum(rank, name):
    FAULTS[name](rank, False)
    varcomm.all_reduce(torch.ones(2))  # all is well
    FAULTS[name](rank, rank == 1)
    with pytest.raises(DisagreementError, match="different calls") as caught:
        varcomm.all_reduce(torch.ones(2))
    assert len(set(share("the errors", lambda: str(caught.value), resolve(None)))) == 1
    assert varcomm.all_reduce(torch.ones(2)).tolist() == [3, 3]  # the group works on


DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int32, torch.int64, torch.complex64, torch.complex128),
    *(torch.int8, torch.uint8, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(3)
def test_sums_of_each_dtype_compare(rank, dtype):
    x, threes = torch.ones(2, 2).to(dtype), [[3, 3], [3, 3]]
    for _ in range(20):  # any bits of the digest are exact in the sum
        assert varcomm.all_reduce(x).tolist() == threes
    FAULTS["dtype"](rank, rank == 1)
    with pytest.raises(DisagreementError):
        varcomm.all_reduce(x)
    assert varcomm.all_reduce(x, async_op=True).wait().tolist() == threes


OF_ONE_WIDTH = (
    *((HALF, torch.bfloat16), (HALF, torch.int16), (FLOAT, INT), (torch.float64, torch.int64)),
    *((torch.int64, torch.complex64), (torch.int8, torch.float8_e5m2)),
    (torch.float8_e4m3fn, torch.float8_e5m2),
)


@pytest.mark.parametrize("dtypes", OF_ONE_WIDTH, ids=str)
@on_ranks(3)
def test_sums_in_another_dtype_are_an_error_on_all_ranks(rank, dtypes):
    """Each rank reads the bits that other ranks carry as numbers of its own dtype."""

    def sums():
        varcomm.all_reduce(torch.ones(2).to(dtypes[rank == 1]))
        varcomm.all_reduce(torch.ones(2))

    for calls in range(10):
        for size in range(calls):
            varcomm.broadcast(F(0, size), like=F(0, size))
        refused(sums)


def of_sequence(cls, inputs, outputs):
    return [cls(inputs, outputs, sequence_sizes=[2] * 3) for _ in range(2)]


SHARDED = {
    "column": lambda: ([ColumnParallelLinear(4, 6) for _ in range(2)], F(6, 4)),
    "column of a sequence": lambda: (of_sequence(ColumnParallelLinear, 4, 6), F(2, 4)),
    "row": lambda: ([RowParallelLinear(6, 4) for _ in range(2)], F(6, 2)),
    "row of a sequence": lambda: (of_sequence(RowParallelLinear, 6, 4), F(6, 2)),
    "ids": lambda: ([VocabParallelEmbedding(7, 4) for _ in range(2)], torch.arange(7)),
}


@pytest.mark.parametrize("name", SHARDED)
@on_ranks(3)
def test_sharded_layers_in_another_order_are_an_error_at_the_next_sum(rank, name):
    layers, x = SHARDED[name]()
    x = x.requires_grad_(x.is_floating_point())

    def step(order):
        sum(layer(x).square().sum() for layer in layers[::order]).backward()
        varcomm.all_reduce(torch.ones(2))

    step(1)
    with torch.no_grad():
        if rank == 0 and name == "column":
            layers[1](x)  # without messages, so this rank may do it alone
    step(1)
    refused(lambda: step(-1 if rank == 1 else 1))


def module():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 3000)  # a sum in pieces


def step_of_sum_gradients(dtype=FLOAT, reduce="sum"):
    model = module().to(dtype)

    def step():
        model(torch.ones(1, 3, dtype=dtype)).sum().backward()
        sum_gradients(model, reduce=reduce)

    return step


def step_of_hook():
    model = DistributedDataParallel(module())
    model.register_comm_hook(None, sum_hook)
    return lambda: (model.zero_grad(), model(torch.ones(1, 3)).sum().backward())


def step_of_sharded_gradients():
    own = ShardedGradients(module(), torch.optim.SGD)
    return own.step


def step_of_loss(dtype=FLOAT, compile=False):
    generator = torch.Generator().manual_seed(varcomm.init().rank)
    logits = torch.randn(5, 2, dtype=dtype, generator=generator)
    target = torch.arange(5)

    def step():
        vocab_parallel_cross_entropy(logits, target, [2, 2, 2])
        linear_cross_entropy(torch.ones(5, 2, dtype=dtype), logits, target, [5, 5, 5])

    return torch.compile(step, backend="aot_eager") if compile else step


def step_of_norm():
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    return lambda: grad_norm([weight])


SUMS = {
    "loss of a vocabulary": step_of_loss,
    "in bf16": lambda: step_of_loss(torch.bfloat16),
    "in fp64": lambda: step_of_loss(torch.float64),
    "compiled": lambda: step_of_loss(compile=True),
    "norm of gradients": step_of_norm,
    "sum_gradients": step_of_sum_gradients,
    "in bf16, a mean": lambda: step_of_sum_gradients(torch.bfloat16, "mean"),
    "in fp32, a mean": lambda: step_of_sum_gradients(FLOAT, "mean"),
    "sum_hook": step_of_hook,
    "ShardedGradients": step_of_sharded_gradients,
    "check": lambda: varcomm.check,
    "set-up": lambda: lambda: ExchangePlan.from_indices([torch.tensor([0])] * 3, 1),
}


@pytest.mark.parametrize("name", SUMS)
@on_ranks(3)
def test_each_sum_of_a_step_compares(rank, name):
    step = SUMS[name]()
    for _ in range(3):
        step()
    FAULTS["dtype"](rank, rank == 1)
    with pytest.raises(DisagreementError, match="int32"):
        step()
    varcomm.check()


@on_ranks(3)
def test_parameters_that_drift_are_an_error_within_100_steps(rank):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(40)])
    if rank == 2:
        with torch.no_grad():
            model[17].weight += 1e-6

    def steps():
        for _ in range(100):
            model(torch.ones(1, 4)).sum().backward()
            sum_gradients(model)

    with pytest.raises(DisagreementError, match=r"'17\.weight'"):
        steps()


@on_ranks(3)
def test_agreement_can_be_turned_off(rank):
    varcomm.init(agreement=False)
    with varcomm.trace() as off:
        FAULTS["dtype"](rank, rank == 1)
        assert varcomm.all_reduce(torch.ones(2)).tolist() == [3, 3]
    assert off.by_operation()["all_reduce"].sent == 2 * 8
    varcomm.init()  # leaves it off
    FAULTS["dtype"](rank, rank == 1)
    varcomm.all_reduce(torch.ones(2))
    varcomm.init(agreement=True)
    varcomm.check()


@pytest.mark.slow
@on_ranks(16, 17)
def test_sums_by_levels_compare(rank, ranks):
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(3, dtype=dtype)
        assert torch.equal(varcomm.all_reduce(x), ranks * x)
        varcomm.all_gather_v(F(2, dtype=INT if rank == 9 else FLOAT), [2] * ranks)
        with pytest.raises(DisagreementError, match="int32"):
            varcomm.all_reduce(x)


def refused(call):
    with pytest.raises(DisagreementError, match="different calls"):
        call()


@on_ranks(3)
def test_ranks_that_differ_each_in_another_way(rank):
    """A rank whose word is the mean of all words raises too."""
    for size in range(1, 40):
        varcomm.broadcast(F(0, size * rank), like=F(0, size * rank))
        refused(lambda: varcomm.all_reduce(torch.ones(2)))


@on_ranks(3)
def test_handles_in_flight_at_an_error(rank):
    early = varcomm.all_reduce(torch.ones(2), async_op=True)
    FAULTS["dtype"](rank, rank == 1)
    wrong = [varcomm.all_reduce(torch.ones(2), async_op=True) for _ in range(2)]
    refused(wrong[0].wait)
    if rank == 0:
        refused(wrong[0].wait)  # the same error, without the other ranks
    assert early.wait().tolist() == wrong[1].wait().tolist() == [3, 3]
    assert varcomm.all_reduce(torch.ones(2)).tolist() == [3, 3]


@on_ranks(3)
def test_what_ranks_may_do_alone(rank):
    """Calls that send nothing, or are refused before; compiled code; asynchronous calls."""
    x = torch.ones(3, requires_grad=True)
    if rank == 0:
        varcomm.graph.replicated(x.sum()).backward()
        with pytest.raises(varcomm.ArgumentError):
            varcomm.all_gather_v(x, [1, 2, 3, 4])
    total = torch.compile(varcomm.all_reduce, backend="eager") if rank == 1 else varcomm.all_reduce
    loss = step_of_loss(compile=rank == 2)
    for _ in range(3):
        assert total(torch.ones(2)).tolist() == [3, 3]
        loss()
        handle = varcomm.all_reduce(torch.ones(2), async_op=True) if rank == 2 else None
        again = handle.wait() if handle else varcomm.all_reduce(torch.ones(2))
        assert again.tolist() == [3, 3]


def graph_model():
    graph = varcomm.graph.partition(wild(24), method="random")
    return varcomm.graph.distribute(pyg.GraphSAGE(4, 6, 2), graph), (
        graph.x.float(),
        graph.edge_index,
    )


def sharded_model():
    model = torch.nn.Sequential(ColumnParallelLinear(4, 6), RowParallelLinear(6, 4))
    return model, (torch.ones(2, 4),)


@pytest.mark.parametrize("model", [graph_model, sharded_model])
@pytest.mark.parametrize("late", [False, True])
@on_ranks(3)
def test_some_ranks_compile_a_model(rank, model, late):
    """Compiled code does not name its layers, which ranks then compare no longer; calls they do."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, inputs = model()
    fast = torch.compile(model, backend="aot_eager")
    for step in range(4):
        out = (fast if rank == 1 and step >= late else model)(*inputs)
        out.square().sum().backward()
        assert varcomm.all_reduce(torch.ones(2)).tolist() == [3, 3]
    varcomm.check()
    FAULTS["dtype"](rank, rank == 1)
    refused(lambda: varcomm.all_reduce(torch.ones(2)))


@pytest.mark.parametrize("model", [graph_model, sharded_model])
@pytest.mark.parametrize("steps", [1, 10])
@on_ranks(3)
def test_the_table_names_the_first_call_that_differs(rank, model, steps):
    """Rank 1 compiles its layers, so that only the other ranks have them among their calls."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = model()
    model = torch.compile(model, backend="aot_eager") if rank == 1 else model
    for _ in range(steps):
        model(*inputs).square().sum().backward()
    FAULTS["dtype"](rank, rank == 1)
    with pytest.raises(DisagreementError) as caught:
        varcomm.all_reduce(model(*inputs)[:1, :2])
    assert "all_gather_v of int32" in str(caught.value)
    assert "all_gather_v of float32" in str(caught.value)


@on_ranks(3)
def test_layers_that_differ_behind_equal_calls(rank):
    """The table names the layer; 100 layers without a call leave no call to compare."""
    x, group = F(6, 4), torch.distributed.new_group()  # whose layers no test has compiled
    layers = [ColumnParallelLinear(4, 6, group=group) for _ in range(2)]
    layers[rank == 1](x)
    with pytest.raises(DisagreementError, match="a layer after call 0 of the group") as caught:
        varcomm.all_reduce(torch.ones(2), group=group)
    assert "the sharded layer 2 of the group" in str(caught.value)
    varcomm.all_reduce(torch.ones(2), group=group)
    for _ in range(100):
        layers[rank == 1](x)
    refused(lambda: varcomm.all_reduce(torch.ones(2), group=group))


@on_ranks(3)
def test_off_and_on_again(rank):
    group = torch.distributed.new_group()
    if rank == 0:
        resolve(group)  # known to one rank alone
    varcomm.all_reduce(torch.ones(2))
    varcomm.init(agreement=False)
    assert varcomm.all_reduce(torch.ones(2), group=group).tolist() == [3, 3]
    varcomm.init(agreement=True)
    varcomm.all_reduce(torch.ones(2))
    FAULTS["dtype"](rank, rank == 1)
    refused(lambda: varcomm.all_reduce(torch.ones(2)))


@pytest.mark.parametrize("members", [3, 2])
@on_ranks(3)
def test_the_end_of_debug_compares_what_sums_on_a_gpu_carried(rank, members):
    """Also of a subgroup; not after an exception, since other ranks may not come."""
    group = torch.distributed.new_group(range(3 - members, 3))
    if rank < 3 - members:
        return
    with strict_nccl(["cuda"]), pretended() as device:

        def calls(wrong, sums):
            x = torch.zeros(2, dtype=INT if wrong and rank == 1 else FLOAT).to(device)
            varcomm.all_gather_v(x, [2] * members, group=group)
            for _ in range(sums):
                varcomm.all_reduce(torch.ones(2).to(device), group=group)

        def debugged(error=None):
            with varcomm.debug(), varcomm.debug():
                if error is not None:
                    raise error

        calls(True, 0)
        debugged()  # no sum has carried anything
        calls(False, 1)
        with pytest.raises(KeyError):
            debugged(KeyError("of this rank"))
        refused(debugged)
        debugged()
        calls(False, 40)
        debugged()
        varcomm.check(group)
