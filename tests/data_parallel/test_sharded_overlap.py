"""Sums that start, and are freed, during backward; graphs and copies from before a step."""

import copy
import io
import time
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import varcomm
from tests.data_parallel.cases import (
    DOUBLE,
    SOME,
    Exchanging,
    Look,
    Looking,
    assert_equal,
    plain,
    square,
    twins,
)
from tests.gpu.pretended import plain as pretended_values
from tests.gpu.pretended import pretended
from tests.transport.strict_nccl import capturing, strict_nccl
from tests.worlds import on_ranks
from varcomm.data_parallel import ShardedGradients


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@on_ranks(2)
def test_copies_are_plain_and_old_graphs_are_refused(rank, ranks):
    """A graph from before a step has saved values that have changed."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    own = ShardedGradients(model, plain)
    loss = model(torch.ones(1, 2)).sum()
    loss.backward(retain_graph=True)
    own.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    for make in (copy.deepcopy, saved):
        model = nn.Linear(3, 2)
        own = ShardedGradients(model, plain, reduce="sum")
        twin = make(model)
        for module in (model, twin):
            module(torch.ones(1, 3)).sum().backward()
        own.step()
        varcomm.data_parallel.sum_gradients(twin)
        assert twin.bias.grad.tolist() == [2.0, 2.0]
        assert type(model.bias.grad) is not torch.Tensor
        assert len(twin.state_dict()) == 2


@on_ranks(2)
def test_sums_start_during_backward(rank, ranks):
    """For bias and weight of the last layer; for those of the first after it."""
    sums = ["reduce_scatter_v"]
    for debug in (False, True):
        model = Looking()
        own = ShardedGradients(model, plain, bucket_bytes=1)
        with varcomm.trace() as model.calls, varcomm.debug() if debug else nullcontext():
            model(torch.ones(2, 3)).sum().backward()
            # to compare is to wait, for ranks that are elsewhere
            assert (model.seen, len(model.calls)) == (([[]], 0) if debug else ([2 * sums], 4))
            own.reduce()
        own.close()
        assert [call.name for call in model.calls] == 4 * sums


@on_ranks(*SOME)
def test_messages_do_not_meet_the_exchanges_of_a_model(rank, ranks):
    model, twin = twins(Exchanging)
    own = ShardedGradients(model, plain, reduce="sum", bucket_bytes=1)
    one = plain(twin.parameters())
    for step in range(3):
        x = torch.full((1, 2), rank + step + 1.0, dtype=DOUBLE)
        square(model(x, rank, varcomm.all_reduce)).backward()
        xs = [torch.full((1, 2), r + step + 1.0, dtype=DOUBLE) for r in range(ranks)]
        for number, layer in enumerate(twin.layers):
            xs = [(layer(x) if (number + r) % 3 else x).tanh() for r, x in enumerate(xs)]
            total = sum(xs)
            xs = [x + total for x in xs]
        sum(map(square, xs)).backward()
        for optimizer in (own, one):
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(model, twin, 1e-11)


@on_ranks(2)
def test_gradients_are_freed_during_backward(rank, ranks):
    """Of twelve layers at most one gradient waits to be packed, and none is left after the sum."""
    layers = [nn.Linear(16, 16, bias=False) for _ in range(12)]
    named = nn.Sequential(*layers).named_parameters()
    own = ShardedGradients(named, plain, bucket_bytes=16 * 16 * 4)
    gradients, seen = [], []
    for layer in layers:
        layer.weight.register_hook(lambda g: gradients.append(StorageWeakRef(g.untyped_storage())))
    h = torch.ones(1, 16)
    for layer in layers:
        h = layer(Look.apply(h, lambda: seen.append(alive(gradients, 1))))
    h.sum().backward()
    del h
    own.reduce()
    assert max(seen) <= 1
    assert alive(gradients, 0) == 0


def alive(storages, at_most):
    """Count storages that exist; Gloo's threads let go of theirs a moment after it is done."""
    for _ in range(100):
        count = sum(not storage.expired() for storage in storages)
        if count <= at_most:
            break
        time.sleep(0.01)
    return count


@on_ranks(2)
def test_a_step_that_is_captured_in_a_cuda_graph(rank, ranks):
    """No message may be asked whether it has arrived."""

    def steps(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double().to(device)
        own = ShardedGradients(model, plain, bucket_bytes=64)
        for _ in range(3):
            model(torch.full((2 - rank, 3), 0.5, dtype=DOUBLE, device=device)).sum().backward()
            own.clip_grad_norm_(1.0)
            own.step()
            own.zero_grad()
        return [p.detach() for p in model.parameters()]

    want = steps("cpu")

    def yes():
        return True

    captures = {"is_available": yes, "is_current_stream_capturing": yes}
    with (
        strict_nccl(["cuda"]),
        pretended() as device,
        capturing(),
        mock.patch.multiple(torch.cuda, **captures),
    ):
        got = steps(device)
    for value, expected in zip(got, want, strict=True):
        torch.testing.assert_close(pretended_values(value), expected)
