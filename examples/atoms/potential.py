"""A learned potential: forces, loss and training."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from crystal import CUTOFF, as_graph, shaken, with_truth
from torch import Tensor
from torch_geometric.data import Data

import varcomm as vc
from varcomm.graph import PartitionedGraph
from varcomm.models import PaiNN

sys.path.append(str(Path(__file__).parents[1]))
from common import one_cycle

Part = Data | PartitionedGraph  # of one process, of ranks


def energy_and_forces(
    model: torch.nn.Module, part: Part, pos: Tensor, create_graph: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the energies, (n,), and forces, (n, 3), of the rank's atoms.

    Energies of other ranks' atoms depend on these positions. The adjoint of the halo exchange adds
    their derivatives, so all ranks make this call.
    """
    if not pos.requires_grad:
        pos = pos.detach().requires_grad_()
    energies = model(part.types, pos, part.edge_index, part.shifts).double()
    (slope,) = torch.autograd.grad(energies.sum(), pos, create_graph=create_graph)
    return energies if create_graph else energies.detach(), -slope


def small_crystals(count: int, cells: int) -> list[Data]:
    """Return crystals of the training set, with displacements of 0.03 to 0.13 Angstrom."""
    amplitudes = torch.linspace(0.03, 0.13, count).tolist()
    return [
        with_truth(as_graph(shaken(cells, amplitude, seed)))
        for seed, amplitude in enumerate(amplitudes)
    ]


def new_model(crystals: Sequence[Data], hidden: int, blocks: int, seed: int) -> PaiNN:
    """Return a model with equal weights on all ranks, which draw them from one seed."""
    torch.manual_seed(seed)
    energies = torch.cat([data.energies for data in crystals])
    forces = torch.cat([data.forces for data in crystals])
    return PaiNN(
        1,
        CUTOFF,
        hidden_channels=hidden,
        num_blocks=blocks,
        mean=energies.mean().item(),
        scale=forces.square().mean().sqrt().item(),  # eV per Angstrom
    )


def loss_of(model: torch.nn.Module, part: Part) -> Tensor:
    """Return the mean squared error of forces and energies, in units of the model."""
    mean = part.mean if isinstance(part, PartitionedGraph) else torch.mean
    energies, forces = energy_and_forces(model, part, part.pos, create_graph=True)
    of_energy = mean(energies - part.energies).square()
    return (mean((forces - part.forces).square()) + 10 * of_energy) / model.scale**2


def fit(model: torch.nn.Module, parts: Sequence[Part], steps: int) -> Iterator[float]:
    """Train on the crystals in turn; yield the loss before each step.

    Partitioning changes two lines: `distribute` and `sum_gradients`.
    """
    optimizer = torch.optim.Adam(model.parameters())
    schedule = one_cycle(optimizer, 1e-2, steps, rise=0.2)
    for step in range(steps):
        part = parts[step % len(parts)]
        if isinstance(part, PartitionedGraph):
            vc.graph.distribute(model, part)
        optimizer.zero_grad()
        value = loss_of(model, part)
        value.backward()
        if isinstance(part, PartitionedGraph):
            vc.data_parallel.sum_gradients(model)
        yield value.item()
        optimizer.step()
        schedule.step()
