"""A step of distributed PyG models on one rank beside the plain model.

``python benchmarks/layer_overhead.py`` times forward and backward of networks of three layers, in
turns, on one thread. On one rank there is no message: the difference is the host's time, which
users of GPUs see first. Nodes have six random edges into them. On several ranks each layer has an
exchange too, whose host time is in ``python benchmarks/python_time.py``. ``--first-call`` times the
first compiled step, of each model in a process and with a folder of compiled code of its own.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from functools import partial

import torch
from measuring import arguments, median, ms, spread, table, turns_of
from torch_geometric import nn
from torch_geometric.data import Data, HeteroData

import varcomm as vc
from varcomm.models import MeshGraphNet

WIDTH, LAYERS, DEGREE = 32, 3, 6
MAX_SECONDS = 30  # of a row


class Layers(torch.nn.Module):
    """Layers of one kind, with ReLU between them."""

    def __init__(self, make, with_edges):
        super().__init__()
        self.layers = torch.nn.ModuleList(make() for _ in range(LAYERS))
        self.with_edges = with_edges

    def forward(self, x, edge_index, edge_attr):
        more = {"edge_attr": edge_attr} if self.with_edges else {}
        for layer in self.layers:
            x = layer(x, edge_index, **more).relu()
        return x


class Hetero(torch.nn.Module):
    """GraphSAGE on two types of nodes and the edges both ways."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            nn.HeteroConv({kind: nn.SAGEConv(WIDTH, WIDTH) for kind in KINDS})
            for _ in range(LAYERS)
        )

    def forward(self, x_dict, edge_index_dict):
        for layer in self.layers:
            x_dict = {name: x.relu() for name, x in layer(x_dict, edge_index_dict).items()}
        return sum(x.sum() for x in x_dict.values())


KINDS = [("cell", "to", "node"), ("node", "to", "cell")]


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH))


def pna():
    degrees = torch.bincount(torch.full((100,), DEGREE))
    kinds = ["mean", "max", "std"], ["identity", "amplification"]
    return nn.PNAConv(WIDTH, WIDTH, *kinds, deg=degrees)


MODELS = {
    "GCN": partial(Layers, partial(nn.GCNConv, WIDTH, WIDTH), False),
    "GraphSAGE": partial(Layers, partial(nn.SAGEConv, WIDTH, WIDTH), False),
    "GAT": partial(Layers, partial(nn.GATConv, WIDTH, WIDTH // 4, 4), False),
    "GATv2": partial(Layers, partial(nn.GATv2Conv, WIDTH, WIDTH // 4, 4), False),
    "PNA": partial(Layers, pna, False),
    "GINE": partial(Layers, lambda: nn.GINEConv(mlp()), True),
    "TransformerConv": partial(Layers, partial(nn.TransformerConv, WIDTH, WIDTH // 4, 4), False),
    "MeshGraphNet": partial(
        MeshGraphNet, WIDTH, WIDTH, WIDTH, hidden_channels=WIDTH, num_blocks=LAYERS
    ),
    "hetero SAGE": Hetero,
}


def data_of(name, nodes):
    torch.manual_seed(0)
    edges = torch.randint(nodes, (2, DEGREE * nodes))
    x, attributes = torch.randn(nodes, WIDTH), torch.randn(DEGREE * nodes, WIDTH)
    if name != "hetero SAGE":
        return Data(x=x, edge_index=edges, edge_attr=attributes)
    data = HeteroData()
    # torch.compile fails to say why it compiles again if two arguments are one tensor
    for kind in ("cell", "node"):
        data[kind].x = x.clone()
    for kind in KINDS:
        data[kind].edge_index = edges.clone()
    return data


def inputs_of(name, graph):
    if name == "hetero SAGE":
        return graph.x_dict, graph.edge_index_dict
    if name == "MeshGraphNet":
        return graph.x, graph.edge_index, graph.edge_attr
    return graph.x, graph.edge_index, graph.edge_attr


def steps(name, nodes, compiled, kinds=("distributed", "plain")):
    """Return a step of each kind of model."""
    data = data_of(name, nodes)
    graph = vc.graph.partition(data)
    made = {}
    for kind in kinds:
        source = graph if kind == "distributed" else data
        torch.manual_seed(0)
        model = MODELS[name]()
        if kind == "distributed":
            vc.graph.distribute(model, graph)
        model = torch.compile(model) if compiled else model
        made[kind] = partial(step, model, inputs_of(name, source))
    return made


def step(model, inputs):
    out = model(*inputs)
    (out if out.dim() == 0 else out.sum()).backward()
    model.zero_grad()


def measured(rank, names, nodes, compiled, turns):
    """Return seconds of steps in turns, by model and number of nodes."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        for count in nodes:
            torch.compiler.reset()
            made = steps(name, count, compiled)
            for call in made.values():
                call()
            pair = sum(map(seconds_of, made.values()))
            repeats = max(3, min(turns, int(MAX_SECONDS / pair)))
            seconds = {kind: [] for kind in made}
            for turn in range(repeats):
                for kind in turns_of(made, turn):
                    seconds[kind].append(seconds_of(made[kind]))
            found[name, count] = seconds
    return found


def first_call(rank, name, nodes, kind):
    """Return the seconds of the first compiled step; a smaller function compiles the headers."""
    torch.set_num_threads(1)
    x = torch.randn(8, 8, requires_grad=True)
    torch.compile(lambda x: (x.sin() @ x.cos()).sum())(x).backward()  # headers, once per folder
    return seconds_of(steps(name, nodes, True, [kind])[kind])


def first_calls(options):
    """Time first calls in processes that share nothing, in turns."""
    rows = []
    for name in options.models:
        for count in options.nodes:
            seconds = {"distributed": [], "plain": []}
            for turn in range(options.turns):
                for kind in turns_of(seconds, turn):
                    seconds[kind].append(alone(name, count, kind))
            a, b = seconds["distributed"], seconds["plain"]
            rows.append([name, f"{count:,}", f"{median(a):.1f}", f"{median(b):.1f}", spread(a, b)])
    table(["model", "nodes", "distributed, s", "plain, s", "ratio (quartiles)"], rows)


def alone(name, nodes, kind):
    """Return the seconds of a first call in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--models", name, "--nodes", str(nodes), "--first-call-of", kind]
        done = subprocess.run(
            [sys.executable, __file__, *words],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return float(done.stdout.split()[-1])


def seconds_of(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compiled", action="store_true", help="time compiled models")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--first-call", action="store_true", help="time first compiled steps")
    parser.add_argument("--first-call-of", choices=["distributed", "plain"], help=argparse.SUPPRESS)
    options = arguments(parser, turns=101, nodes=[500, 5_000, 50_000])
    if options.first_call_of:
        one = options.models[0], options.nodes[0], options.first_call_of
        print(vc.launch(first_call, 1, *one)[0])
        return
    if options.first_call:
        first_calls(options)
        return
    words = options.models, options.nodes, options.compiled, options.turns
    rows = []
    found = vc.launch(measured, 1, *words, timeout=3600)[0]
    for (name, count), seconds in found.items():
        a, b = seconds["distributed"], seconds["plain"]
        rows.append([name, f"{count:,}", *ms(median(a), median(b), digits=2), spread(a, b)])
    table(["model", "nodes", "distributed, ms", "plain, ms", "ratio (quartiles)"], rows)


if __name__ == "__main__":
    main()
