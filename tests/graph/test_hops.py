"""Halos of several hops: what is upstream, found by walking the whole graph."""

import pytest
import torch
from torch_geometric.data import Data

import varcomm
from tests.graph.graphs import grid, split_by, wild
from tests.worlds import WORLDS
from varcomm import ArgumentError
from varcomm.graph import partition


def star(inward):
    """One node with edges from, or to, all others; a chain of three leads to it."""
    leaves, hub = torch.arange(1, 9), torch.zeros(8, dtype=torch.int64)
    rays = torch.stack([leaves, hub] if inward else [hub, leaves])
    chain = torch.tensor([[11, 10, 9], [10, 9, 0]])
    edge_index = torch.cat([rays, chain], dim=1)
    return Data(edge_index=edge_index, num_nodes=12, edge_attr=torch.rand(11, 2))


GRAPHS = {
    "wild": wild(),
    "grid": grid(5, 6),
    "a star inward": star(True),
    "a star outward": star(False),
    "no edges": Data(edge_index=torch.zeros(2, 0, dtype=torch.int64), num_nodes=6),
    "a loop and a pair": Data(edge_index=torch.tensor([[0, 1, 1, 2], [0, 2, 2, 1]]), num_nodes=4),
}
WAYS = ("block", "random", "a rank owns nothing")


def upstream(data, owned, hops):
    """Nodes by how many edges lead from them to an owned node, up to `hops`, one by one."""
    distance = dict.fromkeys(owned, 0)
    for hop in range(1, hops + 1):
        for source, target in data.edge_index.T.tolist():
            if distance.get(target, hop) < hop and source not in distance:
                distance[source] = hop
    return distance


def parts_of(rank, data, method, hops):
    data.edge_number = torch.arange(data.num_edges) + data.num_nodes  # for sure no node's
    graph = partition(data, method=method, hops=hops)
    with varcomm.trace() as calls:
        numbers = graph.with_halo(torch.arange(0.0, graph.num_nodes))
    edges = graph.edges
    return {
        "owned": graph.owned_ids,
        "halo": graph.halo_ids,
        "edge_index": graph.edge_index,
        "edges": graph.edge_number - data.num_nodes,
        "owned edges": edges.owned_ids,
        "num_owned": (edges.num_owned, graph.num_edges),
        "attributes": dict(edges.attributes),
        "with halo": graph.with_halo(graph.owned_ids),
        "exchanges": [call.name for call in calls],
        "rows": len(numbers),
        "hops": (graph.hops, edges.hops),
    }


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("ranks", WORLDS)
def test_all_that_is_upstream_and_nothing_else(worlds, ranks, graph):
    data = GRAPHS[graph]
    # each number of hops with each way, in a few of the combinations
    for hops, way in ((1, WAYS[ranks % 3]), (2, WAYS[0]), (3, WAYS[1]), (4, WAYS[2])):
        parts = worlds.run(ranks, parts_of, data, split_by(way, data.num_nodes, ranks), hops)
        owner = torch.full((data.num_nodes,), -1)
        for rank, part in enumerate(parts):
            owner[part["owned"]] = rank
        for part in parts:
            assert_part(part, data, owner, hops)


def assert_part(part, data, owner, hops):
    owned, halo = part["owned"].tolist(), part["halo"].tolist()
    distance = upstream(data, owned, hops)
    assert sorted(halo) == sorted(distance.keys() - set(owned))
    # by owner, and then by the owner's order, whatever the hop
    keys = [(int(owner[node]), node) for node in halo]
    assert keys == sorted(set(keys))
    # all edges into nodes of less than k hops, each once; the owned ones first, in their order
    targets = data.edge_index[1].tolist()
    into = [edge for edge, end in enumerate(targets) if distance.get(end, hops) < hops]
    own = [edge for edge, end in enumerate(targets) if distance.get(end, hops) == 0]
    assert sorted(part["edges"].tolist()) == into
    assert part["edges"][: len(own)].tolist() == part["owned edges"].tolist() == own
    assert part["num_owned"] == (len(own), len(own))
    ids = torch.tensor(owned + halo, dtype=torch.int64)
    assert torch.equal(ids[part["edge_index"]], data.edge_index[:, part["edges"]])
    for name, value in part["attributes"].items():
        assert name == "edge_number" or torch.equal(value, data[name][part["edges"]]), name
    assert part["attributes"].keys() - {"edge_number"} == {n for n, _ in data if is_of_edges(n)}
    assert torch.equal(part["with halo"], ids)
    assert part["exchanges"] == ["exchange"], "one exchange, whatever the hops"
    assert part["rows"] == len(ids)
    assert part["hops"] == (hops, hops)


def is_of_edges(name):
    return name.startswith("edge_") and name not in ("edge_index", "edge_number")


def in_another_order(rank):
    """Attributes of one dtype and shape: sent in another order they would be swapped."""
    data = wild()
    names = ["first", "second"] if rank == 0 else ["second", "first"]
    for name in names:
        data[name] = torch.arange(data.num_edges) * (1.0 if name == "first" else -1.0)
    graph = partition(data, method="random", hops=2)
    first, second = graph.edges.first, graph.edges.second
    return len(first) > graph.edges.num_owned, first.min() >= 0, torch.equal(second, -first)


def test_ranks_may_list_attributes_in_another_order(worlds):
    assert worlds.run(3, in_another_order) == [(True, True, True)] * 3


def as_many_as_it_takes(rank):
    path = Data(x=torch.ones(4, 1), edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]))
    graph = partition(path, method="block", hops=10**30)
    return graph.hops, graph.halo_ids.tolist()


def test_hops_end_where_there_is_no_more_upstream(worlds):
    halos = [hops_and_halo[1] for hops_and_halo in worlds.run(3, as_many_as_it_takes)]
    assert halos == [[], [0, 1], [0, 1, 2]]


# hops, attributes of the data, and a part of the message
REFUSED = [
    (0, {}, "hops must be an integer of at least 1; got 0"),
    (2.0, {}, "hops must be an integer of at least 1; got 2.0"),
    ("2", {}, "hops must be an integer of at least 1; got '2'"),
    (2, {"names": ["a", "b"]}, "hops=2 needs attributes of edges that are tensors"),
]


def refused(rank):
    told = []
    for hops, attributes, message in REFUSED:
        data = Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
        for name, value in attributes.items():
            data[name] = value
        with pytest.raises(ArgumentError, match=message) as one:
            partition(data, method="block", hops=hops)
        told.append(str(one.value))
    return told


def test_refusals(worlds):
    told, *others = worlds.run(3, refused)
    assert others == [told] * 2
