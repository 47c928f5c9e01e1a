"""Teach a network to solve Poisson's equation on a mesh, from the equation alone.

    torchrun --nproc-per-node 2 examples/poisson/train.py

The network never sees a solution: its loss is the residual of the finite-element equations.
Solutions of held-out right-hand sides serve only for the final error.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import torch
from common import Cost, Parser, Record, differences, one_answer, one_cycle, say, training
from mesh import FiniteElements, load
from physics import Solver, loads, relative_residual, right_hand_side
from picture import draw
from torch import Tensor
from torch_geometric.data import Data

import varcomm as vc
from varcomm.graph import PartitionedGraph

HELD_OUT = range(10**6, 10**6 + 16)  # seeds of held-out right-hand sides; training counts from 0
LEARNED = range(64)  # right-hand sides whose mean solution is a baseline
BATCH, RATE, FUNCTIONS = 32, 3e-3, 64


def fit(
    solver: Solver,
    loss: Callable[[range], Tensor],
    complete_gradients: Callable[[torch.nn.Module], object],
    steps: int,
) -> Iterator[float]:
    """Train on new right-hand sides in every step; yield the loss before each step."""
    optimizer = torch.optim.AdamW(solver.parameters(), lr=RATE, weight_decay=1e-4)
    schedule = one_cycle(optimizer, RATE, steps, rise=0.15)
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(range(BATCH * step, BATCH * (step + 1)))
        value.backward()
        complete_gradients(solver)
        yield value.item()
        torch.nn.utils.clip_grad_norm_(solver.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def fit_on_ranks(solver: Solver, graph: PartitionedGraph, steps: int) -> Iterator[float]:
    """Train on ranks: `all_reduce` sums over ranks, and gradients of parameters are summed."""
    vc.graph.distribute(solver, graph)

    def loss(seeds: range) -> Tensor:
        found = relative_residual(solver, graph, loads(graph, seeds), vc.all_reduce)
        return vc.graph.replicated(found, graph)  # the same on all ranks: it counts once

    return fit(solver, loss, vc.data_parallel.sum_gradients, steps)


def fit_alone(solver: Solver, data: Data, steps: int) -> Iterator[float]:
    """Train in one process, without varcomm."""

    def loss(seeds: range) -> Tensor:
        return relative_residual(solver, data, loads(data, seeds), lambda values: values)

    return fit(solver, loss, lambda solver: None, steps)


def new_solver(hidden: int, blocks: int, seed: int) -> Solver:
    """Return a model with equal weights on all ranks, which draw them from one seed."""
    torch.manual_seed(seed)
    return Solver(hidden, blocks, FUNCTIONS)


def record(solver: Solver, losses: Iterator[float]) -> Record:
    """Run a training; return its losses, and the gradients of its first step."""
    first = next(losses)
    return [first, *losses], [parameter.grad.clone() for parameter in solver.parameters()]


def precise(data: Data, dtype: torch.dtype) -> Data:
    return data.clone().apply(lambda x: x.to(dtype) if x.is_floating_point() else x)


def found_by(solver: Solver, graph: PartitionedGraph, seeds: range) -> Tensor | None:
    """Return the network's solutions (N, S) on all nodes, on the first rank."""
    with torch.no_grad():
        return graph.gather(solver(graph, loads(graph, seeds), vc.all_reduce), dst=0)


def relative_error(found: Tensor, true: Tensor) -> float:
    """Return the relative root mean squared error of solutions (N, fields)."""
    return float((found - true).square().sum().sqrt() / true.square().sum().sqrt())


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(__doc__, smoke={"spacing": 0.05, "steps": 10, "hidden": 16, "blocks": 4})
    parser.add_argument(
        "--spacing",
        type=float,
        default=0.025,
        metavar="X",
        help="node spacing on a plate of width 1 (%(default)s)",
    )
    parser.add_whole("--steps", 1000, "training steps")
    parser.add_whole("--hidden", 32, "width of the network")
    parser.add_whole("--blocks", 6, "message-passing layers")
    parser.add_seed("mesh and first weights")
    parser.add_picture("out/poisson.png")
    parser.add_check("10 steps")
    options = parser.parse(arguments)
    if not 0.005 <= options.spacing <= 0.1:
        parser.error(f"argument --spacing: need 0.005 to 0.1, got {options.spacing}")

    whole = load(options.spacing, options.seed)
    data = precise(whole, torch.float32)
    graph = vc.graph.partition(data)
    solver = new_solver(options.hidden, options.blocks, options.seed)
    say(f"{graph.report()}\n")
    cost = Cost()
    for _ in training(fit_on_ranks(solver, graph, options.steps), options.steps, cost):
        pass
    say(f"\n{cost.report()}")

    found = found_by(solver, graph, HELD_OUT)
    rank = graph.gather(torch.full((graph.num_owned,), graph.group.rank), dst=0)
    if graph.group.rank == 0:
        classical, steps = FiniteElements(whole), options.blocks
        fields = [right_hand_side(whole.pos, seed) for seed in HELD_OUT]
        true = torch.cat([classical.solution(f) for f in fields], dim=1)
        known = [classical.solution(right_hand_side(whole.pos, seed)) for seed in LEARNED]
        mean = torch.cat(known, dim=1).mean(dim=1, keepdim=True)
        learned = found.double()
        iterated = torch.cat([classical.iterate(f, steps) for f in fields], dim=1)
        say(f"\nRelative error of {len(HELD_OUT)} held-out solutions, in per cent:")
        for name, guess in {
            "network": learned,
            "zero": torch.zeros_like(true),
            f"mean of the solutions of {len(LEARNED)} right-hand sides of the training": mean,
            f"{steps} steps of conjugate gradients, as many as the network's": iterated,
        }.items():
            say(f"  {100 * relative_error(guess, true):6.1f}  {name}")
        draw(
            options.picture,
            whole.pos.numpy(),
            rank.numpy(),
            fields[0][:, 0].numpy(),
            true.numpy(),
            learned.numpy(),
        )
        say(f"picture: {options.picture}")
    if not options.check:
        return 0

    def found_differences(dtype: torch.dtype) -> tuple[float, float]:
        graph = vc.graph.partition(precise(whole, dtype))
        first = solver_in(dtype)
        return differences(
            lambda: record(first, fit_on_ranks(first, graph, 10)),
            lambda: record(alone := solver_in(dtype), fit_alone(alone, precise(whole, dtype), 10)),
        )

    def solver_in(dtype: torch.dtype) -> Solver:
        return new_solver(options.hidden, options.blocks, options.seed).to(dtype)

    say("\n10 steps on ranks and in one process:")
    return 0 if one_answer(found_differences) else 1


if __name__ == "__main__":
    sys.exit(main())
