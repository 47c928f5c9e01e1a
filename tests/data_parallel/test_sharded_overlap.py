"""Gathers that overlap forward; sums that start, and are freed, during backward."""

import copy
import io
import time
from contextlib import nullcontext

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
    on,
    plain,
    square,
    twins,
)
from varcomm import ArgumentError
from varcomm.data_parallel import ShardedGradients


class Direct(nn.Module):
    """Reads parameters that are its own, in lists, and in a module of torch that it calls."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.listed = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(3))})
        self.attention = nn.MultiheadAttention(3, 1)
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.ModuleList([nn.Linear(3, 3)])[0])

    def forward(self, x):
        h = self.scale * x * self.listed[0] * self.listed[1] + self.named["shift"]
        h, _ = self.attention(h, h, h, need_weights=False)
        return self.layers(h)


@on(2)
def test_modules_wait_for_the_parameters_that_they_read(rank, ranks):
    for nbytes, buckets in ((1, 12), (2**20, 1)):
        model, twin = twins(Direct)
        options = {"reduce": "sum", "bucket_bytes": nbytes, "overlap_forward": True}
        own, one = ShardedGradients(model, plain, **options), plain(twin.parameters())
        with varcomm.trace() as calls:
            for step in range(3):
                for module, parts in ((model, [rank]), (twin, range(2))):
                    for part in parts:
                        x = torch.full((2, 3), 0.1 * (part + step + 1))
                        module(x).square().sum().backward()
                for optimizer in (own, one):
                    optimizer.step()
                    optimizer.zero_grad()
        assert sum(call.name == "all_gather_v" for call in calls) == 3 * buckets
        state = model.layers[0].state_dict()["weight"]  # of a part: waits for all
        pairs = [(state, twin.layers[0].weight)]
        pairs += zip(model.parameters(), twin.parameters(), strict=True)
        for mine, other in pairs:
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


READS = (
    lambda model: sum(p.square().sum() for p in model.parameters()),
    lambda model: torch.linalg.vector_norm(model.weight),
    lambda model: model.weight.data,
    lambda model: copy.deepcopy(model.weight),
    lambda model: model.weight.double(),
    lambda model: torch.tensor(model.weight.tolist()),
    lambda model: nn.functional.linear(torch.ones(1, 3), model.weight),
)


@on(2)
def test_values_in_flight_cannot_be_read(rank, ranks):
    """They are no numbers, and writing raises, until they are waited for."""
    model = nn.Linear(3, 2)
    own = ShardedGradients(model, plain, overlap_forward=True)
    model(torch.ones(1, 3)).sum().backward()
    own.step()
    with torch.no_grad():
        assert all(read(model).isnan().all() for read in READS)
        with pytest.raises(RuntimeError, match="single memory location"):
            model.weight.add_(1)
    known = model.weight.shape, model.weight.dtype, model.weight.numel(), model.weight.grad
    assert known == (torch.Size([2, 3]), torch.float32, 6, None)
    own.wait()
    own.wait()
    with torch.no_grad():
        assert not any(read(model).isnan().any() for read in READS)
    own.step()
    if rank:  # which torch does not refuse
        model.weight.detach().zero_()
    with pytest.raises(ArgumentError, match=r"refused on rank 1 of 2: .* filled before wait"):
        own.step()


def ways_to_wait(rank):
    """Evaluation, a saved state, a loaded one, the next step, a norm, close, and deletion."""
    sums = []
    for way in ("evaluation", "state_dict", "load_state_dict", "step", "clip", "close", "del"):
        torch.manual_seed(0)
        model, x = nn.Linear(3, 2), torch.ones(1, 3)
        own = ShardedGradients(model, plain, overlap_forward=True)
        model(x).sum().backward()
        state = copy.deepcopy(model.state_dict())
        own.step()
        if way == "evaluation":
            with torch.inference_mode():
                model(x)
        elif way == "state_dict":
            model.state_dict()
        elif way == "load_state_dict":
            model.load_state_dict(state)
        elif way == "step":
            own.step()
            own.wait()
        elif way == "clip":
            own.clip_grad_norm_(1.0)
        elif way == "close":
            own.close()
        else:
            del own
        sums.append(model.weight.sum().item())
    return sums


def test_everything_of_ours_waits(worlds):
    first, second = worlds.run(2, ways_to_wait)
    assert first == second
    assert not any(x != x for x in first)


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@on(2)
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
        own = ShardedGradients(model, plain, overlap_forward=True, reduce="sum")
        twin = make(model)
        for module in (model, twin):
            module(torch.ones(1, 3)).sum().backward()
        own.step()
        varcomm.data_parallel.sum_gradients(twin)
        assert twin.bias.grad.tolist() == [2.0, 2.0]
        assert (model.bias.grad, len(twin.state_dict())) == (None, 2)


@on(2)
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


@on(*SOME)
def test_messages_do_not_meet_the_exchanges_of_a_model(rank, ranks):
    model, twin = twins(Exchanging)
    own = ShardedGradients(model, plain, reduce="sum", bucket_bytes=1, overlap_forward=True)
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
    own.wait()
    assert_equal(model, twin, 1e-11)


@on(2)
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
