"""PyG networks in one process and on ranks of one thread: ``python benchmarks/graph_networks.py``.

The script prints the time per step on nodes with edges from their 10 nearest neighbours, on ranks
also with ``distribute(model, graph, overlap=True)``. Processes and ranks take turns.
"""

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from measuring import arguments, median, ratio, table, turns_of
from scipy.spatial import cKDTree
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, EdgeCNN, GraphSAGE

import varcomm as vc

NETWORKS = {
    "GraphSAGE": lambda: GraphSAGE(64, 64, 3),
    "GAT": lambda: GAT(64, 64, 3, heads=4, concat=False),
    "GCN": lambda: GCN(64, 64, 3),
    "EdgeCNN": lambda: EdgeCNN(64, 64, 3),
}

WAYS = ALONE, RANKS, OVERLAP = "one process", "ranks", "overlap"


def step(model, graph, is_split):
    """Make a training step; return its seconds."""
    begin = time.perf_counter()
    model.zero_grad()
    loss = model(graph.x, graph.edge_index).square().mean(dim=1)
    (graph.mean(loss) if is_split else loss.mean()).backward()
    if is_split:
        vc.data_parallel.sum_gradients(model)
    return time.perf_counter() - begin


def measure(rank, name, nodes, steps, ways):
    """Return seconds of the steps after the first, of each way."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pos = torch.rand(nodes, 2)
    near = torch.from_numpy(cKDTree(pos).query(pos, 11)[1][:, 1:])
    edges = torch.stack([near.flatten(), torch.arange(nodes).repeat_interleave(10)])
    graph, is_split = Data(torch.randn(nodes, 64), edges), ALONE not in ways
    if is_split:
        graph = vc.graph.partition(graph)
    models = {}
    for way in ways:
        torch.manual_seed(0)
        models[way] = NETWORKS[name]()
        if is_split:
            vc.graph.distribute(models[way], graph, overlap=way == OVERLAP)
    seconds = {way: [] for way in ways}
    for turn in range(steps + 1):
        for way in turns_of(ways, turn):
            taken = step(models[way], graph, is_split)
            if turn:  # the first touches the memory
                seconds[way].append(taken)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    given = arguments(parser, nodes=200_000, ranks=2, rounds=3, steps=3)
    rows = []
    for name in given.networks:
        seconds = {way: [] for way in WAYS}
        for turn in range(given.rounds):
            for ways in turns_of([WAYS[:1], WAYS[1:]], turn):
                what = (name, given.nodes, given.steps, ways)
                ranks = 1 if ALONE in ways else given.ranks
                parts = vc.launch(measure, ranks, *what, timeout=1800)
                for way in ways:
                    seconds[way].append(max(median(part[way]) for part in parts))
        times = [f"{median(seconds[way]):.2f}" for way in WAYS]
        gains = [f"{ratio(seconds[ALONE], seconds[way]):.2f}" for way in WAYS[1:]]
        rows.append([name, *times, *gains])
    columns = ["one process, s", f"{given.ranks} ranks, s", "with overlap, s"]
    table(["network", *columns, "one / ranks", "one / overlap"], rows)


if __name__ == "__main__":
    main()
