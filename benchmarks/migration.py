"""Migration of 1 % of the rows beside builds of the same graph: ``python benchmarks/migration.py``.

The graph is a grid with 8 neighbours, 8 floats per node and 3 per edge, cut into bands. Rows at the
borders change their rank. Three builds are compared: ``partition`` with METIS, ``partition`` with
given owners, and ``from_edges`` with given owners.
"""

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from graph_build import grid
from measuring import arguments, median, ms, ratio, slowest, table
from torch_geometric.data import Data

import varcomm as vc


def seconds(call):
    vc.all_reduce(torch.zeros(1))  # ranks start together
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def measure(rank, side, ranks, share, rounds):
    """Return seconds of three builds, a migration and a transfer, in turns, and the moved nodes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    nodes = side * side
    first = torch.arange(nodes) * ranks // nodes
    moved = torch.arange(nodes) + int(share * nodes / (ranks - 1))  # the bands shift
    later = (moved * ranks // nodes).clamp(max=ranks - 1)
    sizes = first.bincount(minlength=ranks).tolist()
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    data = Data(torch.rand(nodes, 8), grid(side, side, range(side)))
    data.edge_attr = torch.rand(data.num_edges, 3)
    here = (first[data.edge_index[1]] == rank).nonzero().view(-1)
    edges, edge_attr, x = data.edge_index[:, here], data.edge_attr[here], data.x[mine]
    old = vc.graph.partition(data, method=first)
    owner, found = later[old.owned_ids], []
    rows = {"node_attrs": {"x": x}, "edge_attrs": {"edge_attr": edge_attr}}
    for _ in range(rounds):
        times = []
        for call in (
            lambda: vc.graph.partition(data, method="metis"),
            lambda: vc.graph.partition(data, method=later),
            lambda: vc.graph.from_edges(edges, sizes, method=later[mine], **rows),
            lambda: old.migrate(owner),
        ):
            took, new = seconds(call)
            times.append(took)
        move = vc.graph.transfer(old, new)
        times.append(seconds(lambda move=move: move(old.x))[0])
        found.append(times)
    return found, int((owner != rank).sum())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given = arguments(parser, side=700, ranks=[2, 4], share=0.01, rounds=5)
    rows = []
    for ranks in given.ranks:
        parts = vc.launch(measure, ranks, given.side, ranks, given.share, given.rounds)
        turns = [slowest([[times[i] for times in part] for part, _ in parts]) for i in range(5)]
        moved = sum(count for _, count in parts)
        shares = [f"{ratio(turns[3], turns[i]):.3f}" for i in range(3)]
        rows.append([ranks, f"{moved:,}", *ms(*map(median, turns), digits=0), *shares])
    print(f"{given.side**2:,} nodes, 8 neighbours each; {100 * given.share:g} % of the rows move")
    table(
        [
            *("ranks", "moved nodes", "METIS, ms", "partition, ms", "from_edges, ms"),
            *("migrate, ms", "transfer of x, ms", "migrate / METIS"),
            *("migrate / partition", "migrate / from_edges"),
        ],
        rows,
    )


if __name__ == "__main__":
    main()
