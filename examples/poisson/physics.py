"""A network that learns the inverse of Poisson's equation, and the residual of the equation.

The energy of a solution is a sum over the edges of the mesh. Its derivative with respect to the
solution, from `torch.autograd.grad`, is the residual of the discrete equations. Training on the
squared residual needs second derivatives, across the borders between ranks.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from varcomm.graph import PartitionedGraph
from varcomm.models import MeshGraphNet

Part = Data | PartitionedGraph
Total = Callable[[Tensor], Tensor]  # sums over ranks
WAVES = 8
SCALE = 0.1  # of the basis, so that the first u is about as large as a solution


class Energy(MessagePassing):
    """The share (N, S) of each node in S energies: a quarter per directed edge."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")

    def forward(self, u: Tensor, load: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        """Return the shares for ``u``, ``load`` (N, S), edges (2, E) and ``weight`` (E,)."""
        return self.propagate(edge_index, u=u, weight=weight) / 4 - load * u

    def message(self, u_i: Tensor, u_j: Tensor, weight: Tensor) -> Tensor:
        return weight[:, None] * (u_i - u_j).square()


class Solver(nn.Module):
    """A network whose outputs G make the solution ``u = G (G^T load)`` for any right-hand side.

    The inverse of the stiffness is as symmetric, positive and linear. The network reads the mesh
    alone, so one pass serves all right-hand sides.
    """

    def __init__(self, hidden: int, blocks: int, functions: int) -> None:
        super().__init__()
        self.network = MeshGraphNet(4, 3, functions, hidden_channels=hidden, num_blocks=blocks)
        self.energy = Energy()

    def forward(self, part: Part, load: Tensor, total: Total) -> Tensor:
        """Return u (N, S), which is 0 on the boundary, for loads (N, S)."""
        inside = part.inside[:, None].to(load.dtype)
        x = torch.cat([inside, part.pos, 4 * part.distance[:, None]], dim=1)
        basis = SCALE * inside * self.network(x, part.edge_index, part.edge_attr)
        return basis @ total(basis.T @ load)


def right_hand_side(pos: Tensor, seed: int) -> Tensor:
    """Return a smooth random f (N, 1) of size 1, equal on all ranks: a constant and some waves."""
    draws = torch.Generator().manual_seed(seed)
    wave = 3 * torch.randn(2, WAVES, generator=draws, dtype=torch.float64)
    phase = 2 * math.pi * torch.rand(WAVES, generator=draws, dtype=torch.float64)
    height = 0.7 * torch.randn(WAVES, generator=draws, dtype=torch.float64)
    waves = torch.cos(pos.double() @ wave + phase) @ height
    return ((1 + waves) / (1 + height.square().sum() / 2).sqrt())[:, None].to(pos.dtype)


def loads(part: Part, seeds: Sequence[int]) -> Tensor:
    """Return the loads (N, S) of random right-hand sides."""
    return part.area[:, None] * torch.cat([right_hand_side(part.pos, seed) for seed in seeds], 1)


def relative_residual(solver: Solver, part: Part, load: Tensor, total: Total) -> Tensor:
    """Return the mean squared residual for loads (N, S), relative to that of u = 0."""
    u = solver(part, load, total)
    shares = solver.energy(u, load, part.edge_index, part.weight)
    # on ranks, the adjoint of the halo exchange adds the shares of other ranks
    (residual,) = torch.autograd.grad(shares.sum(), u, create_graph=True)
    return (squared(part, residual, total) / squared(part, load, total)).mean()


def squared(part: Part, residual: Tensor, total: Total) -> Tensor:
    """Return the squares (S,) of residuals (N, S), tested with narrow and wide hat functions.

    The hat functions of nodes alone hardly detect smooth errors: the residual of a wave falls with
    the square of its length. All functions have energy 1.
    """
    residual = residual * part.inside[:, None]
    near = (residual.square() / part.diagonal[:, None]).sum(dim=0)
    wide = part.tests.T @ residual
    return total(near) + total(wide).square().sum(dim=0)
