"""Calls with ``async_op=True``: the same results, values and gradients, and real overlap."""

import pytest
import torch
import torch.distributed as dist

import varcomm
from tests.ops.comparing import Failures, twin_gradients
from tests.ops.primitives import PATTERNS, PRIMITIVES, Setting, case, random
from tests.ops.test_derivatives import check_order
from tests.worlds import WORLDS, on_ranks

ASYNC = [name for name, make in PRIMITIVES.items() if make(Setting((1,), 0, (1,))).has_async]
QUICK = ("all_gather_v", "all_reduce", "scatter_v", "plan_from_needed")
FEW = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ASYNC]
# more than 16 KiB: summed by pieces on three ranks and more; and more than a socket's buffer
LARGE, HUGE = 3001, 1_000_001
TO_ROOT = ("gather_v", "reduce")


def with_gradient(op, x, **how):
    """Return the value, and the gradient for weights that depend on nothing but the shape."""
    x = x.clone().requires_grad_()
    y = op(x, **how)
    y = y.wait() if how else y
    weight = random(y.shape, y.dtype, torch.Generator().manual_seed(3))
    return y.detach(), torch.autograd.grad(y, x, weight)[0]


@pytest.mark.parametrize("name", ASYNC)
@on_ranks(*WORLDS)
def test_same_values_and_gradients(rank, name, ranks):
    failures = Failures()
    cases = [case(name, pattern, ranks, dim) for pattern in PATTERNS for dim in (0, 1)]
    if name in ("all_reduce", "reduce", "broadcast"):
        cases.append(PRIMITIVES[name](Setting((LARGE, *[0] * (ranks - 1)))))
    for number, c in enumerate(cases):
        op, x = c.bind(), c.input(rank, torch.float64)
        got, want = with_gradient(op, x, async_op=True), with_gradient(op, x)
        handle = op(x, async_op=True)
        without = []
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                plain = x * 1  # an inference tensor in inference mode
                without.append((op(plain), op(plain, async_op=True).wait()))
        with failures.named(number):
            assert isinstance(handle, varcomm.Handle)
            assert handle.wait() is handle.wait()
            assert all(map(torch.equal, got, want))
            assert all(torch.equal(*pair) and not pair[1].requires_grad for pair in without)
    return failures


@pytest.mark.parametrize("name", ASYNC)
@on_ranks(3)
def test_change_between_start_and_wait_is_an_error_there(rank, name):
    """The other ranks' results are right; of a root's call only its tensor is read."""
    c = case(name, "even", 3)  # the root is rank 2
    x = c.input(rank, torch.float64)
    handle = c.bind()(x, async_op=True)
    if rank in ((2,) if name.startswith(("scatter_v", "broadcast")) else (0, 2)):
        x.add_(0)  # a change is a change, whatever is there afterwards
        for _ in range(2):  # a refused wait is refused again
            with pytest.raises(varcomm.ArgumentError, match=f"rank {rank} of 3: the tensor was ch"):
                handle.wait()
    else:
        want = c.reference(c.draw(torch.float64))[rank]
        torch.testing.assert_close(handle.wait(), want)
    varcomm.all_reduce(torch.ones(1))


def peer_finishes_first(rank, name):
    """Rank 0 waits for news that rank 1 has only after its own wait has returned."""
    sizes = (1000, 1001) if name == "transpose_v" else (HUGE, HUGE + 1)  # 2001 x 2001 elements
    c = PRIMITIVES[name](Setting(sizes, 0, (1,), root=1 if name in TO_ROOT else 0))
    op, x = c.bind(), c.input(rank, torch.float32)
    dist.barrier()
    handle = op(x, async_op=True)
    news = torch.zeros(1, device="cpu")  # Gloo sends no tensor of a GPU
    if rank == 0:
        dist.recv(news, 1)
        result = handle.wait()
    else:
        result = handle.wait()
        dist.send(news + 1, 0)
    torch.testing.assert_close(result, c.reference(c.draw(torch.float32))[rank])
    return news.item()


