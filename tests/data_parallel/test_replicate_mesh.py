"""Parameters in several groups: dimensions of a mesh, over each of which they are summed once."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import varcomm
from tests.data_parallel.cases import DOUBLE, rows, square
from tests.data_parallel.comparing import assert_same_gradients, seeded
from tests.data_parallel.test_replicate_misuse import Fragile
from varcomm import ArgumentError, DisagreementError
from varcomm.data_parallel import GlobalCount, mark_module_as_shared, no_sync, replicate


class Parts(nn.Module):
    """An encoder, of which a rank may use only a part, and a head."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 3))
        self.middle = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)
        self.unused = nn.Linear(2, 2)
        self.double()

    def forward(self, x, alone=False):
        h = x if alone else self.encoder(x)
        return self.head(self.middle(h).tanh())


def mesh_of(shape):
    names = ("data", "graph", "tensor")[: len(shape)]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def nested(model, data, graph, order, **options):
    """Sum all over `data`, and the encoder over `graph` as well."""
    calls = [(model, data), (model.encoder, graph)]
    for module, group in calls if order == "outer first" else calls[::-1]:
        replicate(module, group, **options)
    return model


def loss(model, part, step, alone=False):
    return square(model(rows(part + 1, 9) * (1 + step), alone=alone))


def on_a_mesh(rank, shape, order, bucket_bytes, in_debug):
    """The head has a loss of its own in each place of `graph`, but there the data are the same.

    So the gradients of the head, summed over data alone, are those of one process; the encoder is
    used on parts of the data, and some ranks do not use it.
    """
    mesh = mesh_of(shape)
    data, graph = mesh["data"], mesh["graph"]
    i, j = data.get_local_rank(), graph.get_local_rank()
    model, twin = seeded(Parts, 0), seeded(Parts, 0)
    with torch.no_grad():  # rank 0 of the product decides; of each place of graph, its first
        for parameter in (model if i else model.encoder).parameters():
            parameter.add_(rank)
    nested(model, data, graph, order, bucket_bytes=bucket_bytes)
    for step in range(2):
        with varcomm.debug() if in_debug else torch.enable_grad():
            loss(model, 2 * i + j, step, alone=(i, j) == (0, 0)).backward()
        every = [(a, b) for a in range(shape[0]) for b in range(shape[1])]
        at = {place: seeded(Parts, 0) for place in every}
        for a, b in every:
            loss(at[a, b], 2 * a + b, step, alone=(a, b) == (0, 0)).backward()
        for name, parameter in twin.named_parameters():
            of = every if name.startswith("encoder") else [(a, j) for a in range(shape[0])]
            grads = [dict(at[place].named_parameters())[name].grad for place in of]
            grads = [g for g in grads if g is not None]
            if grads:
                old = 0 if parameter.grad is None else parameter.grad
                parameter.grad = old + sum(grads)
        assert_same_gradients(model, twin)
    same = [torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True)]
    assert all(same)
    return model.encoder[0].weight.grad is not None


@pytest.mark.parametrize("order", ["outer first", "inner first"])
@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (1, 3), (1, 1), (5, 1)])
def test_a_part_is_summed_over_another_dimension_too(worlds, shape, order):
    ranks = shape[0] * shape[1]
    used = [ranks > 1] * ranks
    for bucket_bytes in (1, 25 * 2**20):
        assert worlds.run(ranks, on_a_mesh, shape, order, bucket_bytes, False) == used
    if shape == (2, 2):
        assert worlds.run(ranks, on_a_mesh, shape, order, 100, True) == used


