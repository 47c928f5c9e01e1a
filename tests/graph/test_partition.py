"""What each rank has of a graph, and how the parts make up the whole."""

import pytest
import torch
from torch_geometric.data import Data

import varcomm
from tests.graph.graphs import METHODS, WORLDS, split_by, wild
from varcomm.graph import partition

NO_EDGES = torch.zeros(2, 0, dtype=torch.int64)
GRAPHS = {
    "wild": wild(),
    "no edges": Data(x=torch.rand(7, 1), pos=torch.rand(7, 2), edge_index=NO_EDGES),
    "fewer nodes than ranks": Data(
        x=torch.rand(2, 1), pos=torch.rand(2, 2), edge_index=torch.tensor([[0, 0, 1], [1, 1, 1]])
    ),
    "no nodes": Data(x=torch.rand(0, 1), pos=torch.rand(0, 2), edge_index=NO_EDGES),
    "a star": Data(
        x=torch.rand(9, 1),
        pos=torch.rand(9, 2),
        edge_index=torch.stack([torch.arange(9), torch.full((9,), 4)]),
    ),
}


def parts_of(rank, data, method):
    data.edge_number = torch.arange(data.num_edges) + data.num_nodes  # for sure no node's
    edges = data.edge_number.clone()
    graph = partition(data, method=method)
    assert torch.equal(data.edge_number, edges), "the whole graph has changed"
    x = graph.x
    return {
        "owned": graph.owned_ids,
        "halo": graph.halo_ids,
        "edge_index": graph.edge_index,
        "edges": graph.edge_number - data.num_nodes,
        "x": x,
        "with halo": graph.with_halo(x),
        "gathered": [graph.gather(x, dst) for dst in range(len(graph.node_sizes))],
        "sizes": tuple(graph.node_sizes),
        "counts": (graph.num_owned, graph.num_halo),
        "report": graph.report(),
        "shown": repr(graph),
    }


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("ranks", WORLDS)
def test_parts_make_up_the_whole(worlds, ranks, graph, method):
    data = GRAPHS[graph]
    nodes, edges = data.num_nodes, data.num_edges
    parts = worlds.run(ranks, parts_of, data, split_by(method, nodes, ranks))

    owner = torch.full((nodes,), -1)
    for rank, part in enumerate(parts):
        assert (owner[part["owned"]] == -1).all(), "a node has two owners"
        owner[part["owned"]] = rank
    assert (owner >= 0).all(), "a node has no owner"
    owned_edges = torch.cat([part["edges"] for part in parts])
    assert torch.equal(owned_edges.sort().values, torch.arange(edges))
    sizes = tuple(len(part["owned"]) for part in parts)

    for rank, part in enumerate(parts):
        owned, halo = part["owned"], part["halo"]
        assert part["sizes"] == sizes
        assert part["counts"] == (len(owned), len(halo))
        assert (owned.diff() > 0).all(), "owned nodes are not in the order of the whole graph"
        # edges: all into owned nodes, in the order of the whole graph, in local numbers
        into = torch.nonzero(owner[data.edge_index[1]] == rank).view(-1)
        assert torch.equal(part["edges"], into)
        assert torch.equal(torch.cat([owned, halo])[part["edge_index"]], data.edge_index[:, into])
        assert (part["edge_index"][1] < len(owned)).all()
        # the halo: what edges come from, once each, by owner and then by the owner's order
        sources = data.edge_index[0, into]
        assert set(halo.tolist()) == set(sources[owner[sources] != rank].tolist())
        keys = [(int(owner[i]), int(i)) for i in halo]
        assert keys == sorted(set(keys))
        assert torch.equal(part["x"], data.x[owned])
        assert torch.equal(part["with halo"], data.x[torch.cat([owned, halo])])
        for dst, rows in enumerate(part["gathered"]):
            assert torch.equal(rows, data.x if rank == dst else data.x[:0])

    assert_report(parts, data, owner, ranks)


