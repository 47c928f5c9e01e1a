"""Data, graph and tensor parallelism together, on a mesh of ranks.

    torchrun --nproc-per-node 4 examples/three_ways/train.py --mesh 1x2x2 2x2x1

A mesh has ``data x graph x tensor`` ranks. Along the first dimension ranks have different samples,
along the second different nodes, along the third different heads and features. The sizes need not
divide anything. The losses equal those of one process, which the picture shows.
"""

import argparse
import copy
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import plate
import torch
from mesh import DIMENSIONS, compact, named, new_mesh, own, sizes_of
from picture import Part, draw
from torch.distributed.device_mesh import DeviceMesh
from torch_geometric.data import Data

import varcomm as vc
from varcomm.graph import PartitionedGraph
from varcomm.models import GraphTransformer
from varcomm.tensor_parallel import parallelize, shard_spec

sys.path.append(str(Path(__file__).parents[1]))
from command_line import positive
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


def new_model(options: argparse.Namespace) -> GraphTransformer:
    """Return a model with equal weights on all ranks, which draw them from one seed."""
    torch.manual_seed(options.seed)
    return GraphTransformer(
        *(1, 3, 1),
        hidden_channels=8 * options.heads,
        num_blocks=options.blocks,
        num_heads=options.heads,
        mlp_channels=options.wide,
    )


