"""Pools over graphs that span ranks: as PyG in one process, through two derivatives."""

from itertools import product

import pytest
import torch
from torch_geometric.utils import scatter, softmax

import varcomm
from tests.graph.against_one import compare
from tests.graph.batches import FIRST, SECOND, as_data, no_edges, partitions, plain, whole
from tests.ops.comparing import Failures, assert_none
from tests.worlds import WORLDS
from varcomm import ArgumentError
from varcomm import graph as pooling
from varcomm.graph import partition, replicated


def scattered(reduce):
    """PyG's pools have nodes along the last dimension but one; here they come first."""

    def pool(x, batch, size=None):
        if batch is not None:
            return scatter(x, batch, 0, size, reduce)
        if reduce == "max":
            return x.max(dim=0, keepdim=True)[0]
        return scatter(x, torch.zeros(len(x), dtype=torch.int64), 0, 1, reduce)

    return pool


def soft(x, batch, size=None):
    batch = torch.zeros(len(x), dtype=torch.int64) if batch is None else batch
    return softmax(x, batch, num_nodes=size)


POOLS = {
    "add": (pooling.global_add_pool, scattered("sum")),
    "mean": (pooling.global_mean_pool, scattered("mean")),
    "max": (pooling.global_max_pool, scattered("max")),
    "min": (pooling.global_min_pool, scattered("min")),
    "softmax": (pooling.global_softmax, soft),
}


# the number of graphs by that of nodes' graphs; the largest more than goes in a single round
BATCHES = {None: None, 1: None, 150: 700}


def check(rank):
    wrong = []
    for features, is_tied in product(((), (2, 3)), (False, True)):
        given = whole(*features)
        given.x = (given.x * 1.5).round() / 7 if is_tied else given.x
        data = as_data(given)
        for graph, name, times in product(partitions(data), POOLS, BATCHES):

            def call(_, g, name=name, times=times):
                batch = times and plain(g.batch) * times
                pool, alone = POOLS[name]
                more = (BATCHES[times],) if g.graph is None else (g.graph, BATCHES[times])
                return (alone if g.graph is None else pool)(g.x, batch, *more)

            found = compare(None, call, data, graph, second=True, close=SECOND)
            wrong += [f"{name}, {features}, {times}, {graph.method}: {one}" for one in found]
    return wrong


@pytest.mark.parametrize("ranks", WORLDS)
def test_as_in_one_process(worlds, ranks):
    assert_none(worlds.run(ranks, check))


def check_halo(failures, given, graph, name, batch):
    """Rows of the halo do not count; softmax gives them what their originals have."""
    pool, alone = POOLS[name]
    ids = torch.cat([graph.owned_ids, graph.halo_ids])
    expected = alone(given.x, batch)
    expected = expected[ids] if name == "softmax" else expected
    got = [pool(given.x[ids], None if batch is None else batch[ids], graph)]
    if batch is not None and name != "softmax":
        got.append(pool(given.x[ids], batch[graph.owned_ids], graph))
    for result in got:
        with failures.named(name, "halo"):
            torch.testing.assert_close(result, expected, **FIRST)


def check_narrow(failures, given, graph, name, batch):
    pool, alone = POOLS[name]
    ids = graph.owned_ids
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = (given.x * 30).to(dtype)
        expected = alone(x.double(), batch).to(dtype)
        got = pool(x[ids], None if batch is None else batch[ids], graph)
        with failures.named(name, dtype):
            rows = ids if name == "softmax" else slice(None)
            torch.testing.assert_close(got, expected[rows])


def check_numbers(failures, given, graph):
    """Integers and complex numbers."""
    ids = graph.owned_ids
    own = given.batch[ids], graph
    for dtype in (torch.int32, torch.int64, torch.uint8):
        x = (given.x * 30).abs().to(dtype)
        for name in ("add", "mean", "max", "min"):
            pool, alone = POOLS[name]
            with failures.named(name, dtype):
                expected = alone(x, given.batch)
                torch.testing.assert_close(pool(x[ids], *own), expected, rtol=0, atol=0)
    x, zeros = torch.complex(given.x, given.x.sin()), torch.zeros(5, 4).to(torch.complex128)
    total = zeros.index_add(0, given.batch, x)
    mean = total / given.batch.bincount().clamp(min=1).view(-1, 1)
    for name, expected in {"add": total, "mean": mean}.items():
        with failures.named(name, "complex"):
            torch.testing.assert_close(POOLS[name][0](x[ids], *own), expected, **FIRST)


def check_rows(rank):
    failures, given, graph = Failures(), whole(4), partitions()[0]
    for name in POOLS:
        for batch in (None, given.batch):
            check_halo(failures, given, graph, name, batch)
            check_narrow(failures, given, graph, name, batch)
    check_numbers(failures, given, graph)
    return failures


def test_halos_and_dtypes(worlds):
    assert_none(worlds.run(3, check_rows))


def check_operators(rank):
    """Any number of derivatives, and forward mode, against finite differences."""
    graph = partitions()[1]
    given = whole(2).rows(graph.owned_ids)
    for name in ("mean", "max", "softmax"):

        def pool(x, name=name):
            return POOLS[name][0](x, given.batch, graph)

        varcomm.testing.gradcheck(pool, given.x, fast_mode=True)
        varcomm.testing.gradgradcheck(
            lambda x, pool=pool: pool(x.sin()) ** 2, given.x, fast_mode=True
        )


