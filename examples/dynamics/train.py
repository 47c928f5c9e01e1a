"""Molecular dynamics of a crystal and a melt, on any number of ranks.

    torchrun --nproc-per-node 3 examples/dynamics/train.py

Each rank owns the atoms in its slab of the cell. Atoms that cross a border migrate to the next
rank. --check compares the ranks with one process.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from argon import BOLTZMANN, LennardJones, System, WithNetwork, face_centred
from moving import MovingAtoms
from picture import draw
from torch import Tensor
from torch.distributed import ProcessGroup, new_group
from tqdm import tqdm

import varcomm as vc

sys.path.append(str(Path(__file__).parents[1]))
from common import Cost, Parser, is_first, say

EARLY = 100  # steps after which positions are compared


class Run(NamedTuple):
    """Totals at all times, (T, 3); early and last positions of all atoms, on the first rank."""

    history: Tensor
    early: Tensor
    last: Tensor
    first_owner: Tensor
    searches: int


def run(
    name: str, system: System, options: argparse.Namespace, group: ProcessGroup | None, cost: Cost
) -> Run:
    moving = MovingAtoms(WithNetwork() if options.network else LennardJones(), system, group)
    first_owner = moving.slab(system.pos)
    rows, early = [moving.totals()], system.pos
    for step in tqdm(range(1, options.steps + 1), name, unit="step", disable=not is_first()):
        with cost.step():
            moving.step(options.timestep)
            rows.append(moving.totals())
        if step == min(EARLY, options.steps):
            early = moving.whole()
    return Run(torch.stack(rows), early, moving.whole(), first_owner, moving.searches)


def drift(history: Tensor, timestep: float) -> Tensor:
    """Return the slope of a line through the total energy, in meV per atom and ps."""
    total = 1000 * history[:, :2].sum(1)
    time = torch.arange(len(total), dtype=total.dtype) * timestep / 1000
    time = time - time.mean()
    return (time * total).sum() / time.square().sum()


def check(systems: dict[str, System], found: dict[str, Run], options: argparse.Namespace) -> bool:
    """Print whether ranks agree with one process; the first rank computes alone."""
    say("\nthe same on ranks and in one process:")
    first, passed = new_group([0]), True
    for name, system in systems.items():
        errors = None
        if is_first():  # the others wait
            alone, ours = run(f"{name}, alone", system, options, first, Cost()), found[name]
            drifts = torch.stack([drift(one.history, options.timestep) for one in (ours, alone)])
            energies = (ours.history - alone.history)[: EARLY + 1, :2].abs().max()
            positions = (ours.early - alone.early).abs().max()
            errors = torch.stack([energies, positions, drifts.diff().abs()[0]])
        energy, position, slope = vc.broadcast(errors).tolist()
        say(
            f"  {name}: after {min(EARLY, options.steps)} steps energies differ by {energy:.1e} eV "
            f"and positions by {position:.1e} Angstrom (allowed 1e-9);\n"
            f"    drifts over {options.steps:,} steps differ by {slope:.1e} meV per atom and ps "
            "(allowed 1e-6)"
        )
        passed &= energy <= 1e-9 and position <= 1e-9 and slope <= 1e-6
    say("one answer" if passed else "NOT one answer")
    return passed


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(__doc__, smoke={"cells": 3, "steps": 40})
    parser.add_whole("--cells", 5, "cells of 4 atoms along y and z; twice as many along x", least=2)
    parser.add_whole("--steps", 1000, "time steps")
    parser.add_whole("--timestep", 5, "time step in fs")
    parser.add_seed("the velocities")
    parser.add_argument(
        "--network", action="store_true", help="add the small energies of a PaiNN to the potential"
    )
    parser.add_check()
    parser.add_picture("out/dynamics.png")
    options = parser.parse(arguments)

    ranks = vc.init().size
    systems = {
        "crystal": face_centred(options.cells, 5.3, 80.0, options.seed),
        "melt": face_centred(options.cells, 5.6, 400.0, options.seed),
    }
    found = {}
    for name, system in systems.items():
        cost = Cost()
        found[name] = one = run(name, system, options, None, cost)
        _, kinetic, migrated = one.history[-1].tolist()
        say(
            f"{name}: {len(system.pos):,} atoms on {ranks} ranks, "
            f"{options.steps * options.timestep / 1000:g} ps, {kinetic / (1.5 * BOLTZMANN):.0f} K "
            f"at the end\n"
            f"  {migrated:.0f} atoms changed their rank at {one.searches - 1} searches\n"
            f"  drift {drift(one.history, options.timestep):+.1e} meV per atom and ps\n"
            f"  {cost.report()}"
        )
    if is_first():
        draw(options.picture, systems, found, ranks, options.timestep)
        say(f"picture: {options.picture}")
    return 0 if not options.check or check(systems, found, options) else 1


if __name__ == "__main__":
    sys.exit(main())
