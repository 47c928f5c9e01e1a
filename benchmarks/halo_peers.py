"""A training step of MeshGraphNet beside the halo exchanges of other libraries.

``python benchmarks/halo_peers.py --world 3`` trains on a grid whose columns are split unevenly. The
unmodified model runs under `varcomm.graph.distribute`. A loop over its blocks in plain torch runs
with each exchange, and is the model of the other libraries; ways that do not run say why. Once more
with varcomm's exchange, it computes edges between own nodes while the halo travels. Losses and
gradients of all ways are compared first. Time is of the slowest rank, in turns. Bytes are those
that the loopback device carries, with the headers of TCP; memory is the peak of the tensors of a
step. ``pip install --no-deps -r benchmarks/peers.txt`` installs the other libraries.
"""

import argparse
import time
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from measuring import arguments, median, ms, peak_of_tensors, slowest, spread, table, turns_of
from suite.layers import grid, halo_of, run_block
from suite.peers import HALOS, CannotError, versions

import varcomm as vc
from varcomm.cli.workload import shard_sizes
from varcomm.data_parallel import sum_gradients
from varcomm.models import MeshGraphNet

OURS = "varcomm"


def by_hand(model, fetch, rows, edge_index, x, edge_attr):
    """Run the model's modules; `fetch` returns features of own nodes and of the halo at `rows`."""
    source, target = rows[edge_index[0]], edge_index[1]
    x, edge_attr = model.node_encoder(x), model.edge_encoder(edge_attr)
    for block in model.blocks:
        x, edge_attr = run_block(block, fetch, source, target, x, edge_attr)
    return model.decoder(x)


def interior_first(model, graph, x, edge_attr):
    """Run the model's modules; edges between own nodes are computed while the halo travels."""
    source, target = graph.edge_index.plain
    parts = graph.interior, graph.boundary
    sources, targets = [source[part] for part in parts], [target[part] for part in parts]
    sources[1] = sources[1] - graph.num_owned
    x, edge_attr = model.node_encoder(x), model.edge_encoder(edge_attr)
    edge_attrs = [edge_attr[part] for part in parts]
    for block in model.blocks:
        of_sources, of_targets = block.from_source(x), block.from_target(x)
        handle, received = graph.plan.start(of_sources), torch.zeros_like(x)
        for place, (rows, at) in enumerate(zip(sources, targets, strict=True)):
            if place:
                of_sources = handle.wait()
            mixed = of_targets.index_select(0, at) + of_sources.index_select(0, rows)
            mixed = mixed + block.from_edge(edge_attrs[place])
            edge_attrs[place] = edge_attrs[place] + block.edge_mlp(mixed)
            received = received.index_add(0, at, edge_attrs[place])
        x = x + block.node_mlp(torch.cat([x, received], dim=1))
    return model.decoder(x)


def step(model, graph, forward, target):
    """Return the loss of a training step; gradients are summed over ranks."""
    model.zero_grad()
    loss = graph.mean((forward() - target).square())
    loss.backward()
    sum_gradients(model)
    return loss.detach()


def ways_of(options):
    """Return steps and models by name, and the reasons of those that do not run."""
    rank, world = dist.get_rank(), dist.get_world_size()
    columns = shard_sizes("even", options.columns, world)
    sizes = [options.height * count for count in columns]
    edges = grid(options.columns, options.height)
    first = sum(sizes[:rank])
    into = ((edges[1] >= first) & (edges[1] < first + sizes[rank])).nonzero().view(-1)
    graph = vc.graph.from_edges(edges[:, into], sizes)
    torch.manual_seed(0)
    x, y = torch.randn(sum(sizes), 4)[graph.owned_ids], torch.randn(sum(sizes), 1)[graph.owned_ids]
    edge_attr = torch.randn(edges.shape[1], 3)[into]
    layout = halo_of(graph, sizes, options.width, x.dtype, x.device)
    ways, cannot = {}, {}

    def add(name, forward_of):
        torch.manual_seed(0)
        sizes_of_model = {"hidden_channels": options.width, "num_blocks": options.blocks}
        model = MeshGraphNet(4, 3, 1, **sizes_of_model)
        ways[name] = partial(step, model, graph, forward_of(model), y), model

    def distributed(model, overlap=False):
        vc.graph.distribute(model, graph, overlap=overlap)
        return lambda: model(x, graph.edge_index, edge_attr)

    def looped(fetch, rows, model):
        return lambda: by_hand(model, fetch, rows, graph.edge_index.plain, x, edge_attr)

    add(OURS, distributed)
    add(f"{OURS}, overlap=True", partial(distributed, overlap=True))
    here = torch.arange(graph.num_owned + graph.num_halo)
    add("varcomm's exchange in the loop", partial(looped, graph.with_halo, here))
    add(
        "the same, interior edges first",
        lambda model: partial(interior_first, model, graph, x, edge_attr),
    )
    for name, halo in HALOS.items():
        try:
            add(name, partial(looped, *halo(layout, graph.halo_ids)))
        except CannotError as error:
            cannot[name] = str(error)
    return ways, cannot, sizes


def check(ways):
    """Compare losses and gradients with the first way, in fp32."""
    first = None
    for name, (run, model) in ways.items():
        values = [run(), *(parameter.grad for parameter in model.parameters())]
        first = first or values
        for value, expected in zip(values, first, strict=True):
            far = (value - expected).abs().max()
            assert far <= 1e-4 * expected.abs().max() + 1e-6, f"{name} differs by {far}"


def carried():
    """Return the bytes that the loopback device has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(
        int(line.split(":")[1].split()[8]) for line in lines if line.split(":")[0].strip() == "lo"
    )


def measured(rank, options):
    """Return seconds, bytes per rank and peaks by name, and the reasons of ways that do not run."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*deprecated", FutureWarning)  # of torch.distributed.nn
    ways, cannot, sizes = ways_of(options)
    check(ways)
    seconds = {name: [] for name in ways}
    for turn in range(options.turns + 1):
        for name in turns_of(ways, turn):
            dist.barrier()
            begin = time.perf_counter()
            ways[name][0]()
            if turn:  # the first touches the memory
                seconds[name].append(time.perf_counter() - begin)
    sent, peaks = {}, {}
    for name, (run, _) in ways.items():
        dist.barrier()
        begin = carried()
        for _ in range(options.count):
            run()
        dist.barrier()
        sent[name] = (carried() - begin) / options.count / len(sizes)
        peaks[name] = peak_of_tensors(run)
    return seconds, sent, peaks, cannot, sizes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"columns": 301, "height": 100, "width": 64, "blocks": 4}
    options = arguments(parser, world=2, turns=9, count=3, **sizes)
    of_ranks = vc.launch(measured, options.world, options, timeout=1800)
    _, sent, _, cannot, sizes = of_ranks[0]
    print(", ".join(f"{name} {version}" for name, version in versions().items()))
    print(f"nodes per rank: {sizes}", end="\n\n")
    seconds = {name: slowest([found[0][name] for found in of_ranks]) for name in sent}
    rows = []
    for name, each in seconds.items():
        peak = max(found[2][name] for found in of_ranks)
        times = [*ms(median(each), digits=0), spread(each, seconds[OURS])]
        rows.append([name, *times, f"{sent[name] / 1e6:.2f}", f"{peak / 1e6:.0f}"])
    rows += [[name, reason, "", "", ""] for name, reason in cannot.items()]
    table(["exchange", "ms", "of varcomm (quartiles)", "MB sent per rank", "MB of tensors"], rows)


if __name__ == "__main__":
    main()