def both(rank, shape, first, second, how):
    """The whole module over both dimensions, with a mean or a count over one or both of them."""
    mesh = mesh_of(shape)
    i, j = mesh["data"].get_local_rank(), mesh["graph"].get_local_rank()
    count = GlobalCount()
    reduce = {"sum": "sum", "mean": "mean", "count": count}
    model = seeded(Parts)
    replicate(model, mesh["data"], reduce=reduce[first], bucket_bytes=5000)
    add = mark_module_as_shared if how == "marked" else replicate
    add(model, mesh["graph"], **({} if how == "marked" else {"reduce": reduce[second]}))
    if how == "again":  # keeps its place
        replicate(model, mesh["data"], reduce=reduce[first], bucket_bytes=300)
    twin = seeded(Parts)
    numbers = {(a, b): 2 * a + b for a in range(shape[0]) for b in range(shape[1])}
    divisor = {
        "sum": 1,
        "mean": shape[0],
        "count": sum(numbers.values()),
    }[first] * {"sum": 1, "mean": shape[1], "count": 1}[second]
    for step in range(2):
        count.add(numbers[i, j])
        loss(model, numbers[i, j], step).backward()
        (sum(loss(twin, n, step) for n in numbers.values()) / divisor).backward()
        assert_same_gradients(model, twin)
    return True


@pytest.mark.parametrize(
    ("first", "second", "how"),
    [
        ("sum", "sum", "replicated"),
        ("mean", "sum", "replicated"),
        ("sum", "mean", "again"),
        ("mean", "mean", "replicated"),
        ("count", "count", "replicated"),
        ("sum", "sum", "marked"),
    ],
)
def test_the_same_module_over_two_dimensions(worlds, first, second, how):
    for shape in ((2, 2), (1, 2), (3, 1)):
        ranks = shape[0] * shape[1]
        assert worlds.run(ranks, both, shape, first, second, how) == [True] * ranks


def three(rank, shape):
    """All over two dimensions, and the head over a third one too."""
    mesh = mesh_of(shape)
    model, twin = seeded(Parts), seeded(Parts)
    replicate(model.head, mesh["tensor"])
    replicate(model, mesh["data"], reduce="mean", bucket_bytes=500)
    replicate(model, mesh["graph"])
    i, j, k = (mesh[name].get_local_rank() for name in ("data", "graph", "tensor"))
    place = torch.arange(4).view(shape)
    for step in range(2):
        loss(model, rank, step).backward()
        for number in range(4):
            scaled = loss(twin, number, step) / shape[0]
            inputs = list(twin.head.parameters())
            if number in place[:, :, k]:
                inputs += [*twin.encoder.parameters(), *twin.middle.parameters()]
            scaled.backward(inputs=inputs)
        assert_same_gradients(model, twin)
    return place[i, j, k].item()


@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2), (2, 2, 1)])
def test_three_dimensions(worlds, shape):
    assert worlds.run(4, three, shape) == [0, 1, 2, 3]


def failed(rank):
    """After an error everything that sums the same parameters is called again."""
    mesh = mesh_of((2, 2))
    model, twin = seeded(Fragile), seeded(Fragile)
    for group in (mesh["data"], mesh["graph"]):
        replicate(model, group, bucket_bytes=1)
    x = rows(rank, 4).requires_grad_()
    with pytest.raises(ValueError, match="out of memory, say"):
        square(model(x, 1 if rank == 0 else 2)).backward()
    replicate(model, mesh["graph"])
    with pytest.raises(DisagreementError, match="an earlier backward ended in an error"):
        model(x)
    replicate(model, mesh["data"])
    square(model(x)).backward()
    sum(square(twin(rows(r, 4))) for r in range(4)).backward()
    assert_same_gradients(model, twin)
    return len(model._forward_hooks)


def test_a_failed_backward(worlds):
    assert worlds.run(4, failed) == [2] * 4


def test_one_rank_in_two_dimensions(worlds):
    """Both may be the same group; what the first divides by is not lost."""
    assert worlds.run(1, of_one_rank) == [0.25]


def of_one_rank(rank):
    mesh, count = mesh_of((1, 1)), GlobalCount()
    model = replicate(nn.Linear(1, 1, bias=False), mesh["data"], reduce=count)
    replicate(model, mesh["graph"])
    count.add(4)
    model(torch.ones(1, 1)).sum().backward()
    return model.weight.grad.item()


