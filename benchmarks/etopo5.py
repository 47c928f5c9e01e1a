"""The world ocean at 1/12 degree, 6.2 million nodes and 49 million edges, from pieces.

``python benchmarks/etopo5.py etopo5.cdf.xz``: every rank reads its band of latitudes, makes the
edges into its sea cells, and ``from_edges`` joins them. The file is NOAA's relief of the Earth in
netCDF 3, from the data sets of PMEL's Ferret, in the public domain.
"""

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from measuring import Measured, machine, peak, reset_peak, table
from relief import band, sea, unpacked

import varcomm as vc


def build(rank, path, ranks, method):
    torch.set_num_threads(1)
    reset_peak()
    is_sea = sea(path)
    cells = is_sea.sum(axis=1)
    # bands with about as many sea cells each
    ends = np.searchsorted(cells.cumsum(), np.arange(1, ranks + 1) * cells.sum() / ranks)
    stops = [*ends[:-1].tolist(), len(cells)]
    bands = [range(a, b) for a, b in zip([0, *stops[:-1]], stops, strict=True)]
    sizes = [int(cells[r.start : r.stop].sum()) for r in bands]
    rows = bands[rank]
    edges, pos = band(is_sea, rows, int(cells[: max(0, rows.start - 1)].sum()))
    del is_sea
    before = peak()
    with Measured() as cost:
        graph = vc.graph.from_edges(edges, sizes, node_attrs={"pos": pos}, method=method)
    with Measured() as exchange:
        graph.halo(graph.pos)
    own = graph.num_owned, graph.num_edges, graph.num_halo
    return (*own, cost.wall, cost.cpu, cost.sent, exchange.sent, max(before, cost.high))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="etopo5.cdf or etopo5.cdf.xz")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--method", choices=["block", "hilbert", "rcb"], default="block")
    options = parser.parse_args()
    print(machine(), end="\n\n")
    with tempfile.TemporaryDirectory() as folder:
        path = unpacked(options.file, folder)
        parts = vc.launch(build, options.ranks, path, options.ranks, options.method, timeout=1200)
    print(f"from_edges by {options.method} on {options.ranks} ranks")
    table(
        ["rank", "nodes", "edges", "halo", "s", "CPU s", "MB sent", "MB an exchange", "peak GB"],
        [
            [
                rank,
                *(f"{n:,}" for n in part[:3]),
                *(f"{seconds:.1f}" for seconds in part[3:5]),
                *(f"{sent / 1e6:.2f}" for sent in part[5:7]),
                f"{part[7] / 1e9:.2f}",
            ]
            for rank, part in enumerate(parts)
        ],
    )
    nodes, edges = (sum(part[i] for part in parts) for i in (0, 1))
    together = sum(part[7] for part in parts) / 1e9
    print(f"{nodes:,} nodes, {edges:,} edges; peak memory of all ranks together {together:.1f} GB")


if __name__ == "__main__":
    main()
