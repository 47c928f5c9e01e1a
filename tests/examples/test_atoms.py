"""Atoms: the true potential, and a motion that keeps its energy."""

from itertools import islice

import pytest
import torch

from tests.examples.loading import example
from tests.graph.graphs import split_by

crystal = example("atoms", "crystal")
dynamics = example("atoms", "dynamics")


def move(rank, which, timestep):
    """Return the total energies of a crystal that moves for 0.08 ps, and its lists of pairs."""
    potential, start = example("atoms", "potential"), crystal.perfect(3)
    model = crystal.LennardJones()
    if which == "network":
        model = potential.new_model(potential.small_crystals(2, 3), 4, 1, 0).double()
    owner = split_by("a rank owns nothing", len(start.pos), torch.distributed.get_world_size())
    moving = dynamics.MovingAtoms(model, start, 0.2, owner)
    graph, totals = moving.graph, []
    velocity = dynamics.thermal(len(start.pos), 60.0, 0)[graph.owned_ids]
    moments = dynamics.moments(moving, graph.pos, velocity, timestep)
    for moment in islice(moments, int(80 / timestep) + 1):
        totals.append(moving.graph.sum(moment.potential + moment.kinetic).item())
    return torch.tensor(totals), moving.lists


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "which"), [(3, "network"), (1, "truth"), (1, "network")])
def test_energy_is_conserved_as_well_as_the_timestep_allows(worlds, ranks, which):
    """Half the step, a quarter of the error; new lists of pairs change nothing."""
    kinetic = 108 * 1.5 * 60 * crystal.BOLTZMANN
    off = {}
    for timestep in (8.0, 4.0):
        totals, lists = worlds.run(ranks, move, which, timestep)[0]
        off[timestep] = (totals - totals[0]).abs().max().item() / kinetic
        assert lists > 2
    assert off[4.0] < 1e-3
    assert off[4.0] < 0.35 * off[8.0]
