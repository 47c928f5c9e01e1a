"""A crystal of argon, and its true potential: Lennard-Jones with a smooth cutoff.

Lengths in Angstrom, energies in eV, times in fs, masses in u, temperatures in K.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import destroy_process_group, new_group
from torch_geometric.data import Data

import varcomm as vc
from varcomm.models.painn import Displacements

DEPTH, SIGMA = 0.0103, 3.405  # of the potential: eV, Angstrom
SWITCH, CUTOFF = 4.8, 5.8  # distances at which the smoothing begins and ends
SPACING = 5.26  # the side of the cubic cell of four atoms
MASS = 39.948
BOLTZMANN = 8.617333e-5  # eV / K
MOTION = 103.642697  # eV in u (Angstrom / fs)^2


class Crystal(NamedTuple):
    """Positions of atoms, (N, 3), in a periodic box with these sides, (3,)."""

    pos: Tensor
    box: Tensor


def perfect(cells: int) -> Crystal:
    """Return a face-centred cubic crystal of cells^3 cells with 4 atoms each."""
    corner = torch.cartesian_prod(*[torch.arange(cells, dtype=torch.float64)] * 3)
    basis = torch.tensor([[0, 0, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0]], dtype=torch.float64) / 2
    # shifted, so that no site lies on the border of the box
    pos = (corner.view(-1, 1, 3) + basis + 0.25).view(-1, 3) * SPACING
    return Crystal(pos, torch.full((3,), cells * SPACING, dtype=torch.float64))


def shaken(cells: int, amplitude: float, seed: int) -> Crystal:
    """Return the crystal with normal displacements of this standard deviation along each axis."""
    sites, box = perfect(cells)
    draws = torch.Generator().manual_seed(seed)
    return Crystal(sites + amplitude * torch.randn(sites.shape, generator=draws).double(), box)


def pair(distance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the energy of two atoms at a distance, and its derivative."""
    power = (SIGMA / distance) ** 6
    energy = 4 * DEPTH * (power**2 - power)
    slope = -24 * DEPTH * (2 * power**2 - power) / distance
    # from 1 to 0 between SWITCH and CUTOFF, with two continuous derivatives
    x = ((distance - SWITCH) / (CUTOFF - SWITCH)).clamp(0, 1)
    switch = 1 - x**3 * (10 - 15 * x + 6 * x**2)
    falling = -30 * x**2 * (1 - x) ** 2 / (CUTOFF - SWITCH)
    return energy * switch, slope * switch + energy * falling


class LennardJones(torch.nn.Module):
    """The true potential, with the signature of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.displacements = Displacements()

    def forward(self, types: Tensor, pos: Tensor, edge_index: Tensor, shifts: Tensor) -> Tensor:
        """Return the energy of each atom, (N,): half the energy of its pairs."""
        distance = self.displacements(pos, edge_index, shifts).square().sum(1).sqrt()
        energy, _ = pair(distance)
        return torch.zeros_like(pos[:, 0]).index_add(0, edge_index[1], energy / 2)


def true_forces(pos: Tensor, edge_index: Tensor, shifts: Tensor) -> Tensor:
    """Return forces, (N, 3), from the formula, without autograd."""
    source, target = edge_index
    vector = pos[source] + shifts - pos[target]
    distance = vector.square().sum(1).sqrt()
    _, slope = pair(distance)
    pull = vector * (slope / distance)[:, None]
    return torch.zeros_like(pos).index_add(0, target, pull)


def as_graph(crystal: Crystal, cutoff: float = CUTOFF) -> Data:
    """Return the graph of all atoms and their neighbours; this rank finds them alone."""
    alone = new_group([vc.init().rank], use_local_synchronization=True)
    cell = crystal.box.diag()
    graph = vc.graph.radius(crystal.pos, cutoff, alone, cell=cell)
    types, shifts = torch.zeros(len(crystal.pos), dtype=torch.long), graph.shift.to(cell) @ cell
    destroy_process_group(alone)
    edge_index = graph.edges.local_ids
    return Data(types=types, pos=crystal.pos, edge_index=edge_index, shifts=shifts)


def with_truth(data: Data) -> Data:
    """Add the true energies and forces of the atoms."""
    given = data.pos, data.edge_index, data.shifts
    data.energies = LennardJones()(data.types, *given)
    data.forces = true_forces(*given)
    return data
