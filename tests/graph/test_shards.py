"""Rows of a shard: collected, dealt out and reduced, with the derivatives of one process."""

import copy
import math
from dataclasses import FrozenInstanceError
from functools import partial
from itertools import cycle, product

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

import varcomm
from tests.graph.against_one import graph_of
from tests.graph.batches import no_edges
from tests.graph.graphs import WORLDS, wild
from tests.graph.parts import differences, same
from tests.graph.typed import typed
from tests.worlds import on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import distribute, partition
from varcomm.testing import dot_test, gradgradcheck

FAR = [0, 254, 509, 765, 4000]  # ids of nodes and edges between which many, or none, are


@on_ranks(2)
def test_ids_with_gaps(rank):
    nodes = torch.arange(5000)
    owner = (~torch.isin(nodes, torch.tensor(FAR))).long()
    graph = partition(Data(edge_index=nodes.expand(2, -1)), method=owner)
    ids = torch.nonzero(owner == rank).view(-1)
    for shard in (graph.nodes, graph.edges):
        assert torch.equal(shard.owned_ids, ids)


FORMS = (
    lambda x: x,
    lambda x: x[:, 0],
    lambda x: x[:, :0],
    lambda x: x.T.contiguous().T,
)


DTYPES = (torch.float64, torch.int16, torch.bool, torch.complex64, torch.bfloat16)
WAYS = ("block", "random", "a rank owns nothing")


@on_ranks(*WORLDS)
def test_nodes_and_edges_go_and_come_back(rank, ranks):
    """Nodes and edges to everyone and to each rank, from each rank; rows of all forms in turn."""
    data, wrong, forms = wild(), [], cycle(FORMS)
    for dtype, way in zip(DTYPES, WAYS * 2, strict=False):
        graph = graph_of(data, way)
        for kind, whole in (("nodes", data.x), ("edges", data.edge_attr)):
            shard, whole = getattr(graph, kind), (whole * 10).to(dtype)
            for form, dst in zip(forms, (None, None, None, *range(ranks)), strict=False):
                rows, expected = shard.gather(form(whole[shard.owned_ids]), dst), form(whole)
                if not same(rows, expected if dst in (None, rank) else expected[:0]):
                    wrong.append(("gather", kind, dst, expected.shape, dtype))
            for form, src in zip(forms, (0, 0, 0, *range(ranks)), strict=False):
                x = form(whole)
                rows = shard.scatter(x if rank == src else None, src)
                if not same(rows, x[shard.owned_ids]):
                    wrong.append(("scatter", kind, src, x.shape, dtype))
    # of one dimension, torch's index_select does not take these: alone on `src` it would fail
    for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2):
        whole = torch.arange(24).to(dtype)
        graph, last = graph_of(data, "random"), ranks - 1
        own = whole[graph.owned_ids]
        for got, want in (
            (graph.gather(own, last), whole if rank == last else whole[:0]),
            (graph.scatter(whole if rank == last else None, src=last), own),
            (graph.with_halo(own), whole[torch.cat([graph.owned_ids, graph.halo_ids])]),
        ):
            if got.dtype != dtype or got.tolist() != want.tolist():
                wrong.append(dtype)
    return wrong


@on_ranks(3)
def test_numbers_of_rows_travel_once(rank):
    """At the first call for a rank; those of every rank at once."""
    graph = graph_of(wild(), "random")
    told = []
    for dst in (None, None, 1, 1):
        with varcomm.trace() as calls:
            graph.gather(graph.x, dst)
        told.append(sum(call.sent for call in calls))
    with varcomm.trace() as calls:
        graph.scatter(wild().x if rank == 1 else None, src=1)
    x, of_ids = 4 * 8 * graph.num_owned, 8 * graph.num_owned  # bytes
    to_one = 0 if rank == 1 else 1
    assert told == [2 * (x + of_ids), 2 * x, to_one * (x + of_ids), to_one * x]
    assert sum(call.received for call in calls) == to_one * x


