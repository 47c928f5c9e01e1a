"""Moving atoms: they migrate to the rank of their slab, and energy and momentum stay."""

import pytest
import torch

from tests.examples.loading import example

argon, moving = example("dynamics", "argon"), example("dynamics", "moving")


def move(rank):
    system = argon.face_centred(2, 5.6, 400.0, 0)
    atoms = moving.MovingAtoms(argon.WithNetwork(), system)
    first = atoms.totals()
    for _ in range(80):
        atoms.step(5.0)
    change = (atoms.totals() - first)[:2].sum().item()
    return atoms.graph.owned_ids, atoms.migrated, change, atoms.graph.sum(atoms.velocity)


@pytest.mark.slow
def test_atoms_migrate_and_energy_and_momentum_stay(worlds):
    ids, migrated, change, momentum = zip(*worlds.run(3, move), strict=True)
    assert torch.equal(torch.cat(ids).sort().values, torch.arange(64))
    assert migrated[0] > 3
    assert len(set(migrated)) == 1
    assert abs(change[0]) < 1e-4  # eV; heat at the start: 0.05 eV
    assert momentum[0].abs().max() < 1e-12
