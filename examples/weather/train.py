"""Forecast the sea surface temperature a month ahead, on any number of ranks.

    torchrun --nproc-per-node 2 examples/weather/train.py

The model sends features of the grid to a mesh with edges of several lengths, passes messages on the
mesh, and returns the result to the grid. Grid and mesh are partitioned together; the model has no
code for ranks.
"""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import climate
import split
import torch
from picture import draw
from torch_geometric.data import HeteroData

sys.path.append(str(Path(__file__).parents[1]))
from common import Cost, Parser, is_first, one_cycle, say, training
from sea_months import TEST, TRAIN, baselines, errors

import varcomm as vc
from varcomm.graph import PartitionedGraph
from varcomm.models import EncodeProcessDecode


def new_model(hidden: int, blocks: int, seed: int) -> EncodeProcessDecode:
    """Return a model with equal weights on all ranks, which draw them from one seed."""
    torch.manual_seed(seed)
    return EncodeProcessDecode(climate.CHANNELS, 3, 4, 1, hidden_channels=hidden, num_blocks=blocks)


def forecast(
    model: torch.nn.Module, part: HeteroData | PartitionedGraph, x: torch.Tensor
) -> torch.Tensor:
    """Return the predicted change of each cell in a month, (n, 1), in units of ``y_std``."""
    return model({"grid": x, "mesh": part["mesh"].x}, part.edge_index_dict, part.edge_attr_dict)


def drawn(steps: int, seed: int) -> list[int]:
    """Yield the month of each step: all training months, in a random order, repeatedly."""
    draws, months = torch.Generator().manual_seed(seed), list[int]()
    while len(months) < steps:
        order = torch.randperm(len(TRAIN), generator=draws).flip(0)
        months += [TRAIN[i] for i in order]
    return months[:steps]


def fit(
    model: torch.nn.Module, graph: PartitionedGraph, months: climate.Months, steps: int, seed: int
) -> Iterator[float]:
    """Train on one month per step; yield the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-2)
    schedule = one_cycle(optimizer, 5e-3, steps, rise=0.2)
    for x, y in months.samples(drawn(steps, seed)):  # read during the step before
        optimizer.zero_grad()
        error = forecast(model, graph, x) - y
        loss = graph["grid"].mean(graph["grid"].area * error.square())
        loss.backward()
        vc.data_parallel.sum_gradients(model)
        optimizer.step()
        schedule.step()
        yield loss.item()


def main(arguments: list[str] | None = None) -> None:
    world = vc.init()
    smoke = {"level": 2, "steps": 6, "hidden": 8, "blocks": 2}
    parser = Parser(__doc__, smoke)
    parser.add_whole("--level", 4, "refinements of the mesh: 4 gives 2,562 nodes, 6 gives 40,962")
    parser.add_whole("--steps", 360, "training steps")
    parser.add_whole("--hidden", 32, "width of the network")
    parser.add_whole("--blocks", 4, "blocks of the processor")
    parser.add_seed("weights and months")
    parser.add_picture("out/weather.png")
    options = parser.parse(arguments)

    data = climate.load(options.level)
    owner = split.together(data, world.size, options.blocks)
    graph = vc.graph.partition(data, method=owner)
    say(
        f"{data['grid'].num_nodes:,} cells and {data['mesh'].num_nodes:,} nodes of the mesh\n"
        f"{graph.report()}\n"
        f"{split.table(data, owner, world.size, options.blocks, options.hidden)}\n"
    )

    months = climate.Months(graph)
    model = new_model(options.hidden, options.blocks, options.seed)
    vc.graph.distribute(model, graph)
    cost = Cost()
    steps = fit(model, graph, months, options.steps, options.seed)
    losses = [*training(steps, options.steps, cost)]

    with torch.no_grad():
        parts = [forecast(model, graph, x) for x, _ in months.samples(range(12))]
    change = graph["grid"].gather(torch.cat(parts, dim=1), dst=0) * months.y_std
    say(
        f"\nloss {losses[0]:.3f} in the first step, {losses[-1]:.3f} in the last\n{cost.report()}\n"
    )
    if is_first():
        found = change.T.double().numpy()
        sst = climate.read(["sst"])["sst"]
        changes = {"network": found, "linear": climate.linear(), **baselines(sst)}
        print(errors(changes, partial(climate.rmse, starts=TEST)))
        draw(options.picture, data, owner, found, TEST[1])
        print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
