"""The world ocean at 1/12 degree, 6.2 million nodes and 49 million edges, from pieces.

Run ``python benchmarks/etopo5.py etopo5.cdf.xz``. Every rank reads its band of latitudes and makes
the edges into its sea cells; ``from_edges`` builds the graph. The file is NOAA's relief of the
Earth in netCDF 3, from the data sets of PMEL's Ferret, in the public domain.
"""

import argparse
import os
import tempfile
from itertools import product
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from measuring import Measured, arguments, reset_peak, status, table
from sea import read_sea

import varcomm as vc


def band(is_sea, rows, first_id):
    """Return the edges into the sea cells of some rows, and the columns and rows of these cells."""
    # first_id is the id of the first sea cell in the previous row
    above = max(0, rows.start - 1)
    around = np.asarray(is_sea[above : rows.stop + 1])
    number = np.cumsum(around.reshape(-1), dtype=np.int64).reshape(around.shape) - 1 + first_id
    inner = slice(rows.start - above, rows.stop - above)
    edges = []
    for up, right in product((-1, 0, 1), repeat=2):
        if (up, right) != (0, 0):
            top, bottom = max(inner.start, -up), min(inner.stop, len(around) - up)
            source = np.roll(number[top + up : bottom + up], -right, axis=1)
            both = around[top:bottom] & np.roll(around[top + up : bottom + up], -right, axis=1)
            edges.append(torch.from_numpy(np.stack([source[both], number[top:bottom][both]])))
    row, column = np.nonzero(around[inner])
    pos = np.stack([column, row + rows.start], axis=1).astype(np.float32)
    return torch.cat(edges, dim=1), torch.from_numpy(pos)


def build(rank, path, ranks, method):
    torch.set_num_threads(1)
    reset_peak()
    is_sea = np.load(path, mmap_mode="r")
    cells = is_sea.sum(axis=1)
    # bands with about as many sea cells each
    ends = np.searchsorted(cells.cumsum(), np.arange(1, ranks + 1) * cells.sum() / ranks)
    stops = [*ends[:-1].tolist(), len(cells)]
    bands = [range(a, b) for a, b in zip([0, *stops[:-1]], stops, strict=True)]
    sizes = [int(cells[r.start : r.stop].sum()) for r in bands]
    rows = bands[rank]
    edges, pos = band(is_sea, rows, int(cells[: max(0, rows.start - 1)].sum()))
    before = status("VmHWM")
    with Measured() as cost:
        graph = vc.graph.from_edges(edges, sizes, node_attrs={"pos": pos}, method=method)
    with Measured() as exchange:
        graph.halo(graph.pos)
    own = graph.num_owned, graph.edges.num_owned, graph.num_halo
    return (*own, cost.wall, cost.cpu, cost.sent, exchange.sent, max(before, cost.high))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="etopo5.cdf or etopo5.cdf.xz")
    parser.add_argument("--method", choices=["block", "hilbert", "rcb"], default="block")
    options = arguments(parser, ranks=4)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/sea.npy"  # ranks map the file into memory
        np.save(path, read_sea(options.file))
        what = path, options.ranks, options.method
        parts = vc.launch(build, options.ranks, *what, timeout=1200)
    print(f"from_edges with {options.method} on {options.ranks} ranks")
    rows = [
        [
            *(rank, *(f"{n:,}" for n in part[:3]), *(f"{seconds:.1f}" for seconds in part[3:5])),
            *(*(f"{sent / 1e6:.2f}" for sent in part[5:7]), f"{part[7] / 1e9:.2f}"),
        ]
        for rank, part in enumerate(parts)
    ]
    columns = ["rank", "nodes", "edges", "halo", "s", "CPU s", "MB sent", "MB per exchange"]
    table([*columns, "peak GB"], rows)
    nodes, edges, memory = (sum(part[i] for part in parts) for i in (0, 1, 7))
    print(f"{nodes:,} nodes, {edges:,} edges; peak memory of all ranks {memory / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
