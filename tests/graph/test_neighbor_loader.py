"""``NeighborLoader``: exact with all neighbours, and random picks that are what they should be."""

import gc
import resource
import subprocess
import sys
import threading
import time
import warnings
from collections import defaultdict
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch_geometric import loader
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GATv2Conv, GraphSAGE, to_hetero
from torch_geometric.utils import trim_to_layer

import varcomm as vc
from tests.graph.against_one import CLOSE, graph_of, two_types
from tests.graph.graphs import METHODS, rich, split_by
from tests.worlds import WORLDS, on_ranks, refused_alike
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import LinkNeighborLoader, NeighborLoader, partition

ALL = [-1, -1]


def all_of(data, seeds, hops=2, fan_outs=None):
    """Sample all in-edges, node by node, in the order in which PyG's samplers find them.

    Returns nodes by type, and sources, targets and ids of edges by type and hop. Types are None in
    a graph with one type. `fan_outs` are zero for types of edges that are left out.
    """
    stores = {None: data} if isinstance(data, Data) else dict(data.edge_items())
    types = [None] if isinstance(data, Data) else data.node_types
    nodes = {kind: [] for kind in types}
    nodes |= {kind: ids.tolist() for kind, ids in seeds.items()}
    known = {kind: {node: nodes[kind].index(node) for node in nodes[kind]} for kind in types}
    edges, begin, counts = defaultdict(list), dict.fromkeys(types, 0), defaultdict(list)
    for kind in types:
        counts[kind].append(len(nodes[kind]))
    for _ in range(hops):
        end = {kind: len(nodes[kind]) for kind in types}
        for edge_type, store in stores.items():
            source, target = (None, None) if edge_type is None else (edge_type[0], edge_type[-1])
            found = []
            for place in range(begin[target], end[target]):
                into = (store.edge_index[1] == nodes[target][place]).nonzero().view(-1).tolist()
                for edge in into if fan_outs is None or fan_outs[edge_type] else ():
                    node = int(store.edge_index[0, edge])
                    if node not in known[source]:
                        known[source][node] = len(nodes[source])
                        nodes[source].append(node)
                    found.append((known[source][node], place, edge))
            edges[edge_type].append(found)
        for kind in types:
            counts[kind].append(len(nodes[kind]) - end[kind])
        begin = end
    return nodes, edges, counts


def assert_all(batch, data, seeds, fan_outs=None):
    """Assert that a batch has all in-edges of two hops, as PyG returns them, and the attributes."""
    nodes, edges, counts = all_of(data, seeds, fan_outs=fan_outs)
    for kind, expected in nodes.items():
        store, whole = (batch, data) if kind is None else (batch[kind], data[kind])
        assert store.n_id.tolist() == expected
        assert store.num_nodes == len(expected)
        assert store.num_sampled_nodes == counts[kind]
        assert_rows(store, whole, store.n_id, whole.num_nodes)
    for edge_type, of_hops in edges.items():
        store, whole = (batch, data) if edge_type is None else (batch[edge_type], data[edge_type])
        expected = [edge for hop in of_hops for edge in hop]
        assert [*zip(*store.edge_index.tolist(), store.e_id.tolist(), strict=True)] == expected
        assert store.num_sampled_edges == [len(hop) for hop in of_hops]
        assert_rows(store, whole, store.e_id, whole.num_edges)


def assert_rows(store, whole, ids, rows):
    for name, value in whole.items():
        if name != "edge_index" and isinstance(value, torch.Tensor) and len(value) == rows:
            torch.testing.assert_close(store[name], value[ids], rtol=0, atol=0)
            assert store[name].is_contiguous()


