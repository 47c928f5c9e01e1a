"""Sums and short all-gathers over 16 and more ranks, which go by levels of few ranks."""

import copy
import os
import socket
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import varcomm
from varcomm.data_parallel import ShardedGradients
from varcomm.ops import levels
from varcomm.testing import dot_test, gradcheck, gradgradcheck

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex64)


def draw(rank, count, dtype):
    values = torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (10 * values).to(dtype)


def uneven(size, total):
    """Rows of each rank: some have none, the last one has the most."""
    sizes = [0 if rank % 5 == 1 else total * (rank % 3) // (2 * size) for rank in range(size - 1)]
    return [*sizes, total - sum(sizes)]


def sums(size, total):
    """Calls of all sums, and the part of the true sum that a rank gets."""
    sizes = uneven(size, total)
    return {
        "all_reduce": (varcomm.all_reduce, lambda x, rank: x),
        "reduce": (
            lambda x: varcomm.reduce(x, dst=size // 2),
            lambda x, rank: x if rank == size // 2 else torch.zeros_like(x),
        ),
        "reduce_scatter_v": (
            lambda x: varcomm.reduce_scatter_v(x, sizes),
            lambda x, rank: x.split(sizes)[rank],
        ),
        "reduce_scatter_v of columns": (
            lambda x: varcomm.reduce_scatter_v(x.expand(2, total), sizes, dim=1)[1],
            lambda x, rank: x.split(sizes)[rank],
        ),
    }


def join_by_torchrun(rank, size, node, port):
    """Join again, as torchrun would start `node` ranks on each host."""
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"LOCAL_RANK": str(rank % node), "LOCAL_WORLD_SIZE": str(node)}
    os.environ["MASTER_PORT"] = str(port)
    varcomm.init("gloo")


def wrong(rank, size):
    """Sum on all ranks; return the names of calls with a wrong value, and messages and bytes."""
    found, counts = [], {}
    for total in (0, 100, 20_000):
        for dtype in DTYPES:
            parts = [draw(other, total, dtype) for other in range(size)]
            exact = torch.complex128 if dtype.is_complex else torch.float64
            want = sum(part.to(exact) for part in parts)
            bound = sum(part.abs().double() for part in parts)
            eps = torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0
            for name, (call, part) in sums(size, total).items():
                with varcomm.trace() as trace:
                    got = call(parts[rank])
                off = (got - part(want, rank)).abs().double()
                wide = dtype if dtype == torch.float64 else torch.float32
                allowed = (
                    8 * torch.finfo(wide).eps * part(bound, rank) + eps * part(want, rank).abs()
                )
                again = call(parts[rank])
                if got.dtype != dtype or not (off <= allowed).all() or not torch.equal(got, again):
                    found.append((name, dtype, total))
                counts[name, dtype, total] = len(trace), trace.total.messages_sent, trace.total.sent
    for total in (0, 100, 20_000):
        sizes = uneven(size, total)
        for dtype in DTYPES:
            whole = draw(7, 2 * total, dtype).view(total, 2)
            for dim, of in ((0, whole), (1, whole.t())):
                with varcomm.trace() as trace:
                    got = varcomm.all_gather_v(of.split(sizes, dim)[rank], sizes, dim)
                if not torch.equal(got, of):
                    found.append(("all_gather_v", dtype, total))
            counts["all_gather_v", dtype, total] = trace.total.messages_sent, trace.total.sent
    return found, counts


def waits(rank, size):
    """Wait for calls in different orders, beside other calls; some ranks drop the last handle."""
    parts = [draw(other, 20_000, torch.float64) for other in range(size)]
    x, y = parts[rank], torch.arange(10) + rank
    sizes, total = uneven(size, 20_000), sum(parts)
    of_y = torch.arange(10) * size + sum(range(size))
    calls = [
        varcomm.all_reduce(x, async_op=True),
        varcomm.all_reduce(y, async_op=True),
        varcomm.reduce_scatter_v(x, sizes, async_op=True),
        varcomm.reduce(x, async_op=True),
    ]
    first, second, third = ([0, 1, 2], [2, 0, 1])[rank % 2]
    results = {first: calls[first].wait()}
    assert torch.equal(varcomm.all_reduce(y), of_y)
    results |= {second: calls[second].wait(), third: calls[third].wait()}
    if rank < 2:
        calls[3].wait()
    del calls
    assert torch.equal(varcomm.all_reduce(y), of_y)
    torch.testing.assert_close(results[0], total)
    assert torch.equal(results[1], of_y)
    torch.testing.assert_close(results[2], total.split(sizes)[rank])
    x.requires_grad_()
    calls = [
        varcomm.all_reduce(x, async_op=True),
        varcomm.all_gather_v(x[: sizes[rank]], sizes, async_op=True),
    ]
    sum(call.wait().sum() for call in calls).backward()
    want = torch.full_like(x, size)
    want[: sizes[rank]] *= 2
    torch.testing.assert_close(x.grad, want)
    with varcomm.debug():
        assert torch.equal(varcomm.all_reduce(y, async_op=True).wait(), of_y)


def nested(rank, size):
    """Gather a tensor with a gradient in one exchange, another in a second; return messages."""
    x, rows = torch.ones(rank % 3, 2, dtype=torch.float64).requires_grad_(), rank + 1
    with varcomm.trace() as trace:
        got = varcomm.all_gather_v({"x": x * rank, "n": torch.full((rows,), rank)})
    want = [torch.full((other % 3, 2), float(other)) for other in range(size)]
    assert torch.equal(got["x"], torch.cat(want).double())
    assert got["n"].tolist() == [other for other in range(size) for _ in range(other + 1)]
    got["x"].sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, size * rank))
    return [len(call.sent_to) for call in trace if call.name == "all_gather_v"]


