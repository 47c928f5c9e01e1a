"""Small graphs as awkward as graphs get, and ways to split them."""

import torch
from torch_geometric.data import Data

from tests.worlds import WORLDS  # noqa: F401

METHODS = ("metis", "rcb", "block", "random", "a rank owns nothing")


def wild(nodes=24, dtype=torch.float64):
    """A directed graph with self loops, multi-edges and isolated nodes, the same at every call."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)

    inner = nodes - 2  # the first and the last node have no edges
    ends = 1 + torch.randint(inner, (2, 4 * nodes), generator=generator)
    loops = torch.tensor([2, 5, 5]).expand(2, -1)
    edge_index = torch.cat([ends, loops, ends[:, :7]], dim=1)
    edge_index = edge_index[:, torch.randperm(edge_index.shape[1], generator=generator)]
    edges = edge_index.shape[1]
    return Data(
        x=draw(nodes, 4),
        pos=draw(nodes, 2),
        edge_index=edge_index,
        edge_attr=draw(edges, 3),
        edge_weight=draw(edges),
        edge_type=torch.randint(3, (edges,), generator=generator),
        y=draw(nodes, 2),
        train_mask=torch.rand(nodes, generator=generator) < 0.5,
    )


def rich(nodes=24):
    """The same with attributes of many kinds."""
    data = wild(nodes)
    edges = data.num_edges
    generator = torch.Generator().manual_seed(3)
    data.kind = torch.randint(-9, 9, (nodes,), generator=generator, dtype=torch.int8)
    data.half = torch.randn(nodes, 2, generator=generator).bfloat16()
    data.wave = torch.randn(nodes, 2, 3, dtype=torch.complex64, generator=generator).conj()
    data.strided = torch.randn(5, nodes, generator=generator).T[:, ::2]
    data.nothing = torch.empty(nodes, 0)
    data.edge_number = torch.arange(edges, dtype=torch.int32) * 1000
    data.edge_mask = torch.rand(edges, generator=generator) < 0.5
    data.edge_tensor = torch.randn(edges, 2, 1, 2, generator=generator).half()
    return data


def grid(rows, columns):
    """A grid with edges to the east and to the north only, and positions."""
    node = torch.arange(rows * columns).view(rows, columns)
    east = torch.stack([node[:, :-1].reshape(-1), node[:, 1:].reshape(-1)])
    north = torch.stack([node[:-1].reshape(-1), node[1:].reshape(-1)])
    pos = torch.stack([node // columns, node % columns], dim=-1).view(-1, 2).double()
    return Data(edge_index=torch.cat([east, north], dim=1), pos=pos)


def split_by(method, nodes, ranks):
    """Return what ``partition`` takes as its method."""
    if method != "a rank owns nothing":
        return method
    # with one rank there is nobody else to own anything
    owner = torch.arange(nodes) * 7 % max(1, ranks - 1)
    return owner + (owner >= ranks // 2) if ranks > 1 else owner