def squared_error(
    model: torch.nn.Module, part: Data | PartitionedGraph, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Return the squared error of each node and sample, (n, samples, 1)."""
    return (x + model(x, part.edge_index, part.edge_attr) - y).square()


def fit(
    model: torch.nn.Module,
    loss: Callable[[torch.Tensor], torch.Tensor],
    complete_gradients: Callable[[], None],
    options: argparse.Namespace,
    steps: int,
) -> Iterator[torch.Tensor]:
    """Train on batches of samples; yield the loss of each step.

    `loss` returns this rank's part, and `complete_gradients` sums the gradients of all ranks.
    """
    draws = torch.Generator().manual_seed(options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=1e-2)
    schedule = one_cycle(optimizer, options.rate, steps, rise=0.3)
    for _ in range(steps):
        batch = torch.randperm(options.samples, generator=draws)[: options.batch]
        optimizer.zero_grad()
        value = loss(batch)
        value.backward()
        complete_gradients()
        yield value.detach()
        optimizer.step()
        schedule.step()


def spread(model: GraphTransformer, data: Data, mesh: DeviceMesh) -> PartitionedGraph:
    """Shard the heads and features of a model, then distribute it on the graph."""
    parallelize(model, model.tensor_parallel_plan(mesh["tensor"]), group=mesh["tensor"])
    graph = vc.graph.partition(data, group=mesh["graph"])
    vc.graph.distribute(model, graph)
    return graph


def fit_on_mesh(
    model: GraphTransformer,
    graph: PartitionedGraph,
    mesh: DeviceMesh,
    options: argparse.Namespace,
    steps: int,
) -> Iterator[float]:
    """Train with a model and a graph that are sharded over a mesh."""

    def loss(batch: torch.Tensor) -> torch.Tensor:
        mine = own(batch, mesh)
        errors = squared_error(model, graph, graph.x[:, mine], graph.y[:, mine])
        return graph.sum(errors) / (options.nodes * len(batch))  # the part of these samples

    def complete_gradients() -> None:
        # sharded weights too: along these dimensions, ranks hold copies
        vc.data_parallel.sum_gradients(model, mesh["graph"])
        vc.data_parallel.sum_gradients(model, mesh["data"])

    for part in fit(model, loss, complete_gradients, options, steps):
        yield vc.all_reduce(part, group=mesh["data"]).item()


def fit_alone(
    model: GraphTransformer, data: Data, options: argparse.Namespace, steps: int
) -> Iterator[float]:
    """Train in one process, without varcomm."""

    def loss(batch: torch.Tensor) -> torch.Tensor:
        return squared_error(model, data, data.x[:, batch], data.y[:, batch]).mean()

    for value in fit(model, loss, lambda: None, options, steps):
        yield value.item()


@torch.no_grad()
def held_out_error(
    model: GraphTransformer, graph: PartitionedGraph, mesh: DeviceMesh, nodes: int
) -> float:
    """Return the mean squared error on held-out samples, which are shared between replicas."""
    samples = torch.arange(graph.test_x.shape[1])
    mine = own(samples, mesh)
    errors = squared_error(model, graph, graph.test_x[:, mine], graph.test_y[:, mine])
    total = vc.all_reduce(graph.sum(errors), group=mesh["data"])
    return total.item() / (nodes * len(samples))


def whole_gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the full gradients of all parameters."""
    found = []
    for parameter in model.parameters():
        spec = shard_spec(parameter)
        found.append(parameter.grad.clone() if spec is None else spec.gather(parameter.grad))
    return found


def record(model: torch.nn.Module, losses: Iterator[float]) -> Record:
    """Run a training; return its losses, and the full gradients of its first step."""
    first = next(losses)
    gradients = whole_gradients(model)
    return [first, *losses], gradients


def compare(
    data: Data, mesh: DeviceMesh, options: argparse.Namespace, dtype: torch.dtype
) -> tuple[float, float]:
    """Return the differences of some steps on a mesh from one process."""
    model = new_model(options).to(dtype)
    data = data.clone().apply(lambda x: x.to(dtype) if x.is_floating_point() else x)

    def on_ranks() -> Record:
        together = copy.deepcopy(model)
        graph = spread(together, data, mesh)
        return record(together, fit_on_mesh(together, graph, mesh, options, options.check))

    def alone() -> Record:
        single = copy.deepcopy(model)
        return record(single, fit_alone(single, data, options, options.check))

    return differences(on_ranks, alone)


def parts_of(graph: PartitionedGraph, mesh: DeviceMesh, options: argparse.Namespace) -> list[Part]:
    """Return the part of each rank of the mesh, in rank order."""
    sizes, at = [mesh[name].size() for name in DIMENSIONS], mesh.get_coordinate()
    shared = ((options.batch, 0), (options.heads, 2), (options.wide, 2))
    ranges = [vc.ShardSizes.balanced(n, sizes[d]).range(at[d]) for n, d in shared]
    part = (tuple(at), graph.owned_ids.numpy(), graph.num_halo, *ranges)
    found = [part] * math.prod(sizes)
    torch.distributed.all_gather_object(found, part)
    return [Part(*part) for part in found]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__, smoke={"side": 10, "steps": 8, "samples": 16})
    parser.add_argument(
        "--mesh",
        type=sizes_of,
        nargs="+",
        metavar="DxGxT",
        help="data x graph x tensor ranks; the product is the number of ranks; several layouts "
        "are trained in turn (as equal as possible)",
    )
    parser.add_whole("--steps", 100, "training steps")
    parser.add_whole("--side", 24, "nodes along a side of the plate", least=2)
    parser.add_whole("--samples", 64, "training samples")
    parser.add_whole("--batch", 9, "samples per step")
    parser.add_whole("--heads", 5, "attention heads of 8 features")
    parser.add_whole("--wide", 131, "features between the wide layers")
    parser.add_whole("--blocks", 3, "blocks of the transformer")
    parser.add_argument(
        "--rate", type=float, default=1e-2, metavar="X", help="learning rate (%(default)s)"
    )
    parser.add_seed("all draws")
    parser.add_argument(
        "--check",
        type=positive,
        nargs="?",
        const=20,
        metavar="N",
        help="compare N steps (20) with one process, in double precision",
    )
    parser.add_picture("out/three_ways.png")
    options = parser.parse(arguments)
    ranks = vc.init().size
    options.mesh = options.mesh or [compact(ranks)]
    for sizes in options.mesh:
        if math.prod(sizes) != ranks:
            parser.error(f"argument --mesh: {named(sizes)} are not {ranks} ranks")
    if options.batch > options.samples:
        parser.error(f"argument --batch: need at most {options.samples}, got {options.batch}")
    options.nodes = options.side**2
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    data = plate.load(options.side, options.samples, 16)
    say(f"{data.num_nodes:,} nodes, {data.num_edges:,} edges, {options.samples} samples")
    curves: dict[str, list[float]] = {}
    errors, parts = {}, []
    for sizes in options.mesh:
        mesh = new_mesh(sizes)
        model, cost = new_model(options), Cost()
        graph = spread(model, data, mesh)
        name = named(sizes)
        say(f"\n{name} ranks (data x graph x tensor)")
        parts.append(parts_of(graph, mesh, options))
        for rank, part in enumerate(parts[-1]):
            say(f"  rank {rank}: {part}")
        losses = fit_on_mesh(model, graph, mesh, options, options.steps)
        curves[name] = list(training(losses, options.steps, cost))
        errors[f"model on {name}"] = held_out_error(model, graph, mesh, options.nodes)
        say(cost.report())

    if is_first():
        print("\nthe same in one process, while the other ranks wait")
        model = new_model(options)
        losses = fit_alone(model, data, options, options.steps)
        alone = list(training(losses, options.steps, Cost()))
        with torch.no_grad():
            error = squared_error(model, data, data.test_x, data.test_y).mean().item()
        errors["model in one process"] = error
        known = plate.baselines(data)
        print("root mean squared error on samples held out:")
        for name, error in (errors | known).items():
            print(f"  {math.sqrt(error):.4f}  {name}")
        draw(options.picture, data.pos.numpy(), parts, alone, curves, known)
        print(f"picture: {options.picture}")
    torch.distributed.barrier()
    passed = True
    for sizes in options.mesh if options.check else []:
        say(f"\n{options.check} steps on {named(sizes)} ranks and in one process:")
        mesh = new_mesh(sizes)
        passed &= one_answer(lambda dtype, mesh=mesh: compare(data, mesh, options, dtype))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
