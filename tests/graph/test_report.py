"""Numbers and predictions of a report; test_partition counts the columns by hand."""

import json

import pytest

import varcomm
from tests.graph.graphs import wild
from varcomm.graph import Report, partition

# Three ranks: the second has most edges, the third nothing at all.
EXAMPLE = Report(
    "rcb", (1200, 300, 0), (5, 7, 0), (4000, 8000, 0), (9, 12, 0), (7, 5, 0), (1, 1, 0)
)


def report_of(rank, hops):
    return partition(wild(), method="random", hops=hops).report()


def test_edges_into_halos_of_several_hops_are_not_counted(worlds):
    one, two = (worlds.run(3, report_of, hops)[0] for hops in (1, 2))
    assert (one.owned, one.edges, one.cut) == (two.owned, two.edges, two.cut)
    assert sum(two.halo) > sum(one.halo)
    assert sum(two.sent) == sum(two.halo)


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
    *(("itemsize", 0), ("bandwidth", 0.0), ("edge_rate", float("nan")), ("latency", -1.0)),
]


def test_numbers_out_of_range():
    right = {"channels": 8, "itemsize": 4, "bandwidth": 1e9, "edge_rate": 1e6, "latency": 0.0}
    for name, wrong in WRONG:
        with pytest.raises(varcomm.ArgumentError, match=name):
            EXAMPLE.table(**(right | {name: wrong}))
    with pytest.raises(TypeError, match="edge_rate"):
        EXAMPLE.table(8, bandwidth=1e9)
    assert EXAMPLE.table(**right).endswith("of such a layer")
