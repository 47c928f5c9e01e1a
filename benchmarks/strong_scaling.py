"""One process against two ranks, with one thread each.

``python benchmarks/strong_scaling.py etopo20.cdf.xz`` trains MeshGraphNet on the world ocean at 1/3
degree, 386,000 nodes. Runs of one process and of two ranks take turns. The file is NOAA's, as for
etopo5.py.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from measuring import Measured, arguments, median, reset_peak, table
from sea import ocean, read_sea

import varcomm as vc
from varcomm.models import MeshGraphNet


def sphere(file):
    """Return the graph of sea cells with 4 features, and edges to 8 neighbours with 3 features."""
    is_sea = read_sea(file)
    data = ocean(is_sea)
    x, y, z = data.pos.T[:, :, None]
    source, target = data.edge_index
    data.edge_attr = (data.pos[source] - data.pos[target]) * is_sea.shape[0]
    data.x = torch.cat([data.pos, (1 - z * z).clamp(min=0).sqrt()], dim=1)
    data.y = (3 * torch.atan2(y, x)).sin() * (2 * z * z - 1)
    return data


def train(rank, file, width, blocks, steps):
    """Return seconds of each step, peak memory, sent bytes per step, and the last loss."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    graph = vc.graph.partition(sphere(file))
    model = MeshGraphNet(4, 3, 1, hidden_channels=width, num_blocks=blocks)
    model = vc.graph.distribute(model, graph)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    costs = []
    reset_peak()
    for _ in range(steps):
        with Measured() as cost:
            optimizer.zero_grad()
            prediction = model(graph.x, graph.edge_index, graph.edge_attr)
            loss = graph.mean((prediction - graph.y) ** 2)
            loss.backward()
            vc.data_parallel.sum_gradients(model)
            optimizer.step()
        costs.append(cost)
    return [c.wall for c in costs], max(c.high for c in costs), costs[-1].sent, loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="etopo20.cdf or etopo20.cdf.xz")
    options = arguments(parser, width=64, blocks=4, steps=3, rounds=2)
    runs = {1: [], 2: []}
    what = options.file.absolute(), options.width, options.blocks, options.steps
    for _ in range(options.rounds):
        for ranks, parts in runs.items():
            parts += vc.launch(train, ranks, *what, timeout=1800)
    # the first step of a run warms up
    seconds = {n: median([s for part in parts for s in part[0][1:]]) for n, parts in runs.items()}
    memory = {n: max(part[1] for part in parts) for n, parts in runs.items()}
    rows = [
        [n, f"{seconds[n]:.2f}", f"{memory[n] / 1e9:.2f}", f"{sent / 1e6:.2f}", f"{loss:.6f}"]
        for n, ((*_, sent, loss), *_) in runs.items()
    ]
    table(["ranks", "s per step", "peak GB per rank", "MB sent per step", "last loss"], rows)
    print(
        f"two ranks are {seconds[1] / seconds[2]:.2f} times as fast as one process, and take "
        f"{memory[2] / memory[1]:.2f} of its memory each"
    )


if __name__ == "__main__":
    main()
