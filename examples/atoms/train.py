"""Learn the forces between atoms, and move a crystal with them, on any number of ranks.

    torchrun --nproc-per-node 2 examples/atoms/train.py

A network without code for ranks learns the energies and forces of small crystals of argon.
Forces are derivatives of energies, so training differentiates twice, through the exchanges between
ranks. Then 10,976 atoms move with the learned forces, and their total energy stays constant.
--check compares the ranks with one process.
"""

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from crystal import Crystal, LennardJones, as_graph, perfect, shaken, with_truth
from dynamics import Moment, MovingAtoms, drift, moments, thermal
from picture import draw
from potential import Part, energy_and_forces, fit, new_model, small_crystals
from torch_geometric.data import Data
from tqdm import tqdm

import varcomm as vc

sys.path.append(str(Path(__file__).parents[1]))
from common import Cost, Parser, differences, is_first, one_answer, say, training

SKIN = 0.4  # Angstrom


def run(
    potential: MovingAtoms, options: argparse.Namespace, name: str, cost: Cost
) -> tuple[torch.Tensor, Moment]:
    """Move atoms from their sites; return energies at each time, and the last atoms.

    The energies, (moves + 1, 2), are the mean potential and kinetic energy per atom in eV. Half of
    the initial kinetic energy becomes potential energy.
    """
    graph = potential.graph  # the first step, because the counted values do not depend on edges
    velocity = thermal(graph.node_sizes.total, 2 * options.temperature, options.seed)
    along = moments(potential, graph.pos, velocity[graph.owned_ids], options.timestep)
    rows = []
    for _ in tqdm(range(options.moves + 1), name, unit="step", disable=not is_first()):
        with cost.step():
            moment = next(along)
            rows.append(torch.stack([graph.mean(moment.potential), graph.mean(moment.kinetic)]))
    return torch.stack(rows), moment


def whole(potential: MovingAtoms, moment: Moment) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions and forces of all atoms, on the first rank."""
    _, forces = potential(moment.pos)
    return potential.graph.gather(moment.pos, dst=0), potential.graph.gather(forces, dst=0)


def force_errors(data: Data, forces: torch.Tensor, sites: torch.Tensor) -> dict[str, float]:
    """Return RMS errors of forces, in meV / Angstrom: of the network and of baselines."""
    away = data.pos - sites
    spring = (away * data.forces).sum() / away.square().sum()
    guesses = {
        "network": forces,
        "springs to the sites, fitted to these very forces": spring * away,
        "no forces": torch.zeros_like(forces),
    }
    return {
        name: 1000 * (guess - data.forces).square().mean().sqrt().item()
        for name, guess in guesses.items()
    }


def check(options: argparse.Namespace, crystals: list[Data], learned: torch.nn.Module) -> bool:
    """Compare training, and the forces on the large crystal, with one process."""
    say("\n10 steps of training, on ranks and in one process:")

    def found(dtype: torch.dtype) -> tuple[float, float]:
        def record(parts: Sequence[Part]) -> tuple[list[float], list[torch.Tensor]]:
            model = new_model(crystals, options.hidden, options.blocks, options.seed).to(dtype)
            losses = fit(model, parts, 10)
            first = next(losses)
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            return [first, *losses], gradients

        some = crystals[-10:]
        graphs = [vc.graph.partition(one, method="rcb") for one in some]
        return differences(lambda: record(graphs), lambda: record(some))

    passed = one_answer(found)
    data = as_graph(shaken(options.cells, 0.1, options.seed))
    alone = new_model(crystals, options.hidden, options.blocks, options.seed)
    alone.load_state_dict(learned.state_dict())
    graph = vc.graph.partition(data, method="rcb")
    model = vc.graph.distribute(copy.deepcopy(alone).double(), graph)
    forces = graph.gather(energy_and_forces(model, graph, graph.pos)[1], dst=0)
    error = None
    if is_first():  # the others wait
        wanted = energy_and_forces(alone.double(), data, data.pos)[1]
        error = (forces - wanted).abs().max() / wanted.abs().max()
    error = vc.broadcast(error).item()
    say(f"forces on {data.num_nodes:,} atoms differ by {error:.1e} (allowed 1e-12)")
    return passed and error <= 1e-12


def main(arguments: list[str] | None = None) -> int:
    smoke = {"steps": 20, "crystals": 4, "small": 4, "cells": 6, "moves": 10}
    parser = Parser(__doc__, smoke)
    parser.add_whole("--steps", 400, "training steps")
    parser.add_whole("--crystals", 20, "crystals in the training set")
    parser.add_whole("--small", 5, "cubic cells of 4 atoms along each side of a training crystal")
    parser.add_whole("--cells", 14, "cells along each side of the moving crystal")
    parser.add_whole("--moves", 120, "time steps of the motion")
    parser.add_whole("--timestep", 8, "time step of the motion in fs")
    parser.add_whole("--temperature", 40, "target temperature of the crystal in K")
    parser.add_whole("--hidden", 16, "width of the network")
    parser.add_whole("--blocks", 2, "message-passing layers")
    parser.add_seed("all draws")
    parser.add_check()
    parser.add_picture("out/atoms.png")
    options = parser.parse(arguments)

    crystals = small_crystals(options.crystals, options.small)
    graphs = [vc.graph.partition(data, method="rcb") for data in crystals]
    model = new_model(crystals, options.hidden, options.blocks, options.seed)
    say(f"{len(crystals)} crystals of {crystals[0].num_nodes:,} atoms to learn from")
    cost = Cost()
    for _ in training(fit(model, graphs, options.steps), options.steps, cost):
        pass
    say(f"training: {cost.report()}")

    crystal = perfect(options.cells)
    moving = MovingAtoms(model, crystal, SKIN)
    say(f"\n{moving.graph.report()}")
    cost = Cost()
    energies, last = run(moving, options, "network", cost)
    say(f"motion: {cost.report()}")
    true_energies, _ = run(MovingAtoms(LennardJones(), crystal, SKIN), options, "truth", Cost())
    say(
        f"\n{options.moves} steps of {options.timestep} fs, {moving.lists} lists of neighbours\n"
        f"  network: {drift(energies, options.timestep)}\n"
        f"  truth:   {drift(true_energies, options.timestep)}"
    )

    pos, forces = whole(moving, last)
    if is_first():
        data = with_truth(as_graph(Crystal(pos, crystal.box)))
        say("errors of the forces at the end, in meV / Angstrom:")
        for name, error in force_errors(data, forces, crystal.pos).items():
            say(f"  {error:7.2f}  {name}")
        draw(
            options.picture,
            crystal,
            moving.owner,
            data.forces,
            forces,
            energies,
            true_energies,
            options.timestep,
        )
        say(f"picture: {options.picture}")
    return 0 if not options.check or check(options, crystals, model) else 1


if __name__ == "__main__":
    sys.exit(main())
