"""Routes: their counts are those of the tensors, and those that the other ranks expect.

NCCL refuses other counts on one rank, and the other ranks wait. Each rank of a simulated world
makes the same calls; then the calls are compared across ranks.
"""

import pytest
import torch
from torch import nn

import varcomm
from tests.ops.primitives import PATTERNS, PRIMITIVES, Setting, setting
from varcomm.data_parallel import sum_gradients
from varcomm.ops.levels import levels
from varcomm.transport.engines.simulated import Simulated, alone
from varcomm.transport.group import MANY, resolve

# Rows of more than 16 KiB, beyond which sums go by pieces.
LARGE = 1500
SUMS = ("all_reduce", "reduce", "broadcast", "reduce_scatter_v")

# The rank alone cannot learn what the root has, nor which rows the others need.
UNKNOWN = {"scatter_v", "broadcast", "plan_from_needed", "adjoint_from_needed"}


def plan_from_indices(s):
    plan = plan_of(s)
    return s.shards[
        plan.group.rank
    ], lambda x, async_op=False: plan.start(x, s.dim) if async_op else plan(x, s.dim)


def adjoint_from_indices(s):
    plan = plan_of(s)
    return s.shape(plan.num_received), lambda x: plan.adjoint(x, s.dim)


def plan_of_two_tensors(s):
    plan = plan_of(s)
    return s.shape(plan.num_rows), lambda x: torch.cat(plan(x, x.square(), dim=s.dim), s.dim)


def broadcast_module(s):
    def call(x):
        varcomm.broadcast_module(nn.Linear(3, 2), s.root)
        return x

    return (1,), call


def gradients(s):
    """`x` and the parameters of a model, whose gradients are summed."""

    def call(x):
        model = nn.Linear(3, 2).to(x.dtype)
        model(x).sum().backward(inputs=list(model.parameters()))
        sum_gradients(model)
        return x

    return (2, 3), call


def plan_of(s):
    rank, sizes = resolve(None).rank, [[len(index) for index in row] for row in s.indices]
    return varcomm.ExchangePlan.from_indices(s.indices[rank], s.sizes[rank], sizes)


CALLS = {
    call.__name__: call
    for call in (
        plan_from_indices,
        adjoint_from_indices,
        plan_of_two_tensors,
        broadcast_module,
        gradients,
    )
}


def call_of(name, s):
    """Return the shape of this rank's tensor, the call, and whether it can be asynchronous."""
    if name in CALLS:
        shape, call = CALLS[name](s)
        return shape, call, name in PRIMITIVES and PRIMITIVES[name](s).has_async
    c = PRIMITIVES[name](s)
    return c.shapes[resolve(None).rank], c.bind(), c.has_async


NAMES = sorted((PRIMITIVES.keys() - UNKNOWN) | CALLS.keys())


def check_bytes(route, out, data):
    """Assert that the counts of a route are the bytes of its tensors."""
    schedule, group, recv, send, width = route
    assert len(recv) == len(send) == group.size
    assert all(n >= 0 and n % width == 0 for n in (*recv, *send))
    assert out.is_contiguous()
    assert data.is_contiguous()
    if schedule == "broadcast":
        assert out.nbytes == data.nbytes == max((*recv, *send))
        assert (sum(recv) == 0) == (group.rank == route.root)
        return
    assert sum(recv) == out.nbytes
    if schedule == "all_gather":
        assert {*send} == {recv[group.rank]} == {data.nbytes}
    elif schedule == "copies":
        assert {*send} <= {0, data.nbytes}
    else:
        assert sum(send) == data.nbytes


@pytest.fixture
def calls(monkeypatch):
    """The routes that the engine was asked to start, each checked beside its tensors."""
    found, prepare = [], Simulated.prepare

    def checked(self, route):
        start = prepare(self, route)

        def begin(out, data):
            check_bytes(route, out, data)
            found.append(route)
            return start(out, data)

        return begin

    monkeypatch.setattr(Simulated, "prepare", checked)
    return found


def twice_differentiated(call, shape, dtype, how):
    x = torch.ones(shape, dtype=dtype, requires_grad=True)
    y = call(x, **how)
    y = y.wait() if how else y
    if y is x:
        return
    weight = torch.ones_like(y, requires_grad=True)
    (gradient,) = torch.autograd.grad(y, x, weight, create_graph=True)
    torch.autograd.grad(gradient, weight, torch.ones_like(gradient))


def compared(name, routes):
    """Assert that all ranks make the same calls, and expect of each other what is sent."""
    assert len({len(of_rank) for of_rank in routes}) == 1, f"{name}: calls of some ranks"
    for number, call in enumerate(zip(*routes, strict=True)):
        where = f"{name}, message {number}"
        assert len({(route.schedule, route.width) for route in call}) == 1, where
        for src, sender in enumerate(call):
            for dst, receiver in enumerate(call):
                if src != dst or sender.schedule != "broadcast":
                    assert sender.send[dst] == receiver.recv[src], (where, src, dst)


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("ranks", [1, 2, 3, MANY, MANY + 1])
def test_routes(calls, ranks):
    assert len(levels_of(ranks)) == (0 if ranks < MANY else 2)
    large = Setting((LARGE, *[3] * (ranks - 1)), 0, (3,))
    patterns = PATTERNS if ranks < MANY else PATTERNS[1:2]
    settings = {pattern: setting(pattern, ranks, 1) for pattern in patterns} | {"large": large}
    routes = {}
    for rank in range(ranks):
        with alone(ranks, rank):
            for name in NAMES:
                for pattern, s in settings.items():
                    if pattern == "large" and name not in SUMS:
                        continue
                    shape, call, has_async = call_of(name, s)
                    for how in ({}, {"async_op": True})[: 1 + has_async]:
                        calls.clear()
                        try:
                            twice_differentiated(call, shape, torch.float32, how)
                        except AssertionError as error:
                            raise AssertionError(f"{name} of {pattern} {how}: {error}") from error
                        key = (name, pattern, *how)
                        routes.setdefault(key, []).append([*calls])
    for key, of_ranks in routes.items():
        compared(key, of_ranks)
    if ranks > 1:
        assert {route.schedule for ranks in routes.values() for of in ranks for route in of} == {
            "all_gather", "broadcast", "all", "neighbours", "copies", "one",
        }  # fmt: skip


def levels_of(ranks):
    with alone(ranks, 0):
        return levels(resolve(None))
