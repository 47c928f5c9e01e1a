"""What a report says of a partition, and what it predicts, against counts by hand."""

import json

import pytest
import torch
from torch_geometric.data import HeteroData

import varcomm
from tests.graph.graphs import WORLDS, split_by, wild
from varcomm.graph import Report, partition

# Three ranks, the second of which has most edges and the third nothing at all.
EXAMPLE = Report(
    "rcb", (1200, 300, 0), (5, 7, 0), (4000, 8000, 0), (9, 12, 0), (7, 5, 0), (1, 1, 0)
)


def report_of(rank, data, method, hops=1):
    return partition(data, method=method, hops=hops).report()


def by_hand(data, owner, ranks):
    """All columns, from the edges of the whole graph one by one."""
    halos = [set() for _ in range(ranks)]
    sent, neighbours = [0] * ranks, [set() for _ in range(ranks)]
    edges, cut = [0] * ranks, [0] * ranks
    for u, v in data.edge_index.T.tolist():
        here, there = int(owner[v]), int(owner[u])
        edges[here] += 1
        if here != there:
            cut[here] += 1
            halos[here].add(u)
            neighbours[here].add(there)
            neighbours[there].add(here)
    for halo in halos:
        for node in halo:
            sent[int(owner[node])] += 1
    owned = torch.bincount(owner, minlength=ranks).tolist()
    columns = owned, list(map(len, halos)), edges, cut, sent, list(map(len, neighbours))
    return tuple(map(tuple, columns))


@pytest.mark.parametrize("method", ["metis", "a rank owns nothing"])
@pytest.mark.parametrize("ranks", WORLDS)
def test_columns_are_what_one_counts(worlds, ranks, method):
    data = wild()
    given = split_by(method, data.num_nodes, ranks)
    owner = given
    if isinstance(given, str):
        owner = varcomm.graph.assign(data, ranks, given)
    first, *others = worlds.run(ranks, report_of, data, given)
    columns = (first.owned, first.halo, first.edges, first.cut, first.sent, first.neighbours)
    assert columns == by_hand(data, owner, ranks)
    assert others == [first] * (ranks - 1)
    assert first.edge_cut == sum(first.cut) / data.num_edges
    assert first.imbalance == max(first.owned) * ranks / data.num_nodes
    assert first.edge_imbalance == max(first.edges) * ranks / data.num_edges
    assert first.halo_share == sum(first.halo) / data.num_nodes


def test_edges_into_halos_of_several_hops_are_not_counted(worlds):
    one, two = (worlds.run(3, report_of, wild(), "random", hops)[0] for hops in (1, 2))
    assert (one.owned, one.edges, one.cut) == (two.owned, two.edges, two.cut)
    assert sum(two.halo) > sum(one.halo)
    assert sum(two.sent) == sum(two.halo)


def several_types():
    data = HeteroData()
    data["paper"].num_nodes, data["author"].num_nodes = 4, 2
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 0, 1], [0, 3, 1]])
    data["paper", "cites", "paper"].edge_index = torch.tensor([[0, 1, 2], [3, 3, 2]])
    return data


def test_types_are_counted_together(worlds):
    method = {"paper": torch.tensor([0, 0, 1, 1]), "author": torch.tensor([0, 0])}
    for report in worlds.run(2, report_of, several_types(), method):
        assert report.owned == (4, 2)
        assert report.edges == (2, 4)
        # author 0, papers 0 and 1
        assert (report.halo, report.cut, report.sent) == ((0, 3), (0, 3), (3, 0))
        assert report.neighbours == (1, 1)  # by two types of edges, but one rank


def test_as_a_dict():
    told = EXAMPLE.to_dict(1000, itemsize=8, bandwidth=1e6, edge_rate=1e5, latency=0.01)
    assert json.loads(json.dumps(told)) == told
    assert told == {
        "method": "rcb",
        "ranks": 3,
        "nodes": 1500,
        "owned": [1200, 300, 0],
        "halo": [5, 7, 0],
        "edges": [4000, 8000, 0],
        "cut": [9, 12, 0],
        "sent": [7, 5, 0],
        "neighbours": [1, 1, 0],
        "edge_cut": 21 / 12000,
        "imbalance": 2.4,
        "edge_imbalance": 2.0,
        "halo_share": 12 / 1500,
        "bytes_sent": [56000, 40000, 0],
        "bytes_received": [40000, 56000, 0],
        # rank 1 computes for 80 ms and exchanges for 10 + 56; rank 0 for 40 and 10 + 56
        "communication_share": pytest.approx(66 / 146, rel=1e-14),
    }
    assert "bytes_sent" not in EXAMPLE.to_dict()
    assert "communication_share" not in EXAMPLE.to_dict(3)
    assert EXAMPLE.nbytes(16) == (448, 320, 0)
    assert EXAMPLE.nbytes_received(16) == (320, 448, 0)


def test_communication_that_the_slowest_rank_does_not_wait_for():
    """Rank 1 computes longest, and alone: what the others exchange meanwhile costs nothing."""
    report = Report("rcb", (1,) * 3, (4, 0, 4), (10, 90, 10), (1, 0, 1), (4, 0, 4), (1, 0, 1))
    assert report.communication_share(1, bandwidth=4.0, edge_rate=1.0) == 0
    # 10 s + 4 * 4 * 10 bytes at 1 byte a second, against 90 s
    share = report.communication_share(10, bandwidth=1.0, edge_rate=1.0)
    assert share == pytest.approx(1 - 90 / 170, rel=1e-14)


def test_nothing_at_all():
    nothing = Report("block", (0,), (0,), (0,), (0,), (0,), (0,))
    ratios = nothing.edge_cut, nothing.imbalance, nothing.edge_imbalance, nothing.halo_share
    assert ratios == (0, 0, 0, 0)
    assert nothing.communication_share(8, bandwidth=1e9, edge_rate=1e6) == 0


WRONG = [
    *(("channels", wrong) for wrong in (0, 2.0, None)),
    ("itemsize", 0),
    ("bandwidth", 0.0),
    *(("edge_rate", wrong) for wrong in (float("nan"), None)),
    ("latency", -1.0),
]


def test_numbers_out_of_range():
    right = {"channels": 8, "itemsize": 4, "bandwidth": 1e9, "edge_rate": 1e6, "latency": 0.0}
    for name, wrong in WRONG:
        with pytest.raises(varcomm.ArgumentError, match=name):
            EXAMPLE.table(**(right | {name: wrong}))
    assert EXAMPLE.table(**right).endswith("of such a layer")