@pytest.mark.parametrize("name", [name for name in ASYNC if "plan_from" not in name])
def test_communication_proceeds_between_start_and_wait(worlds, name, request):
    if request.config.getoption("--engine") == "mpi":
        pytest.skip("MPI makes progress inside calls: it has no thread of its own")
    assert worlds.run(2, peer_finishes_first, name, timeout=60) == [1.0, 0.0]


@on_ranks(2, 3)
def test_several_at_once(rank, ranks):
    """Wait in order and in reverse; then one backward through all calls together."""
    failures = Failures()
    cases = [(name, case(name, pattern, ranks)) for name in ASYNC for pattern in PATTERNS[1:]]
    ops = [c.bind() for _, c in cases]
    for order in (1, -1):
        inputs = [c.input(rank, torch.float64).requires_grad_() for _, c in cases]
        handles = [op(x, async_op=True) for op, x in zip(ops, inputs, strict=True)]
        results = [None] * len(handles)
        for number in range(len(handles))[::order]:
            results[number] = handles[number].wait()
        gradients = torch.autograd.grad(sum((y * rank).sum() for y in results), inputs)
        for (name, c), y, gradient in zip(cases, results, gradients, strict=True):
            drawn = [x if x is None else x.requires_grad_() for x in c.draw(torch.float64)]
            outputs = c.reference(drawn)
            weights = [torch.full_like(out, r) for r, out in enumerate(outputs)]
            want = twin_gradients(c, drawn, weights)[rank]
            with failures.named(name, order):
                torch.testing.assert_close(y.detach(), outputs[rank].detach())
                want = torch.zeros_like(gradient) if want is None else want
                torch.testing.assert_close(gradient, want)
    return failures


@on_ranks(3)
def test_calls_without_a_wait(rank):
    """The next calls do not hang, whether the handle is kept or forgotten."""
    failures, kept = Failures(), []
    for name in ASYNC:
        c = PRIMITIVES[name](Setting((60,) * 3 if name == "transpose_v" else (LARGE,) * 3, 0, (1,)))
        op, x = c.bind(), c.input(rank, torch.float64)
        kept.append(op(x, async_op=True))
        op(x, async_op=True)
        total, y = varcomm.all_reduce(torch.tensor(rank)), op(x)
        with failures.named(name):
            assert total == 3
            torch.testing.assert_close(y, c.reference(c.draw(torch.float64))[rank])
    return failures


# --- derivatives


@pytest.mark.parametrize(("order", "kind"), [(2, "none at all"), (3, "linear")])
@pytest.mark.parametrize("name", FEW)
@on_ranks(3)
def test_derivatives_where_one_rank_is_linear(rank, name, order, kind):
    return check_order(rank, name, 3, order, kind, True)


@pytest.mark.parametrize("name", ["all_gather_v", "reduce_scatter_v", "gather_v"])
@on_ranks(2, timeout=60)
def test_adjoint_travels_while_the_rest_is_differentiated(rank, name):
    """Rank 1 begins its adjoint only after rank 0 is in the backward of what came meanwhile.

    It would hang if rank 0 waited for its adjoint where it begins.
    """
    root = 0 if name in TO_ROOT else 1  # whose adjoint sends, or receives, what the other waits for
    c = PRIMITIVES[name](Setting((HUGE, HUGE + 1), 0, (1,), root=root))
    op, x = c.bind(), c.input(rank, torch.float32).requires_grad_()
    news = torch.zeros(1, device="cpu")

    def send(gradient):
        if rank == 0:
            dist.send(torch.ones(1, device="cpu"), 1)

    def listen(gradient):
        if rank == 1:
            dist.recv(news, 0)

    handle = op(x * 2, async_op=True)
    meanwhile = x * 3
    meanwhile.register_hook(send)
    y = handle.wait()
    y.register_hook(listen)
    (y.sum() + meanwhile.sum()).backward()
    assert news.item() == rank


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(tuple(ASYNC), marks=pytest.mark.slow)], ids=["few", "all"]
)
@on_ranks(3)
def test_several_backwards(rank, names):
    """Several backwards through one graph, and derivatives in debug(), are those of sync calls."""
    failures = Failures()
    for name in names:
        c = case(name, "off by one", 3)
        op, x = c.bind(), c.input(rank, torch.float64).requires_grad_()

        def loss(async_op, op=op, x=x):
            y = op(x**2, async_op=True).wait() if async_op else op(x**2)
            return (x**3).sum() + (y**2).sum()

        def second(loss, x=x):
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            return torch.autograd.grad((first**2).sum(), x)[0]

        total, plain = loss(True), loss(False)
        grads = [torch.autograd.grad(t, x, retain_graph=True)[0] for t in (total, total, plain)]
        with varcomm.debug():
            in_debug = second(loss(True))
        want = second(plain)
        with failures.named(name):
            assert torch.equal(grads[0], grads[2])
            assert torch.equal(grads[1], grads[2])
            torch.testing.assert_close(in_debug, want, rtol=1e-12, atol=1e-12)
    return failures


