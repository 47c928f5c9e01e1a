"""Atoms that move by the forces of a learned potential, each rank its own."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from crystal import BOLTZMANN, CUTOFF, MASS, MOTION, Crystal
from potential import energy_and_forces
from torch import Tensor
from torch_geometric.data import Data

import varcomm as vc


class MovingAtoms:
    """A crystal whose atoms stay on their ranks while they move, and a potential for them.

    The list of neighbours reaches farther than the potential, by a skin. As long as no atom has
    moved by half of it, no other atom is in reach; then list, halo and plan are rebuilt.

    Parameters
    ----------
    model : torch.nn.Module
        The potential.
    crystal : Crystal
        Where all atoms are, the same on every rank.
    skin : float
        How much farther the list reaches, in Angstrom.
    method : str or Tensor
        How to split the atoms over ranks.
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
        """Find neighbours of this rank's atoms, here and on other ranks."""
        reach = CUTOFF + self.skin
        self.graph = graph = vc.graph.radius(pos, reach, cell=self.cell, ids=self.ids)
        types, shifts = torch.zeros(len(pos), dtype=torch.long), graph.shift.to(pos) @ self.cell
        self.part = Data(types=types, edge_index=graph.edge_index, shifts=shifts)
        vc.graph.distribute(self.model, graph)
        self.lists += 1

    def __call__(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Return energies, (n,), and forces, (n, 3), of this rank's atoms at positions, (n, 3)."""
        moved = (pos - self.graph.pos).square().sum(1)
        if self.graph.max(moved) > (self.skin / 2) ** 2:
            self._renew(pos)
        return energy_and_forces(self.model, self.part, pos)


def thermal(atoms: int, temperature: float, seed: int) -> Tensor:
    """Velocities in Angstrom / fs that add up to none, (N, 3)."""
    draws = torch.Generator().manual_seed(seed)
    spread = (BOLTZMANN * temperature / (MASS * MOTION)) ** 0.5
    velocity = spread * torch.randn(atoms, 3, generator=draws, dtype=torch.float64)
    return velocity - velocity.mean(0)


class Moment(NamedTuple):
    """Atoms at one time: positions and velocities, (n, 3), potential and kinetic energies, (n,)."""

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
    """Move atoms by Newton's law for as long as one wants, in steps of so many fs.

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
    """How well the total energy stays, by a line through it and by the farthest moment."""
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
