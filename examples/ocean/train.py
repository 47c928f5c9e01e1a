"""Train a graph network on the world ocean, on as many ranks as there are.

    torchrun --nproc-per-node 2 examples/ocean/train.py

From what the surface shows it predicts the temperature at 400 m. The graph is split over the
ranks; the model knows nothing of that. With --check, it also trains in one process and compares.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import ocean
import torch
from picture import draw
from torch_geometric.data import Data
from tqdm import tqdm

import varcomm as vc
from varcomm.graph import PartitionedGraph
from varcomm.models import MeshGraphNet


def new_model(data: Data, hidden: int, blocks: int, seed: int) -> MeshGraphNet:
    """The same on every rank, since all draw from the same seed."""
    torch.manual_seed(seed)
    channels = data.x.shape[1], data.edge_attr.shape[1], data.y.shape[1]
    return MeshGraphNet(*channels, hidden_channels=hidden, num_blocks=blocks)


def squared_error(model: torch.nn.Module, part: Data | PartitionedGraph) -> torch.Tensor:
    """Of each node; where the target is not known it means nothing, but is a number."""
    return (model(part.x, part.edge_index, part.edge_attr) - part.y.nan_to_num()).square()


def fit(
    model: torch.nn.Module,
    loss: Callable[[], torch.Tensor],
    complete_gradients: Callable[[torch.nn.Module], None],
    steps: int,
) -> Iterator[float]:
    """Train on the whole graph at every step; yields the loss before each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=steps, pct_start=0.3, cycle_momentum=False
    )
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        complete_gradients(model)
        yield value.item()
        optimizer.step()
        schedule.step()


def fit_on_ranks(model: torch.nn.Module, graph: PartitionedGraph, steps: int) -> Iterator[float]:
    """What partitioning changes: the loss is a mean over all ranks, and gradients are summed."""
    vc.graph.distribute(model, graph)
    return fit(
        model,
        lambda: graph.mean(squared_error(model, graph), graph.train_mask),
        vc.data_parallel.sum_gradients,
        steps,
    )


def fit_alone(model: torch.nn.Module, data: Data, steps: int) -> Iterator[float]:
    """The same in one process, without varcomm."""
    return fit(
        model,
        lambda: squared_error(model, data)[data.train_mask].mean(),
        lambda model: None,
        steps,
    )


def record(model: torch.nn.Module, losses: Iterator[float]) -> tuple[torch.Tensor, ...]:
    """Run a training; return its losses, and the gradients of its first step."""
    first = next(losses)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    return torch.tensor([first, *losses], dtype=torch.float64), *gradients


def differences(
    model: torch.nn.Module, data: Data, method: str | torch.Tensor | None, steps: int
) -> tuple[float, float]:
    """How far training on ranks is from training alone; the same on every rank.

    Relative, at its worst: of the losses of all steps, and of the first step's gradients of any
    parameter, by the largest of its entries.
    """
    graph = vc.graph.partition(data, method=method)
    copied = copy.deepcopy(model)
    losses, *gradients = record(copied, fit_on_ranks(copied, graph, steps))
    found = None
    if graph.group.rank == 0:  # the others wait
        copied = copy.deepcopy(model)
        losses_alone, *gradients_alone = record(copied, fit_alone(copied, data, steps))
        errors = [
            (x - y).abs().max() / y.abs().max()
            for x, y in zip(gradients, gradients_alone, strict=True)
        ]
        found = torch.stack([((losses - losses_alone) / losses_alone).abs().max(), max(errors)])
    loss_error, gradient_error = vc.broadcast(found).tolist()
    return loss_error, gradient_error


def in_precision(data: Data, dtype: torch.dtype) -> Data:
    return data.clone().apply(lambda x: x.to(dtype) if x.is_floating_point() else x)


