"""The NCCL engine over strict_nccl: values, derivatives and models; each rule of strict_nccl."""

from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg

import varcomm
from tests.data_parallel.cases import (
    Layers,
    assert_gradients,
    assert_same_gradients,
    plain,
    rows,
    square,
    twins,
)
from tests.gpu.pretended import Pretended
from tests.graph.graphs import split_by, wild
from tests.ops.comparing import Failures, assert_none
from tests.ops.primitives import PRIMITIVES, case
from tests.transport import strict_nccl
from tests.transport.strict_nccl import Misuse, Refused
from tests.transport.twin import compare
from varcomm.data_parallel import ShardedGradients, sum_gradients
from varcomm.graph import distribute, partition
from varcomm.testing import gradgradcheck
from varcomm.transport.engines.choose import engine_for
from varcomm.transport.group import resolve

RANKS = 3
CPU = torch.device("cpu")


@contextmanager
def on_nccl():
    """Let the NCCL engine serve CPU tensors, and check that it does."""
    with strict_nccl.strict_nccl(["cpu"]):
        assert type(engine_for(resolve(None), CPU)).__name__ == "NCCL"
        yield
    assert type(engine_for(resolve(None), CPU)).__name__ == "Gloo"


def primitives(rank):
    failures = Failures()
    with on_nccl():
        for number, name in enumerate(PRIMITIVES):
            pattern = ("off by one", "one empty", "all on one", "even")[number % 4]
            c = case(name, pattern, RANKS, number % 2)
            compare(failures, c, torch.float64, (name, pattern))
            if c.has_async:
                inputs = c.draw(torch.float64)
                got = c.bind()(c.input(rank, torch.float64), async_op=True).wait()
                with failures.named(name, "async"):
                    torch.testing.assert_close(got, c.reference(inputs)[rank])
        for name in ("reduce", "plan_from_needed"):
            c = case(name, "one empty", RANKS, 0, ())
            gradgradcheck(c.bind(), c.input(rank, torch.float64).requires_grad_())
        large = torch.arange(20_000.0) * (rank + 1)
        with failures.named("a sum in two rounds"):
            assert torch.equal(varcomm.all_reduce(large), torch.arange(20_000.0) * 6)
    return failures


def test_primitives_and_plans(worlds):
    assert_none(worlds.run(RANKS, primitives))
    worlds.run(RANKS, captured)


def captured(rank):
    """No wait stops the host, and no call asks for completion, which a CUDA graph refuses."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    with on_nccl(), strict_nccl.capturing():
        for name in PRIMITIVES:
            c = case(name, "one empty", RANKS)
            x = c.input(rank, torch.float32).requires_grad_()
            op = c.bind()
            for how in ({}, {"async_op": True})[: 1 + c.has_async]:
                y = op(x, **how)
                y = y.wait() if how else y
                torch.autograd.grad(y, x, torch.ones_like(y))
        model(torch.ones(2, 3)).sum().backward()
        sum_gradients(model)


def models(rank):
    data = wild()
    with on_nccl():
        graph = partition(wild(), method=split_by("a rank owns nothing", 24, RANKS))
        for make in (pyg.GCN, pyg.GAT):
            model, twin = twins(lambda make=make: make(4, 6, 2, 2).double())
            model = distribute(model, graph)
            loss = graph.mean(model(graph.x, graph.edge_index).square())
            loss.backward()
            sum_gradients(model)
            twin(data.x, data.edge_index).square().mean().backward()
            assert_same_gradients(model, twin)
        model, twin = twins(Layers)
        own = ShardedGradients(model, plain, reduce="sum", bucket_bytes=60)
        for _ in range(2):  # sums start during backward, on a communicator of their own
            square(model(rows(rank + 1, RANKS + 1))).backward()
            own.reduce()
            sum(square(twin(rows(r + 1, RANKS + 1))) for r in range(RANKS)).backward()
            assert_gradients(own, twin)


def test_models(worlds):
    worlds.run(RANKS, models)


def bytes_like(n, value=7):
    return torch.full((n,), value, dtype=torch.uint8)


def exchange(group, send, recv, data=None, out=None):
    """Start an exchange; it needs no message if this rank refuses it."""
    data = bytes_like(sum(send)) if data is None else data
    out = bytes_like(sum(recv)) if out is None else out
    return strict_nccl.all_to_all_single(out, data, recv, send, group, async_op=True)


def refused_at_once(rank):
    """Return the errors of calls that NCCL's process group refuses on this rank."""
    errors = []

    def refuse(call, match, kind=Refused):
        group = dist.new_group()  # after an error NCCL's communicator is unusable
        with pytest.raises(kind, match=match):
            call(group)
        errors.append(match)

    each, six = [2] * RANKS, bytes_like(6)
    with strict_nccl.strict_nccl(["cpu"]):
        refuse(lambda g: exchange(g, [0] * RANKS, each, data=six), "input splits .* do not sum")
        refuse(lambda g: exchange(g, each, [2, 2, 1], out=six), "output splits .* do not sum")
        refuse(lambda g: exchange(g, [3, 3], each), "2 input splits for 3 ranks")
        refuse(lambda g: exchange(g, [4, 4, -2], each), "negative")
        refuse(lambda g: exchange(g, each, each, data=six.view(torch.int8)), "int8 beside|uint8 b")
        odd = torch.zeros(6, dtype=torch.int16)
        refuse(lambda g: exchange(g, each, each, odd, odd.clone()), "NCCL has no torch.int16")
        refuse(lambda g: exchange(g, each, each, data=bytes_like(12)[::2]), "not contiguous")
        refuse(lambda g: exchange(g, each, each, data=Pretended(six)), "on cuda:0; NCCL serves cpu")
        refuse(lambda g: exchange(g, each, each, six, six), "overlaps", Misuse)
        outs = [bytes_like(n) for n in (1, 2, 3)]
        refuse(
            lambda g: strict_nccl.all_gather(outs, bytes_like(9), g, async_op=True),
            "sends 9 bytes, but its output has",
        )
        refuse(lambda g: strict_nccl.all_gather(outs[:2], outs[0], g), "2 outputs")
        refuse(lambda g: strict_nccl.all_gather_single(bytes_like(7), bytes_like(2), g), "3 times")
        refuse(lambda g: strict_nccl.broadcast(six, group=g, group_src=3), "no rank 3")
    with strict_nccl.strict_nccl(["cuda"]):
        refuse(lambda g: exchange(g, each, each), "a tensor on cpu; NCCL serves cuda")
        gpu = Pretended(six)
        refuse(lambda g: exchange(g, each, each, gpu, six.clone()), "a tensor on cpu")
        assert varcomm.all_reduce(torch.ones(1)).item() == RANKS  # Gloo serves the CPU
    with strict_nccl.strict_nccl(["cpu", "cuda"]):
        refuse(lambda g: exchange(g, each, each, gpu, six.clone()), "cpu beside|cuda:0 beside")

        def two_devices(group):
            exchange(group, each, each).wait()
            exchange(group, each, each, gpu, Pretended(six.clone()))

        refuse(two_devices, "earlier calls were on cpu")
    return len(errors)


