"""A moving front on a mesh that is refined around the front and rebalanced over all ranks.

    torchrun --nproc-per-node 2 examples/adaptive/train.py

The program solves Nagumo's equation, u' = D lap(u) + 4 r u (1 - u) (u - 0.2), with finite volumes.
Every 20 steps it refines and merges cells, transfers u without loss, and migrates cells until the
ranks are balanced.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import mesh
import torch
from common import Cost, Parser, is_first, say
from picture import draw
from torch import Tensor
from torch.distributed import ProcessGroup, new_group
from torch_geometric.data import Data

import varcomm as vc
from varcomm.graph import PartitionedGraph

COARSEST, FIRST = 3, 5  # levels
WIDTH = 0.02  # width of the front, sqrt(D / r), for a square of side 1
History = list[dict[str, float]]


def partition(
    cells: Tensor, finest: int, group: ProcessGroup | None, method: str | Tensor
) -> PartitionedGraph:
    """Return the rank's part of the graph of cells, with faces, areas and centres."""
    edge_index, weight = mesh.faces(cells, finest)
    side = 2.0 ** -cells[:, 0].double()
    pos = (cells[:, 1:] + 0.5) * side[:, None]
    data = Data(edge_index=edge_index, pos=pos, area=side**2, edge_weight=weight.double())
    return vc.graph.partition(data, group, method)


def initial(graph: PartitionedGraph) -> Tensor:
    distance = (graph.pos - torch.tensor([0.35, 0.4])).norm(dim=1)
    return torch.sigmoid((0.08 - distance) / WIDTH)


def step(graph: PartitionedGraph, u: Tensor, finest: int) -> Tensor:
    """Make one explicit step of flow through faces and growth; time is in units of 1 / r."""
    time = 0.2 * (0.5**finest / WIDTH) ** 2
    source, target = graph.edges.local_ids
    flow = graph.edge_weight * (graph.with_halo(u)[source] - u[target])
    inflow = torch.zeros_like(u).index_add(0, target, flow)
    return u + time * (WIDTH**2 * inflow / graph.area + 4 * u * (1 - u) * (u - 0.2))


def adapt(
    graph: PartitionedGraph, cells: Tensor, u: Tensor, finest: int, history: History
) -> tuple[PartitionedGraph, Tensor, Tensor]:
    """Refine around the front and balance the ranks; return the graph, the cells and u."""
    group = graph.group.process_group
    is_front = ((u - 0.5).abs() < 0.49).double()
    source, target = graph.edges.local_ids
    near = is_front.index_add(0, target, graph.with_halo(is_front)[source])
    # every rank has the integers of all cells, but only its part of the field
    wanted, rank_of = graph.gather(near > 0), graph.gather(torch.full_like(near, graph.group.rank))
    cells, parents = mesh.adapted(cells, wanted, COARSEST, finest)
    fine = partition(cells, finest, group, rank_of[parents[:, 0]].long())
    carry = vc.graph.remap(graph, fine, parents[fine.owned_ids], conserve=True)
    u = carry(u * graph.area) / fine.area
    even = vc.graph.rebalance(fine, torch.ones(fine.num_owned))
    move = vc.graph.transfer(fine, even)
    came = sum(move.plan.recv_counts) - move.plan.recv_counts[even.group.rank]
    moved = vc.all_reduce(torch.tensor([came]), group=group)
    before, after = (max(g.node_sizes) * even.group.size / len(cells) for g in (fine, even))
    history.append({"cells": len(cells), "before": before, "after": after, "moved": int(moved)})
    return even, cells, move(u)


def run(
    finest: int, steps: int, group: ProcessGroup | None, cost: Cost
) -> tuple[PartitionedGraph, Tensor, Tensor, History]:
    """Return the last graph, its cells, u, and the history of adaptations."""
    cells, history = mesh.uniform(FIRST), History()
    graph = partition(cells, finest, group, "rcb")
    for _ in range(finest - FIRST):
        graph, cells, _ = adapt(graph, cells, initial(graph), finest, [])
    u = initial(graph)
    for number in range(steps):
        with cost.step():
            if number % 20 == 0:
                graph, cells, u = adapt(graph, cells, u, finest, history)
            u = step(graph, u, finest)
    return graph, cells, u, history


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(__doc__, smoke={"finest": 6, "steps": 41})
    parser.add_whole("--finest", 7, "level of the smallest cells: their side is 2^-N", least=FIRST)
    parser.add_whole("--steps", 800, "time steps")
    parser.add_picture("out/adaptive.png")
    parser.add_check()
    options = parser.parse(arguments)

    cost = Cost()
    graph, cells, u, history = run(options.finest, options.steps, None, cost)
    say("adaptation   cells   largest part / mean, before and after   moved cells")
    for number, row in enumerate(history):
        if number % max(1, len(history) // 10) == 0:
            say(
                f"{number:10} {row['cells']:7,} {row['before']:27.3f} {row['after']:9.3f}"
                f" {row['moved']:13,} ({row['moved'] / row['cells']:.1%})"
            )
    say(cost.report())
    owner = graph.gather(torch.full((graph.num_owned,), graph.group.rank), dst=0)
    values = graph.gather(u, dst=0)
    if is_first():
        draw(options.picture, cells.numpy(), owner.numpy(), values.numpy(), history)
        say(f"picture: {options.picture}")
    if not options.check:
        return 0

    say("\nthe same on ranks and in one process:")
    error, first = None, new_group([0])
    if is_first():
        _, others, alone, _ = run(options.finest, options.steps, first, Cost())
        same = torch.equal(cells, others)
        error = torch.tensor([(values - alone).abs().max().item() if same else torch.inf])
    worst = vc.broadcast(error).item()
    say(f"  the largest difference of u is {worst:.1e} (allowed 1e-10)")
    say("one answer" if worst <= 1e-10 else "NOT one answer")
    return 0 if worst <= 1e-10 else 1


if __name__ == "__main__":
    sys.exit(main())
