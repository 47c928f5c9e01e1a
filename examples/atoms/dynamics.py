"""Molecular dynamics with a learned potential; each rank moves its own atoms."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from crystal import BOLTZMANN, CUTOFF, MASS, MOTION, Crystal
from potential import energy_and_forces
from torch import Tensor
from torch_geometric.data import Data

import varcomm as vc


class MovingAtoms:
    """Moving atoms of a crystal and their potential; atoms stay on their ranks.

    Neighbour lists include a skin beyond the cutoff. After an atom has moved by half the skin, the
    list, the halo and the plan are built again.

    Parameters
    ----------
    model : torch.nn.Module
        The potential.
    crystal : Crystal
        All atoms at their sites; equal on all ranks.
    skin : float
        Length beyond the cutoff, in Angstrom.
    method : str or Tensor
        The partitioner, or the owner of each atom.
    """

    def __init__(
        self, model: torch.nn.Module, crystal: Crystal, skin: float, method: str | Tensor = "rcb"
    ) -> None:
        self.model, self.skin, self.lists = model, skin, 0
        self.cell, ranks = crystal.box.diag(), vc.init()
        if isinstance(method, str):
            method = vc.graph.assign(Data(pos=crystal.pos), ranks.size, method)
        self.owner, self.ids = method, (method == ranks.rank).nonzero().view(-1)
        self._renew(crystal.pos[self.ids])

    def _renew(self, pos: Tensor) -> None:
        """Find the neighbours of this rank's atoms on all ranks."""
        reach = CUTOFF + self.skin
        self.graph = graph = vc.graph.radius(pos, reach, cell=self.cell, ids=self.ids)
        types, shifts = torch.zeros(len(pos), dtype=torch.long), graph.shift.to(pos) @ self.cell
        self.part = Data(types=types, edge_index=graph.edge_index, shifts=shifts)
        vc.graph.distribute(self.model, graph)
        self.lists += 1

    def __call__(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Return the energies, (n,), and forces, (n, 3), of this rank's atoms."""
        moved = (pos - self.graph.pos).square().sum(1)
        if self.graph.max(moved) > (self.skin / 2) ** 2:
            self._renew(pos)
        return energy_and_forces(self.model, self.part, pos)


def thermal(atoms: int, temperature: float, seed: int) -> Tensor:
    """Return random velocities, (N, 3), in Angstrom / fs, with zero sum."""
    draws = torch.Generator().manual_seed(seed)
    spread = (BOLTZMANN * temperature / (MASS * MOTION)) ** 0.5
    velocity = spread * torch.randn(atoms, 3, generator=draws, dtype=torch.float64)
    return velocity - velocity.mean(0)


class Moment(NamedTuple):
    """The rank's atoms at one time: positions, velocities, (n, 3), and energies, (n,)."""

    pos: Tensor
    velocity: Tensor
    potential: Tensor
    kinetic: Tensor


def moments(
    potential: Callable[[Tensor], tuple[Tensor, Tensor]],
    pos: Tensor,
    velocity: Tensor,
    timestep: float,
) -> Iterator[Moment]:
    """Yield the atoms after each time step, given in fs, without end.

    Velocity Verlet is reversible in time, so the total energy does not drift.
    """
    energies, forces = potential(pos)
    while True:
        kinetic = velocity.square().sum(1) * (MASS * MOTION / 2)
        yield Moment(pos, velocity, energies, kinetic)
        velocity = velocity + forces * (timestep / (2 * MASS * MOTION))
        pos = pos + timestep * velocity
        energies, forces = potential(pos)
        velocity = velocity + forces * (timestep / (2 * MASS * MOTION))


def drift(energies: Tensor, timestep: float) -> str:
    """Describe the drift of the total energy, and its largest deviation."""
    total = energies.sum(1) * 1000
    time = torch.arange(len(total), dtype=total.dtype) * timestep / 1000
    time = time - time.mean()
    slope = (time * total).sum() / time.square().sum()
    kinetic = energies[len(energies) // 2 :, 1].mean() * 1000
    off = (total - total[0]).abs().max()
    return (
        f"drift {slope:+.5f} meV per atom and ps, at most {off:.5f} meV off, "
        f"{off / kinetic:.1e} of the kinetic energy of {kinetic:.2f} meV"
    )