def found_by_ranks_together(rank):
    """Ranks that call other operations, or other counts, or only some of which refuse."""
    each, six = [2] * RANKS, bytes_like(6)

    def misuse(call, match, kind=Misuse):
        group = dist.new_group(timeout=timedelta(seconds=30))
        with pytest.raises(kind, match=match):
            call(group)
        with pytest.raises(Refused, match="an earlier call has failed"):
            exchange(group, each, each)

    with strict_nccl.strict_nccl(["cpu"]):

        def operations(group):
            if rank == 1:
                strict_nccl.all_gather_single(six, bytes_like(2), group)
            exchange(group, each, each).wait()

        misuse(operations, "ranks call all_to_all_single.*, all_gather_single")
        counts = [[2, 2, 2], [2, 2, 3], [2, 2, 2]][rank]
        misuse(
            lambda g: exchange(g, counts, each).wait(), "rank 1 sends 3 bytes to rank 2, .* expects"
        )
        misuse(lambda g: strict_nccl.broadcast(six, group=g, group_src=rank % 2), "of root 1")
        bad = {"data": six} if rank == 2 else {}
        zeros = [0] * RANKS
        match, kind = ("do not sum", Refused) if rank == 2 else ("rank 2 has refused", Misuse)
        misuse(lambda g: exchange(g, zeros, zeros, **bad).wait(), match, kind)

        def changed(group):
            data = bytes_like(6)
            work = exchange(group, each, each, data)
            data[rank] += 1
            work.wait()

        misuse(changed, "the sent tensor has changed before wait")
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank < 2:
        with strict_nccl.strict_nccl(["cpu"]), pytest.raises(RuntimeError, match="has not come"):
            exchange(group, each, each).wait()
    dist.barrier()


def waits(rank):
    """Outputs are garbage until wait(), whatever calls and communicators are in flight."""
    each = [2] * RANKS
    first, second = dist.new_group(), dist.new_group()
    with strict_nccl.strict_nccl(["cuda"]):
        for _ in range(3):
            exchange(
                first, each, each, Pretended(bytes_like(6)), Pretended(bytes_like(6))
            )  # abandoned
        works, outs = [], []
        order = (first, second) if rank else (second, first)  # each communicator has one order
        for group in (*order, *order):
            mine = Pretended(bytes_like(6, rank + 10 * (group is first)))
            outs.append((group, bytes_like(6)))
            works.append(exchange(group, each, each, mine, Pretended(outs[-1][1])))
        whole = torch.cat([bytes_like(2, r) for r in range(RANKS)])
        place = whole.clone()
        here = place.split(2)[rank]
        gathered = strict_nccl.all_gather_single(
            Pretended(place), Pretended(here), second, async_op=True
        )
        ours = bytes_like(3, rank)
        sent = strict_nccl.broadcast(Pretended(ours), group=first, group_src=1, async_op=True)
        assert (ours == strict_nccl.GARBAGE).all() == (rank != 1)
        left = [r if r == rank else strict_nccl.GARBAGE for r in (0, 0, 1, 1, 2, 2)]
        assert place.tolist() == left
        assert all((out == strict_nccl.GARBAGE).all() for _, out in outs)
        with strict_nccl.capturing():
            with pytest.raises(Refused, match="not permitted in a capture"):
                works[0].is_completed()
            with pytest.raises(Refused, match="stops the host"):
                works[0].wait(timedelta(seconds=9))
            works[0].wait()
        while not all(work.is_completed() for work in works):
            assert (outs[1][1] == strict_nccl.GARBAGE).all()  # until wait()
        for work in (*reversed(works), *works, gathered, sent):
            work.wait()
        for group, out in outs:
            assert torch.equal(out, whole + 10 * (group is first))
        assert torch.equal(place, whole)
        assert ours.tolist() == [1] * 3


def test_rules(worlds):
    assert worlds.run(RANKS, refused_at_once) == [17] * RANKS
    worlds.run(RANKS, found_by_ranks_together)
    worlds.run(RANKS, waits)
