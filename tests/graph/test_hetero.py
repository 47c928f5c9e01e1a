"""Graphs with several types of nodes and edges: each type's part against the whole graph."""

import pytest
import torch
from torch_geometric.data import HeteroData

import varcomm
from tests.graph.graphs import WORLDS
from tests.graph.typed import WAYS, owners, typed
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import EdgeShard, NodeShard, partition


def parts_of(rank, data, method):
    graph = partition(data, method=method)
    nodes, edges = {}, {}
    for node_type in graph.node_types:
        shard = graph[node_type]
        assert isinstance(shard, NodeShard)
        nodes[node_type] = {
            "ids": shard.owned_ids,
            "sizes": tuple(shard.sizes),
            "num_owned": shard.num_owned,
            "attributes": dict(shard.attributes),
            "gathered": shard.gather(shard.owned_ids, dst=0),
        }
    for edge_type in graph.edge_types:
        shard = graph[edge_type]
        assert isinstance(shard, EdgeShard)
        ids = graph[edge_type[0]].owned_ids
        edges[edge_type] = {
            "ids": shard.owned_ids,
            "sizes": tuple(shard.sizes),
            "edge_index": shard.edge_index,
            "halo": shard.halo_ids,
            "attributes": dict(shard.attributes),
            "counts": (shard.num_sources, shard.num_halo, shard.num_targets, shard.num_owned),
            "with halo": shard.with_halo(ids),
            "only halo": shard.halo(ids),
            "interior": shard.interior,
            "boundary": shard.boundary,
            "gathered": shard.gather(shard.owned_ids, dst=0),
        }
    return nodes, edges, dict(graph.attributes), graph.report()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", WORLDS)
def test_parts_make_up_the_whole(worlds, ranks, way):
    data = typed()
    owner = owners(data, way, ranks)
    parts = worlds.run(ranks, parts_of, data, owner)
    for rank, (nodes, edges, attributes, report) in enumerate(parts):
        assert nodes.keys() == set(data.node_types)
        assert edges.keys() == set(data.edge_types)
        for node_type, part in nodes.items():
            assert_nodes(part, data[node_type], owner[node_type], rank, ranks)
        for edge_type, part in edges.items():
            assert_edges(part, data, edge_type, owner, rank)
        assert attributes.keys() == {"year", "scale"}
        assert (attributes["year"], attributes["scale"].tolist()) == (1998, [[0.5, 2.0]])
        assert report == parts[0][3]
        assert report.owned[rank] == sum(part["num_owned"] for part in nodes.values())
        assert report.halo[rank] == sum(len(part["halo"]) for part in edges.values())
        assert report.edges[rank] == sum(len(part["ids"]) for part in edges.values())
        assert report.cut[rank] == sum(len(part["boundary"]) for part in edges.values())
    for edge_type in data.edge_types:
        ids = torch.cat([edges[edge_type]["ids"] for _, edges, *_ in parts])
        assert ids.sort().values.tolist() == [*range(data[edge_type].edge_index.shape[1])]


def assert_nodes(part, store, owner, rank, ranks):
    ids = torch.nonzero(owner == rank).view(-1)
    assert torch.equal(part["ids"], ids)
    assert part["sizes"] == tuple(int((owner == r).sum()) for r in range(ranks))
    assert part["num_owned"] == len(ids)
    assert part["attributes"].keys() == set(store.keys()) - {"num_nodes"}
    for name, value in part["attributes"].items():
        assert torch.equal(value, store[name][ids]), name
    assert part["gathered"].tolist() == ([*range(len(owner))] if rank == 0 else [])


def assert_edges(part, data, edge_type, owner, rank):
    source, _, target = edge_type
    edge_index = data[edge_type].edge_index
    into = [e for e, end in enumerate(edge_index[1].tolist()) if owner[target][end] == rank]
    sources = torch.nonzero(owner[source] == rank).view(-1)
    targets = torch.nonzero(owner[target] == rank).view(-1)
    # by owner, and then by the owner's order
    from_others = {int(edge_index[0, e]) for e in into} - set(sources.tolist())
    halo = sorted(from_others, key=lambda node: (int(owner[source][node]), node))
    ids = torch.cat([sources, torch.tensor(halo, dtype=torch.int64)])
    assert part["ids"].tolist() == into
    assert part["halo"].tolist() == halo
    assert part["counts"] == (len(sources), len(halo), len(targets), len(into))
    assert torch.equal(ids[part["edge_index"][0]], edge_index[0, into])
    assert torch.equal(targets[part["edge_index"][1]], edge_index[1, into])
    assert torch.equal(part["with halo"], ids)
    assert part["only halo"].tolist() == halo
    inner = [int(owner[source][edge_index[0, e]]) == rank for e in into]
    assert part["interior"].tolist() == [place for place, own in enumerate(inner) if own]
    assert part["boundary"].tolist() == [place for place, own in enumerate(inner) if not own]
    assert torch.equal(part["attributes"]["weight"], data[edge_type].weight[into])
    assert part["gathered"].tolist() == ([*range(edge_index.shape[1])] if rank == 0 else [])