@pytest.mark.parametrize("method", METHODS)
@on_ranks(*WORLDS)
def test_all_neighbours_are_those_of_the_full_graph(rank, ranks, method):
    data = rich()
    owner = split_by(method, 24, ranks) if method == METHODS[-1] else method
    graph = partition(data, method=owner)
    found = []
    for batch in NeighborLoader(graph, ALL, batch_size=5, seed=3):
        seeds = batch.n_id[: batch.batch_size]
        assert torch.equal(seeds, graph.owned_ids[batch.input_id])
        assert_all(batch, data, {None: seeds})
        found += seeds.tolist()
    assert sorted(found) == graph.owned_ids.tolist()


@on_ranks(3, 1)
def test_all_neighbours_of_several_types(rank, ranks):
    data = several_types()
    graph = graph_of(data)
    for fan_outs in (ALL, {edge: [0, 0] if "of" in edge else ALL for edge in data.edge_types}):
        for batch in NeighborLoader(graph, fan_outs, batch_size=4, input_nodes="b"):
            kept = None if fan_outs is ALL else {edge: of[0] for edge, of in fan_outs.items()}
            assert_all(batch, data, {"b": batch["b"].n_id[: batch["b"].batch_size]}, kept)


def several_types():
    data = two_types()
    generator = torch.Generator().manual_seed(5)
    for edge, sizes in ((("b", "of", "a"), (9, 14)), (("a", "near", "a"), (14, 14))):
        ends = [torch.randint(size, (25,), generator=generator) for size in sizes]
        data[edge].edge_index = torch.stack(ends)
    return data


@on_ranks(2)
def test_the_graph_of_pygs_own_test(rank):
    edge_index = [[1, 2, 3, 4, 5, 0, 5, 6, 7, 8, 9, 0], [0, 1, 2, 3, 4, 4, 9, 5, 6, 7, 8, 9]]
    data = Data(edge_index=torch.tensor(edge_index), num_nodes=10)
    graph = partition(data, method=[0] * 5 + [1] * 5)
    seeds = torch.tensor([[1, 6], [4, 9]][rank])
    (batch,) = NeighborLoader(graph, ALL, 2, seeds, shuffle=False)
    assert batch.n_id.tolist() == [[1, 6, 2, 7, 3, 8], [4, 9, 5, 0, 6, 1]][rank]
    assert_all(batch, data, {None: seeds})


@pytest.mark.skipif(not find_spec("torch_sparse"), reason="PyG's loader needs torch-sparse")
@pytest.mark.parametrize("subgraph_type", ["directional", "induced"])
@on_ranks(3)
def test_batches_are_those_of_pyg(rank, subgraph_type):
    warnings.simplefilter("ignore")
    options = {"subgraph_type": subgraph_type, "batch_size": 5, "shuffle": False}
    for data, kind in ((rich(), None), (several_types(), "a")):
        graph = graph_of(data)
        store = data if kind is None else data[kind]
        ids = graph.owned_ids if kind is None else graph[kind].owned_ids
        mine = torch.zeros(store.num_nodes, dtype=torch.bool).index_fill(0, ids, True)
        theirs = loader.NeighborLoader(data, ALL, mine if kind is None else (kind, mine), **options)
        ours = NeighborLoader(graph, ALL, input_nodes=kind, **options)
        for one, other in zip([*ours], theirs, strict=False):
            for place, expected in zip(one.stores, other.stores, strict=True):
                assert {*expected.keys()} <= {*place.keys(), "num_nodes"}
                for ids in {"n_id", "e_id"} & {*expected.keys()}:
                    # their order of the edges into a node is that of an unstable sort
                    assert torch.equal(place[ids].sort().values, expected[ids].sort().values)
            seeds = (each if kind is None else each[kind] for each in (one, other))
            first, second = (each.n_id[: each.batch_size].tolist() for each in seeds)
            assert first == second