def assert_report(parts, data, owner, ranks):
    source, target = data.edge_index
    between = owner[source] != owner[target]
    sent = [set() for _ in range(ranks)]
    for u, v in data.edge_index.T.tolist():
        if owner[u] != owner[v]:
            sent[owner[u]].add((u, int(owner[v])))
    for part in parts:
        report = part["report"]
        assert report == parts[0]["report"]
        assert report.owned == part["sizes"]
        assert report.halo == tuple(len(p["halo"]) for p in parts)
        assert report.edges == tuple(int((owner[target] == r).sum()) for r in range(ranks))
        assert report.cut == tuple(
            int((between & (owner[target] == r)).sum()) for r in range(ranks)
        )
        assert report.sent == tuple(map(len, sent))
        assert report.nbytes(3, itemsize=8) == tuple(len(rows) * 24 for rows in sent)
        assert report.edge_cut == int(between.sum()) / max(1, data.num_edges)
        assert f"{part['counts'][0]} of {sum(part['sizes'])} nodes" in part["shown"]


def names_of_methods(rank, data):
    owner = torch.arange(data.num_nodes) % 2
    methods = ("metis", "rcb", "block", "random", None, owner, owner.int(), owner.to(torch.uint8))
    return [partition(data, method=method).report().method for method in methods]


def test_the_report_names_the_method(worlds):
    given = ["the ranks given"] * 3
    expected = ["metis", "rcb", "block", "random", "metis", *given]
    assert worlds.run(2, names_of_methods, wild()) == [expected] * 2


def names_for_few_nodes(rank):
    ring = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    return [partition(ring, method=method).report().method for method in ("metis", None, "random")]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_report_says_blocks_where_metis_has_nothing_to_cut(worlds, ranks):
    assert worlds.run(ranks, names_for_few_nodes) == [["block", "block", "random"]] * ranks


def attributes_of(rank, data, method):
    graph = partition(data, method=method)
    part = graph.data
    return graph.owned_ids, part.to_dict(), graph.num_nodes, isinstance(part, Data)


def edges_of(data, owned):
    """Numbers of the edges into these nodes."""
    return torch.isin(data.edge_index[1], owned).nonzero().view(-1)


@pytest.mark.parametrize("ranks", WORLDS)
def test_attributes_of_nodes_edges_and_the_graph(worlds, ranks):
    data = wild()
    nodes, edges = data.num_nodes, data.num_edges
    data.names = [f"node {i}" for i in range(nodes)]
    data.kinds = [f"edge {i}" for i in range(edges)]
    data.label = torch.arange(nodes)
    data.scalar, data.title, data.level = torch.tensor(2.5), "a graph", torch.ones(1, 3)
    data.settings, data.year = {"depth": [400]}, 1998
    of_node, of_edge, of_graph = (
        ("x", "pos", "y", "train_mask", "names", "label"),
        ("edge_attr", "edge_weight", "edge_type", "kinds"),
        ("scalar", "title", "level", "settings", "year"),
    )
    method = split_by("a rank owns nothing", nodes, ranks)
    for owned, part, count, is_data in worlds.run(ranks, attributes_of, data, method):
        assert is_data
        assert count == len(owned)
        assert set(part) == {*of_node, *of_edge, *of_graph, "edge_index", "num_nodes"}
        for keys, ids in ((of_node, owned), (of_edge, edges_of(data, owned))):
            for key in keys:
                value = data[key]
                if isinstance(value, torch.Tensor):
                    assert torch.equal(part[key], value[ids]), key
                else:
                    assert part[key] == [value[i] for i in ids], key
        for key in of_graph:
            assert (
                torch.equal(part[key], data[key])
                if key == "scalar" or key == "level"
                else (part[key] == data[key])
            )


def test_with_as_many_edges_as_nodes_the_name_tells(worlds):
    """As PyG has it: ``edge`` in the name is an attribute of edges, anything else of nodes."""
    values = torch.arange(4.0)
    ring = Data(
        edge_index=torch.tensor([[3, 0, 1, 2], [1, 2, 3, 0]]),  # edge i is not into node i
        x=values,
        weight=values,
        edge_attr=values,
        edge_weight=values,
    )
    for owned, part, *_ in worlds.run(2, attributes_of, ring, torch.tensor([0, 1, 0, 1])):
        into = edges_of(ring, owned)
        assert not torch.equal(owned, into)
        for key in ("x", "weight"):
            assert torch.equal(part[key], owned.float())
        for key in ("edge_attr", "edge_weight"):
            assert torch.equal(part[key], into.float())