def what_models_take(rank):
    data = typed()
    graph = partition(data, method=owners(data, "by chance", 3))
    x, edge_index = graph.x_dict, graph.edge_index_dict
    assert x.keys() == {"author", "paper", "editor", "reader"}
    assert all(x[key] is graph[key].x for key in x)
    assert edge_index.keys() == set(data.edge_types)
    assert all(edge_index[key] is graph[key].edge_index for key in edge_index)
    assert graph.weight_dict.keys() == set(data.edge_types)
    assert graph.num_nodes == sum(graph[key].num_owned for key in graph.node_types)
    assert graph.num_edges == sum(graph[key].num_owned for key in graph.edge_types)
    assert isinstance(graph.data, HeteroData)
    assert graph.data["venue"].num_nodes == graph["venue"].num_owned
    assert "mask" in graph["paper"]
    assert "x" not in graph["venue"]
    assert all(key in graph for key in ("year", "paper", WRITES))
    assert "x" not in graph, "which is none that graph['x'] gives"
    assert not hasattr(graph, "z_dict")
    return graph.year, graph["paper"].mask.dtype


def test_what_models_take(worlds):
    assert worlds.run(3, what_models_take) == [(1998, torch.bool)] * 3


WRITES = ("author", "writes", "paper")
# questions to a graph with types, the error, and a word of the message
UNKNOWN = [
    (lambda graph: graph["publisher"], KeyError, "'publisher'"),
    (lambda graph: graph["author", "paper"], KeyError, "('author', 'paper')"),
    (lambda graph: graph.nodes, ArgumentError, "graph['author'], graph['paper']"),
    (lambda graph: graph.edge_index, ArgumentError, "graph[('author', 'writes', 'paper')]"),
    (lambda graph: graph.mean(torch.ones(1)), ArgumentError, "graph['author']"),
    (lambda graph: graph.halo(torch.ones(1)), ArgumentError, "graph[('author'"),
    (lambda graph: graph.x, AttributeError, "graph['author'].x, graph['"),
    (lambda graph: graph.z, AttributeError, "'z'"),
    (lambda graph: graph.z_dict, AttributeError, "'z'"),
    (lambda graph: graph["author"].y, AttributeError, "'y'; they have x, age"),
    (lambda graph: graph[WRITES].x, AttributeError, "'x'; they have weight"),
    (lambda graph: graph["venue"].x, AttributeError, "no attributes"),
]


def answers(rank):
    data = typed()
    graph = partition(data, method=owners(data, "by chance", 2))
    for ask, kind, word in UNKNOWN:
        with pytest.raises(kind) as caught:
            ask(graph)
        assert word in str(caught.value)


def test_what_the_graph_does_not_have(worlds):
    assert worlds.run(2, answers) == [None] * 2


def by_name(rank):
    """A mean and a halo of one type."""
    data = typed()
    method = owners(data, "a rank owns nothing", 3)
    graph = partition(data, method=method)
    paper, writes = graph["paper"], graph[WRITES]
    x = paper.x.requires_grad_()
    loss = paper.mean(x**2, paper.mask) + paper.max(x)
    (gradient,) = torch.autograd.grad(loss, x)
    varcomm.testing.dot_test(writes.with_halo, graph["author"].x)
    whole = graph["author"].scatter(data["author"].x if rank == 1 else None, src=1)
    assert torch.equal(whole, graph["author"].x)
    return loss.item(), paper.gather(gradient)


def test_reductions_of_one_type(worlds):
    data = typed()
    x = data["paper"].x.clone().requires_grad_()
    expected = (x**2)[data["paper"].mask].mean() + x.max()
    expected.backward()
    for loss, gradient in worlds.run(3, by_name):
        assert loss == pytest.approx(expected.item(), rel=1e-14)
        torch.testing.assert_close(gradient, x.grad, rtol=1e-13, atol=0)


