"""Forecast the sea surface temperature with a U-Net on a grid that is split over ranks.

    torchrun --nproc-per-node 3 examples/weather_grid/train.py
    torchrun --nproc-per-node 4 examples/weather_grid/train.py --mesh 2x2

The grid has 67 latitudes, which no number of ranks from 2 to 66 divides. The model is a plain
network of torch, without code for ranks.
"""

import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from pathlib import Path

import climate
import torch
from picture import draw
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

sys.path.append(str(Path(__file__).parents[1]))
from common import (
    Cost,
    Parser,
    Record,
    differences,
    is_first,
    one_answer,
    one_cycle,
    say,
    training,
)
from sea_months import TEST, TRAIN, baselines, errors

import varcomm as vc
from varcomm.models import UNet


def new_model(hidden: int, seed: int, dtype: torch.dtype = torch.float32) -> UNet:
    """Return a model with equal weights on all ranks, which draw them from one seed."""
    torch.manual_seed(seed)
    model = UNet(climate.CHANNELS, 1, hidden_channels=hidden, num_levels=3, periodic=True)
    return model.to(dtype)


def drawn(steps: int, seed: int) -> list[int]:
    """Return the month of each step: all training months, in a random order, repeatedly."""
    draws, months = torch.Generator().manual_seed(seed), list[int]()
    while len(months) < steps:
        order = torch.randperm(len(TRAIN), generator=draws)
        months += [TRAIN[i] for i in order]
    return months[:steps]


def fit(
    model: torch.nn.Module,
    error_of: Callable[[int], Tensor],
    complete_gradients: Callable[[torch.nn.Module], object],
    steps: int,
    seed: int,
) -> Iterator[float]:
    """Train on one month per step; yield the loss before each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=5e-2)
    schedule = one_cycle(optimizer, 4e-3, steps, rise=0.2)
    for month in drawn(steps, seed):
        optimizer.zero_grad()
        loss = error_of(month)
        loss.backward()
        complete_gradients(model)
        yield loss.item()
        optimizer.step()
        schedule.step()


def fit_on_ranks(
    model: torch.nn.Module, grid: vc.grid.Grid, months: climate.Months, steps: int, seed: int
) -> Iterator[float]:
    """Train on a rank's block of the grid: means are over the sea of all ranks."""
    weight = grid.field(months.weight)

    def error_of(month: int) -> Tensor:
        x, truth = map(grid.field, months.sample(month))
        return grid.mean((model(x) - truth).square(), weights=weight)

    return fit(model, error_of, vc.data_parallel.sum_gradients, steps, seed)


def fit_alone(
    model: torch.nn.Module, months: climate.Months, steps: int, seed: int
) -> Iterator[float]:
    """Train on the full grid, without ranks."""

    def error_of(month: int) -> Tensor:
        x, truth = months.sample(month)
        error = (model(x) - truth).square() * months.weight
        return error.sum() / months.weight.sum()

    return fit(model, error_of, lambda model: None, steps, seed)


def check(grid: vc.grid.Grid, hidden: int, steps: int, seed: int) -> bool:
    """Compare losses, and the gradients of the first step, with one process; print and return."""
    whole = [range(count) for count in climate.SHAPE]

    def record(model: torch.nn.Module, losses: Iterator[float]) -> Record:
        first = next(losses)
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        return [first, *losses], gradients

    def found(dtype: torch.dtype) -> tuple[float, float]:
        months = climate.Months(climate.read(*grid.ranges), dtype)
        # every rank has the full grid here, so its moments are sums of equal parts
        full = climate.Months(climate.read(*whole), dtype)
        one, other = (new_model(hidden, seed, dtype) for _ in range(2))
        return differences(
            lambda: record(one, fit_on_ranks(one, grid, months, steps, seed)),
            lambda: record(other, fit_alone(other, full, steps, seed)),
        )

    say(f"\n{steps} steps beside one process:")
    return one_answer(found)


def mesh_of(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not found:
        raise ArgumentTypeError(f"must be ROWSxCOLUMNS of ranks, such as 2x2; got {text!r}")
    return int(found[1]), int(found[2])


def main(arguments: list[str] | None = None) -> bool:
    """Train, compare, draw; return whether a comparison failed."""
    world = vc.init()
    parser = Parser(__doc__, {"steps": 4, "hidden": 8})
    parser.add_argument(
        "--mesh", type=mesh_of, metavar="RxC", help="ranks along rows and columns (all along rows)"
    )
    parser.add_whole("--steps", 300, "training steps")
    parser.add_whole("--hidden", 16, "channels of the network's first level, a multiple of 8")
    parser.add_seed("weights and months")
    parser.add_check("5 steps")
    parser.add_picture("out/weather_grid.png")
    options = parser.parse(arguments)
    ranks = options.mesh or (world.size, 1)
    if ranks[0] * ranks[1] != world.size:
        parser.error(f"--mesh: {ranks[0]} x {ranks[1]} is not the number of ranks, {world.size}")
    if options.hidden % 8:  # two channels in each of four groups, else some gradients are zero
        parser.error(f"--hidden: must be a multiple of 8, got {options.hidden}")

    mesh = init_device_mesh("cpu", ranks) if options.mesh else None
    grid = vc.grid.Grid(climate.SHAPE, mesh)
    shares = " and ".join(
        f"{list(sizes)} {name}"
        for sizes, name in zip(grid.sizes, ("rows", "columns"), strict=True)
        if sizes is not None
    )
    say(f"{climate.SHAPE[0]} x {climate.SHAPE[1]} points on {world.size} ranks: {shares}\n")

    months = climate.Months(climate.read(*grid.ranges), torch.float32)
    model, cost = new_model(options.hidden, options.seed), Cost()
    steps = fit_on_ranks(model, grid, months, options.steps, options.seed)
    losses = [*training(steps, options.steps, cost)]

    with torch.no_grad():
        parts = [model(grid.field(months.sample(month)[0])) for month in range(12)]
    change = torch.cat(parts).gather(dst=0) * months.y_std
    say(
        f"\nloss {losses[0]:.3f} in the first step, {losses[-1]:.3f} in the last\n{cost.report()}\n"
    )
    if is_first():
        found = change[:, 0].double().numpy()
        known = baselines(climate.temperatures().reshape(12, -1))
        known = {name: change.reshape(found.shape) for name, change in known.items()}
        print(errors({"U-Net": found, **known}, climate.rmse))
        draw(options.picture, grid.sizes, found, TEST[1])
        print(f"picture: {options.picture}")
    return options.check and not check(grid, options.hidden, 5, options.seed)


if __name__ == "__main__":
    sys.exit(main())
