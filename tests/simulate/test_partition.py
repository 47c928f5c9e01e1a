"""Partitions made by one process: parts as on real ranks, counts as by a loop over edges."""

import pytest
import torch
import torch.distributed as dist
from torch_geometric.data import Data, HeteroData

import varcomm as vc
from tests.graph.graphs import split_by, wild
from tests.graph.parts import differences
from varcomm import ArgumentError, GroupError


def papers():
    data = HeteroData()
    data["author"].x = torch.arange(14.0).view(7, 2)
    data["paper"].x = torch.arange(9.0)
    generator = torch.Generator().manual_seed(0)
    for kind, (sources, targets) in {
        ("author", "writes", "paper"): (7, 9),
        ("paper", "cites", "paper"): (9, 9),
        ("paper", "by", "author"): (9, 7),
    }.items():
        ends = [torch.randint(n, (20,), generator=generator) for n in (sources, targets)]
        data[kind].edge_index = torch.stack(ends)
    data["author", "writes", "paper"].edge_attr = torch.arange(20.0)
    return data


def method_for(data, name, size):
    if isinstance(data, HeteroData):
        return name
    return split_by(name, data.num_nodes, size)


def compared(rank, kind, name):
    data = wild() if kind == "one type" else papers()
    size = dist.get_world_size()
    method = method_for(data, name, size)
    expected = vc.graph.partition(data, method=method)
    found = vc.simulate.partition(data, size, method).part()
    report = expected.report()
    return differences(found, expected), found.method == expected.method, str(report)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("one type", "block"), ("one type", "a rank owns nothing"), ("types", "random")],
)
def test_parts_are_those_of_real_ranks(worlds, size, kind, name):
    for different, same_method, _ in worlds.run(size, compared, kind, name):
        assert not different
        assert same_method


@pytest.mark.parametrize("size", [1, 4, 7])
def test_counts_are_those_of_a_loop_over_edges(size):
    data = wild()
    owner = torch.arange(data.num_nodes) * 5 % size
    parts = vc.simulate.partition(data, size, owner)
    edges, needed = [0] * size, {}
    for source, target in data.edge_index.T.tolist():
        sender, receiver = int(owner[source]), int(owner[target])
        edges[receiver] += 1
        if sender != receiver:
            needed.setdefault((sender, receiver), set()).add(source)
    expected = torch.zeros(size, size, dtype=torch.int64)
    for (sender, receiver), rows in needed.items():
        expected[sender, receiver] = len(rows)
    assert parts.owned.tolist() == torch.bincount(owner, minlength=size).tolist()
    assert parts.edges.tolist() == edges
    assert torch.equal(parts.rows.to_dense(), expected)
    assert torch.equal(parts.sent, expected.sum(dim=1))
    assert torch.equal(parts.halo, expected.sum(dim=0))
    assert torch.equal(parts.neighbours, ((expected + expected.T) > 0).sum(dim=1))
    assert parts.without_graph().size == size


def test_edges_are_looked_at_in_pieces(monkeypatch):
    from varcomm.simulate import needs

    data = wild()
    whole = vc.simulate.partition(data, 3, "random")
    monkeypatch.setattr(needs, "_EDGES", 10)
    pieces = vc.simulate.partition(data, 3, "random")
    assert torch.equal(whole.rows.to_dense(), pieces.rows.to_dense())
    assert torch.equal(whole.edges, pieces.edges)


def test_thousands_of_ranks():
    ring = torch.stack([torch.arange(10000), torch.arange(10000).roll(-1)])
    parts = vc.simulate.partition(Data(edge_index=ring, num_nodes=10000), 4096, "block")
    assert parts.size == 4096
    assert int(parts.owned.sum()) == 10000
    assert parts.halo.tolist() == [1] * 4096
    with vc.simulate.world(4096, 17):
        graph = parts.part()
        assert graph.num_owned == int(parts.owned[17])
        assert graph.plan.neighbours == (16, 18)
        assert graph.halo(torch.ones(graph.num_owned, 3)).shape == (1, 3)


def test_finer_meshes_have_longer_cuts():
    counts = vc.simulate.partition(wild(), 3, "block").refined(2)
    coarse = vc.simulate.partition(wild(), 3, "block")
    assert torch.equal(counts.owned, 4 * coarse.owned)
    assert torch.equal(counts.edges, 4 * coarse.edges)
    assert torch.equal(counts.halo, 2 * coarse.halo)
    assert torch.equal(counts.neighbours, coarse.neighbours)


def test_refusals():
    data = wild()
    with pytest.raises(ArgumentError, match="size must be a positive integer; got 0"):
        vc.simulate.partition(data, 0)
    with pytest.raises(ArgumentError, match=r"spans ranks 0\.\.\.3, out of range for 2 ranks"):
        vc.simulate.partition(data, 2, torch.arange(24) % 4)
    parts = vc.simulate.partition(data, 2, "block")
    with (
        vc.simulate.world(3),
        pytest.raises(ArgumentError, match=r"these parts are for 2 ranks; this is rank 0 of 3"),
    ):
        parts.part()
    with vc.simulate.world(2), pytest.raises(GroupError, match="no other rank says"):
        vc.graph.partition(data, method="block")
