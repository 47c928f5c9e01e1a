"""Partitions made by one process: parts, files and counts as on real ranks."""

import json

import pytest
import torch
import torch.distributed as dist
from torch_geometric.data import Data

import varcomm as vc
from tests.graph.graphs import split_by, wild
from tests.graph.parts import differences
from tests.graph.typed import drawn
from tests.worlds import WORLDS


def papers():
    types = ("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "by", "author")
    return drawn({"author": (7, 2), "paper": (9, 1)}, dict.fromkeys(types, 20))


def cut(kind, size):
    """Return a graph and a method that leaves a rank empty."""
    data = papers() if kind == "types" else wild()
    data.unit, data.name = torch.tensor([[3.0]]), "of both"
    if kind == "types":
        return data, "random"
    return data, split_by("a rank owns nothing", data.num_nodes, size)


def compared(rank, kind, folder):
    data, method = cut(kind, dist.get_world_size())
    expected = vc.graph.partition(data, method=method)
    expected.save(folder)
    parts = vc.simulate.partition(data, dist.get_world_size(), method)
    found = parts.part()
    assert not differences(found, expected)
    assert found.method == expected.method
    return str(expected.report()), str(parts.report())


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("kind", ["one type", "types"])
def test_parts_files_and_report_are_those_of_real_ranks(worlds, size, kind, tmp_path):
    reports = worlds.run(size, compared, kind, tmp_path / "ranks")
    assert len({report for pair in reports for report in pair}) == 1
    data, method = cut(kind, size)
    done, indexes = [], []
    vc.simulate.partition(data, size, method).save(tmp_path / "alone", done.append)
    assert done == list(range(size))
    for of in ("ranks", "alone"):
        index = json.loads((tmp_path / of / "graph.json").read_text())
        # names of files contain the token of their save
        index["files"] = list(index["files"].values())
        indexes.append({key: index[key] for key in index.keys() - {"save", "digest"}})
    assert indexes[0] == indexes[1]  # digests of all files too
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "ranks"]


@pytest.mark.parametrize("size", [1, 4, 7])
def test_counts_are_those_of_a_loop_over_edges(size):
    data = wild()
    owner = torch.arange(data.num_nodes) * 5 % size
    parts = vc.simulate.partition(data, size, owner)
    edges, needed = [0] * size, set()
    for source, target in data.edge_index.T.tolist():
        sender, receiver = int(owner[source]), int(owner[target])
        edges[receiver] += 1
        needed |= {(sender, receiver, source)} if sender != receiver else set()
    expected = torch.zeros(size, size, dtype=torch.int64)
    for sender, receiver, _ in needed:
        expected[sender, receiver] += 1
    assert parts.owned.tolist() == torch.bincount(owner, minlength=size).tolist()
    assert parts.edges.tolist() == edges
    assert torch.equal(parts.rows.to_dense(), expected)
    assert torch.equal(parts.sent, expected.sum(dim=1))
    assert torch.equal(parts.halo, expected.sum(dim=0))
    assert torch.equal(parts.neighbours, ((expected + expected.T) > 0).sum(dim=1))
    finer = parts.without_graph().refined(2)
    assert torch.equal(finer.owned, 4 * parts.owned)
    assert torch.equal(finer.edges, 4 * parts.edges)
    assert torch.equal(finer.halo, 2 * parts.halo)
    assert torch.equal(finer.neighbours, parts.neighbours)


def test_thousands_of_ranks():
    ring = torch.stack([torch.arange(10000), torch.arange(10000).roll(-1)])
    parts = vc.simulate.partition(Data(edge_index=ring, num_nodes=10000), 4096, "block")
    assert int(parts.owned.sum()) == 10000
    assert parts.halo.tolist() == [1] * 4096
    with vc.simulate.world(4096, 17):
        graph = parts.part()
        assert graph.num_owned == int(parts.owned[17])
        assert graph.plan.neighbours == (16, 18)
        assert graph.halo(torch.ones(graph.num_owned, 3)).shape == (1, 3)
