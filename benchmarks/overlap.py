"""A step with and without overlap of the halo's exchange: ``python benchmarks/overlap.py``.

Forward and backward of some layers of message passing, an MLP at each edge and a sum at each node,
on a square grid with 8 neighbours. Steps with and without overlap take turns. A rank has one
thread; an engine's own threads need a core too.
"""

import argparse
import os
import statistics

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from graph_build import blocks, grid
from measuring import Measured, arguments, median, ms, slowest, spread, table, turns_of
from torch_geometric.data import Data
from torch_geometric.utils import scatter

import varcomm as vc


class Layer(torch.nn.Module):
    """A message from target, source and edge."""

    def __init__(self, width, overlap):
        super().__init__()
        self.overlap = overlap
        self.edge_mlp = torch.nn.Sequential(
            torch.nn.Linear(2 * width + 3, width), torch.nn.SiLU(), torch.nn.Linear(width, width)
        )

    def message(self, x_i, x_j, edge_attr):
        return self.edge_mlp(torch.cat([x_i, x_j, edge_attr], dim=1))

    def forward(self, graph, x):
        if self.overlap:
            return x + vc.graph.message_passing(graph, self.message, x, graph.edge_attr)
        j, i = graph.edge_index
        sources = graph.with_halo(x)
        messages = self.message(x.index_select(0, i), sources.index_select(0, j), graph.edge_attr)
        return x + scatter(messages, i, dim_size=len(x), reduce="sum")


def measure(rank, side, ranks, split, width, layers, repeats):
    """Costs of steps with and without overlap, and of their exchanges alone."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    edge_index = grid(side, side, range(side))
    owner = blocks(side, side, ranks) if split == "blocks" else torch.randint(ranks, (side**2,))
    data = Data(
        x=torch.randn(side**2, width),
        edge_index=edge_index,
        edge_attr=torch.randn(edge_index.shape[1], 3),
    )
    graph = vc.graph.partition(data, method=owner)
    models = {}
    for overlap in (False, True):
        torch.manual_seed(1)
        models[overlap] = torch.nn.ModuleList(Layer(width, overlap) for _ in range(layers))

    def step(overlap):
        x = graph.x.clone().requires_grad_()
        h = x
        for layer in models[overlap]:
            h = layer(graph, h)
        (h**2).sum().backward()
        return h.detach(), x.grad

    def exchanges():
        for _ in range(layers):
            graph.plan.adjoint(graph.plan(graph.x))

    pairs = zip(step(False), step(True), strict=True)
    error = max(float((p - q).abs().max() / p.abs().max()) for p, q in pairs)
    works = {"without": lambda: step(False), "with": lambda: step(True), "alone": exchanges}
    costs = {name: [] for name in works}
    for turn in range(repeats):
        for name in turns_of(works, turn):
            vc.all_reduce(torch.zeros(1))  # ranks begin together
            with Measured() as cost:
                works[name]()
            costs[name].append(cost)
    interior = len(graph.interior) / graph.edges.num_owned
    return costs, error, interior, graph.num_halo / graph.num_owned


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--split", choices=["blocks", "random"], default="blocks")
    given = arguments(parser, ranks=2, side=200, width=32, layers=4, repeats=15)
    what = (given.side, given.ranks, given.split, given.width, given.layers, given.repeats)
    parts = vc.launch(measure, given.ranks, *what, timeout=1800)
    costs, _, interior, halo = parts[0]
    seconds = {n: slowest([[cost.wall for cost in part[0][n]] for part in parts]) for n in costs}
    alone, rows = median(seconds["alone"]), []
    for name in ("without", "with"):
        low, middle, high = ms(*statistics.quantiles(seconds[name], n=4))
        cpu = max(median([cost.cpu for cost in part[0][name]]) for part in parts)
        sent = f"{costs[name][0].sent / 1e6:.2f}"
        share = f"{100 * alone / median(seconds[name]):.1f}"
        rows.append([name, middle, f"{low} ... {high}", *ms(cpu), sent, share])
    nodes, edges = given.side**2, 8 * given.side**2
    print(
        f"{nodes:,} nodes, {edges:,} edges in {given.split} on {given.ranks} ranks; rank 0: "
        f"{100 * interior:.1f} % of edges interior, halo {100 * halo:.1f} % of nodes; "
        f"{given.layers} layers of width {given.width}, forward and backward"
    )
    table(["overlap", "ms per step", "quartiles", "CPU ms", "MB sent", "exchanges alone, %"], rows)
    print(
        f"without / with, turn by turn: {spread(seconds['without'], seconds['with'])}; "
        f"the exchanges alone take {1e3 * alone:.1f} ms; results differ by "
        f"{max(part[1] for part in parts):.1e} of the largest"
    )


if __name__ == "__main__":
    main()