@pytest.mark.slow
def test_against_finite_differences(worlds):
    assert worlds.run(3, check_operators) == [None] * 3


def check_not_finite(rank):
    """Graph 0 has nothing but the lowest value, graph 1 the largest, and graph 3 has a NaN."""
    failures, given = Failures(), whole(4)
    given.x[given.batch == 0, 0] = -torch.inf
    given.x[given.batch == 1, 1] = torch.inf
    for spoiled in (False, True):
        given.x[given.batch == 3, 2] = torch.nan if spoiled else 1.0
        for name in ("max", "min"):
            pool, alone = POOLS[name]
            for batch in (None, given.batch):
                x = given.x.clone().requires_grad_()
                expected = alone(x, batch)
                expected.sum().backward()
                for graph in partitions():
                    ids = graph.owned_ids
                    own = given.x[ids].requires_grad_()
                    got = pool(own, batch if batch is None else batch[ids], graph)
                    replicated(got.sum(), graph).backward()
                    with failures.named(name, graph.method, spoiled):
                        torch.testing.assert_close(got, expected, equal_nan=True)
                        if not spoiled:
                            torch.testing.assert_close(own.grad, x.grad[ids])
    return failures


def test_values_that_are_not_finite(worlds):
    assert_none(worlds.run(3, check_not_finite))


def received(rank):
    graph, found = partitions()[0], []
    given = whole(4).rows(graph.owned_ids)
    for name, size, *_ in SENT:
        with varcomm.trace() as calls:
            POOLS[name][0](given.x, None if size is None else given.batch, graph, size)
        found.append(sum(call.received for call in calls))
    return found


# a pool, the number of graphs, bytes in a single round, and bytes by pieces of a third
SENT = [
    ("add", 6, 8 * 24, 0),
    ("add", 1500, 0, 2 * 8 * 6000),
    ("mean", None, 8 * 4, 0),
    ("mean", 6, 8 * (24 + 6), 0),
    ("max", None, (8 + 8) * 4, 0),
    ("max", 6, (8 + 4) * 24, 0),
    ("max", 1500, 0, (8 + 4 + 8) * 6000),
    ("min", 6, (8 + 4) * 24, 0),
    ("softmax", 6, (8 + 4 + 8) * 24, 0),
]


def test_no_more_is_sent_than_is_said(worlds):
    expected = [2 * single + 2 * pieces // 3 for _, _, single, pieces in SENT]
    assert worlds.run(3, received) == [expected] * 3


def no_nodes(rank):
    graph = partition(no_edges(0), method="block")
    x, batch = torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="there are no nodes"):
        pooling.global_max_pool(x, None, graph)
    empty = [pool(x, batch, graph, 2) for pool, _ in POOLS.values()]
    return [value.tolist() for value in empty], pooling.global_mean_pool(x, None, graph)


def test_a_graph_without_nodes(worlds):
    for results, mean in worlds.run(3, no_nodes):
        assert results == [[[0.0, 0.0]] * 2] * 4 + [[]]
        assert mean.isnan().all()


X = torch.ones(3, 2)
ZEROS = torch.zeros(3, dtype=torch.int64)


# a pool, x, batch and size, and the name of the wrong one
REFUSED = [
    ("add", (X[:2], None), "x must have one row"),
    ("add", ([1.0], None), "x must be a torch.Tensor"),
    ("add", (X > 0, None), "x must be of numbers"),
    ("max", (X.to(torch.complex64), None), "x must be of numbers that have an order"),
    ("min", (X > 0, ZEROS), "x must be of numbers that have an order"),
    ("mean", (X, ZEROS[:2]), "batch must be"),
    ("mean", (X, ZEROS.int()), "batch must be"),
    ("add", (X, [0, 0, 0]), "batch must be a torch.Tensor"),
    ("add", (X, ZEROS - 1), "numbers in batch"),
    ("add", (X, ZEROS + 2, 2), "numbers in batch"),
    ("softmax", (X.long(), None), "x must be of floats"),
    ("softmax", (X[:1], None), "x must have one row"),
]


def refused(rank):
    graph = partition(no_edges(9), method="block")
    for name, given, message in REFUSED:
        pool = {"softmax": "global_softmax"}.get(name, f"global_{name}_pool")
        with pytest.raises(ArgumentError, match=f"^{pool} on rank {rank} of 3: .*{message}"):
            POOLS[name][0](*given[:2], graph, *given[2:])


def test_refusals(worlds):
    assert worlds.run(3, refused) == [None] * 3


def maxima_of_zeros(rank, data):
    graph = partition(data, method="block")
    x = torch.zeros(graph.num_owned, 1, requires_grad=True)
    scatter(x, graph.batch, 0, 1, "max").sum().backward()
    return x.grad


def test_maxima_of_zeros_have_the_gradients_of_pyg(worlds):
    """PyG starts from a 0, which takes a share of the gradient in torch 2.13."""
    data = no_edges(9)
    x = torch.zeros(9, 1, requires_grad=True)
    scatter(x, torch.zeros(9, dtype=torch.int64), 0, 1, "max").sum().backward()
    found = torch.cat(worlds.run(3, maxima_of_zeros, data))
    torch.testing.assert_close(found, 3 * x.grad)  # the loss counts once per rank
