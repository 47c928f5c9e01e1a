"""A random mesh: nodes on a square, edges between neighbours, and a field on them."""

import torch
from torch_geometric.data import Data


def load(side: int) -> Data:
    """Return the graph of ``side * side`` nodes, in float64, equal on all ranks. It has

    - ``x`` (N, 3): the position of a node, and a measurement: the field and noise.
    - ``edge_attr`` (E, 3): displacement from source to target, and distance, in mean spacings.
    - ``y`` (N, 1): the field.
    - ``known`` (N,): whether training uses the field there; one node in ten.
    - ``pos`` (N, 2): the position, for the partition.
    """
    draws = torch.Generator().manual_seed(0)
    nodes = torch.arange(side * side)
    grid = nodes.view(side, side)
    pos = torch.stack([nodes // side, nodes % side], dim=1).double()
    pos += 0.8 * torch.rand(pos.shape, generator=draws, dtype=pos.dtype) - 0.4

    pairs = [(grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (grid[1:, 1:], grid[:-1, :-1])]
    one_way = torch.cat([torch.stack([a.flatten(), b.flatten()]) for a, b in pairs], dim=1)
    edge_index = torch.cat([one_way, one_way.flip(0)], dim=1)
    along = pos[edge_index[1]] - pos[edge_index[0]]

    place = pos / side
    waves = torch.tensor([[5.0, 1.0], [-2.0, 7.0], [9.0, 8.0]], dtype=pos.dtype)
    y = (place @ waves.T).sin().sum(dim=1, keepdim=True)
    shown = y + 0.5 * torch.randn(y.shape, generator=draws, dtype=y.dtype)
    return Data(
        x=torch.cat([place, shown], dim=1),
        edge_index=edge_index,
        edge_attr=torch.cat([along, along.norm(dim=1, keepdim=True)], dim=1),
        y=y,
        known=torch.rand(len(nodes), generator=draws) < 0.1,
        pos=pos,
    )