def with_micro_batches(rank, order):
    """Two of three backwards are not summed over either dimension."""
    mesh = mesh_of((2, 2))
    model = nested(seeded(Parts), mesh["data"], mesh["graph"], order, bucket_bytes=100)
    replicate(model.middle, mesh["graph"])
    replicate(model.head, mesh["graph"])
    twin = seeded(Parts)
    for step in range(3):
        part = loss(model, rank, step, alone=rank == step)
        if step < 2:
            with no_sync(model):
                part.backward()
        else:
            part.backward()
        sum(loss(twin, r, step, alone=r == step) for r in range(4)).backward()
    assert_same_gradients(model, twin)
    with no_sync(model.encoder), pytest.raises(ArgumentError, match="only some are in no_sync"):
        loss(model, rank, 0).backward()
    model.zero_grad()
    loss(model, rank, 0).backward()
    return model.head.bias.grad is not None


@pytest.mark.parametrize("order", ["outer first", "inner first"])
def test_micro_batches_on_a_mesh(worlds, order):
    assert worlds.run(4, with_micro_batches, order) == [True] * 4


def crossing(rank, how):
    """Groups that overlap as no mesh does: somebody would be counted twice."""
    world = dist.new_group([0, 1, 2])
    pair = dist.new_group([0, 1])
    chain = dist.new_group([1, 2])
    model = nn.Linear(2, 2)
    if how == "world":
        replicate(model)
        with pytest.raises(ArgumentError) as caught:
            replicate(nn.Sequential(model), world)
        return str(caught.value)
    if how == "part":
        replicate(model)
        if rank == 2:
            return None
        with pytest.raises(ArgumentError) as caught:
            replicate(model, pair)
        return str(caught.value)
    if rank < 2:
        replicate(model, pair)
    if rank == 0:
        return None
    with pytest.raises(DisagreementError) as caught:
        replicate(model, chain)
    return str(caught.value)


CROSSING = {
    "world": (
        "is in another module that is replicated already, and would be summed twice. Replicate the "
        "module that has all parameters, alone.",
        [0, 1, 2],
    ),
    "part": (
        "data_parallel.replicate: parameter 'weight' is summed over ranks [0, 1, 2] already, of "
        "which more than one, or one that others sum with, is in this group: it would be counted "
        "twice. Groups must cross as dimensions of a mesh do.",
        [0, 1],
    ),
    "chain": ("summed over groups of 2 before this one; rank 1 has", [1, 2]),
}


@pytest.mark.parametrize("how", CROSSING)
def test_groups_that_do_not_cross_like_those_of_a_mesh(worlds, how):
    said, where = CROSSING[how]
    told = worlds.run(3, crossing, how)
    for rank, text in enumerate(told):
        assert (text is None) if rank not in where else re.search(re.escape(said), text)


def counted_twice(rank):
    """A count is summed over a group and over a part of it, for two parts of one module."""
    pair, alone = dist.new_group([0, 1]), [dist.new_group([r]) for r in range(3)]
    count = GlobalCount()
    model = replicate(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), alone[rank])
    if rank < 2:
        replicate(model[0], pair, reduce=count)
    with pytest.raises(ArgumentError) as caught:
        replicate(model[1], reduce=count)
    return str(caught.value)


def test_a_count_over_groups_that_do_not_cross(worlds):
    said = (
        "data_parallel.replicate: refused on rank 0 of 3 (and on 1 more: [1]): reduce is a "
        "GlobalCount that is summed over ranks [0, 1] already; over [0, 1, 2] rows would be "
        "counted twice. Take another GlobalCount."
    )
    assert worlds.run(3, counted_twice) == [said] * 3


def cost(rank):
    """Bytes over both dimensions: 2 (P - 1) / P of the parameters for each."""
    mesh = mesh_of((2, 2))
    model = nn.Linear(101, 150).double()
    replicate(model, mesh["data"])
    replicate(model, mesh["graph"])
    x = torch.ones(1, 101, dtype=DOUBLE)
    with varcomm.trace() as calls:
        model(x).sum().backward()
    return [call.name for call in calls], sum(call.sent for call in calls)


def test_bytes_on_a_mesh(worlds):
    numbers = 101 * 150 + 150 + 2
    for names, sent in worlds.run(4, cost):
        assert names == ["reduce_scatter_v", "all_gather_v"] * 2
        assert abs(sent - 2 * numbers * 8) <= 4 * 8
