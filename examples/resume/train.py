"""Train on any number of ranks, from the last checkpoint if one exists.

    torchrun --nproc-per-node 3 examples/resume/train.py out/resume
    torchrun --nproc-per-node 2 examples/resume/train.py out/resume --steps 300

A graph network learns a field on a mesh from one node in ten. The checkpoint is independent of the
number of ranks, and the loss of every step equals the loss of one process.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import mesh
import torch
from history import History

import varcomm as vc
from varcomm.checkpoint import RowsById
from varcomm.graph import PartitionedGraph
from varcomm.models import MeshGraphNet

sys.path.append(str(Path(__file__).parents[1]))
from common import Cost, Parser, say


class Training:
    """The complete state of the training.

    It includes the mean of past predictions per node, which enters the loss, and a generator. Each
    rank draws noise for all nodes, so that a node gets the same values on any rank.
    """

    def __init__(self, graph: PartitionedGraph, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.graph = graph
        channels = graph.x.shape[1], graph.edge_attr.shape[1], graph.y.shape[1]
        self.model = MeshGraphNet(
            *channels, hidden_channels=options.hidden, num_blocks=options.blocks
        ).to(graph.x.dtype)
        vc.graph.distribute(self.model, graph)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / 20, 1.0) * 0.98 ** (step / 10)
        )
        self.draws = torch.Generator().manual_seed(options.seed)
        self.mean = torch.zeros_like(graph.y)
        self.step = 0

    def state(self) -> dict[str, Any]:
        """Return the content of a checkpoint; each rank holds the means of its own nodes."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "draws": self.draws,
            "mean": RowsById(self.mean, self.graph.owned_ids, self.graph.node_sizes.total),
            "step": self.step,
        }

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint, saved on any number of ranks."""
        state = self.state()
        vc.checkpoint.load(state, folder)
        self.step = state["step"]

    def advance(self) -> float:
        """Make one step on the full graph; return the loss before the step."""
        graph = self.graph
        nodes = graph.node_sizes.total
        noise = torch.randn(nodes, graph.x.shape[1], generator=self.draws, dtype=graph.x.dtype)
        x = graph.x + 0.02 * noise[graph.owned_ids]
        prediction = self.model(x, graph.edge_index, graph.edge_attr)
        loss = graph.mean((prediction - graph.y).square(), graph.known)
        loss = loss + 0.1 * graph.mean((prediction - self.mean).square())
        self.optimizer.zero_grad()
        loss.backward()
        vc.data_parallel.sum_gradients(self.model)
        self.optimizer.step()
        self.schedule.step()
        self.mean.lerp_(prediction.detach(), 0.1)
        self.step += 1
        return loss.item()


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__, smoke={"steps": 60, "every": 10, "side": 20})
    parser.add_argument("folder", type=Path, help="folder of the checkpoint")
    parser.add_whole("--steps", 150, "training steps")
    parser.add_whole("--every", 20, "training steps between checkpoints")
    parser.add_whole("--side", 60, "nodes along a side", least=4)
    parser.add_whole("--hidden", 16, "width of the network")
    parser.add_whole("--blocks", 2, "message-passing layers")
    parser.add_seed("all draws")
    parser.add_argument(
        "--async",
        dest="async_",
        action="store_true",
        help="save checkpoints while training continues",
    )
    parser.add_argument(
        "--history",
        type=Path,
        metavar="FILE",
        help="file to which events are appended, as lines of JSON",
    )
    return parser.parse(arguments)


def main(arguments: list[str] | None = None) -> int:
    world = vc.init(timeout=60)
    options = parsed(arguments)
    first = world.rank == 0
    graph = vc.graph.partition(mesh.load(options.side))
    training = Training(graph, options)
    # rank 0 looks, because other machines may see new files later
    there = torch.tensor((options.folder / "checkpoint.json").exists()) if first else None
    if vc.broadcast(there):
        training.resume(options.folder)

    def note(event: str, **facts: object) -> None:
        if first and options.history:
            History(options.history).note(event, **facts)

    own = torch.tensor([[os.getpid(), os.getppid()]])
    processes = vc.all_gather_v(own, [1] * world.size).tolist()
    note("start", step=training.step, ranks=world.size, processes=processes)
    say(f"from step {training.step} on {world.size} ranks, of {list(graph.node_sizes)} nodes")
    saving, cost = None, Cost()
    while training.step < options.steps:
        step = training.step
        with cost.step():
            loss = training.advance()
        note("step", step=step, loss=loss)
        if step % 10 == 0:
            say(f"step {step:4}  loss {loss:.6f}")
        if training.step % options.every == 0 or training.step == options.steps:
            note("save", step=training.step)
            saving = vc.checkpoint.save(training.state(), options.folder, async_=options.async_)
    if saving:
        saving.wait()
    if cost.seconds:
        report = cost.report()
        note("end", cost=report)
        say(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
