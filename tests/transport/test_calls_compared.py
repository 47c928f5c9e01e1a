"""Outside of debug(), ranks that made other calls all raise at their next sum over ranks."""

from itertools import product

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn.parallel import DistributedDataParallel

import varcomm
from tests.gpu.pretended import pretended
from tests.graph.graphs import wild
from tests.transport.strict_nccl import strict_nccl
from tests.worlds import on_ranks, refused_alike
from varcomm import DisagreementError, ExchangePlan
from varcomm.data_parallel import ShardedGradients, sum_gradients, sum_hook
from varcomm.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    grad_norm,
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)
from varcomm.transport.group import resolve

F = torch.zeros
INT, FLOAT, HALF = torch.int32, torch.float32, torch.float16


def faulty(wrong):
    """Gather as many bytes on all ranks, on some in another dtype."""
    return varcomm.all_gather_v(F(2, dtype=INT if wrong else FLOAT), [2] * 3)


@on_ranks(3)
def test_other_calls_are_an_error_at_the_next_sum(rank):
    """One error on all ranks; tests/fuzz/swaps.py has the kinds of calls that are found."""
    for culprit in (1, None, 1):
        faulty(rank == culprit)
        if culprit is not None:
            refused_alike(
                DisagreementError, lambda: varcomm.all_reduce(torch.ones(2)), "different calls"
            )
        assert varcomm.all_reduce(torch.ones(2)).tolist() == [3, 3]  # the group works on


DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int32, torch.int64, torch.complex64, torch.complex128),
    *(torch.int8, torch.uint8, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2),
)


OF_ONE_WIDTH = (
    *((HALF, torch.bfloat16), (HALF, torch.int16), (FLOAT, INT), (torch.float64, torch.int64)),
    *((torch.int64, torch.complex64), (torch.int8, torch.float8_e5m2)),
    (torch.float8_e4m3fn, torch.float8_e5m2),
)


@on_ranks(3)
def test_sums_of_each_dtype_compare(rank):
    threes = [[3, 3], [3, 3]]
    for dtype in DTYPES:
        x = torch.ones(2, 2).to(dtype)
        for _ in range(20):  # any bits of the digest are exact in the sum
            assert varcomm.all_reduce(x).tolist() == threes, dtype
        faulty(rank == 1)
        refused(lambda x=x: varcomm.all_reduce(x))
        assert varcomm.all_reduce(x, async_op=True).wait().tolist() == threes, dtype
    # each rank reads the bits that other ranks carry as numbers of its own dtype
    for dtypes, calls in product(OF_ONE_WIDTH, range(10)):
        for size in range(calls):
            varcomm.broadcast(F(0, size), like=F(0, size))

        def sums(dtype=dtypes[rank == 1]):
            varcomm.all_reduce(torch.ones(2).to(dtype))
            varcomm.all_reduce(torch.ones(2))

        refused(sums)


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
    faulty(rank == 1)
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
def test_agreement_can_be_turned_off_and_on(rank):
    """Also for a group that only one rank has used before."""
    group = torch.distributed.new_group()
    if rank == 0:
        resolve(group)
    varcomm.init(agreement=False)
    with varcomm.trace() as off:
        faulty(rank == 1)
        assert varcomm.all_reduce(torch.ones(2)).tolist() == [3, 3]
    assert off.by_operation()["all_reduce"].sent == 2 * 8
    varcomm.init()  # leaves it off
    faulty(rank == 1)
    assert varcomm.all_reduce(torch.ones(2), group=group).tolist() == [3, 3]
    varcomm.init(agreement=True)
    varcomm.check()
    faulty(rank == 1)
    refused(lambda: varcomm.all_reduce(torch.ones(2)))


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
    faulty(rank == 1)
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
    layer = ColumnParallelLinear(4, 6)
    if rank == 0:
        with torch.no_grad():
            layer(F(6, 4))
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
    faulty(rank == 1)
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
    faulty(rank == 1)
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
