"""The calculator for ASE: ASE's own numbers, optimisers and dynamics, on 1 and 3 ranks."""

import numpy as np
import pytest
import torch
from ase import Atoms, units
from ase.build import bulk, molecule
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.fd import calculate_numerical_forces, calculate_numerical_stress
from ase.calculators.lj import LennardJones
from ase.filters import FrechetCellFilter
from ase.md import Langevin, VelocityVerlet
from ase.optimize import BFGS, FIRE

from varcomm import ArgumentError, LaunchError
from varcomm.ase import Calculator
from varcomm.models import PaiNN

CUTOFF, SKIN = 5.0, 0.3
DEPTH, SIGMA = 0.0104, 3.4


class Argon(torch.nn.Module):
    """Energies of atoms: Lennard-Jones for argon, PaiNN for krypton, failures for others."""

    cutoff = CUTOFF

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.painn = PaiNN(1, CUTOFF, hidden_channels=4, num_blocks=2).double()

    def forward(self, graph):
        if (graph.numbers == 1).any():
            raise ValueError("no hydrogen")
        if (graph.numbers == 2).any():
            return graph.numbers.new_zeros(len(graph.numbers), 1)
        power = (SIGMA**2 / graph.edge_attr.square().sum(1)) ** 3
        end = (SIGMA / CUTOFF) ** 6
        energy = 2 * DEPTH * (power**2 - power - end**2 + end)
        pair = torch.zeros_like(graph.pos[:, 0]).index_add(0, graph.edge_index[1], energy)
        shifts = graph.shift.to(graph.pos) @ graph.cell
        types = torch.zeros_like(graph.numbers)
        of_network = self.painn(types, graph.pos, graph.edge_index, shifts)
        return torch.where(graph.numbers == 36, of_network, pair)


@pytest.fixture(scope="module")
def calculators():
    """Not closed: once forgotten, their ranks end at once."""
    return {1: Calculator(Argon, ranks=1), 3: Calculator(Argon, ranks=3, skin=SKIN)}


def rattled(atoms, amplitude=0.1):
    atoms.rattle(amplitude, seed=0)
    return atoms


def crystal(repeats=(3, 2, 2)):
    """A crystal in a skewed cell."""
    return rattled(bulk("Ar", "fcc", a=5.3).repeat(repeats))


def slab():
    atoms = bulk("Ar", "fcc", a=5.3, cubic=True).repeat((2, 2, 1))
    atoms.set_cell([*atoms.cell[:2], [0, 0, 0]])
    atoms.pbc = (True, True, False)
    return rattled(atoms)


STRUCTURES = {
    "crystal": crystal,
    "atoms outside of the cell": lambda: Atoms(
        crystal(), positions=crystal().positions + np.array([40.0, -30.0, 20.0])
    ),
    "cell thinner than the cutoff": lambda: rattled(bulk("Ar", "fcc", a=5.3)),
    "slab without a third vector": slab,
    "cluster": lambda: Atoms("Ar13", rattled(molecule("C6H6"))[:1].positions + 3.7 * corners()),
    "isolated atom": lambda: Atoms("Ar"),
    "two atoms": lambda: Atoms("Ar2", [[0, 0, 0], [0, 0, 3.9]], cell=[9, 9, 9]),
    "isolated atoms": lambda: Atoms("Ar4", 20.0 * np.arange(12).reshape(4, 3)),
}


def corners():
    """The centre and the corners of a shell of 13 atoms."""
    return np.array([[x, y, z] for x in (-1, 0, 1) for y in (-1, 0, 1) for z in (0, 1)])[:13]


def own_calculator():
    return LennardJones(sigma=SIGMA, epsilon=DEPTH, rc=CUTOFF)


def close(one, other, tolerance=1e-9):
    np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_properties_are_those_of_ase(calculators, ranks):
    """One calculator for all structures: numbers of atoms, cell and periodicity change."""
    for make in STRUCTURES.values():
        atoms, other = make(), make()
        atoms.calc, other.calc = calculators[ranks], own_calculator()
        close(atoms.get_potential_energy(), other.get_potential_energy())
        close(atoms.get_potential_energy(force_consistent=True), other.get_potential_energy())
        close(atoms.get_potential_energies(), other.get_potential_energies())
        close(atoms.get_forces(), other.get_forces())
        if atoms.pbc.any() and atoms.cell.rank == 3:
            close(atoms.get_stress(), other.get_stress())
        else:
            with pytest.raises(PropertyNotImplementedError):
                atoms.get_stress()