def only_nodes(rank):
    data = HeteroData()
    data["a"].x, data["b"].num_nodes = torch.arange(5.0), 2
    owner = {"a": torch.tensor([1, 0, 1, 0, 1]), "b": torch.tensor([0, 0])}
    graph = partition(data, method=owner)
    assert (graph.hops, graph.num_edges) == (1, 0)
    return graph["a"].x.tolist(), graph["b"].num_owned, graph.edge_types, graph.report().owned


def test_types_of_nodes_alone(worlds):
    assert worlds.run(2, only_nodes) == [
        ([1.0, 3.0], 2, [], (4, 3)),
        ([0.0, 2.0, 4.0], 0, [], (4, 3)),
    ]


def in_another_order(rank):
    """Ranks have built the same graph, type by type, in orders of their own."""
    data, names = HeteroData(), ["a", "b", "c"]
    ends = [("a", "to", "b"), ("b", "to", "a"), ("c", "to", "a"), ("a", "of", "b")]
    if rank == 1:
        names, ends = names[::-1], ends[::-1]
    for name in names:
        data[name].x = torch.arange(6.0) + 10 * ord(name)
    for k, edge_type in enumerate(sorted(ends)):
        data[edge_type].edge_index = torch.tensor([[0, 1, 2, 3 + k % 3], [5, 4, 3, k % 3]])
    data = HeteroData.from_dict(
        {key: data.to_dict()[key] for key in ["_global_store", *names, *ends]}
    )
    owner = {name: torch.arange(6) % 2 for name in names}
    graph = partition(data, method=owner)
    return [
        torch.equal(
            graph[key].with_halo(graph[key[0]].x),
            10.0 * ord(key[0]) + torch.cat([graph[key[0]].owned_ids, graph[key].halo_ids]),
        )
        for key in graph.edge_types
    ], graph.node_types


def test_ranks_may_list_types_in_another_order(worlds):
    assert worlds.run(2, in_another_order) == [([True] * 4, ["a", "b", "c"])] * 2


def two_places(**more):
    data = HeteroData()
    data["a"].x, data["b"].x = torch.ones(3, 1), torch.ones(2, 1)
    data["a", "to", "b"].edge_index = torch.tensor([[0, 1, 2], [0, 1, 1]])
    for name, value in more.items():
        data["a"][name] = value
    return data


OWNER = {"a": torch.tensor([0, 1, 2]), "b": torch.tensor([1, 1])}
# data, method and hops of rank 1, and a word of the message
WRONG = [
    (two_places(), {"a": OWNER["a"]}, 1, "method"),
    (two_places(), OWNER | {"c": OWNER["a"]}, 1, "method"),
    (two_places(), OWNER["a"], 1, "method"),
    (two_places(), OWNER | {"b": OWNER["b"][:1]}, 1, "method"),
    (two_places(), OWNER | {"a": OWNER["a"] + 1}, 1, "method"),
    (two_places(), OWNER, 2, "hops"),
    (two_places(age=torch.ones(2)), OWNER, 1, "data['a'].age"),
]


def refused(rank, given, kind):
    told = []
    for data, method, hops, _ in given:
        data, method, hops = (data, method, hops) if rank == 1 else (two_places(), OWNER, 1)
        with pytest.raises(kind) as caught:
            partition(data, method=method, hops=hops)
        told.append(str(caught.value))
    return told, partition(two_places(), method=OWNER)["a"].num_owned


def test_one_rank_is_wrong_and_all_say_so(worlds):
    (told, _), *others = worlds.run(3, refused, WRONG, ArgumentError)
    assert [(told, 1)] * 2 == others
    for (*_, word), message in zip(WRONG, told, strict=True):
        assert message.startswith("graph.partition: refused on rank 1 of 3: ")
        assert word in message


def test_ranks_with_different_graphs(worlds):
    edges = two_places()
    edges["a", "to", "b"].edge_index = torch.tensor([[0, 1, 1], [0, 1, 1]])
    given = [
        (two_places(age=torch.ones(3)), OWNER, 1, "data['a'].age"),
        (edges, OWNER, 1, "data[('a', 'to', 'b')].edge_index"),
        (two_places(), OWNER | {"b": OWNER["b"] + 1}, 1, "method['b']"),
    ]
    (told, _), *others = worlds.run(3, refused, given, DisagreementError)
    assert [(told, 1)] * 2 == others
    for (*_, word), message in zip(given, told, strict=True):
        assert "ranks [1]" in message
        assert word in message