@on_ranks(3)
def test_seeds_of_other_ranks_and_repeated(rank):
    data = rich()
    graph = graph_of(data)
    seeds = torch.tensor([[23, 4, 4], [0], []][rank], dtype=torch.int64)
    loader = NeighborLoader(graph, ALL, 3, seeds, shuffle=False)
    (batch,) = loader
    assert batch.n_id[: batch.batch_size].tolist() == seeds.tolist()
    assert batch.input_id.tolist() == [*range(len(seeds))]
    assert len(loader) == 1
    if rank == 0:
        into = batch.e_id[(batch.edge_index[1] == 1) | (batch.edge_index[1] == 2)]
        expected = (data.edge_index[1] == 4).nonzero().view(-1)
        assert torch.equal(into.sort().values, torch.cat([expected, expected]).sort().values)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("weight_attr", [None, "weight"])
@on_ranks(3, 1)
def test_picks_are_edges_of_the_graph(rank, ranks, replace, weight_attr):
    data = rich(30)
    data.weight = data.edge_weight.abs() * (torch.arange(data.num_edges) % 4 > 0)
    graph = partition(data, method="random")
    drawn = NeighborLoader(graph, [4, 2], 7, None, replace, weight_attr=weight_attr)
    usable = data.weight > 0 if weight_attr else torch.ones(data.num_edges, dtype=torch.bool)
    degree = data.edge_index[1][usable].bincount(minlength=30)
    for batch in drawn:
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
        assert bool(usable[batch.e_id].all())
        begin = 0
        for k, nodes, edges in zip(
            [4, 2], batch.num_sampled_nodes, batch.num_sampled_edges, strict=False
        ):
            frontier = degree[batch.n_id[begin : begin + nodes]]
            picked = torch.where(frontier > 0, k, 0) if replace else frontier.clamp(max=k)
            assert edges == int(picked.sum())
            begin += nodes
        if not replace:
            assert len(batch.e_id.unique()) == len(batch.e_id)


def stars(count):
    """Graphs of 7 nodes, with edges of weights 0 ... 5 into the first from the others."""
    first = 7 * torch.arange(count).repeat_interleave(6)
    source, weight = first + 1 + torch.arange(6).repeat(count), torch.arange(6.0).repeat(count)
    return Data(edge_index=torch.stack([source, first]), num_nodes=7 * count, weight=weight)


def inclusion(weights, k):
    """Return the probability of each edge to be among k that are drawn one after the other."""
    total = np.zeros(len(weights))

    def draw(left, probability, drawn):
        if len(drawn) == k:
            total[drawn] += probability
            return
        for i in left:
            share = weights[i] / sum(weights[j] for j in left)
            draw([j for j in left if j != i], probability * share, [*drawn, i])

    draw([i for i, weight in enumerate(weights) if weight], 1.0, [])
    return total


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("weight_attr", [None, "weight"])
@on_ranks(2)
def test_the_distribution_of_picks(rank, replace, weight_attr):
    graph = partition(stars(4000), method="random")
    seeds = 7 * torch.arange(4000 if rank == 0 else 0)
    (batch,) = NeighborLoader(graph, [2], 4000, seeds, replace, weight_attr=weight_attr)
    counts = (batch.e_id % 6).bincount(minlength=6)
    if rank == 0:
        weights = np.arange(6) if weight_attr else np.ones(6)
        expected = 2 * weights / weights.sum() if replace else inclusion(weights, 2)
        rate, some = counts.numpy() / 4000, expected > 0
        # chi-square: 16.7 is exceeded once in 200 with 5 degrees of freedom
        assert (4000 * (rate - expected)[some] ** 2 / expected[some]).sum() < 16.7
        assert not rate[~some].any()


def one_epoch(rank, seeds, method):
    data = rich(40)
    graph = partition(data, method=method if dist.get_world_size() > 1 else "block")
    mine = torch.tensor(seeds if rank == 0 else [7, 1, 30])
    loader = NeighborLoader(graph, [3, 2], 4, mine, seed=5)
    batches = [*loader, *loader] if rank == 0 else [None for _ in (*loader, *loader)]
    return [(b.n_id.tolist(), b.e_id.tolist(), b.edge_index.tolist()) for b in batches if b]


