"""Seconds, memory and bytes of building a partitioned graph: ``python benchmarks/graph_build.py``.

Ranks share the cores of the machine. CPU seconds are the time of a rank on a core of its own.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from measuring import Measured, arguments, median, table
from torch_geometric.data import Data

import varcomm as vc

NEIGHBOURS = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)]


def grid(rows, columns, own, around=False):
    """Return edges into the nodes of `own` rows of a grid with 8 neighbours."""
    row = torch.arange(own.start, own.stop)[:, None]
    column = torch.arange(columns)
    edges = []
    for up, right in NEIGHBOURS:
        above, beside = (row + up) % rows, (column + right) % columns
        source, target = above * columns + beside, row * columns + column
        inside = (column + right == beside) & ((row + up == above) | around)
        edges.append(torch.stack([source[inside], target[inside]]))
    return torch.cat(edges, dim=1)


def blocks(rows, columns, ranks):
    """Return the rank of each node: blocks that are as square as possible."""
    down = max(n for n in range(1, int(ranks**0.5) + 1) if ranks % n == 0)
    across = ranks // down
    row, column = torch.arange(rows) * down // rows, torch.arange(columns) * across // columns
    return (row[:, None] * across + column).reshape(-1)


def build(rank, side, ranks, repeats):
    """Partition a grid that every rank has, with given owners."""
    torch.set_num_threads(1)
    data = Data(edge_index=grid(side, side, range(side)), num_nodes=side * side)
    owner = blocks(side, side, ranks)
    costs = []
    for _ in range(repeats):
        with Measured() as cost:
            graph = vc.graph.partition(data, method=owner)
        costs.append(cost)
    ids = 2 * graph.edges.num_owned + graph.num_owned + graph.num_halo
    return (
        median([cost.wall for cost in costs]),
        median([cost.cpu for cost in costs]),
        max(cost.rise for cost in costs),
        kept(graph) / (8 * ids),
    )


def kept(graph):
    """Return the bytes of the local graph and its plan, including the order of sums."""
    tensors = [graph.edge_index, graph.halo_ids, graph.plan.send_index]
    tensors += [graph.edges.ids, graph.nodes.ids]
    tensors += graph.plan.routes.bags
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def weak(rank, ranks, nodes, repeats):
    """Build from edges that each rank makes for its rows; no rank has the full graph."""
    torch.set_num_threads(1)
    columns = 200
    rows = nodes // columns
    own = range(rank * rows, (rank + 1) * rows)
    edges = grid(rows * ranks, columns, own, around=True)  # so that all ranks have two neighbours
    sizes = [rows * columns] * ranks
    x = torch.zeros(rows * columns, 8)
    costs = []
    for _ in range(repeats):
        with Measured() as cost:
            graph = vc.graph.from_edges(edges, sizes, node_attrs={"x": x})
        costs.append(cost)
    with Measured() as exchange:
        for _ in range(10):
            graph.halo(x)
    return (
        median([cost.cpu for cost in costs]),
        costs[-1].sent,
        kept(graph),
        exchange.sent // 10,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options = arguments(parser, side=1000, ranks=8, nodes=20_000, weak=[2, 4, 8, 16], repeats=5)
    side, ranks = options.side, options.ranks
    print(f"partition({side} x {side} grid, 8 neighbours, method=given), {ranks} ranks")
    parts = vc.launch(build, ranks, side, ranks, options.repeats)
    table(
        ["rank", "s", "CPU s", "peak MB", "bytes / (2 edges + owned + halo) ids"],
        [
            [rank, f"{wall:.2f}", f"{cpu:.2f}", f"{peak / 1e6:.0f}", f"{share:.2f}"]
            for rank, (wall, cpu, peak, share) in enumerate(parts)
        ],
    )

    print(f"from_edges, {options.nodes:,} nodes per rank: the worst rank")
    rows = []
    for count in options.weak:
        parts = vc.launch(weak, count, count, options.nodes, options.repeats)
        cpu, sent, memory, exchange = (max(column) for column in zip(*parts, strict=True))
        rows.append([count, f"{cpu:.3f}", f"{sent:,}", f"{memory:,}", f"{exchange:,}"])
    table(["ranks", "CPU s", "bytes sent", "bytes kept", "bytes per exchange"], rows)


if __name__ == "__main__":
    main()
