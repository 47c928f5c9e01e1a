"""Neighbours of atoms in a periodic box, found on ranks: ``python benchmarks/neighbours.py``.

The script times the search of edges, shifts and displacements; on ranks, halo and plan are
included. SciPy's tree, and vesin's cells if it is installed, search in one process. They and ranks
take turns, with one thread each. Times are of the slowest rank. CPU milliseconds are the time of
ranks with a core each.
"""

import argparse
import os
import time
from importlib.util import find_spec

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from measuring import arguments, median, slowest, table
from scipy.spatial import cKDTree
from torch_geometric.data import Data

import varcomm as vc


def by_scipy(pos, side, cutoff):
    """Search with a tree of the atoms, and a tree of their images beyond the borders."""
    atom, shift = np.arange(len(pos)), np.zeros((len(pos), 3), np.int32)
    for axis in range(3):
        x = pos[atom, axis] + shift[:, axis] * side
        for step, beyond in ((1, x < cutoff), (-1, x > side - cutoff)):
            moved = shift[: len(x)][beyond]
            moved[:, axis] += step
            atom, shift = np.r_[atom, atom[: len(x)][beyond]], np.r_[shift, moved]
    atom, shift = atom[len(pos) :], shift[len(pos) :]
    tree, images = (
        cKDTree(points, balanced_tree=False, compact_nodes=False)
        for points in (pos, pos[atom] + shift * side)
    )
    pairs = tree.query_pairs(cutoff, output_type="ndarray")
    near = tree.sparse_distance_matrix(images, cutoff, output_type="ndarray")
    target, image = near["i"], near["j"]
    away = pos.take(pairs[:, 0], 0) - pos.take(pairs[:, 1], 0)
    across = pos[atom[image]] + shift[image] * side - pos[target]
    edges = np.empty((2, 2 * len(pairs) + len(near)), np.int64)
    for way, rows in enumerate((pairs.T, pairs.T[::-1])):
        edges[:, way * len(pairs) : (way + 1) * len(pairs)] = rows
    edges[:, 2 * len(pairs) :] = atom[image], target
    shifts = np.zeros((edges.shape[1], 3), np.int32)
    shifts[2 * len(pairs) :] = shift[image]
    return edges, np.concatenate([away, -away, across]), shifts


def by_vesin(pos, side, cutoff):
    """Search with cell lists, in one thread."""
    import vesin

    search = vesin.NeighborList(cutoff=cutoff, full_list=True, n_threads=1)
    return search.compute(pos, np.eye(3) * side, True, "ijSD")


ALONE = {"SciPy": by_scipy}
if find_spec("vesin") is not None:
    ALONE["vesin"] = by_vesin


def measure(rank, way, atoms, neighbours, repeats):
    """Return seconds and CPU seconds of each repetition, edges and sent bytes of this rank."""
    torch.set_num_threads(1)
    side, cutoff = atoms ** (1 / 3), (neighbours * 3 / 4 / np.pi) ** (1 / 3)
    pos = np.random.default_rng(0).random((atoms, 3)) * side
    cell = torch.eye(3, dtype=torch.float64) * side
    ranks = vc.init()
    if way not in ALONE:
        points = torch.from_numpy(pos)
        owner = vc.graph.assign(Data(pos=points), ranks.size, "rcb")
        pos = points[owner == rank]
    seconds, cpu = [], []
    for _ in range(repeats + 1):
        found = None
        vc.all_reduce(torch.zeros(1))
        begin, began = time.perf_counter(), time.process_time()
        with vc.trace() as calls:
            if way in ALONE:
                found = ALONE[way](pos, side, cutoff)
            else:
                found = vc.graph.radius(pos, cutoff, cell=cell)
        seconds.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - began)
    edges = found.edges.num_owned if way not in ALONE else found[1].shape[0]
    return seconds[1:], cpu[1:], edges, calls.total.sent


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given = arguments(parser, atoms=100_000, neighbours=50, ranks=[1, 2, 4], rounds=3, repeats=5)
    ways = dict.fromkeys(ALONE, 1) | {f"{n} rank{'s' * (n > 1)}": n for n in given.ranks}
    seconds, cpu, more = {way: [] for way in ways}, {way: [] for way in ways}, {}
    for turn in range(given.rounds):
        for way in list(ways)[:: 1 if turn % 2 else -1]:
            what = (way, given.atoms, given.neighbours, given.repeats)
            found = vc.launch(measure, ways[way], *what, timeout=900)
            walls, cpus, edges, sent = zip(*found, strict=True)
            seconds[way] += slowest(walls)
            cpu[way] += slowest(cpus)
            more[way] = sum(edges), max(sent)
    assert len({edges for edges, _ in more.values()}) == 1, "all ways find the same edges"
    rows = []
    for way in ways:
        row = [way]
        for times, best in ((seconds, median), (seconds, min), (cpu, median)):
            alone = min(best(times[name]) for name in ALONE)
            row += [f"{1e3 * best(times[way]):.0f}", f"{alone / best(times[way]):.2f}"]
        rows.append([*row, f"{more[way][1] / 1e3:.0f}"])
    gain = "times as fast"
    columns = ["way", "median ms", gain, "least ms", gain, "CPU ms", gain, "KB sent"]
    table(columns, rows)


if __name__ == "__main__":
    main()