def test_message_passing_and_other_numbers(calculators):
    one, three = crystal((2, 2, 1)), crystal((2, 2, 1))
    one.calc, three.calc = calculators[1], calculators[3]
    argon = one.get_potential_energy()
    for atoms in (one, three):
        atoms.numbers[:] = 36
    assert abs(one.get_potential_energy() - argon) > 1e-3
    close(one.get_potential_energies(), three.get_potential_energies())
    close(one.get_forces(), three.get_forces())
    close(one.get_stress(), three.get_stress())
    close(three.get_stress(), calculate_numerical_stress(three, eps=1e-5), 1e-7)
    close(three.get_forces()[:2], calculate_numerical_forces(three, eps=1e-5, iatoms=[0, 1]), 1e-6)


DYNAMICS = {
    "verlet": lambda atoms: VelocityVerlet(atoms, 5 * units.fs),
    "langevin": lambda atoms: Langevin(
        atoms,
        5 * units.fs,
        temperature_K=300,
        friction=0.01,
        fixcm=False,
        rng=np.random.default_rng(1),
    ),
}


@pytest.mark.parametrize("name", DYNAMICS)
def test_dynamics(calculators, name):
    found = []
    for calculator in (calculators[3], own_calculator()):
        atoms = crystal()
        atoms.calc = calculator
        begin = atoms.positions.copy()
        atoms.set_velocities(np.random.default_rng(0).normal(0, 0.03, (len(atoms), 3)))
        DYNAMICS[name](atoms).run(20)
        assert np.linalg.norm(atoms.positions - begin, axis=1).max() > SKIN
        found.append((atoms.positions, atoms.get_velocities(), atoms.get_total_energy()))
    for one, other in zip(*found, strict=True):
        close(one, other)


@pytest.mark.parametrize("optimizer", [BFGS, FIRE])
def test_relaxation_with_the_cell(calculators, optimizer):
    found = []
    for calculator in (calculators[3], own_calculator()):
        atoms = crystal((2, 2, 2))
        atoms.set_cell(1.03 * atoms.cell, scale_atoms=True)
        atoms.calc = calculator
        optimizer(FrechetCellFilter(atoms), logfile=None).run(fmax=1e-3, steps=8)
        found.append((atoms.cell.array, atoms.positions, atoms.get_potential_energy()))
    for one, other in zip(*found, strict=True):
        close(one, other, 1e-7)


def test_refusals(calculators):
    def refused(atoms, error, words):
        atoms.calc = calculators[1]
        with pytest.raises(error, match=words):
            atoms.get_forces()

    flat = bulk("Ar")
    flat.cell[2] = flat.cell[1]
    no_vector = Atoms("Ar", cell=[4, 4, 0], pbc=True)
    for atoms in (flat, no_vector):
        refused(atoms, ArgumentError, "independent cell vectors")
    refused(Atoms("Ar", [[np.nan, 0, 0]]), ArgumentError, "finite")
    refused(Atoms("ArH", [[0, 0, 0], [4, 0, 0]]), LaunchError, "no hydrogen")
    refused(Atoms("Ar2He", 4 * np.eye(3)), LaunchError, r"an energy per atom, \(3,\)")
    atoms, other = crystal(), crystal()  # a failure leaves nothing behind
    atoms.calc, other.calc = calculators[1], own_calculator()
    close(atoms.get_forces(), other.get_forces())


class Compiled(Argon):
    """With a module in TorchScript, which sees no edges."""

    def __init__(self):
        super().__init__()
        self.last = torch.jit.script(torch.nn.Identity())

    def forward(self, graph):
        return self.last(super().forward(graph))


@pytest.mark.slow
def test_models_with_torchscript():
    atoms, other = crystal((2, 2, 1)), crystal((2, 2, 1))
    other.calc = own_calculator()
    with (
        Calculator(Compiled, ranks=1) as atoms.calc,
        pytest.raises(LaunchError, match="TorchScript"),
    ):
        atoms.get_forces()
    with Calculator(Compiled, ranks=1, adapt=False) as atoms.calc:
        close(atoms.get_forces(), other.get_forces())


def test_arguments():
    with pytest.raises(ArgumentError, match="world_size"):
        Calculator(Argon, ranks=0)
    atoms = Atoms("Ar")
    atoms.calc = Calculator(torch.nn.Identity, ranks=1)
    with pytest.raises(LaunchError, match="cutoff is missing"):
        atoms.get_potential_energy()
    atoms.calc.close()