def steps(rank, size):
    """Two steps of ShardedGradients, as in one process; return messages per bucket gathered."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).double()
    twin, rows = copy.deepcopy(model), torch.randn(size, 5, dtype=torch.float64)
    own = ShardedGradients(model, partial(torch.optim.SGD, lr=0.1), reduce="sum", bucket_bytes=300)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        model(rows[rank]).square().sum().backward()
        with varcomm.trace() as trace:
            own.step()
        own.zero_grad()
        optimizer.zero_grad()
        twin(rows).square().sum().backward()
        optimizer.step()
    for parameter, want in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, want)
    own.close()
    return [len(call.sent_to) for call in trace if call.name == "all_gather_v"]


def checked(rank, size, node, port):
    if node:
        join_by_torchrun(rank, size, node, port)
    results = *wrong(rank, size), steps(rank, size), nested(rank, size)
    waits(rank, size)
    return results


@pytest.mark.parametrize(
    ("size", "node", "merges"),
    [
        pytest.param(16, 8, (8, 2), marks=pytest.mark.slow),
        pytest.param(16, 0, (4, 4), marks=pytest.mark.slow),
        pytest.param(17, 0, None, marks=pytest.mark.slow),
        pytest.param(32, 4, (4, 8), marks=pytest.mark.slow),
    ],
)
def test_values_messages_and_bytes(size, node, merges):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    results = varcomm.launch(checked, size, size, node, port)
    assert [found for found, *_ in results] == [[]] * size
    n = 20_000
    for rank, (_, counts, gathers, of_nested) in enumerate(results if merges else ()):
        messages = sum(merged - 1 for merged in merges)
        assert len(of_nested) == 2 * len(merges)
        assert sum(of_nested) <= 2 * messages  # fewer without rows
        assert len(gathers) > len(merges)
        assert sum(gathers) <= len(gathers) // len(merges) * messages
        assert counts["all_reduce", torch.float32, 100] == (2, messages, 408 * messages)
        calls, sent, nbytes = counts["all_reduce", torch.float32, n]
        assert (calls, sent) == (4, 2 * messages)
        assert abs(nbytes - 2 * 4 * n * (size - 1) / size) <= 8 * size
        own = uneven(size, n)[rank]
        calls, sent, nbytes = counts["reduce_scatter_v", torch.float32, n]
        assert (calls, nbytes) == (2, 4 * (n - own))
        assert sent <= messages  # fewer to ranks without rows
        # all-gather: short shards by levels, long ones to each rank; the same bytes
        for total in (100, n):
            rows = uneven(size, total)
            sent, nbytes = counts["all_gather_v", torch.int64, total]
            assert sent <= (messages if 16 * total <= 4096 * size else size - 1)
            assert (sent > messages) == (16 * total > 4096 * size and rows[rank] > 0)
            if 16 * total > 4096 * size:
                assert nbytes == 16 * rows[rank] * (size - 1)
        # narrow on the first level, in fp32 above
        first = uneven(size, n)[rank % merges[0] :: merges[0]]
        narrow = 2 * (n - sum(first)) + 4 * (sum(first) - own)
        assert counts["reduce_scatter_v", torch.bfloat16, n][2] == narrow


def derivatives(rank, size):
    sizes = uneven(size, 2 * size)
    x = draw(rank, 2 * size, torch.float64).requires_grad_()
    for call in (
        varcomm.all_reduce,
        varcomm.reduce,
        lambda x: varcomm.reduce_scatter_v(x, sizes),
        lambda x: varcomm.all_gather_v(x[: sizes[rank]], sizes),
    ):
        dot_test(call, x.detach())
        _, tangent = torch.func.jvp(call, (x.detach(),), (x.detach(),))
        torch.testing.assert_close(tangent, call(x.detach()))
        gradcheck(call, x, fast_mode=True)
        gradgradcheck(call, x, fast_mode=True)
    with varcomm.debug():
        total = varcomm.all_reduce(x.detach())
    compiled = torch.compile(varcomm.all_reduce, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x.detach()), total)
    handle = varcomm.all_reduce(x.detach(), async_op=True)
    torch.testing.assert_close(handle.wait(), total)


@pytest.mark.slow
@pytest.mark.parametrize("size", [17, 18])
def test_derivatives(size):
    varcomm.launch(derivatives, size, size)


class InOneProcess:
    """All ranks of a group in one process, in turns: their messages arrive when all have sent."""

    def __init__(self, monkeypatch, size, node):
        monkeypatch.setattr(levels, "_node_size", lambda group: node)
        monkeypatch.setattr(levels.packing, "exchange", self.exchange)
        ranks = tuple(range(size))
        state = {"size": size, "ranks": ranks}
        self.groups = [SimpleNamespace(rank=r, auxiliary={}, **state) for r in ranks]
        for group in self.groups:
            group.auxiliary["levels"] = [*levels._levels(group)]
        self.sent, self.arriving, self.elements = {}, [], 0

    def exchange(self, name, group, values, send, recv, schedule):
        out, place = values.new_empty(sum(recv)), 0
        for peer, count in enumerate(send):
            if count:
                self.sent[group.rank, peer] = values[place : place + count]
                self.elements += count * (peer != group.rank)
            place += count * (schedule != "copies")
        self.arriving.append((group.rank, recv, out))
        return (), out

    def results(self, rounds):
        found = {}
        while len(found) < len(rounds):
            for rank, each in enumerate(rounds):
                try:
                    next(each)
                except StopIteration as end:
                    found[rank] = end.value
            for rank, recv, out in self.arriving:
                parts = [self.sent.pop((peer, rank)) for peer, count in enumerate(recv) if count]
                out.copy_(torch.cat([out[:0], *parts]))
            self.arriving.clear()
            assert not self.sent
        return [found[rank] for rank in range(len(rounds))]


@pytest.mark.parametrize("node", [0, 8, pytest.param(2, marks=pytest.mark.slow)])
def test_trees_of_every_number_of_ranks(monkeypatch, node):
    for size in (*range(16, 65), 127, 128):
        if node and size % node:
            continue
        world = InOneProcess(monkeypatch, size, node)
        sizes, n = uneven(size, 4 * size), 4 * size
        parts = [draw(rank, n, torch.int64) for rank in range(size)]
        total, natural = sum(parts), list(range(size))
        order, ranks = levels.piece_order(world.groups[0]), world.groups
        got = world.results(
            [
                levels.reduce_scatter("", g, x, sizes, natural, True)
                for g, x in zip(ranks, parts, strict=True)
            ]
        )
        assert all(map(torch.equal, got, total.split(sizes)))
        assert world.elements == (size - 1) * n  # as in one level
        pieces = dict(zip(order, total.split([sizes[rank] for rank in order]), strict=True))
        for root in (None, size // 3):
            got = world.results(
                [levels.all_gather("", g, pieces[g.rank], sizes, root) for g in ranks]
            )
            whole = world.results(
                [levels.all_sum("", g, x, True, root) for g, x in zip(ranks, parts, strict=True)]
            )
            for rank in range(size) if root is None else [root]:
                assert torch.equal(got[rank], total), (size, rank)
                assert torch.equal(whole[rank], total), (size, rank)
