"""Argon: a crystal, a melt, and a potential. Units are Angstrom, eV, fs, K and u."""

from typing import NamedTuple

import torch
from torch import Tensor

from varcomm.graph import PartitionedGraph
from varcomm.models import PaiNN

DEPTH, SIGMA = 0.0103, 3.405  # of the potential: eV, Angstrom
SWITCH, CUTOFF = 5.0, 6.0  # distances at which the smoothing begins and ends
MASS = 39.948
BOLTZMANN = 8.617333e-5  # eV / K
MOTION = 103.642697  # eV in u (Angstrom / fs)^2


class System(NamedTuple):
    """Positions and velocities of all atoms, (N, 3), in a periodic cell, (3, 3)."""

    pos: Tensor
    velocity: Tensor
    cell: Tensor


def face_centred(cells: int, spacing: float, temperature: float, seed: int) -> System:
    """Return atoms at the sites of 2n x n x n cubic cells of four, with random velocities."""
    sides = torch.tensor([2 * cells, cells, cells], dtype=torch.float64)
    corner = torch.cartesian_prod(*map(torch.arange, sides))
    basis = torch.tensor([[0, 0, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0]], dtype=torch.float64) / 2
    pos = (corner.view(-1, 1, 3) + basis + 0.25).view(-1, 3) * spacing
    draws = torch.Generator().manual_seed(seed)
    spread = (BOLTZMANN * temperature / (MASS * MOTION)) ** 0.5
    velocity = spread * torch.randn(pos.shape, generator=draws, dtype=torch.float64)
    return System(pos, velocity - velocity.mean(0), (sides * spacing).diag())


class LennardJones(torch.nn.Module):
    """Half the energy of each pair of an atom, with a smooth cutoff."""

    def forward(self, graph: PartitionedGraph) -> Tensor:
        """Return the energies, (n,), of the rank's atoms."""
        distance = graph.edge_attr.square().sum(1).sqrt()
        power = (SIGMA / distance) ** 6
        x = ((distance - SWITCH) / (CUTOFF - SWITCH)).clamp(0, 1)
        energy = 2 * DEPTH * (power**2 - power) * (1 - x**3 * (10 - 15 * x + 6 * x**2))
        return torch.zeros_like(graph.pos[:, 0]).index_add(0, graph.edge_index[1], energy)


class WithNetwork(LennardJones):
    """The same energies plus small energies of a network with random weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = PaiNN(1, CUTOFF, hidden_channels=8, num_blocks=2, scale=0.01).double()

    def forward(self, graph: PartitionedGraph) -> Tensor:
        """Return the energies, (n,), of the rank's atoms."""
        types = torch.zeros(graph.num_owned, dtype=torch.long)
        shifts = graph.shift.to(graph.pos) @ graph.cell
        return super().forward(graph) + self.network(types, graph.pos, graph.edge_index, shifts)
