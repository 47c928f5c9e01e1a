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


def pieces(rank, ranks, side, method):
    """Build from half of the rows of a grid on each rank; return the cost and the edges cut."""
    torch.set_num_threads(1)
    first, last = (side * at // ranks for at in (rank, rank + 1))
    sizes = [side * (r + 1) // ranks * side - side * r // ranks * side for r in range(ranks)]
    edges = grid(side, side, range(first, last))
    row, column = torch.meshgrid(torch.arange(first, last), torch.arange(side), indexing="ij")
    pos = torch.stack([row, column], -1).view(-1, 2).float()
    del row, column
    vc.graph.from_edges(edges[:, :0], sizes)  # imports, and the first messages
    with Measured() as cost:
        graph = vc.graph.from_edges(edges, sizes, node_attrs={"pos": pos}, method=method)
    return cost.wall, cost.high, len(graph.boundary)


def metis(rank, ranks, side):
    """Let METIS assign the nodes of the whole grid, as its users call it from Python."""
    import pymetis

    torch.set_num_threads(1)
    source, target = grid(side, side, range(side))
    first = torch.zeros(side * side + 1, dtype=torch.int64)
    with Measured() as cost:
        first[1:] = torch.bincount(target, minlength=side * side).cumsum(0)
        others = source[target.argsort(stable=True)]
        adjacency = pymetis.CSRAdjacency(first.numpy(), others.numpy())
        cut, _ = pymetis.part_graph(ranks, adjacency)
    return cost.wall, cost.high, 2 * cut


def cluster_data(rank, ranks, side):
    """Let PyG cut the whole grid into clusters."""
    from torch_geometric.loader import ClusterData

    torch.set_num_threads(1)
    data = Data(edge_index=grid(side, side, range(side)), num_nodes=side * side)
    with Measured() as cost:
        found = ClusterData(data, ranks, log=False).partition.partptr
    return cost.wall, cost.high, len(found)


def large(side, ranks):
    """Yield a line for each way to cut a grid that is too large to partition in seconds."""
    ways = [(f"from_edges, {method}", pieces, method) for method in ("block", "hilbert", "rcb")]
    for name, way, *more in [*ways, ("METIS alone", metis), ("ClusterData", cluster_data)]:
        count = ranks if way is pieces else 1
        try:
            parts = vc.launch(way, count, ranks, side, *more)
        except vc.LaunchError as error:
            yield [name, "", "", str(error).strip().splitlines()[-1][:60]]
            continue
        wall, high, cut = zip(*parts, strict=True)
        yield [name, f"{max(wall):.1f}", f"{sum(high) / 1e9:.1f}", f"{sum(cut):,}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options = arguments(
        parser, side=1000, ranks=8, nodes=20_000, weak=[2, 4, 8, 16], repeats=5, large=0
    )
    if options.large:
        print(f"{options.large**2:,} nodes with 8 neighbours, for 2 ranks; peaks with the edges")
        head = ["way", "s", "peak GB of all ranks", "edges between parts"]
        return table(head, list(large(options.large, 2)))
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