def check(options: argparse.Namespace, say: Callable[[str], None]) -> bool:
    """Tell whether ranks give what one process gives, in double and in single precision."""
    spacing = options.check or options.spacing
    say(f"\n20 steps on the grid of {spacing} degrees, on ranks and in one process:")
    data = ocean.load(spacing)
    passed = True
    for dtype, loss_limit, gradient_limit in (
        (torch.float64, 1e-10, 1e-12),
        (torch.float32, 1e-4, 1e-3),
    ):
        model = new_model(data, options.hidden, options.blocks, options.seed).to(dtype)
        floats = in_precision(data, dtype)
        loss_error, gradient_error = differences(model, floats, options.method, 20)
        passed &= loss_error <= loss_limit and gradient_error <= gradient_limit
        say(
            f"  {dtype}: losses differ by {loss_error:.1e} (allowed {loss_limit:.0e}), "
            f"first gradients by {gradient_error:.1e} (allowed {gradient_limit:.0e})"
        )
    say("one answer" if passed else "NOT one answer")
    return passed


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say it once, on the first rank, before any rank leaves."""
        if vc.init().rank == 0:
            print(f"{self.format_usage()}{self.prog}: error: {message}", file=sys.stderr)
        torch.distributed.barrier()
        sys.exit(2)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"need a whole number from 1 on, got {text!r}")
    return int(text)


def image(text: str) -> Path:
    if Path(text).suffix not in {".png", ".pdf", ".svg"}:
        raise argparse.ArgumentTypeError(f"need a name that ends in .png, .pdf or .svg: {text!r}")
    return Path(text)


def hindrance(picture: Path) -> str | None:
    """Why the picture could not be written once training is over."""
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.open("ab").close()
    except OSError as error:
        return f"argument --picture: cannot write {str(picture)!r}: {error.strerror}"
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    grid = {"type": int, "choices": ocean.SPACINGS, "metavar": "N"}
    whole = {"type": positive, "metavar": "N"}
    parser.add_argument(
        "--spacing", default=1, help="of the grid, in degrees (%(default)s)", **grid
    )
    parser.add_argument("--steps", default=200, help="of training (%(default)s)", **whole)
    parser.add_argument("--hidden", default=32, help="width of the network (%(default)s)", **whole)
    parser.add_argument(
        "--blocks", default=4, help="steps of message passing (%(default)s)", **whole
    )
    parser.add_argument(
        "--seed", default=0, type=int, metavar="N", help="of the first weights (%(default)s)"
    )
    parser.add_argument(
        "--method",
        choices=["metis", "rcb", "block", "random"],
        help="how to split the graph (metis where pymetis is installed)",
    )
    parser.add_argument(
        "--picture",
        type=image,
        default=Path("out/ocean.png"),
        metavar="FILE",
        help="what to draw (%(default)s)",
    )
    parser.add_argument(
        "--check",
        nargs="?",
        const=0,
        **grid,
        help="compare 20 steps with those of one process as well, on a grid of N degrees (that of "
        "the training)",
    )
    options = parser.parse_args(arguments)

    world = vc.init()
    first = world.rank == 0
    problem = [hindrance(options.picture) if first else None]
    torch.distributed.broadcast_object_list(problem)
    if problem[0]:
        parser.error(problem[0])

    def say(text: str) -> None:
        if first:
            print(text, flush=True)

    data = ocean.load(options.spacing)
    graph = vc.graph.partition(data, method=options.method)
    report = graph.report()
    say(f"{report}\nbytes a rank sends in each layer: {report.nbytes(options.hidden)}\n")

    model = new_model(data, options.hidden, options.blocks, options.seed)
    began = time.perf_counter()
    with tqdm(total=options.steps, desc="training", unit="step", disable=not first) as bar:
        for loss in fit_on_ranks(model, graph, options.steps):
            bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            bar.update()
    seconds = time.perf_counter() - began

    with torch.no_grad():
        part = model(graph.x, graph.edge_index, graph.edge_attr)
    prediction = graph.gather(part, dst=0)
    rank = graph.gather(torch.full((graph.num_owned,), world.rank), dst=0)
    if first:
        print(f"\n{options.steps} steps in {seconds:.0f} s. RMSE on the test tiles, in deg C:")
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
    if options.check is not None and not check(options, say):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
