"""Moving atoms; each rank owns the atoms in its slab of the cell."""

from dataclasses import replace

import torch
from argon import CUTOFF, MASS, MOTION, System
from torch import Tensor
from torch.distributed import ProcessGroup, get_rank, get_world_size

import varcomm as vc
from varcomm.graph import PartitionedGraph

SKIN = 0.8  # Angstrom


class MovingAtoms:
    """Velocity Verlet; atoms migrate to the rank of their slab.

    Each rank holds the positions, velocities and forces of its own atoms. Neighbours, halo and plan
    stay until an atom has moved by half the skin. Then atoms outside their slab migrate, and ranks
    find neighbours again.
    """

    def __init__(
        self, model: torch.nn.Module, system: System, group: ProcessGroup | None = None
    ) -> None:
        self.model, self.cell, self.group = model, system.cell, group
        self.rank, self.ranks = get_rank(group), get_world_size(group)
        self.migrated = self.searches = 0
        ids = (self.slab(system.pos) == self.rank).nonzero().view(-1)
        self.velocity = system.velocity[ids]
        self.search(system.pos[ids], ids)

    def slab(self, pos: Tensor) -> Tensor:
        """Return the new owner of each atom: slabs of equal width along the first cell vector."""
        part = torch.linalg.solve(self.cell.T, pos.T)[0] % 1
        return (part * self.ranks).long().clamp(max=self.ranks - 1)

    def search(self, pos: Tensor, ids: Tensor) -> None:
        """Find neighbours on all ranks."""
        self.searches, self.stood = self.searches + 1, pos.detach()
        self.compute(pos, None, ids)

    def compute(self, pos: Tensor, previous: PartitionedGraph | None, ids: Tensor) -> None:
        """Return the energies, (n,), and forces, (n, 3), of the rank's atoms."""
        graph = vc.graph.radius(
            pos.requires_grad_(),
            CUTOFF,
            self.group,
            cell=self.cell,
            skin=SKIN,
            previous=previous,
            ids=ids,
        )
        self.graph = replace(graph, attributes={"cell": self.cell})
        energies = vc.graph.distribute(self.model, self.graph)(self.graph)
        (slope,) = torch.autograd.grad(energies.sum(), pos)
        self.energies, self.forces = energies.detach(), -slope

    def migrate(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Send atoms to the ranks of their slabs; return the rank's positions and ids."""
        owner = self.slab(pos)
        self.migrated += int(self.graph.sum((owner != self.rank).double()))
        graph = self.graph.migrate(owner, {"pos": pos, "velocity": self.velocity})
        self.velocity = graph.velocity
        return graph.pos, graph.owned_ids

    def step(self, time: float) -> None:
        """Move all atoms by one time step, given in fs."""
        kick = time / (2 * MASS * MOTION)
        self.velocity = self.velocity + kick * self.forces
        pos = self.graph.pos.detach() + time * self.velocity
        if self.graph.max((pos - self.stood).square().sum(1)) > (SKIN / 2) ** 2:
            self.search(*self.migrate(pos))
        else:
            self.compute(pos, self.graph, self.graph.owned_ids)
        self.velocity = self.velocity + kick * self.forces

    def totals(self) -> Tensor:
        """Return the mean potential and kinetic energy in eV, and the migrations so far; (3,)."""
        kinetic = self.velocity.square().sum(1) * (MASS * MOTION / 2)
        means = [self.graph.mean(each) for each in (self.energies, kinetic)]
        return torch.stack([*means, means[0].new_tensor(self.migrated)])

    def whole(self) -> Tensor:
        """Return the positions of all atoms, (N, 3), on the first rank."""
        return self.graph.gather(self.graph.pos.detach(), dst=0)
