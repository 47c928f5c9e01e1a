"""A network that solves Poisson's equation, and by how much it misses the equation.

The energy of a solution is summed from the edges of the mesh. Its derivative by the solution is
what the discrete equations are off by, the residual: `torch.autograd.grad` makes it, and so its
square can only be trained on with derivatives of second order, across the boundaries between ranks.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from varcomm.graph import PartitionedGraph
from varcomm.models import MeshGraphNet

Part = Data | PartitionedGraph
WAVES = 8


class Energy(MessagePassing):
    """Each node's share (N, 1) of the energy: a quarter for either direction of its edges."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")

    def forward(self, u: Tensor, load: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        """Of ``u`` and ``load``, (N, 1), on edges (2, E) of ``weight`` (E,)."""
        return self.propagate(edge_index, u=u, weight=weight) / 4 - load * u

    def message(self, u_i: Tensor, u_j: Tensor, weight: Tensor) -> Tensor:
        return weight[:, None] * (u_i - u_j).square()


class Solver(nn.Module):
    """From the right-hand side f to the solution u, which is 0 on the boundary by construction."""

    def __init__(self, hidden: int, blocks: int) -> None:
        super().__init__()
        self.network = MeshGraphNet(5, 3, 1, hidden_channels=hidden, num_blocks=blocks)
        self.energy = Energy()
        for parameter in self.network.decoder[-1].parameters():
            nn.init.zeros_(parameter)  # begins at u = 0, where the relative residual is 1

    def forward(self, part: Part, f: Tensor) -> Tensor:
        """Of ``f`` (N, 1)."""
        inside = part.inside[:, None].to(f.dtype)
        x = torch.cat([f, inside, part.pos, 4 * part.distance[:, None]], dim=1)
        scale = 0.05  # about that of u where f is 1
        return scale * inside * self.network(x, part.edge_index, part.edge_attr)


def right_hand_side(pos: Tensor, seed: int) -> Tensor:
    """A smooth random f (N, 1) of size 1, the same on every rank: a constant and some waves."""
    draws = torch.Generator().manual_seed(seed)
    wave = 3 * torch.randn(2, WAVES, generator=draws, dtype=torch.float64)
    phase = 2 * math.pi * torch.rand(WAVES, generator=draws, dtype=torch.float64)
    height = 0.7 * torch.randn(WAVES, generator=draws, dtype=torch.float64)
    waves = torch.cos(pos.double() @ wave + phase) @ height
    return ((1 + waves) / (1 + height.square().sum() / 2).sqrt())[:, None].to(pos.dtype)


def relative_residual(
    solver: Solver, part: Part, f: Tensor, total: Callable[[Tensor], Tensor]
) -> Tensor:
    """Square of the residual, by that of u = 0: between 0, of the solution, and 1, of nothing.

    ``total`` sums over all nodes, (N, ...) to (...).
    """
    load = part.area[:, None] * f
    u = solver(part, f)
    energy = total(solver.energy(u, load, part.edge_index, part.weight))
    (residual,) = torch.autograd.grad(energy.sum(), u, create_graph=True)
    return squared(part, residual, total) / squared(part, load, total)


def squared(part: Part, residual: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """Square of a residual (N, 1), tested by the nodes' own hat functions and by wider ones.

    By the former alone it would hardly see what is smooth: a wave's residual falls with the square
    of its length. All functions have energy 1, so that the sum is about the energy of the error.
    """
    residual = residual * part.inside[:, None]
    near = total(residual.square() / part.diagonal[:, None]).sum()
    wide = total(residual * part.tests)
    return near + wide.square().sum()