def test_batches_are_equal_on_any_number_of_ranks(worlds):
    seeds = [*range(0, 40, 3)]
    alone = worlds.run(1, one_epoch, seeds, "block")[0]
    assert len(alone) == 8
    assert alone[:4] != alone[4:]
    for ranks, method in ((3, "random"), (3, "block")):
        assert worlds.run(ranks, one_epoch, seeds, method)[0] == alone


@on_ranks(3)
def test_ranks_with_other_numbers_of_seeds_train_as_one(rank):
    data = rich()
    graph = graph_of(data)
    torch.manual_seed(0)
    models = [GraphSAGE(4, 8, 2, 2).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    error = torch.nn.functional.mse_loss(models[0](data.x, data.edge_index), data.y)
    error.backward()
    count = vc.data_parallel.GlobalCount()
    loader = NeighborLoader(graph, ALL, batch_size=4)
    assert len(loader) == -(-max(graph.node_sizes) // 4)
    sizes = []
    for batch in loader:
        out = models[1](batch.x, batch.edge_index)[: batch.batch_size]
        loss = torch.nn.functional.mse_loss(out, batch.y[: batch.batch_size], reduction="sum")
        (loss / 2).backward()
        count.add(batch.batch_size)
        sizes.append(batch.batch_size)
    assert sum(sizes) == graph.num_owned
    vc.data_parallel.sum_gradients(models[1], reduce=count)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, **CLOSE)
    whole = NeighborLoader(graph, ALL, batch_size=4, drop_last=True)
    assert {batch.batch_size for batch in whole} <= {4}
    assert len(whole) == min(graph.node_sizes) // 4


@on_ranks(3)
def test_unmodified_models_on_batches(rank):
    data = rich()
    graph = partition(data, method="random")
    torch.manual_seed(0)
    layers = [GATv2Conv(4, 4, edge_dim=3, add_self_loops=False).double() for _ in range(2)]
    whole = data.x
    for layer in layers:
        whole = layer(whole, data.edge_index, data.edge_attr)
    for batch in NeighborLoader(graph, ALL, batch_size=4):
        x, edge_index, edge_attr = batch.x, batch.edge_index, batch.edge_attr
        for hop, layer in enumerate(layers):
            x, edge_index, edge_attr = trim_to_layer(
                hop, batch.num_sampled_nodes, batch.num_sampled_edges, x, edge_index, edge_attr
            )
            x = layer(x, edge_index, edge_attr)
        seeds = batch.n_id[: batch.batch_size]
        torch.testing.assert_close(x[: batch.batch_size], whole[seeds], **CLOSE)


@on_ranks(3)
def test_an_unmodified_model_of_several_types(rank):
    data = several_types()
    data["b"].x = torch.cat([data["b"].x, data["b"].x[:, :1]], dim=1)
    graph = graph_of(data)
    torch.manual_seed(0)
    model = to_hetero(GraphSAGE(4, 8, 2, 2).double(), data.metadata())
    whole = model(data.x_dict, data.edge_index_dict)["a"]
    for batch in NeighborLoader(graph, ALL, 5, ("a", None)):
        seeds = batch["a"].n_id[: batch["a"].batch_size]
        out = model(batch.x_dict, batch.edge_index_dict)["a"][: len(seeds)]
        torch.testing.assert_close(out, whole[seeds], **CLOSE)


@on_ranks(3, 1)
def test_induced_subgraphs_have_all_edges_between_their_nodes(rank, ranks):
    data = rich()
    graph = partition(data, method="random")
    for batch in NeighborLoader(graph, [2, 1], 4, subgraph_type="induced"):
        inside = torch.isin(data.edge_index, batch.n_id).all(dim=0).nonzero().view(-1)
        assert torch.equal(batch.e_id.sort().values, inside)
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
        assert_rows(batch, data, batch.e_id, data.num_edges)
        assert "num_sampled_nodes" not in batch


@on_ranks(3)
def test_a_cache_changes_no_batch(rank):
    data = rich(40)
    graph = partition(data, method="random")
    plain = NeighborLoader(graph, [3, 2], 4, seed=1)
    cached = NeighborLoader(graph, [3, 2], 4, seed=1, cache=9)
    for one, other in zip(plain, cached, strict=True):
        assert one.to_dict().keys() == other.to_dict().keys()
        assert_rows(other, data, other.n_id, 40)
        assert torch.equal(one.n_id, other.n_id)
    assert plain.report().hit_rate == 0 < cached.report().hit_rate < 1
    assert cached.report().remote == plain.report().remote
    with vc.trace() as calls:
        whole = NeighborLoader(graph, ALL, 40, cache=40)
        batches = [*whole]
    assert whole.report().hit_rate == 1
    assert len(batches) == 1
    assert calls


@on_ranks(3)
def test_only_rows_of_other_ranks_travel(rank):
    data = rich(40)
    graph = partition(data, method="random")
    loader = NeighborLoader(graph, [3, 2], 6, prefetch=0)
    batches = iter(loader)
    with vc.trace() as calls:
        batch = next(batches)
    away = graph.owner(batch.n_id) != rank
    width = {
        kind: sum(value[0].nbytes for name, value in data if name != "edge_index" and of(name))
        for kind, of in (("node", data.is_node_attr), ("edge", data.is_edge_attr))
    }
    first = batch.num_sampled_nodes[0] + batch.num_sampled_nodes[1]
    edges = int(away[batch.edge_index[1]].sum())
    rows = int(away.sum())
    requested = int(away[:first].sum())
    # what this rank asks for, sent by it and by the owners, and tables of counts and of the batch
    asked = 8 * requested + (8 + width["edge"]) * edges + (8 + width["node"]) * rows
    tables = 2 * (24 + 2 * 16 + 8)
    totals = torch.tensor([asked + tables, calls.total.sent])
    expected, sent = vc.all_reduce(totals).tolist()
    assert sent == expected
    assert [*batches]


@on_ranks(3)
def test_leaving_the_loop(rank):
    graph = partition(rich(), method="block")
    loader = NeighborLoader(graph, [2], batch_size=2, prefetch=2)
    for _ in range(2):
        assert next(iter(loader)).batch_size == 2
    assert loader.state_dict()["epoch"] == 2

    def leave_alone():
        for place, _ in enumerate(loader):
            if rank == 1 and place == 1:
                break
        return [*loader]

    error = refused_alike(DisagreementError, leave_alone, "ended after 2 batches")
    assert "graph.NeighborLoader" in str(error)


@on_ranks(3)
def test_loaders_after_an_error(rank):
    graph = partition(rich(), method="block")
    loader = NeighborLoader(graph, [2], batch_size=1)

    def leave_alone(loader):
        for place, _ in enumerate(loader):
            if rank == 1 and place == 1:
                break
        return [*loader]

    with pytest.raises(DisagreementError):
        leave_alone(loader)
    assert len([*loader]) == len(loader)
    del loader
    for prefetch in (0, 1, 2):
        other = NeighborLoader(graph, [2], batch_size=1, prefetch=prefetch, cache=4)
        assert len([*other]) == len(other)


@on_ranks(2)
def test_resuming(rank):
    graph = partition(rich(), method="random")

    def names(batches):
        return [(batch.n_id.tolist(), batch.e_id.tolist()) for batch in batches]

    first = NeighborLoader(graph, [2, 2], batch_size=3, seed=4, prefetch=2)
    whole = names([*first, *first])
    second = NeighborLoader(graph, [2, 2], batch_size=3, seed=4)
    taken, states = [], []
    for _ in range(2):
        for batch in second:
            taken.append(batch)
            states.append(second.state_dict())
    assert names(taken) == whole
    assert second.state_dict() == {"epoch": 2, "batch": 0, "seed": 4}
    third = NeighborLoader(graph, [2, 2], batch_size=3, seed=4)
    third.load_state_dict(states[1])
    assert names([*third, *third]) == whole[2:]
    other = NeighborLoader(graph, [2, 2], batch_size=3, seed=5)
    with pytest.raises(ArgumentError, match="seed"):
        other.load_state_dict(states[1])


@pytest.mark.parametrize("prefetch", [0, pytest.param(2, marks=pytest.mark.slow)])
@on_ranks(3)
def test_several_iterators_of_a_loader(rank, prefetch):
    """Their messages have one order on all ranks."""
    graph = partition(rich(40), method="random")

    def names(batches):
        return [batch.n_id.tolist() for batch in batches]

    alone = NeighborLoader(graph, [2, 2], 3, prefetch=prefetch)
    first, second, third = (names(alone) for _ in range(3))
    for _ in range(5):  # threads that share a group rarely fail
        loader = NeighborLoader(graph, [2, 2], 3, prefetch=prefetch)
        pairs = [*zip(loader, loader, strict=True)]
        assert [names(of) for of in zip(*pairs, strict=True)] == [first, second]
    loader = NeighborLoader(graph, [2, 2], 3, prefetch=prefetch)
    looked_at, left = iter(loader), iter(loader)
    seen = names([next(looked_at), next(left)])
    assert names(loader) == third
    assert [*seen[:1], *names(looked_at)] == first
    assert seen[1:] == second[:1]
    left.close()
    assert len([*loader]) == len(loader)


@pytest.mark.parametrize("replace", [False, True])
@on_ranks(2)
def test_weights_of_very_different_size(rank, replace):
    data = stars(800)
    data.weight *= torch.logspace(14, -14, 800).repeat_interleave(6)
    graph = partition(data, method=[0] * data.num_nodes)
    (batch,) = NeighborLoader(graph, [1], 800, 7 * torch.arange(800), replace, weight_attr="weight")
    counts = (batch.e_id % 6).bincount(minlength=6).numpy()
    expected = 800 * np.arange(6) / 15
    assert counts[0] == 0
    assert ((counts - expected)[1:] ** 2 / expected[1:]).sum() < 14.9  # 4 degrees of freedom


@on_ranks(2)
def test_numbers_and_labels_of_any_library(rank):
    data = rich()
    data.weight = data.edge_weight.abs().bfloat16()
    graph = partition(data, method="random")
    loader = NeighborLoader(
        graph, [2], np.int64(3), seed=np.int64(4), prefetch=np.int32(1), weight_attr="weight"
    )
    same = NeighborLoader(graph, [2], 3, seed=4, weight_attr="weight")
    for one, other in zip(loader, same, strict=True):
        assert torch.equal(one.e_id, other.e_id)
    ends = torch.arange(6).view(2, 3)
    for labels in (torch.arange(3), torch.eye(3)):
        (batch,) = LinkNeighborLoader(graph, [2], 3, ends, labels, "binary", shuffle=False)
        expected = torch.as_tensor(labels) + 1
        assert torch.equal(batch.edge_label[:3], expected)
        assert torch.equal(batch.edge_label[3:], torch.zeros_like(expected))


REFUSED = {
    "num_neighbors": {"num_neighbors": 3},
    "no hop": {"num_neighbors": []},
    "batch_size": {"batch_size": 0},
    "input_nodes": {"input_nodes": torch.ones(3, dtype=torch.bool)},
    "ids of the full graph": {"input_nodes": "local ids"},
    "out of range for 24 nodes": {"input_nodes": torch.tensor([24])},
    "subgraph_type": {"subgraph_type": "bidirectional"},
    "weight_attr": {"weight_attr": "edge_weight"},
    "seed": {"seed": 0.5},
    "temporal": {"time_attr": "time"},
    "prefetch": {"num_workers": 2},
    "no such argument": {"batchsize": 2},
}


@pytest.mark.parametrize("word", REFUSED)
@on_ranks(3)
def test_refusals(rank, word):
    graph = partition(rich(), method="block")
    options = {"num_neighbors": [2], **(REFUSED[word] if rank == 1 else {})}
    if options.get("input_nodes") is not None and isinstance(options["input_nodes"], str):
        options["input_nodes"] = graph.edge_index[0]
    if word == "subgraph_type":
        options |= REFUSED[word]
    refused_alike(ArgumentError, lambda: NeighborLoader(graph, **options), word)


@on_ranks(2)
def test_other_arguments_on_a_rank(rank):
    graph = partition(rich(), method="block")
    call = lambda: NeighborLoader(graph, [2], batch_size=2 + rank)  # noqa: E731
    refused_alike(DisagreementError, call, "batch_size")
    data = HeteroData({"a": {"x": torch.ones(3, 1)}})
    data["a", "to", "a"].edge_index = torch.tensor([[0, 1], [1, 2]])
    typed = partition(data, method="block")
    refused_alike(ArgumentError, lambda: NeighborLoader(typed, [2]), "input_nodes")


def test_a_simulated_group():
    with vc.simulate.world(2, rank=0):
        graph = vc.simulate.partition(rich(), 2, "block").part()
        with pytest.raises(ArgumentError, match="simulated"):
            NeighborLoader(graph, [2])


@on_ranks(3)
def test_picks_of_types_of_edges_are_independent(rank):
    data = HeteroData()
    data["a"].num_nodes = 300
    ends = torch.randint(300, (2, 6000), generator=torch.Generator().manual_seed(0))
    data["a", "one", "a"].edge_index = data["a", "other", "a"].edge_index = ends
    graph = partition(data, method="random")
    (batch,) = NeighborLoader(graph, [2], 300, "a", shuffle=False)
    one, other = (batch["a", name, "a"].e_id for name in ("one", "other"))
    # 2 of about 20 edges are in both with probability 0.1
    assert 0.02 < torch.isin(one, other).double().mean() < 0.2


@on_ranks(2)
def test_weights_of_any_size(rank):
    data = stars(400)
    heavy = torch.arange(data.num_edges) // 6 % 2 == 0
    data.weight = (data.weight * torch.where(heavy, 1e9, 1e-9)).bfloat16()
    graph = partition(data, method="random")
    seeds = 7 * torch.arange(400)
    for replace in (False, True):
        (batch,) = NeighborLoader(graph, [2], 400, seeds, replace, weight_attr="weight")
        rate = (batch.e_id % 6)[~heavy[batch.e_id]].bincount(minlength=6) / 200
        assert bool((rate[1:] > 0.05).all())
        assert rate[0] == 0


@on_ranks(3)
def test_two_iterators_of_a_loader(rank):
    data = rich()
    graph = partition(data, method="random")
    loader = NeighborLoader(graph, ALL, 3, prefetch=1)
    pairs = [*zip(loader, loader, strict=True)]
    assert len(pairs) == len(loader)
    for batch in [batch for pair in pairs for batch in pair]:
        assert_all(batch, data, {None: batch.n_id[: batch.batch_size]})


@on_ranks(3)
def test_inside_debug(rank):
    data = rich()
    graph = partition(data, method="random")
    with vc.debug():
        batches = [*NeighborLoader(graph, ALL, 5)]
    for batch in batches:
        assert_all(batch, data, {None: batch.n_id[: batch.batch_size]})
    assert len(batches) == -(-max(graph.node_sizes) // 5)


@on_ranks(3)
def test_types_that_are_no_source(rank):
    data = two_types()  # edges from a to b alone
    graph = graph_of(data)
    for batch in NeighborLoader(graph, [-1, -1, -1], 4, "b"):
        seeds = batch["b"].n_id[: batch["b"].batch_size]
        into = torch.isin(data["a", "to", "b"].edge_index[1], seeds).nonzero().view(-1)
        assert torch.equal(batch["a", "to", "b"].e_id.sort().values, into)
    for batch in NeighborLoader(graph, ALL, 4, "a"):
        assert batch["b"].num_nodes == batch["a", "to", "b"].num_edges == 0
    edge = ("a", "to", "b")
    for batch in LinkNeighborLoader(graph, ALL, 4, edge, neg_sampling="binary"):
        ends = batch[edge].edge_label_index
        count = len(batch[edge].input_id)
        edges = data[edge].edge_index[:, graph[edge].owned_ids[batch[edge].input_id]]
        assert torch.equal(batch["a"].n_id[ends[0, :count]], edges[0])
        assert torch.equal(batch["b"].n_id[ends[1, :count]], edges[1])


@on_ranks(2)
def test_repeated_seeds_are_shuffled_apart(rank):
    graph = partition(rich(), method="random")
    seeds = torch.arange(12).repeat(8)
    batches = [*NeighborLoader(graph, [1], 12, seeds)]
    found = [batch.n_id[: batch.batch_size] for batch in batches]
    assert torch.cat(found).bincount().tolist() == [8] * 12
    assert sum(len(of.unique()) for of in found) > 40  # 16 if equal seeds follow each other
    inputs = torch.cat([batch.input_id for batch in batches])
    assert torch.equal(inputs.sort().values, torch.arange(96))
    ends = torch.stack([seeds, seeds + 1])
    links = [*LinkNeighborLoader(graph, [1], 12, ends)]
    assert sum(batch.edge_label_index[0].unique().numel() for batch in links) > 40


def resident():
    """Return the memory of this process, in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


@pytest.mark.slow
@on_ranks(2)
def test_memory_is_flat_over_a_thousand_batches(rank):
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(5000, (2, 50_000), generator=generator)
    data = Data(x=torch.randn(5000, 64, generator=generator), edge_index=ends)
    loader = NeighborLoader(partition(data, method="block"), [5, 3], 64, cache=100)
    batches = (batch for _ in iter(int, 1) for batch in loader)
    assert sum(batch.num_nodes for batch in islice(batches, 200))
    before = resident()
    sizes = {len(batch.x) for batch in islice(batches, 1000)}
    assert len(sizes) > 20  # messages have many sizes
    assert resident() - before < 8
    batches.close()


@pytest.mark.slow
@on_ranks(2)
def test_loaders_leave_no_threads_and_groups(rank):
    graph, threads, groups = partition(rich(), method="block"), threading.active_count(), []
    for turn in range(12):
        loader = NeighborLoader(graph, [2], 5)
        batches = iter(loader)
        next(batches)
        if turn % 2:
            batches.close()
        del batches, loader
        gc.collect()
        deadline = time.monotonic() + 20  # a thread ends soon after its loader
        while threading.active_count() > threads and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threading.active_count() == threads
        vc.all_reduce(torch.ones(1))
        groups.append(len(distributed_c10d._world.pg_map))
    assert groups == groups[:1] * 12


ENDS = """
import sys
import torch, varcomm
from torch_geometric.data import Data
rank = varcomm.init("gloo", timeout=300).rank
ends = torch.randint(60, (2, 400), generator=torch.Generator().manual_seed(0))
graph = varcomm.graph.partition(Data(edge_index=ends, num_nodes=60), method="block")
for step, batch in enumerate(varcomm.graph.NeighborLoader(graph, [2, 2], batch_size=5)):
    if rank == 1 and step == 2 and sys.argv[1] == "fails":
        raise KeyError("of the user")
    if rank == 1 and step == 2:
        break
    varcomm.all_reduce(torch.ones(1))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fails", "leaves"])
def test_a_rank_that_exits_in_the_loop_stops_the_others(how, tmp_path):
    """The thread of its loader must not keep the process alive until the timeout."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script, how]
    done = subprocess.run(run, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0
    expected = "KeyError: 'of the user'" if how == "fails" else "CommunicationError"
    assert expected in done.stderr
