"""Train a graph network on the world ocean, on any number of ranks.

    torchrun --nproc-per-node 2 examples/ocean/train.py

The network predicts the temperature at 400 m from surface data. The graph is partitioned over the
ranks; the model has no code for ranks. --check compares the training with one process.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ocean
import torch
from picture import draw
from torch_geometric.data import Data

import varcomm as vc
from varcomm.graph import PartitionedGraph
from varcomm.models import MeshGraphNet

sys.path.append(str(Path(__file__).parents[1]))
from common import Cost, Parser, Record, differences, one_answer, one_cycle, say, training


def new_model(data: Data, hidden: int, blocks: int, seed: int) -> MeshGraphNet:
    """Return a model with equal weights on all ranks, which draw them from one seed."""
    torch.manual_seed(seed)
    channels = data.x.shape[1], data.edge_attr.shape[1], data.y.shape[1]
    return MeshGraphNet(*channels, hidden_channels=hidden, num_blocks=blocks)


def squared_error(model: torch.nn.Module, part: Data | PartitionedGraph) -> torch.Tensor:
    """Return the squared error of each node; finite, but without meaning, if the target is NaN."""
    return (model(part.x, part.edge_index, part.edge_attr) - part.y.nan_to_num()).square()


def fit(
    model: torch.nn.Module,
    loss: Callable[[], torch.Tensor],
    complete_gradients: Callable[[torch.nn.Module], None],
    steps: int,
) -> Iterator[float]:
    """Train on the full graph in every step; yield the loss before each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    schedule = one_cycle(optimizer, 1e-2, steps, rise=0.3)
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        complete_gradients(model)
        yield value.item()
        optimizer.step()
        schedule.step()


def fit_on_ranks(model: torch.nn.Module, graph: PartitionedGraph, steps: int) -> Iterator[float]:
    """Train on ranks: the loss is a mean over all ranks, and gradients are summed."""
    vc.graph.distribute(model, graph)
    return fit(
        model,
        lambda: graph.mean(squared_error(model, graph), graph.train_mask),
        vc.data_parallel.sum_gradients,
        steps,
    )


def fit_alone(model: torch.nn.Module, data: Data, steps: int) -> Iterator[float]:
    """Train in one process, without varcomm."""
    return fit(
        model,
        lambda: squared_error(model, data)[data.train_mask].mean(),
        lambda model: None,
        steps,
    )


def record(model: torch.nn.Module, losses: Iterator[float]) -> Record:
    """Run a training; return its losses, and the gradients of its first step."""
    first = next(losses)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    return [first, *losses], gradients


def compare(
    model: torch.nn.Module, data: Data, method: str | torch.Tensor | None, steps: int
) -> tuple[float, float]:
    """Return the differences between training on ranks and in one process; equal on all ranks."""
    graph = vc.graph.partition(data, method=method)
    together, alone = copy.deepcopy(model), copy.deepcopy(model)
    return differences(
        lambda: record(together, fit_on_ranks(together, graph, steps)),
        lambda: record(alone, fit_alone(alone, data, steps)),
    )


def in_precision(data: Data, dtype: torch.dtype) -> Data:
    return data.clone().apply(lambda x: x.to(dtype) if x.is_floating_point() else x)


def check(options: argparse.Namespace) -> bool:
    """Compare ranks with one process in fp64 and fp32."""
    spacing = options.check or options.spacing
    say(f"\n20 steps on the grid of {spacing} degrees, on ranks and in one process:")
    data = ocean.load(spacing)

    def found(dtype: torch.dtype) -> tuple[float, float]:
        model = new_model(data, options.hidden, options.blocks, options.seed).to(dtype)
        return compare(model, in_precision(data, dtype), options.method, 20)

    return one_answer(found)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__, smoke={"spacing": 4, "steps": 20, "hidden": 16})
    grid = {"type": int, "choices": ocean.SPACINGS, "metavar": "N"}
    parser.add_argument(
        "--spacing", default=1, help="grid spacing in degrees (%(default)s)", **grid
    )
    parser.add_whole("--steps", 200, "training steps")
    parser.add_whole("--hidden", 32, "width of the network")
    parser.add_whole("--blocks", 4, "message-passing layers")
    parser.add_seed("the first weights")
    parser.add_argument(
        "--method",
        choices=["metis", "rcb", "block", "random"],
        help="partitioner (metis if pymetis is installed)",
    )
    parser.add_picture("out/ocean.png")
    parser.add_argument(
        "--check",
        nargs="?",
        const=0,
        **grid,
        help="compare 20 steps with one process, on a grid of N degrees (the training grid)",
    )
    return parser.parse(arguments)


def main(arguments: list[str] | None = None) -> int:
    world = vc.init()
    options = parsed(arguments)
    data = ocean.load(options.spacing)
    graph = vc.graph.partition(data, method=options.method)
    report = graph.report()
    say(f"{report}\nbytes sent per rank and layer: {report.nbytes(options.hidden)}\n")

    model = new_model(data, options.hidden, options.blocks, options.seed)
    cost = Cost()
    began = time.perf_counter()
    for _ in training(fit_on_ranks(model, graph, options.steps), options.steps, cost):
        pass
    seconds = time.perf_counter() - began

    with torch.no_grad():
        part = model(graph.x, graph.edge_index, graph.edge_attr)
    prediction = graph.gather(part, dst=0)
    rank = graph.gather(torch.full((graph.num_owned,), world.rank), dst=0)
    say(f"\n{cost.report()}")
    if world.rank == 0:
        print(f"{options.steps} steps in {seconds:.0f} s. RMSE on the test tiles, in deg C:")
        network = ocean.rmse(data, prediction)
        for name, error in [("network", network), *ocean.baselines(data).items()]:
            print(f"  {error:6.2f}  {name}")
        draw(
            options.picture,
            data.pos.numpy(),
            rank.numpy(),
            (data.y[:, 0] * data.y_std + data.y_mean).numpy(),
            (prediction[:, 0] * data.y_std + data.y_mean).numpy(),
            data.test_mask.numpy(),
            spacing=options.spacing,
            title="Ocean temperature at 400 m, learned from the surface on "
            + ("one rank" if world.size == 1 else f"{world.size} ranks"),
        )
        print(f"picture: {options.picture}")
    if options.check is not None and not check(options):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
