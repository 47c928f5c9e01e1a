"""A network that solves Poisson's equation, and the residual of the equation.

The energy of a solution is a sum over the edges of the mesh. Its derivative with respect to the
solution, from `torch.autograd.grad`, is the residual of the discrete equations. Training on the
squared residual needs second derivatives, across the borders between ranks.
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
    """The share (N, 1) of each node in the energy: a quarter per directed edge."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")

    def forward(self, u: Tensor, load: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        """Return the shares for ``u``, ``load`` (N, 1), edges (2, E) and ``weight`` (E,)."""
        return self.propagate(edge_index, u=u, weight=weight) / 4 - load * u

    def message(self, u_i: Tensor, u_j: Tensor, weight: Tensor) -> Tensor:
        return weight[:, None] * (u_i - u_j).square()


class Solver(nn.Module):
    """A network from the right-hand side f to the solution u, which is 0 on the boundary."""

    def __init__(self, hidden: int, blocks: int) -> None:
        super().__init__()
        self.network = MeshGraphNet(5, 3, 1, hidden_channels=hidden, num_blocks=blocks)
        self.energy = Energy()
        for parameter in self.network.decoder[-1].parameters():
            nn.init.zeros_(parameter)  # training starts at u = 0, where the relative residual is 1

    def forward(self, part: Part, f: Tensor) -> Tensor:
        """Return u (N, 1) for ``f`` (N, 1)."""
        inside = part.inside[:, None].to(f.dtype)
        x = torch.cat([f, inside, part.pos, 4 * part.distance[:, None]], dim=1)
        scale = 0.05  # about the size of u for f = 1
        return scale * inside * self.network(x, part.edge_index, part.edge_attr)


def right_hand_side(pos: Tensor, seed: int) -> Tensor:
    """Return a smooth random f (N, 1) of size 1, equal on all ranks: a constant and some waves."""
    draws = torch.Generator().manual_seed(seed)
    wave = 3 * torch.randn(2, WAVES, generator=draws, dtype=torch.float64)
    phase = 2 * math.pi * torch.rand(WAVES, generator=draws, dtype=torch.float64)
    height = 0.7 * torch.randn(WAVES, generator=draws, dtype=torch.float64)
    waves = torch.cos(pos.double() @ wave + phase) @ height
    return ((1 + waves) / (1 + height.square().sum() / 2).sqrt())[:, None].to(pos.dtype)


def relative_residual(
    solver: Solver, part: Part, f: Tensor, total: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the squared residual relative to u = 0: the solution has 0, and u = 0 has 1.

    ``total`` sums over all nodes, (N, ...) to (...).
    """
    load = part.area[:, None] * f
    u = solver(part, f)
    energy = total(solver.energy(u, load, part.edge_index, part.weight))
    (residual,) = torch.autograd.grad(energy.sum(), u, create_graph=True)
    return squared(part, residual, total) / squared(part, load, total)


def squared(part: Part, residual: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the square of a residual (N, 1), tested with narrow and wide hat functions.

    The hat functions of nodes alone hardly detect smooth errors: the residual of a wave falls with
    the square of its length. All functions have energy 1.
    """
    residual = residual * part.inside[:, None]
    near = total(residual.square() / part.diagonal[:, None]).sum()
    wide = total(residual * part.tests)
    return near + wide.square().sum()
