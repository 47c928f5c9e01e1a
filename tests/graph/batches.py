"""Batches of graphs that span ranks."""

import torch
from torch_geometric.data import Data

from tests.graph.graphs import split_by, wild
from varcomm.graph import partition

NODES = 23
GRAPHS = 6  # of which 2 and 5 have no nodes

FIRST = {"rtol": 1e-10, "atol": 1e-10}
SECOND = {"rtol": 1e-9, "atol": 1e-9}


def whole(*features, dtype=torch.float64, nodes=NODES):
    """Nodes with a graph each, not sorted, and a kind each; the same at every call."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(nodes, *features, dtype=torch.float64, generator=generator).to(dtype)
    weight = torch.randn(nodes, *features, dtype=torch.float64, generator=generator).to(dtype)
    batch = torch.tensor([4, 0, 1, 0, 3, 4, 1])[torch.arange(nodes) * 5 % 7]
    kinds = torch.tensor([0, 2, 2])[torch.arange(nodes) % 3]
    return no_edges(nodes, x=x, batch=batch, kinds=kinds, weight=weight)


def rows_of(data, ids):
    return Data(**{name: data[name][ids] for name in ("x", "batch", "kinds", "weight")})


def no_edges(nodes, **values):
    return Data(edge_index=torch.zeros(2, 0, dtype=torch.int64), num_nodes=nodes, **values)


def partitions(data=None):
    """Split these nodes at random, and so that a rank owns nothing."""
    ranks = torch.distributed.get_world_size()
    methods = ("random", split_by("a rank owns nothing", NODES, ranks))
    return [partition(data or wild(NODES), method=method) for method in methods]


def plain(vector):
    """Return a vector as an ordinary tensor, without its graph."""
    return getattr(vector, "plain", vector)