@on_ranks(2)
def test_backward_after_one_that_failed(rank):
    """A hook raises on all ranks while the adjoint is in flight; the next backward is right."""
    x = torch.ones(2, requires_grad=True)
    handle = varcomm.all_gather_v(x * 2, [2, 2], async_op=True)
    meanwhile = x * 3
    broken = meanwhile.register_hook(lambda gradient: 1 / 0)
    loss = (handle.wait() ** 2).sum() + meanwhile.sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    broken.remove()
    assert torch.autograd.grad(loss, x)[0].tolist() == [2 * 2 * 2 * 2 + 3.0] * 2


@on_ranks(2)
def test_the_wait_decides_whether_the_call_is_recorded(rank):
    for at_start, at_wait in ((True, False), (False, False), (True, True), (False, True)):
        x = torch.full((2,), rank + 1.0, dtype=torch.float64, requires_grad=True)
        with torch.set_grad_enabled(at_start):
            handle = varcomm.all_gather_v(x, [2, 2], async_op=True)
        with torch.set_grad_enabled(at_wait):
            y = handle.wait()
        assert y.requires_grad == at_wait
        if at_wait:  # both losses have all cubes
            (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
            assert first.tolist() == [6.0 * (rank + 1) ** 2] * 2
            assert second.tolist() == [12.0 * (rank + 1)] * 2


@on_ranks(2)
def test_gradient_changed_while_it_travels(rank):
    x = torch.ones(2, requires_grad=True)
    handle = varcomm.all_gather_v(x * 2, [2, 2], async_op=True)
    meanwhile = x * 3
    y = handle.wait()
    seen = []
    y.register_hook(seen.append)
    if rank == 1:
        meanwhile.register_hook(lambda gradient: seen[0].add_(1).sum() * gradient)
    loss = (y**2).sum() + meanwhile.sum()
    if rank == 1:
        with pytest.raises(varcomm.ArgumentError, match="rank 1 of 2, in backward: the gradient"):
            loss.backward()
    else:
        loss.backward()
    assert varcomm.all_reduce(torch.tensor(1)) == 2


@on_ranks(3)
def test_adjoint_of_an_asynchronous_call_takes_one_round(rank):
    """A wait could not begin a second round in the order of the other ranks."""
    for op in (varcomm.all_reduce, varcomm.broadcast):
        x = torch.ones(30_000, requires_grad=True)
        y = op(x, async_op=True).wait()
        with varcomm.trace() as calls:
            y.sum().backward()
        assert len(calls) == 1
        assert x.grad.max() == (0 if op is varcomm.broadcast and rank else 3)


@on_ranks(2)
def test_waits_in_another_order_are_an_error_in_backward(rank):
    """Adjoints begin in the order of the waits, which is another one on rank 1."""
    x = torch.ones(2, 2, requires_grad=True)
    handles = [varcomm.all_gather_v(x, [2, 2], async_op=True), varcomm.all_reduce(x, async_op=True)]
    loss = sum(handle.wait().sum() for handle in handles[:: -1 if rank == 1 else 1])
    message = r"ranks disagree on operation: rank 0 has 'all_reduce'; rank 1 has"
    with varcomm.debug(), pytest.raises(varcomm.DisagreementError, match=message):
        loss.backward()