@on_ranks(*WORLDS)
def test_gather_and_scatter_have_exact_adjoints(rank, ranks):
    for way in ("random", "a rank owns nothing"):
        graph = graph_of(wild(10), way)
        for shard, x in ((graph.nodes, graph.x[:, :2]), (graph.edges, graph.edge_attr[:, :1])):
            for dst in (None, *range(ranks)):
                dot_test(lambda x, s=shard, d=dst: s.gather(x, d), x)
            gradgradcheck(lambda x, s=shard: s.gather(x**3), x, fast_mode=True)
            rows = shard.sizes.total if rank == ranks - 1 else 0
            whole = torch.ones(rows, 2, dtype=torch.float64)
            scatter = partial(shard.scatter, src=ranks - 1)
            dot_test(scatter, whole)
            gradgradcheck(lambda x, f=scatter: f(x**3), whole, fast_mode=True)


def derivatives(values, every, counted, total):
    """A function of two reductions of rows, of every row and of those that count alone."""
    x = values.clone().requires_grad_()
    result = every(x * x.detach().sign()) ** 2 + counted(x**3)
    (first,) = torch.autograd.grad(result, x, create_graph=True)
    (second,) = torch.autograd.grad(total(first * first), x)
    return result.detach(), first.detach(), second


def rows_to_reduce(kind):
    """Whole numbers, so that several rows on several ranks share the maximum."""
    data, generator = wild(), torch.Generator().manual_seed(2)
    rows = data.num_nodes if kind == "nodes" else data.num_edges
    values = torch.randint(-4, 5, (rows, 2), generator=generator).double()
    return values, torch.rand(rows, generator=generator) < 0.6


def picked(reduce, mask):
    return lambda x: reduce(x[mask])


REDUCTIONS = {"max": torch.amax, "sum": torch.sum, "mean": torch.mean}


@on_ranks(*WORLDS)
def test_reductions_and_their_derivatives(rank, ranks):
    for kind, way in product(("nodes", "edges"), WAYS):
        (values, some), masked = rows_to_reduce(kind), way != "random"
        assert (values == values.max()).sum() > ranks, "there are no ties"
        shard = getattr(graph_of(wild(), way), kind)
        ids, mask = shard.owned_ids, some if masked else torch.ones_like(some)
        own = mask[ids]
        for name, in_one_process in REDUCTIONS.items():
            reduce = partial(getattr(shard, name), mask=own if masked else None)
            got = derivatives(values[ids], reduce, picked(reduce, own), shard.sum)
            alone = picked(in_one_process, mask)
            result, *gradients = derivatives(values, alone, alone, torch.sum)
            torch.testing.assert_close(got[0], result, rtol=1e-13, atol=0)
            for mine, whole in zip(got[1:], gradients, strict=True):
                torch.testing.assert_close(mine, whole[ids], rtol=1e-12, atol=1e-13)


EXTREMES = {
    "NaN": [1.0, math.nan, 3.0],
    "infinity": [1.0, math.inf, -math.inf],
    "minus infinity alone": [-math.inf] * 3,
    "a tie": [2.0, -1.0, 2.0],
}


@on_ranks(3)
def test_masks_over_edges(rank):
    """The page's edge mask, in a mean and in a layer; and a type that has no nodes on any rank."""
    data = wild()
    torch.manual_seed(0)
    data.loss_of_edge = torch.rand(data.num_edges, dtype=torch.float64)
    data.train_edges = torch.rand(data.num_edges) < 0.5
    graph = graph_of(data)  # a rank owns nothing
    found = graph.edges.mean(graph.loss_of_edge, graph.train_edges)
    torch.testing.assert_close(found, data.loss_of_edge[data.train_edges].mean())
    layer = SAGEConv(1, 2).double()
    alone = layer(data.x[:, :1].double(), data.edge_index[:, data.train_edges])
    model = distribute(layer, graph)
    found = model(graph.x[:, :1].double(), graph.edge_index[:, graph.train_edges])
    torch.testing.assert_close(found, alone[graph.owned_ids])
    kinds = typed()
    graph, kind = graph_of(kinds), ("paper", "cites", "paper")
    weight = kinds[kind].weight
    found = graph[kind].mean(graph[kind].weight, graph[kind].weight[:, 0] > 0)
    torch.testing.assert_close(found, weight[weight[:, 0] > 0].mean())
    assert graph["editor"].num_nodes == 0
    assert graph["editor"].sum(graph["editor"].x) == 0


