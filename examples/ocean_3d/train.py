"""Train a graph network on the ocean in three dimensions, on any number of ranks.

    torchrun --nproc-per-node 2 examples/ocean_3d/train.py

The network predicts the temperature at 19 depths from surface data. Each rank reads its part of the
data and makes its part of the graph. With --checkpoint, training resumes from a checkpoint, also on
another number of ranks.
"""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ocean import CHANNELS, DEPTHS, RESOLUTIONS, Fields, Ocean
from picture import draw
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data

import varcomm as vc
from varcomm.graph import PartitionedGraph
from varcomm.models import MeshGraphNet

sys.path.append(str(Path(__file__).parents[1]))
from common import Cost, Parser, say, training


def owners(ocean: Ocean, ranks: int) -> torch.Tensor:
    """Return the owner of each column; a column is never split between ranks."""
    surface = Data(edge_index=torch.from_numpy(ocean.edges), pos=torch.from_numpy(ocean.pos))
    return vc.graph.assign(surface, ranks, node_weight=torch.from_numpy(ocean.levels))


def on_ranks(ocean: Ocean, dtype: torch.dtype = torch.float32) -> tuple[PartitionedGraph, Fields]:
    """Return the graph and the fields; each rank reads and makes its own columns only."""
    world = vc.init()
    owner = owners(ocean, world.size)
    surface = Data(edge_index=torch.from_numpy(ocean.edges), num_nodes=len(owner))
    fields = Fields(ocean, vc.graph.partition(surface, method=owner))
    ids, nodes, edge_index, moved = fields.part(dtype)
    sizes = vc.ShardSizes.balanced(ocean.num_nodes, world.size)  # ranges of nodes
    of_nodes = owner.repeat_interleave(torch.from_numpy(ocean.levels))
    graph = vc.graph.from_edges(
        edge_index,
        sizes,
        node_attrs=nodes,
        edge_attrs={"edge_attr": moved},
        node_ids=ids,
        method=of_nodes.split(list(sizes))[world.rank],
    )
    return graph, fields


def new_model(options: argparse.Namespace) -> MeshGraphNet:
    """Return a model with equal weights on all ranks, which draw them from one seed."""
    torch.manual_seed(options.seed)
    model = MeshGraphNet(*CHANNELS, hidden_channels=options.hidden, num_blocks=options.blocks)
    if options.recompute:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def rate(step: int) -> float:
    """Return the factor of the learning rate; it does not depend on the number of steps."""
    return min((step + 1) / 20, 1.0) * 0.985**step


class Training:
    """The complete state of the training, which is independent of the number of ranks."""

    def __init__(self, graph: PartitionedGraph, options: argparse.Namespace) -> None:
        self.graph = graph
        self.model = vc.graph.distribute(new_model(options).to(graph.x.dtype), graph)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)
        self.losses: list[float] = []  # losses of the steps so far
        names = ("resolution", "levels", "hidden", "blocks")
        self.kind = {name: getattr(options, name) for name in names}

    def state(self) -> dict[str, Any]:
        """Return the content of a checkpoint."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "losses": self.losses,
            "kind": dict(self.kind),
        }

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint, saved on any number of ranks."""
        state = self.state()
        vc.checkpoint.load(state, folder)
        if state["kind"] != self.kind:  # otherwise a network trained on another grid would load
            raise vc.ArgumentError(f"{folder} is of {state['kind']}, and this is {self.kind}.")
        self.losses = state["losses"]

    def advance(self) -> float:
        """Make one step on the full graph; return the loss before the step."""
        graph = self.graph
        prediction = self.model(graph.x, graph.edge_index, graph.edge_attr)
        loss = graph.mean((prediction - graph.y).square(), graph.train)
        self.optimizer.zero_grad()
        loss.backward()
        vc.data_parallel.sum_gradients(self.model)
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.item())
        return self.losses[-1]

    def run(self, options: argparse.Namespace) -> Iterator[float]:
        """Train to the end, with checkpoints; return the loss of each step."""
        while len(self.losses) < options.steps:
            loss = self.advance()
            made = len(self.losses)
            if options.checkpoint and (made % options.every == 0 or made == options.steps):
                vc.checkpoint.save(self.state(), options.checkpoint)
            yield loss


