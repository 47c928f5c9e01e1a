"""Outside of debug(), ranks that made other calls all raise at their next sum over ranks."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import varcomm
from tests.worlds import on_ranks
from varcomm import DisagreementError, ExchangePlan
from varcomm.data_parallel import ShardedGradients, sum_gradients, sum_hook
from varcomm.tensor_parallel import grad_norm, linear_cross_entropy, vocab_parallel_cross_entropy
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
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(3)
def test_sums_of_each_dtype_compare(rank, dtype):
    x = torch.ones(2, 2, dtype=dtype)
    for _ in range(20):  # any bits of the digest are exact in the sum
        assert torch.equal(varcomm.all_reduce(x), 3 * x)
    FAULTS["dtype"](rank, rank == 1)
    with pytest.raises(DisagreementError):
        varcomm.all_reduce(x)
    handle = varcomm.all_reduce(x, async_op=True)
    assert torch.equal(handle.wait(), 3 * x)


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
