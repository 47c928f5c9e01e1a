"""Asynchronous calls in backward: the adjoint travels while what was computed meanwhile is
differentiated, and derivatives are those of synchronous calls.
"""

import pytest
import torch
import torch.distributed as dist

import varcomm
from tests.ops.comparing import assert_none
from tests.ops.primitives import PRIMITIVES, Setting, case
from tests.ops.test_async import COMMUNICATE, TO_ROOT
from tests.ops.test_derivatives import DIMS, check_order
from tests.transport.test_agree import message_of
from tests.worlds import WORLDS
from varcomm.testing import gradcheck, gradgradcheck

FEW = [
    name
    if name in ("all_gather_v", "all_reduce", "scatter_v", "plan_from_needed")
    else pytest.param(name, marks=pytest.mark.slow)
    for name in COMMUNICATE
]
HUGE = 1_000_001  # no socket's buffer holds it


def check_derivatives(rank, name, ranks, pattern):
    c = case(name, pattern, ranks, DIMS[pattern], rest=(2,))
    op = c.bind()

    def fn(x):
        first = op(torch.sin(x), async_op=True)
        second = op(torch.cos(x), async_op=True)
        meanwhile = torch.exp(x)
        return torch.sin(first.wait()), second.wait() ** 2, meanwhile

    gradcheck(fn, c.input(rank, torch.float64), fast_mode=True)
    gradgradcheck(fn, c.input(rank, torch.float64), fast_mode=True)


@pytest.mark.parametrize("pattern", ["off by one", "one empty"])
@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("name", FEW)
def test_first_and_second_derivatives(worlds, name, ranks, pattern):
    assert worlds.run(ranks, check_derivatives, name, ranks, pattern) == [None] * ranks


@pytest.mark.parametrize(("order", "kind"), [(2, "none at all"), (3, "linear")])
@pytest.mark.parametrize("name", FEW)
def test_derivatives_where_one_rank_is_linear(worlds, name, order, kind):
    assert_none(worlds.run(3, check_order, name, 3, order, kind, True))


def waits_for_news_before_its_adjoint(rank, name):
    """Rank 1 does not begin its adjoint before rank 0 is in the backward of what came meanwhile."""
    sizes = (1000, 1001) if name == "transpose_v" else (HUGE, HUGE + 1)
    root = 0 if name in TO_ROOT else 1  # whose adjoint sends, or receives, what the other waits for
    c = PRIMITIVES[name](Setting(sizes, 0, (1,), root=root))
    op, x = c.bind(), c.input(rank, torch.float32).requires_grad_()
    news = torch.zeros(1)

    def tell(gradient):
        if rank == 0:
            dist.send(torch.ones(1), 1)

    def listen(gradient):
        if rank == 1:
            dist.recv(news, 0)

    handle = op(x * 2, async_op=True)
    meanwhile = x * 3
    meanwhile.register_hook(tell)
    y = handle.wait()
    (y * 1).register_hook(listen)
    y.register_hook(listen)
    (y.sum() + meanwhile.sum()).backward()
    return news.item()


@pytest.mark.parametrize("name", ["all_gather_v", "reduce_scatter_v", "gather_v"])
def test_adjoint_travels_while_the_rest_is_differentiated(worlds, name):
    """It would hang if rank 0 waited for its adjoint where it begins."""
    assert worlds.run(2, waits_for_news_before_its_adjoint, name, timeout=60) == [0.0, 1.0]


def several_backwards(rank, name):
    c = case(name, "off by one", 3)
    op = c.bind()
    x = c.input(rank, torch.float64).requires_grad_()
    handle = op(x**2, async_op=True)
    loss = (x**3).sum() + (handle.wait() ** 2).sum()
    first, second, third = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(3))
    loss = (x**3).sum() + (op(x**2) ** 2).sum()
    (want,) = torch.autograd.grad(loss, x)
    return [torch.equal(got, want) for got in (first, second, third)]


@pytest.mark.parametrize("name", FEW)
def test_several_backwards_through_one_graph(worlds, name):
    assert worlds.run(3, several_backwards, name) == [[True] * 3] * 3


def after_a_failed_backward(rank):
    """A hook raises on all ranks while the adjoint is under way; the next backward is right."""
    x = torch.ones(2, requires_grad=True)
    handle = varcomm.all_gather_v(x * 2, [2, 2], async_op=True)
    meanwhile = x * 3
    broken = meanwhile.register_hook(lambda gradient: 1 / 0)
    loss = (handle.wait() ** 2).sum() + meanwhile.sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    broken.remove()
    return torch.autograd.grad(loss, x)[0].tolist()