def is_there(folder: Path) -> bool:
    """Return whether rank 0 finds the checkpoint; other machines may see new files later."""
    there = torch.tensor((folder / ".metadata").exists()) if vc.init().rank == 0 else None
    return bool(vc.broadcast(there))


def file_in_the_way(folder: Path | None) -> str | None:
    """Return the reason why no checkpoint can be saved in a folder, or None."""
    if folder is None or not folder.exists() or folder.is_dir():
        return None
    return f"argument --checkpoint: {str(folder)!r} is not a folder"


def print_errors(fields: Fields, prediction: np.ndarray) -> None:
    """Print the errors at some depths, and of all nodes below the surface; collective."""
    found = [fields.rmse(values) for values in (prediction, fields.fit, fields.level_mean())]
    depth = fields.ocean.depth
    say("RMSE in the test tiles, in deg C:\n   depth   network  linear fit  mean of the depth")
    for level in range(1, len(depth), 3):
        network, linear, mean = (errors[level] for errors, _ in found)
        say(f"{depth[level]:6.0f} m {network:9.2f} {linear:11.2f} {mean:18.2f}")
    network, linear, mean = (error for _, error in found)
    say(f"     all {network:9.2f} {linear:11.2f} {mean:18.2f}")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__, smoke={"resolution": 6, "levels": 8, "steps": 15, "hidden": 16})
    parser.add_argument(
        "--resolution",
        default=4,
        type=int,
        choices=RESOLUTIONS,
        metavar="N",
        help="grid spacing in degrees, a divisor of 180 (%(default)s)",
    )
    parser.add_argument(
        "--levels",
        default=DEPTHS,
        type=int,
        choices=range(2, DEPTHS + 1),
        metavar="N",
        help="number of depths, of 20 from the surface to 5000 m (%(default)s)",
    )
    parser.add_whole("--steps", 200, "training steps, including those before the checkpoint")
    parser.add_whole("--hidden", 32, "width of the network")
    parser.add_whole("--blocks", 4, "message-passing layers")
    parser.add_seed("the first weights")
    parser.add_argument(
        "--recompute",
        action="store_true",
        help="recompute each block in backward, which saves memory",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="folder of checkpoints; training resumes from a checkpoint there",
    )
    parser.add_whole("--every", 50, "training steps between checkpoints")
    parser.add_picture("out/ocean_3d.png")
    options = parser.parse(arguments)
    parser.require(lambda: file_in_the_way(options.checkpoint))
    return options


def main(arguments: list[str] | None = None) -> int:
    world = vc.init()
    options = parsed(arguments)
    ocean = Ocean(options.resolution, options.levels)
    graph, fields = on_ranks(ocean)
    say(f"{graph.report()}\n")
    run = Training(graph, options)
    if options.checkpoint and is_there(options.checkpoint):
        run.resume(options.checkpoint)
        say(f"going on from step {len(run.losses)}")

    cost = Cost()
    for _ in training(run.run(options), options.steps - len(run.losses), cost):
        pass
    if cost.seconds:
        say(f"\nloss {run.losses[-1]:.4f} in step {len(run.losses)}; {cost.report()}")
    with torch.no_grad():
        part = run.model(graph.x, graph.edge_index, graph.edge_attr)
    prediction = fields.celsius(part[:, 0].numpy())
    print_errors(fields, prediction)
    tables = [fields.gathered(table) for table in (fields.temperature, prediction)]
    _, rmse = fields.rmse(prediction)
    if world.rank == 0:
        draw(options.picture, ocean, owners(ocean, world.size).numpy(), *tables, rmse)
        print(f"picture: {options.picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