@on_ranks(3)
def test_values_that_are_not_finite(rank):
    """Of a graph with one row a rank: what is not finite, nothing at all, who gets gradients."""
    data = Data(edge_index=torch.zeros(2, 0, dtype=torch.int64), num_nodes=3)
    graph = partition(data, method=torch.arange(3))
    for name, values in EXTREMES.items():
        x = torch.tensor(values[rank : rank + 1], requires_grad=True)
        result = graph.max(x)
        result.backward()
        greatest = torch.tensor(values).amax().item()
        assert str(result.item()) == str(greatest), name
        # as torch.amax has it, but for NaN, where it is NaN there
        share = (values[rank] == greatest) / max(1, values.count(greatest))
        assert x.grad.item() == pytest.approx(share), name
    nobody = torch.zeros(1, dtype=torch.bool)
    x = torch.ones(1, 2, requires_grad=True)
    result = graph.max(x, nobody)
    result.backward()
    assert (result.item(), x.grad.abs().sum().item()) == (-math.inf, 0)
    assert graph.max(torch.ones(0, 2), nobody) == graph.max(torch.ones(1, 0)) == -math.inf
    for name in ("max", "sum", "mean"):  # whole numbers, which every float holds
        narrow = getattr(graph, name)(torch.full((1, 2), 2.0 * rank, dtype=torch.bfloat16))
        assert (narrow.dtype, narrow.item()) == (
            torch.bfloat16,
            {"sum": 12, "mean": 2}.get(name, 4),
        )
    assert graph.max(torch.full((1,), float(-rank)), torch.tensor([rank == 2])).item() == -2


# wrong values, and wrong masks
WRONG = {
    "values must be floats": [
        *((torch.ones(4), None), (torch.tensor(1.0), None), (1.0, None)),
        *((torch.ones(3, dtype=kind), None) for kind in (torch.int64, torch.complex64)),
        (torch.ones(1), torch.arange(3) < 2),
    ],
    "mask must be": [
        *((torch.ones(3), mask) for mask in ([True] * 3, torch.ones(3), torch.ones(2) > 0)),
        (torch.ones(3, 1), torch.ones(3, 1) > 0),
    ],
}


@on_ranks(3)
def test_forward_mode_sums_of_nothing_dtypes_and_refusals(rank):
    data = wild()
    graph = partition(data, method="block")
    # forward mode gives what backward gives
    direction = graph.y[:, :1].expand_as(graph.x).contiguous()
    _, forward = torch.func.jvp(lambda x: graph.mean(x**2), (graph.x,), (direction,))
    assert forward.item() == pytest.approx((2 * data.x * data.y[:, :1]).mean().item(), rel=1e-13)
    # the mean of nothing is NaN, and its sum zero
    nobody, x = torch.zeros(graph.num_owned, dtype=torch.bool), graph.x.requires_grad_()
    total = graph.sum(x, nobody)
    (gradient,) = torch.autograd.grad(total, x)
    assert total.item() == gradient.abs().sum().item() == 0
    assert graph.mean(x, nobody).isnan()
    # summed in fp64 and rounded once: a large value and its negative leave the small ones whole
    large = 2.0**15
    values = torch.tensor([large, 0.125, 0.25, 0.5, 0.25, -large, 0.375, 0.5])
    for dtype in (torch.float64, torch.bfloat16):
        eight = partition(no_edges(8, x=values.to(dtype)), method=torch.arange(8) % 3)
        with varcomm.trace() as calls:
            total = eight.sum(eight.x)
        assert sum(call.sent for call in calls) <= (16 + 16) * 2
        assert (total.dtype, total.item(), eight.mean(eight.x).item()) == (dtype, 2.0, 0.25)
    three = partition(no_edges(9), method="block")
    for kind, (message, given) in product(("sum", "mean", "max"), WRONG.items()):
        for values, mask in given:
            where = f"graph.{kind} on rank {rank} of 3: "
            with pytest.raises(ArgumentError, match=f"{where}.*{message}"):
                getattr(three, kind)(values, mask)


