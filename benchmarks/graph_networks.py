"""PyG networks in one process and on ranks of one thread: ``python benchmarks/graph_networks.py``.

The script prints the time per step on nodes with edges from their 10 nearest neighbours. Processes
and ranks take turns.
"""

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from measuring import arguments, median, ratio, table
from scipy.spatial import cKDTree
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GraphSAGE

import varcomm as vc

NETWORKS = {
    "GraphSAGE": lambda: GraphSAGE(64, 64, 3),
    "GAT": lambda: GAT(64, 64, 3, heads=4, concat=False),
    "GCN": lambda: GCN(64, 64, 3),
}


def step(model, graph, is_split):
    """Make a training step; return its seconds."""
    begin = time.perf_counter()
    model.zero_grad()
    loss = model(graph.x, graph.edge_index).square().mean(dim=1)
    (graph.mean(loss) if is_split else loss.mean()).backward()
    if is_split:
        vc.data_parallel.sum_gradients(model)
    return time.perf_counter() - begin


def measure(rank, name, nodes, steps, is_split):
    """Return seconds of the steps after the first."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pos = torch.rand(nodes, 2)
    near = torch.from_numpy(cKDTree(pos).query(pos, 11)[1][:, 1:])
    edges = torch.stack([near.flatten(), torch.arange(nodes).repeat_interleave(10)])
    graph, model = Data(torch.randn(nodes, 64), edges), NETWORKS[name]()
    if is_split:
        graph = vc.graph.partition(graph)
        vc.graph.distribute(model, graph)
    step(model, graph, is_split)
    return [step(model, graph, is_split) for _ in range(steps)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    given = arguments(parser, nodes=200_000, ranks=2, rounds=3, steps=3)
    rows = []
    for name in given.networks:
        seconds = {False: [], True: []}
        for turn in range(given.rounds):
            for is_split in (False, True) if turn % 2 else (True, False):
                what = (name, given.nodes, given.steps, is_split)
                parts = vc.launch(measure, given.ranks if is_split else 1, *what, timeout=1800)
                seconds[is_split].append(max(median(part) for part in parts))
        one, many = median(seconds[False]), median(seconds[True])
        gain = ratio(seconds[False], seconds[True])
        rows.append([name, f"{one:.2f}", f"{many:.2f}", f"{gain:.2f}"])
    table(["network", "one process, s", f"{given.ranks} ranks, s", "one / ranks"], rows)


if __name__ == "__main__":
    main()
