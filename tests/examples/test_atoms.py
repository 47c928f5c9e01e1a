"""Atoms: who is near whom, the true potential, and a motion that keeps its energy."""

from itertools import islice

import pytest
import torch

from tests.examples.loading import example
from tests.graph.graphs import WORLDS, split_by

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def train():
    return example("atoms", "train")


def crystal():
    return example("atoms", "crystal")


def cloud(atoms, box, seed=0):
    draws = torch.Generator().manual_seed(seed)
    # also outside of the box
    places = 3 * torch.rand(atoms, 3, generator=draws, dtype=torch.float64) - 1
    return places * box


def brute_force(pos, box, cutoff):
    """Every atom, every image of every other; as a set of neighbour, atom and image."""
    reach = [int(n) for n in (cutoff / box).ceil() + 3]  # atoms are at most two boxes apart
    axes = [torch.arange(-n, n + 1) for n in reach]
    images = torch.cartesian_prod(*axes)
    vector = (pos[:, None, None] + images * box) - pos[:, None]
    distance = vector.norm(dim=3)
    near, atom, image = ((distance <= cutoff) & (distance > 0)).nonzero().T
    return set(map(tuple, torch.cat([near[:, None], atom[:, None], images[image]], 1).tolist()))


@pytest.mark.parametrize("box", [(9.0, 9.0, 9.0), (3.1, 2.9, 3.2), (2.0, 1.1, 7.0)])
@pytest.mark.parametrize("atoms", [1, 2, 30])
def test_neighbours_are_those_of_brute_force(atoms, box):
    box = torch.tensor(box, dtype=torch.float64)
    pos = cloud(atoms, box)
    edge_index, shifts = example("atoms", "neighbours").neighbours(pos, box, 3.0)
    jumps = shifts / box
    assert torch.allclose(jumps, jumps.round(), atol=1e-9)
    found = torch.cat([edge_index.T, jumps.round().long()], dim=1)
    found = list(map(tuple, found.tolist()))
    assert len(found) == len(set(found)), "each pair once"
    assert set(found) == brute_force(pos, box, 3.0)
    assert (box.min() < 3) <= len(found), "an atom is near its own images"


def test_a_perfect_crystal_is_face_centred_cubic():
    pos, box = crystal().perfect(3)
    assert len(pos) == 4 * 3**3
    assert ((pos > 0) & (pos < box)).all()
    for cutoff, count in ((3.8, 12), (5.3, 18), (6.5, 42)):  # the shells
        edge_index, _ = example("atoms", "neighbours").neighbours(pos, box, cutoff)
        assert edge_index[1].bincount().tolist() == [count] * len(pos)


def shaken(cells=3):
    return crystal().as_graph(crystal().shaken(cells, 0.1, seed=1))


def test_true_forces_are_slopes_of_the_energy_by_formula_and_by_autograd():
    data = shaken()
    forces = crystal().true_forces(data.pos, data.edge_index, data.shifts)
    pos = data.pos.clone().requires_grad_()
    energies = crystal().LennardJones()(data.types, pos, data.edge_index, data.shifts)
    (slope,) = torch.autograd.grad(energies.sum(), pos)
    torch.testing.assert_close(-slope, forces, **CLOSE)
    assert -9 * crystal().DEPTH < energies.mean() < -4 * crystal().DEPTH
    assert forces.sum(0).abs().max() < 1e-13
    assert forces.square().mean().sqrt() > 0.02


def small():
    """Crystals, and a network that has learned from them so far that it holds them together."""
    module = example("atoms", "potential")
    crystals = module.small_crystals(2, 3)
    return module, crystals, module.new_model(crystals, 4, 1, 0).double()


def motion(potential, crystal, steps, timestep=4.0):
    """Total energies of all atoms, and their last positions."""
    module, graph = example("atoms", "dynamics"), potential.graph
    velocity = module.thermal(len(crystal.pos), 60.0, 0)[graph.owned_ids]
    totals = []
    for moment in islice(module.moments(potential, graph.pos, velocity, timestep), steps):
        totals.append(graph.sum(moment.potential + moment.kinetic).item())
    return torch.tensor(totals), potential.graph.gather(moment.pos)


def run_motion(rank, which, method, skin, steps, timestep):
    dynamics, start = example("atoms", "dynamics"), crystal().perfect(3)
    model = crystal().LennardJones() if which == "truth" else small()[2]
    owner = split_by(method, len(start.pos), torch.distributed.get_world_size())
    moving = dynamics.MovingAtoms(model, start, skin, owner)
    totals, pos = motion(moving, start, steps, timestep)
    return totals, pos, moving.lists


@pytest.mark.slow
@pytest.mark.parametrize("which", ["truth", "network"])
def test_energy_is_conserved_as_well_as_the_timestep_allows(worlds, which):
    """A motion of 0.08 ps: half the step, a quarter of the error; other lists change nothing."""
    kinetic = 108 * 1.5 * 60 * crystal().BOLTZMANN
    off = {}
    for timestep in (8.0, 4.0):
        steps = int(80 / timestep) + 1
        totals, _, lists = worlds.run(1, run_motion, which, "block", 0.2, steps, timestep)[0]
        off[timestep] = (totals - totals[0]).abs().max().item() / kinetic
        assert lists > 2
    assert off[4.0] < 1e-3
    assert off[4.0] < 0.35 * off[8.0]


@pytest.mark.parametrize("ranks", WORLDS)
def test_atoms_on_ranks_move_as_in_one_process(worlds, ranks):
    _, alone, _ = worlds.run(1, run_motion, "network", "block", 0.1, 6, 8.0)[0]
    for totals, pos, lists in worlds.run(
        ranks, run_motion, "network", "a rank owns nothing", 0.1, 6, 8.0
    ):
        torch.testing.assert_close(pos, alone, rtol=0, atol=1e-9)
        assert len(totals) == 6
        assert lists > 1


def compare(rank, method):
    """Train on ranks and alone; forces and gradients of the loss of forces of the first step."""
    module, crystals, _ = small()
    common, partition = example(".", "common"), example("atoms", "potential").vc.graph.partition
    size = torch.distributed.get_world_size()
    graphs = [partition(one, method=split_by(method, one.num_nodes, size)) for one in crystals]

    def record(parts):
        model = module.new_model(crystals, 4, 1, 0).double()
        losses = module.fit(model, parts, 4)
        first = next(losses)
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        return [first, *losses], gradients

    return common.differences(lambda: record(graphs), lambda: record(crystals))


@pytest.mark.parametrize("ranks", WORLDS)
def test_training_on_ranks_is_that_of_one_process(worlds, ranks):
    answers = worlds.run(ranks, compare, "a rank owns nothing")
    assert answers == answers[:1] * ranks, "ranks differ"
    losses, gradients = answers[0]
    assert losses < 1e-10
    assert gradients < 1e-9


@pytest.mark.slow
def test_training_learns(worlds):
    losses = worlds.run(1, losses_of_training)[0]
    assert sum(losses[-4:]) < 0.3 * sum(losses[:4])


def losses_of_training(rank):
    module, crystals, model = small()
    return list(module.fit(model, crystals, 40))