def test_backward_after_one_that_failed(worlds):
    assert worlds.run(2, after_a_failed_backward) == [[2 * 2 * 2 * 2 + 3.0] * 2] * 2


def recorded_at_the_wait(rank, grad_at_start, grad_at_wait):
    x = torch.full((2,), rank + 1.0, dtype=torch.float64, requires_grad=True)
    with torch.set_grad_enabled(grad_at_start):
        handle = varcomm.all_gather_v(x, [2, 2], async_op=True)
    with torch.set_grad_enabled(grad_at_wait):
        y = handle.wait()
    if not y.requires_grad:
        return None
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return first.tolist(), second.tolist()


@pytest.mark.parametrize("grad_at_start", [True, False])
def test_the_wait_decides_whether_the_call_is_recorded(worlds, grad_at_start):
    assert worlds.run(2, recorded_at_the_wait, grad_at_start, False) == [None] * 2
    answers = worlds.run(2, recorded_at_the_wait, grad_at_start, True)
    # both losses have all cubes
    assert answers == [([6.0 * v**2] * 2, [12.0 * v] * 2) for v in (1.0, 2.0)]


def refusal(call):
    with pytest.raises(varcomm.ArgumentError) as caught:
        call()
    return str(caught.value)


def gradient_changed_on_the_way(rank):
    x = torch.ones(2, requires_grad=True)
    handle = varcomm.all_gather_v(x * 2, [2, 2], async_op=True)
    meanwhile = x * 3
    y = handle.wait()
    seen = []
    y.register_hook(seen.append)
    if rank == 1:
        meanwhile.register_hook(lambda gradient: seen[0].add_(1).sum() * gradient)
    loss = (y**2).sum() + meanwhile.sum()
    message = refusal(loss.backward) if rank == 1 else loss.backward()
    return message, varcomm.all_reduce(torch.tensor(1)).item()


def test_gradient_changed_while_it_travels(worlds):
    (nothing, _), (message, total) = worlds.run(2, gradient_changed_on_the_way)
    assert nothing is None
    assert message.startswith(
        "reduce_scatter_v on rank 1 of 2, in backward: the gradient was changed in place between"
    )
    assert message.endswith("Let hooks return new tensors.")
    assert total == 2


def rounds(rank):
    answers = []
    for op in (varcomm.all_reduce, varcomm.broadcast):
        x = torch.ones(30_000, requires_grad=True)
        y = op(x, async_op=True).wait()
        with varcomm.trace() as calls:
            y.sum().backward()
        answers.append((len(calls), float(x.grad.max())))
    return answers


def test_adjoint_of_an_asynchronous_call_takes_one_round(worlds):
    """Who waits for it could not begin a second one in the order of the other ranks."""
    at_root, *others = worlds.run(3, rounds)
    assert at_root == [(1, 3.0), (1, 3.0)]
    assert others == [[(1, 3.0), (1, 0.0)]] * 2


def in_debug(rank, name):
    c = case(name, "off by one", 3)
    op, x = c.bind(), c.input(rank, torch.float64).requires_grad_()
    with varcomm.debug():
        handles = [op(x**2, async_op=True) for _ in range(2)]
        loss = sum((handle.wait() ** 2).sum() for handle in handles)
        (first,) = torch.autograd.grad(loss, x, create_graph=True, materialize_grads=True)
        (second,) = torch.autograd.grad((first**2).sum(), x)
    loss = 2 * (op(x**2) ** 2).sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True, materialize_grads=True)
    (want,) = torch.autograd.grad((first**2).sum(), x)
    return torch.allclose(second, want, rtol=1e-12)


@pytest.mark.parametrize("name", FEW)
def test_derivatives_in_debug(worlds, name):
    assert worlds.run(3, in_debug, name) == [True] * 3


def waits_in_another_order(rank):
    """Adjoints begin in the order of the waits, which is another one on rank 1."""
    x = torch.ones(2, 2, requires_grad=True)
    handles = [varcomm.all_gather_v(x, [2, 2], async_op=True), varcomm.all_reduce(x, async_op=True)]
    results = [handle.wait() for handle in handles[:: -1 if rank == 1 else 1]]
    return message_of(lambda: sum(y.sum() for y in results).backward())


def test_waits_in_another_order_are_told_in_backward(worlds):
    told = worlds.run(2, waits_in_another_order)
    text = "ranks disagree on operation: rank 0 has 'all_reduce'; rank 1 has 'reduce_scatter_v'."
    assert told == [text] * 2