def counts_of(rank):
    graph = partition(wild(), method="block")
    counts = graph.num_nodes, graph.num_edges, graph.num_features, graph.num_node_features
    assert ("x" in graph, "z" in graph, "num_edges" in graph) == (True, False, False)
    return *counts, graph.num_edge_features, graph.report()


def test_what_data_counts(worlds):
    for rank, (*counts, report) in enumerate(worlds.run(3, counts_of)):
        assert counts == [report.owned[rank], report.edges[rank], 4, 4, 3]


def differentiate(rank, data, method, dst):
    """Gather with a weight that only `dst` knows; then derive the gradient once more."""
    graph = partition(data, method=method)
    x = graph.x.clone().requires_grad_()
    rows = graph.gather(x**3, dst)
    weight = torch.arange(1.0, rows.numel() + 1, dtype=x.dtype).view(rows.shape)
    (gradient,) = torch.autograd.grad((rows * weight).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    return graph.owned_ids, gradient.detach(), second


@pytest.mark.parametrize("ranks", WORLDS)
def test_gather_sends_gradients_back(worlds, ranks):
    data = wild()
    weight = torch.arange(1.0, data.x.numel() + 1, dtype=torch.float64).view(data.x.shape)
    for method in ("random", split_by("a rank owns nothing", data.num_nodes, ranks)):
        for ids, first, second in worlds.run(ranks, differentiate, data, method, ranks - 1):
            torch.testing.assert_close(first, (3 * data.x**2 * weight)[ids], rtol=1e-14, atol=0)
            torch.testing.assert_close(second, (6 * data.x * weight)[ids], rtol=1e-14, atol=0)


def halo_derivatives(rank, data, method):
    graph = partition(data, method=method)
    varcomm.testing.dot_test(graph.with_halo, graph.x)
    few = graph.x[:, :1]
    varcomm.testing.gradgradcheck(lambda x: graph.with_halo(x**2), few, fast_mode=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", WORLDS)
def test_halos_have_exact_derivatives(worlds, ranks, method):
    assert (
        worlds.run(ranks, halo_derivatives, wild(), split_by(method, wild().num_nodes, ranks))
        == [None] * ranks
    )


def in_a_subgroup(rank, data):
    group = torch.distributed.new_group([2, 1])
    if rank == 0:
        return None
    graph = partition(data, group, "block")
    ids, rows = graph.owned_ids, graph.gather(graph.x, dst=0)
    return ids, rows, graph.mean(graph.x), graph.group.size


def test_in_a_subgroup(worlds):
    data = wild()
    nobody, *parts = worlds.run(3, in_a_subgroup, data)
    assert nobody is None
    ids = [part[0].tolist() for part in parts]
    assert sorted(ids[0] + ids[1]) == list(range(data.num_nodes))
    assert sorted(len(part[1]) for part in parts) == [0, data.num_nodes]
    for _, _, mean, size in parts:
        assert size == 2
        torch.testing.assert_close(mean, data.x.mean(), rtol=1e-14, atol=0)


def gather_wrong(rank):
    """Before the first message: rank 0, whose rows fit, would wait for the others' for ever."""
    graph = partition(wild(), method="block")
    message = f"graph.gather on rank {rank} of 2: x must be a tensor with one row for each of the"
    for x in (graph.x[1:], graph.x[0, 0], 3):
        with pytest.raises(varcomm.ArgumentError, match=message):
            graph.gather(x)
    with varcomm.debug(), pytest.raises(varcomm.DisagreementError) as caught:
        graph.gather(graph.x if rank == 0 else graph.x[1:])
    return str(caught.value), graph.gather(graph.x, dst=0).shape[0]


def test_gather_of_wrong_rows(worlds):
    told = worlds.run(2, gather_wrong)
    for rank, (message, rows) in enumerate(told):
        assert "not called, since on rank 1: graph.gather on rank 1 of 2: x must be" in message
        assert rows == (0 if rank else 24)
