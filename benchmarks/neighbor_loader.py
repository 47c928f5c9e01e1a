"""Batches per second of ``NeighborLoader``, beside PyG's loader in one process.

``python benchmarks/neighbor_loader.py`` samples from a random graph, in turns, on one thread per
rank. PyG's loader needs torch-sparse or pyg-lib; without both, its row is missing. A step is the
forward and backward of GraphSAGE with ``sum_gradients``, with batches that a thread samples ahead
(prefetch 1) and without (0).
"""

import argparse
import time
import warnings
from functools import partial
from itertools import islice
from statistics import median

import torch
import torch.distributed as dist
from measuring import arguments, slowest, spread, table, turns_of
from torch.nn.functional import cross_entropy
from torch_geometric import loader
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import varcomm as vc

CLASSES, HIDDEN = 10, 64


def data_of(options):
    torch.manual_seed(0)
    nodes, edges = options.nodes, torch.randint(options.nodes, (2, options.edges))
    x, y = torch.randn(nodes, options.features), torch.randint(CLASSES, (nodes,))
    return Data(x=x, y=y, edge_index=edges)


def forever(made):
    while True:
        yield from made


def of_pyg(data, options):
    """Return PyG's batches, or None if PyG cannot sample here."""
    warnings.simplefilter("ignore")
    settings = {"batch_size": options.batch, "shuffle": True}
    made = forever(loader.NeighborLoader(data, options.fan_outs, **settings))
    try:
        next(made)
    except ImportError:
        return None
    return made


def of_ranks(data, group, options, prefetch):
    """Return the batches of a partitioned graph, and its loader."""
    graph = vc.graph.partition(data, method=options.method, group=group)
    settings = {"batch_size": options.batch, "cache": options.cache, "prefetch": prefetch}
    made = vc.graph.NeighborLoader(graph, options.fan_outs, **settings)
    return forever(made), made


def seconds_of(batches, count, step=None):
    vc.all_reduce(torch.ones(1))
    begin = time.perf_counter()
    for batch in islice(batches, count):
        if step is not None:
            step(batch)
    return time.perf_counter() - begin


def measured(rank, options):
    """Return seconds by row and turn; the bytes and the report of a loader."""
    torch.set_num_threads(1)
    data, alone = data_of(options), dist.new_group([0])
    model = GraphSAGE(options.features, HIDDEN, len(options.fan_outs), CLASSES)

    def step(group, batch):
        model.zero_grad()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        cross_entropy(out, batch.y[: batch.batch_size]).backward()
        if group is None:
            vc.data_parallel.sum_gradients(model)

    made, world = {}, vc.init().size
    if rank == 0 and (pyg := of_pyg(data, options)):
        made["PyG, 1 process"] = 1, pyg, None
    for ranks, group in ((1, alone), (world, None)):
        if rank and group is not None:
            continue
        for prefetch in (0, 1):
            batches, one = of_ranks(data, group, options, prefetch)
            if not prefetch:
                made[f"varcomm, {ranks} ranks"] = ranks, batches, None
            name = f"step on {ranks} ranks, prefetch {prefetch}"
            made[name] = ranks, batches, partial(step, group)
    names = [[*made]]  # of rank 0, which has all rows
    dist.broadcast_object_list(names)
    seconds = {}
    for turn in range(options.turns + 1):
        for name in turns_of(names[0], turn):
            ranks, batches, each = made.get(name, (1, (), None))
            found = seconds_of(batches, options.count, each)
            if turn:  # the first touches the memory
                seconds.setdefault(name, (ranks, []))[1].append(found)
    batches, one = of_ranks(data, None, options, 0)
    with vc.trace() as calls:
        next(batches)
    return seconds, calls.total.sent, str(one.report())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="random", help="how the graph is partitioned")
    sizes = {"nodes": 200_000, "edges": 5_000_000, "features": 64, "batch": 1024}
    more = {"world": 2, "count": 5, "turns": 9, "cache": 0, "fan_outs": [15, 10, 5]}
    options = arguments(parser, **sizes, **more)
    of_each = vc.launch(measured, options.world, options, timeout=3600)
    rows, base = [], of_each[0][0].get("PyG, 1 process", (1, None))[1]
    for name, (ranks, own) in of_each[0][0].items():
        parts = [found[0][name][1] for found in of_each[:ranks]]
        each = slowest(parts)
        rate = ranks * options.count / median(each)
        against = spread([ranks * other for other in base], each) if base else "-"
        rows.append([name, f"{1e3 * median(each) / options.count:.0f}", f"{rate:.2f}", against])
        assert len(own) == options.turns
    rows.sort(key=lambda row: row[0])
    table(["batches of", "ms per batch", "batches/s", "of PyG's (quartiles)"], rows)
    _, sent, report = of_each[0]
    print(f"a batch on {options.world} ranks sends {sent / 1e6:.1f} MB per rank: {report}")


if __name__ == "__main__":
    main()
