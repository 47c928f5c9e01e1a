"""Calls with ``async_op=True``: the same results, whatever happens before ``wait()``."""

import pytest
import torch
import torch.distributed as dist

import varcomm
from tests.ops.comparing import Failures, assert_none
from tests.ops.primitives import PATTERNS, PRIMITIVES, Setting, case, random
from tests.worlds import WORLDS

ASYNC = [name for name, make in PRIMITIVES.items() if make(Setting((1,), 0, (1,))).has_async]
COMMUNICATE = [name for name in ASYNC if name != "shard_v"]
# more than 16 KiB: summed by pieces on three ranks and more, and no socket's buffer holds the last
LARGE, HUGE = 3001, 1_000_001
TO_ROOT = ("gather_v", "reduce")


def with_gradient(op, x, **how):
    """Return the value, and the gradient for weights that depend on nothing but the shape."""
    x = x.clone().requires_grad_()
    y = op(x, **how)
    y = y.wait() if how else y
    weight = random(y.shape, y.dtype, torch.Generator().manual_seed(3))
    return y.detach(), torch.autograd.grad(y, x, weight)[0]


def check_same(rank, name, ranks):
    failures = Failures()
    cases = [case(name, pattern, ranks, dim) for pattern in PATTERNS for dim in (0, 1)]
    if name in ("all_reduce", "reduce", "broadcast"):
        cases.append(PRIMITIVES[name](Setting((LARGE, *[0] * (ranks - 1)))))
    for number, c in enumerate(cases):
        op, x = c.bind(), c.input(rank, torch.float64)
        got, want = with_gradient(op, x, async_op=True), with_gradient(op, x)
        with failures.named(number):
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])
    return failures


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("name", ASYNC)
def test_same_values_and_gradients(worlds, name, ranks):
    assert_none(worlds.run(ranks, check_same, name, ranks))


def wait_twice(rank, name):
    c = case(name, "off by one", 2)
    handle = c.bind()(c.input(rank, torch.float32), async_op=True)
    return isinstance(handle, varcomm.Handle) and handle.wait() is handle.wait()


@pytest.mark.parametrize("name", ASYNC)
def test_second_wait_gives_the_same_tensor(worlds, name):
    assert worlds.run(2, wait_twice, name) == [True] * 2


def change_on(rank, name, culprits):
    """Return this rank's error; the others' results must be right nevertheless."""
    c = case(name, "even", 3)  # the root is rank 2
    inputs = c.draw(torch.float64)
    x = c.input(rank, torch.float64)
    handle = c.bind()(x, async_op=True)
    if rank not in culprits:
        torch.testing.assert_close(handle.wait(), c.reference(inputs)[rank])
        message = None
    else:
        x.add_(0)  # a change is a change, whatever is there afterwards
        with pytest.raises(varcomm.ArgumentError) as caught:
            handle.wait()
        message = str(caught.value)
    varcomm.all_reduce(torch.ones(1))
    return message


@pytest.mark.parametrize("name", COMMUNICATE)
def test_change_between_start_and_wait_is_an_error_there(worlds, name):
    # what a rank other than the root passes to these is not read
    culprits = (2,) if name in ("scatter_v", "broadcast") else (0, 2)
    messages = worlds.run(3, change_on, name, culprits)
    assert [rank for rank in range(3) if messages[rank] is not None] == list(culprits)
    for rank in culprits:
        message = messages[rank]
        assert f"rank {rank} of 3: the tensor was changed in place between async_op=True" in message
        assert "Change a clone, or wait first." in message


def peer_finishes_first(rank, name):
    """Rank 0 waits for news that rank 1 has only after its own wait has returned."""
    sizes = (1000, 1001) if name == "transpose_v" else (HUGE, HUGE + 1)  # 2001 x 2001 elements
    c = PRIMITIVES[name](Setting(sizes, 0, (1,), root=1 if name in TO_ROOT else 0))
    op, x = c.bind(), c.input(rank, torch.float32)
    dist.barrier()
    handle = op(x, async_op=True)
    news = torch.zeros(1)
    if rank == 0:
        dist.recv(news, 1)
        result = handle.wait()
    else:
        result = handle.wait()
        dist.send(news + 1, 0)
    inputs = c.draw(torch.float32)
    torch.testing.assert_close(result, c.reference(inputs)[rank])
    return news.item()


@pytest.mark.parametrize("name", [name for name in COMMUNICATE if "plan_from" not in name])
def test_communication_proceeds_between_start_and_wait(worlds, name, request):
    if request.config.getoption("--engine") == "mpi":
        pytest.skip("MPI makes progress inside calls: it has no thread of its own")
    assert worlds.run(2, peer_finishes_first, name, timeout=60) == [1.0, 0.0]


def several_at_once(rank, ranks, order):
    failures = Failures()
    cases = [(name, case(name, pattern, ranks)) for name in ASYNC for pattern in PATTERNS[1:]]
    ops = [c.bind() for _, c in cases]
    inputs = [c.input(rank, torch.float64).requires_grad_() for _, c in cases]
    handles = [op(x, async_op=True) for op, x in zip(ops, inputs, strict=True)]
    results = [None] * len(handles)
    for number in range(len(handles))[::order]:
        results[number] = handles[number].wait()
    # one backward through all of them together
    gradients = torch.autograd.grad(sum((y * rank).sum() for y in results), inputs)
    for (name, c), y, gradient in zip(cases, results, gradients, strict=True):
        with failures.named(name):
            torch.testing.assert_close(y.detach(), c.reference(c.draw(torch.float64))[rank])
            want = sent_ranks(c, rank)
            torch.testing.assert_close(gradient, torch.zeros_like(gradient) + want)
    return failures


def sent_ranks(c, rank):
    """Differentiate in one process: what `rank` should get if each loss is its rank times y."""
    inputs = [x if x is None else x.requires_grad_() for x in c.draw(torch.float64)]
    if inputs[rank] is None:
        return 0
    total = sum((y * r).sum() for r, y in enumerate(c.reference(inputs)))
    return torch.autograd.grad(total, inputs[rank])[0]


@pytest.mark.parametrize("order", [1, -1], ids=["in order", "in reverse"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_several_at_once(worlds, ranks, order):
    assert_none(worlds.run(ranks, several_at_once, ranks, order))


def without_gradients(rank, name, mode):
    c = case(name, "one empty", 3)
    op = c.bind()
    with mode():
        x = c.input(rank, torch.float64) * 1  # an inference tensor in inference mode
        now, later = op(x), op(x, async_op=True).wait()
    want = c.reference(c.draw(torch.float64))[rank]
    return torch.allclose(now, want), torch.equal(now, later), now.requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ASYNC)
def test_without_gradients(worlds, name, mode):
    assert worlds.run(3, without_gradients, name, mode) == [(True, True, False)] * 3


def never_waited_for(rank, name, keep):
    c = PRIMITIVES[name](Setting((60,) * 3 if name == "transpose_v" else (LARGE,) * 3, 0, (1,)))
    op, x = c.bind(), c.input(rank, torch.float64)
    handle = op(x, async_op=True)
    if not keep:
        del handle
    want = c.reference(c.draw(torch.float64))[rank]
    total = varcomm.all_reduce(torch.tensor(rank))
    return torch.allclose(op(x), want), total.item()


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "forgotten"])
@pytest.mark.parametrize("name", ASYNC)
def test_next_call_does_not_hang_if_nobody_waits(worlds, name, keep):
    assert worlds.run(3, never_waited_for, name, keep) == [(True, 3)] * 3
