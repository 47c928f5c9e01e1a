"""A step with and without overlap of the halo's exchange: ``python benchmarks/overlap.py``.

Forward and backward of some layers of message passing, an MLP at each edge and a sum at each node,
on a square grid with 8 neighbours. Steps with and without overlap take turns, since machines are
noisy. A rank has one thread; what an engine does on threads of its own needs a core too.
"""

import argparse
import os
import statistics

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from graph_build import blocks, grid
from measuring import Measured, machine, median, table
from torch_geometric.data import Data
from torch_geometric.utils import scatter

import varcomm as vc


class Layer(torch.nn.Module):
    """Looks at target, source and edge."""

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

    (a, of_a), (b, of_b) = step(False), step(True)
    error = max(float((p - q).abs().max() / p.abs().max()) for p, q in ((a, b), (of_a, of_b)))
    costs = {"without": [], "with": [], "alone": []}
    for turn in range(repeats):
        works = [
            ("without", lambda: step(False)),
            ("with", lambda: step(True)),
            ("alone", exchanges),
        ]
        # who goes first may find warmer caches
        for name, work in works if turn % 2 else works[::-1]:
            vc.all_reduce(torch.zeros(1))  # ranks begin together
            with Measured() as cost:
                work()
            costs[name].append((cost.wall, cost.cpu, cost.sent))
    return costs, error, len(graph.interior) / graph.num_edges, graph.num_halo / graph.num_owned


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--side", type=int, default=200, help="of the grid")
    parser.add_argument("--split", choices=["blocks", "random"], default="blocks")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    print(machine(), end="\n\n")
    what = (options.split, options.width, options.layers, options.repeats)
    parts = vc.launch(measure, options.ranks, options.side, options.ranks, *what, timeout=1800)
    costs, _, interior, halo = parts[0]

    def seconds(name):
        """The slowest rank's, turn by turn."""
        turns = zip(*([cost[0] for cost in part[0][name]] for part in parts), strict=True)
        return [max(turn) for turn in turns]

    alone = median(seconds("alone"))
    rows = []
    for name in ("without", "with"):
        walls = seconds(name)
        low, _, high = statistics.quantiles(walls, n=4)
        cpu = max(median([cost[1] for cost in part[0][name]]) for part in parts)
        rows.append(
            [
                name,
                f"{1e3 * median(walls):.1f}",
                f"{1e3 * low:.1f} ... {1e3 * high:.1f}",
                f"{1e3 * cpu:.1f}",
                f"{costs[name][0][2] / 1e6:.2f}",
                f"{100 * alone / median(walls):.1f}",
            ]
        )
    nodes, edges = options.side**2, 8 * options.side**2
    print(
        f"{nodes:,} nodes, {edges:,} edges in {options.split} on {options.ranks} ranks; rank 0: "
        f"{100 * interior:.1f} % of edges interior, halo {100 * halo:.1f} % of nodes; "
        f"{options.layers} layers of width {options.width}, forward and backward"
    )
    table(["overlap", "ms a step", "quartiles", "CPU ms", "MB sent", "exchanges alone, %"], rows)
    without, with_ = seconds("without"), seconds("with")
    ratios = [a / b for a, b in zip(without, with_, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"without / with, turn by turn: median {middle:.3f}, quartiles {low:.3f} ... {high:.3f}; "
        f"the exchanges alone take {1e3 * alone:.1f} ms; results differ by "
        f"{max(part[1] for part in parts):.1e} of the largest"
    )


if __name__ == "__main__":
    main()
