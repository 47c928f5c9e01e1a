"""Gathers that go on while forward does; sums that are begun, and freed, while backward does."""

import copy
import io
import time
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import varcomm
from tests.data_parallel.cases import DOUBLE, square
from tests.data_parallel.sharded_cases import plain, twins
from tests.data_parallel.test_replicate_overlap import Exchanging, Graphs, Looking
from tests.graph.graphs import split_by, wild
from varcomm import ArgumentError
from varcomm.data_parallel.sharded import ShardedGradients
from varcomm.graph import distribute, partition
from varcomm.ops import packing


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


def waiting(rank, bucket_bytes):
    model, twin = twins(Direct)
    own = ShardedGradients(
        model, plain, reduce="sum", bucket_bytes=bucket_bytes, overlap_forward=True
    )
    one = plain(twin.parameters())
    with varcomm.trace() as calls:
        for step in range(3):
            for module, parts in ((model, [rank]), (twin, range(2))):
                for part in parts:
                    x = torch.full((2, 3), 0.1 * (part + step + 1))
                    module(x).square().sum().backward()
            own.step()
            own.zero_grad()
            one.step()
            one.zero_grad()
    gathers = sum(call.name == "all_gather_v" for call in calls)
    state = model.layers[0].state_dict()["weight"]  # of a part: waits for all
    torch.testing.assert_close(state, twin.layers[0].weight, rtol=1e-5, atol=1e-6)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    return gathers // 3


def test_modules_wait_for_what_they_read(worlds):
    assert worlds.run(2, waiting, 1) == [12, 12]
    assert worlds.run(2, waiting, 2**20) == [1, 1]


READS = {
    "a penalty": lambda model: sum(p.square().sum() for p in model.parameters()),
    "a norm": lambda model: torch.linalg.vector_norm(model.weight),
    "data": lambda model: model.weight.data,
    "a view": lambda model: model.weight.T,
    "a copy": lambda model: copy.deepcopy(model.weight),
    "another dtype": lambda model: model.weight.double(),
    "a list": lambda model: model.weight.tolist(),
    "numpy": lambda model: model.weight.detach().numpy(),
    "writing": lambda model: model.weight.zero_(),
    "print": lambda model: repr(model.weight),
    "conversion": lambda model: model.double(),
    "functional": lambda model: nn.functional.linear(torch.ones(1, 3), model.weight),
}


def read_too_early(rank):
    model = nn.Linear(3, 2)
    own = ShardedGradients(model, plain, overlap_forward=True)
    x = torch.ones(1, 3)
    model(x).sum().backward()
    own.step()
    said = "^ShardedGradients: this parameter is used before its new values are gathered"
    for read in READS.values():
        with torch.no_grad(), pytest.raises(ArgumentError, match=said):
            read(model)
    known = model.weight.shape, model.weight.dtype, model.weight.numel(), model.weight.grad
    assert known == (torch.Size([2, 3]), torch.float32, 6, None)
    assert isinstance(model.weight, nn.Parameter)
    own.wait()
    own.wait()
    assert type(model.weight) is nn.Parameter
    with torch.no_grad():
        assert len([read(model) for name, read in READS.items() if name != "conversion"]) == 11
    return True


def test_values_that_are_not_there_yet_cannot_be_read(worlds):
    assert worlds.run(2, read_too_early) == [True, True]


def ways_to_wait(rank, way):
    """Evaluation, a saved state, a loaded one, the next step, a new one, and its end."""
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
    return model.weight.sum().item()


WAYS = ("evaluation", "state_dict", "load_state_dict", "step", "clip", "close", "deletion")


@pytest.mark.parametrize("way", WAYS)
def test_everything_of_ours_waits(worlds, way):
    first, second = worlds.run(2, ways_to_wait, way)
    assert first == second


