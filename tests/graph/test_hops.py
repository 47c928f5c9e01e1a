"""Halos of several hops: the nodes and edges upstream, found by walking the full graph."""

import torch
from torch_geometric.data import Data

import varcomm
from tests.graph.graphs import grid, split_by, wild
from tests.worlds import WORLDS, on_ranks
from varcomm.graph import assign, partition


def star(inward):
    """One node with edges from, or to, all others; a chain of three leads to it."""
    leaves, hub = torch.arange(1, 9), torch.zeros(8, dtype=torch.int64)
    rays = torch.stack([leaves, hub] if inward else [hub, leaves])
    chain = torch.tensor([[11, 10, 9], [10, 9, 0]])
    edge_index = torch.cat([rays, chain], dim=1)
    return Data(edge_index=edge_index, num_nodes=12, edge_attr=torch.arange(22.0).view(11, 2))


GRAPHS = {
    "wild": wild(),
    "grid": grid(5, 6),
    "a star inward": star(True),
    "a star outward": star(False),
    "no edges": Data(edge_index=torch.zeros(2, 0, dtype=torch.int64), num_nodes=6),
    "a loop and a pair": Data(edge_index=torch.tensor([[0, 1, 1, 2], [0, 2, 2, 1]]), num_nodes=4),
}


def upstream(data, owned, hops):
    """Nodes by how many edges lead from them to an owned node, up to `hops`, one by one."""
    distance = dict.fromkeys(owned, 0)
    for hop in range(1, hops + 1):
        for source, target in data.edge_index.T.tolist():
            if distance.get(target, hop) < hop and source not in distance:
                distance[source] = hop
    return distance


def assert_part(data, method, ranks, hops):
    data.edge_number = torch.arange(data.num_edges) + data.num_nodes  # for sure no node's
    graph = partition(data, method=method, hops=hops)
    owner = assign(data, ranks, method) if isinstance(method, str) else method
    owned, halo = graph.owned_ids.tolist(), graph.halo_ids.tolist()
    distance = upstream(data, owned, hops)
    # by owner, and then in the owner's order, whatever the hop
    outer = distance.keys() - set(owned)
    assert halo == sorted(outer, key=lambda node: (int(owner[node]), node))
    # all edges into nodes of fewer hops, each once; the owned ones first, in their order
    targets = data.edge_index[1].tolist()
    into = [edge for edge, end in enumerate(targets) if distance.get(end, hops) < hops]
    own = [edge for edge, end in enumerate(targets) if distance.get(end, hops) == 0]
    edges = graph.edge_number - data.num_nodes
    assert sorted(edges.tolist()) == into
    assert edges[: len(own)].tolist() == graph.edges.owned_ids.tolist() == own
    assert graph.edges.num_owned == len(own)
    assert graph.num_edges == data.num_edges
    ids = torch.tensor(owned + halo, dtype=torch.int64)
    assert torch.equal(ids[graph.edge_index.plain], data.edge_index[:, edges])
    names = {name for name, _ in data if name.startswith("edge_")} - {"edge_index"}
    assert graph.edges.attributes.keys() == names
    assert all(torch.equal(graph[name], data[name][edges]) for name in names)
    with varcomm.trace() as calls:
        assert torch.equal(graph.with_halo(graph.owned_ids), ids)
    assert [call.name for call in calls] == ["exchange"], "one exchange, whatever the hops"
    assert graph.hops == graph.edges.hops == hops


@on_ranks(*WORLDS)
def test_everything_upstream_and_nothing_else(rank, ranks):
    ways = ("block", "random", "a rank owns nothing")
    for data in GRAPHS.values():
        for hops, way in ((1, ways[ranks % 3]), (2, ways[0]), (3, ways[1]), (4, ways[2])):
            assert_part(data, split_by(way, data.num_nodes, ranks), ranks, hops)
    # attributes of one dtype and shape: sent in another order they would be swapped
    data = wild()
    for name in ("first", "second")[:: 1 if rank == 0 else -1]:
        data[name] = torch.arange(data.num_edges) * (1.0 if name == "first" else -1.0)
    graph = partition(data, method="random", hops=2)
    assert graph.edges.first.min() >= 0
    assert torch.equal(graph.edges.second, -graph.edges.first)
    path = Data(x=torch.ones(4, 1), edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]))
    halo = partition(path, method="block", hops=10**30).halo_ids.tolist()
    assert ranks != 3 or halo == [[], [0, 1], [0, 1, 2]][rank], "hops end at the start of a path"
