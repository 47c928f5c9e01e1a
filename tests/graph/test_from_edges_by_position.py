"""``from_edges`` by positions that are never collected owns what one process would decide."""

import pytest
import torch

from tests.graph.graphs import WORLDS, wild
from tests.graph.parts import differences
from varcomm import ArgumentError
from varcomm.graph import assign, from_edges, partition


def built(rank, ranks, method, shuffled):
    """Nodes and edges dealt in odd ways; the first rank speaks for nothing."""
    data = wild()
    edges, nodes = data.num_edges, data.num_nodes
    sizes = [0, *[nodes // ranks] * (ranks - 1)] if ranks > 1 else [nodes]
    sizes[-1] += nodes - sum(sizes)
    first = sum(sizes[:rank])
    ids = torch.arange(first, first + sizes[rank])
    if shuffled:
        ids = torch.randperm(nodes, generator=torch.Generator().manual_seed(4))[rank::ranks]
    cut = [edges * r * r // (ranks * ranks) for r in range(ranks + 1)]
    own = slice(cut[rank], cut[rank + 1])
    graph = from_edges(
        data.edge_index[:, own],
        sizes,
        node_attrs={key: data[key][ids] for key in ("x", "pos", "y", "train_mask")},
        edge_attrs={key: data[key][own] for key in ("edge_attr", "edge_weight", "edge_type")},
        node_ids=ids if shuffled else None,
        method=method,
    )
    owner = assign(data, ranks, method)
    return differences(graph, partition(data, method=owner))


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("method", ["hilbert", "rcb"])
@pytest.mark.parametrize("ranks", WORLDS)
def test_it_is_what_assign_decides(worlds, ranks, method, shuffled):
    assert worlds.run(ranks, built, ranks, method, shuffled) == [[]] * ranks


def without_positions(rank, pos):
    attributes = {"pos": pos} if pos is not None and rank == 1 else {}
    with pytest.raises(ArgumentError) as caught:
        from_edges(
            torch.zeros(2, 0, dtype=torch.int64), [0, 3], node_attrs=attributes, method="hilbert"
        )
    return str(caught.value)


@pytest.mark.parametrize(
    ("pos", "message"),
    [
        (None, 'needs the positions of nodes in node_attrs["pos"]'),
        (torch.full((3, 2), torch.nan), "finite"),
    ],
)
def test_positions_that_will_not_do(worlds, pos, message):
    one, other = worlds.run(2, without_positions, pos)
    assert message in one
    assert one == other