@on_ranks(3)
def test_refusals(rank):
    """Calls that each rank refuses alone, then those that the root refuses for all."""
    graph = graph_of(wild(), "block")
    for word, call in (
        ("x must", lambda: graph.edges.gather(graph.x)),
        ("dst must", lambda: graph.gather(graph.x, dst=3)),
        ("dst must", lambda: graph.nodes.gather(graph.x, dst=0.5)),
        ("src must", lambda: graph.scatter(None, src=-1)),
        ("values must", lambda: graph.edges.sum(graph.x)),
    ):
        with pytest.raises(ArgumentError, match=f"on rank {rank} of 3: {word}"):
            call()
    for x in (torch.ones(23), torch.tensor(1.0), [1.0] * 24, None):
        told = "" if rank == 1 else "refused by its root, rank 1"
        with pytest.raises(ArgumentError, match=told):
            graph.scatter(x if rank == 1 else None, src=1)
    with varcomm.debug(), pytest.raises(DisagreementError, match=r"graph\.max: ranks disagree on"):
        graph.max(torch.ones(graph.num_owned, 1 + rank))
    assert torch.equal(graph.scatter(wild().x if rank == 1 else None, src=1), graph.x)


@on_ranks(3)
def test_ids_of_users_are_not_those_of_the_graph(rank):
    """A change in place of what was returned, or passed, leaves the graph as it is."""
    data, shares = wild(), varcomm.ShardSizes.balanced(24, 3)
    graph = partition(data, method="random")
    ids = torch.arange(24)[shares.range(rank).start : shares.range(rank).stop]
    near = varcomm.graph.radius(data.pos[ids], 0.5, ids=ids)
    ends = torch.empty(2, 0, dtype=torch.int64)
    made = varcomm.graph.from_edges(ends, shares, node_attrs={"x": data.x[ids]}, node_ids=ids)
    before = [shard.owned_ids.clone() for shard in (graph.nodes, graph.edges, near, made)]
    ids.zero_()
    for shard, expected in zip((graph.nodes, graph.edges, near, made), before, strict=True):
        shard.owned_ids.zero_()
        assert torch.equal(shard.owned_ids, expected)


@on_ranks(2)
def test_copies_devices_and_changes(rank):
    data = wild()
    data.level, data.title = torch.ones(1, 2), "wild"
    graph = partition(data, method="random", hops=2)
    again = graph.to("cpu")
    model = torch.nn.Module()
    model.graph, model.nodes, model.edges = graph, graph.nodes, graph.edges
    twin = copy.deepcopy(model)
    assert (twin.graph, twin.nodes, twin.edges) == (graph, graph.nodes, graph.edges)
    numbers = graph.edge_index.numel() + graph.num_halo + sum(graph.plan.send_counts)
    assert graph.edges.nbytes() == 8 * (numbers + graph.edges.num_owned)
    there = graph.to("meta")
    moved = [there.x, there.edge_index, there.level, there.plan.send_index, there.halo_ids]
    moved += [there.nodes.ids, there.edges.ids]
    assert graph.x.device.type == "cpu", "the graph itself stays where it is"
    assert {tensor.device.type for tensor in moved} == {"meta"}
    for shard, name in ((graph, "x"), (graph.nodes, "sizes"), (graph.edges, "edge_index")):
        with pytest.raises(FrozenInstanceError, match=f"cannot assign to field '{name}'"):
            setattr(shard, name, 1)
    assert ("x" in graph.nodes, hasattr(graph.edges, "__x__")) == (True, False)
    assert again is not graph
    assert not differences(again, graph)
    assert there.title == "wild"