def stale_graph(rank):
    """A graph from before a step has saved what is not there any more."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    own = ShardedGradients(model, plain)
    loss = model(torch.ones(1, 2)).sum()
    loss.backward(retain_graph=True)
    own.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    return True


def test_a_graph_from_before_the_step_is_not_differentiated(worlds):
    assert worlds.run(2, stale_graph) == [True, True]


def copied(rank, how):
    """A copy, or one that is loaded, is a plain module."""
    model = nn.Linear(3, 2)
    own = ShardedGradients(model, plain, overlap_forward=True, reduce="sum")
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    for module in (model, twin):
        module(torch.ones(1, 3)).sum().backward()
    return twin.bias.grad.tolist(), model.bias.grad, len(own.pieces) > 0, len(twin.state_dict())


@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_copies_are_plain(worlds, how):
    assert worlds.run(2, copied, how) == [([1.0, 1.0], None, True, 2)] * 2


def begun(rank, debug):
    model = Looking()
    own = ShardedGradients(model, plain, bucket_bytes=1)
    with varcomm.trace() as model.calls:
        loss = model(torch.ones(2, 3)).sum()
        with varcomm.debug() if debug else nullcontext():
            loss.backward()
    own.close()
    return model.seen, [call.name for call in model.calls]


def test_sums_are_begun_while_backward_goes_on(worlds):
    """For bias and weight of the last layer; for those of the first when it is done."""
    sums = ["reduce_scatter_v"]
    assert worlds.run(2, begun, False) == [([2 * sums], 4 * sums)] * 2
    # to compare is to wait, for ranks that are elsewhere
    assert worlds.run(2, begun, True) == [([[]], 4 * sums)] * 2


def among_exchanges(rank, ranks):
    """Sums and gathers of shards meet nothing that the model exchanges meanwhile."""
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
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11)
    return model.layers[0].weight.sum().item()


@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_do_not_meet_the_exchanges_of_a_model(worlds, ranks):
    assert len(set(worlds.run(ranks, among_exchanges, ranks))) == 1


def on_a_graph(rank, method):
    """A partitioned graph, of which one of the ranks owns nothing."""
    data = wild()
    graph = partition(data, method=method)
    model, twin = twins(Graphs)
    model = distribute(model, graph)
    own = ShardedGradients(
        model, plain, module=model, reduce="sum", bucket_bytes=100, overlap_forward=True
    )
    one = plain(twin.parameters())
    for _ in range(3):
        square(model(graph.x, graph.edge_index) - graph.y).backward()
        square(twin(data.x, data.edge_index) - data.y).backward()
        for optimizer in (own, one):
            optimizer.step()
            optimizer.zero_grad()
    own.wait()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
    return graph.num_owned


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_distributed_model(worlds, ranks):
    owned = worlds.run(ranks, on_a_graph, split_by("a rank owns nothing", 24, ranks))
    assert (sum(owned), min(owned)) == (24, 0)


class Noting(torch.autograd.Function):
    """Identity; its backward notes how many gradients of parameters are still in memory."""

    @staticmethod
    def forward(ctx, x, note):
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.note()
        return gradient, None


def alive(storages, at_most=None):
    """Count storages that exist; Gloo's threads let go of theirs a moment after it is done."""
    for _ in range(100):
        count = sum(not storage.expired() for storage in storages)
        if at_most is None or count <= at_most:
            return count
        time.sleep(0.01)
    return count


def freed(rank):
    """Twelve layers, each a bucket: gradients go when they are sent, messages when they arrive."""
    layers = [nn.Linear(16, 16, bias=False) for _ in range(12)]
    model = nn.Sequential(*layers)
    own = ShardedGradients(model.named_parameters(), plain, bucket_bytes=16 * 16 * 4)
    gradients, messages, under_way, seen = [], [], [], []
    for layer in layers:
        layer.weight.register_hook(lambda g: gradients.append(StorageWeakRef(g.untyped_storage())))
    exchange = packing.exchange

    def noted(name, group, values, *args):
        works, received = exchange(name, group, values, *args)
        under_way.extend(works)
        messages.append(StorageWeakRef(values.untyped_storage()))
        messages.append(StorageWeakRef(received.untyped_storage()))
        return works, received

    def note():
        deadline = time.monotonic() + 30  # for ranks that are slower
        while not all(work.is_completed() for work in under_way) and time.monotonic() < deadline:
            time.sleep(0.01)
        under_way.clear()
        seen.append((alive(gradients), alive(messages, 4)))

    packing.exchange = noted
    try:
        h = torch.ones(1, 16)
        for number, layer in enumerate(layers):
            h = layer(Noting.apply(h, note) if number else h)
        h.sum().backward()
    finally:
        packing.exchange = exchange
    del h
    under_way.clear()
    left = alive(messages, 0), alive(gradients, 0)
    return max(g for g, _ in seen), max(m for _, m in seen), len(messages), left, len(own.pieces)


def test_gradients_and_messages_are_freed_while_backward_goes_on(worlds):
    """At most one gradient waits to be packed, and what has arrived is freed at the next bucket."""
    for gradients, messages, sent, left, _ in worlds.run(2, freed):
        assert gradients <= 1
        assert sent == 24
        assert messages <= 4
        assert left == (0, 0)
