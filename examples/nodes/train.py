"""Three unchanged models of PyTorch Geometric on one large partitioned graph.

    torchrun --nproc-per-node 2 examples/nodes/train.py

GCN, GAT and GraphSAGE predict the part of METIS of each node, from distances to landmarks and a few
labelled nodes. With --sampled, GraphSAGE also trains on sampled mini-batches.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from itertools import chain, islice, repeat
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import graphs
import torch
from common import Cost, Parser, Record, differences, one_answer, say, training
from picture import draw
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GraphSAGE

import varcomm as vc
from varcomm.data_parallel import GlobalCount, sum_gradients
from varcomm.graph import NeighborLoader, PartitionedGraph

MODELS = {"gcn": (GCN, {"cached": True}), "gat": (GAT, {"heads": 2}), "sage": (GraphSAGE, {})}
SAMPLED = "sage"  # in GCN, the weight of an edge would depend on the batch
Mean = Callable[[Tensor, Tensor], Tensor]


def new_model(name: str, hidden: int, layers: int, seed: int, sampled: bool) -> torch.nn.Module:
    """Return a model with equal weights on all ranks, which draw them from one seed.

    A model for mini-batches normalises each node by itself, because the statistics of a batch are
    not those of the graph.
    """
    torch.manual_seed(seed)
    kind, more = MODELS[name]
    norm = {"norm": "batch_norm"}
    if sampled:
        norm = {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}}
    return kind(graphs.LANDMARKS, hidden, layers, graphs.PARTS, **norm, **more)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)


def fit(
    model: torch.nn.Module,
    part: Data | PartitionedGraph,
    mean: Mean,
    complete_gradients: Callable[[torch.nn.Module], object],
    steps: int,
    curve: list[float] | None = None,
) -> Iterator[float]:
    """Train on the full graph in every step; yield the loss before each step.

    ``mean`` is over the nodes of a mask; ``curve`` receives the accuracies on the test nodes.
    """
    optimizer = optimizer_of(model)
    for _ in range(steps):
        optimizer.zero_grad()
        logits = model(part.x, part.edge_index)
        loss = mean(cross_entropy(logits, part.y, reduction="none"), part.train_mask)
        loss.backward()
        complete_gradients(model)
        if curve is not None:
            right = (logits.detach().argmax(dim=1) == part.y).to(logits.dtype)
            curve.append(mean(right, part.test_mask).item())
        yield loss.item()
        optimizer.step()


def fit_on_ranks(
    model: torch.nn.Module, graph: PartitionedGraph, steps: int, curve: list[float] | None = None
) -> Iterator[float]:
    """Train on ranks: means are over all ranks, and gradients are summed."""
    model = vc.graph.distribute(model, graph)
    return fit(model, graph, graph.mean, sum_gradients, steps, curve)


def fit_sampled(model: torch.nn.Module, loader: NeighborLoader, steps: int) -> Iterator[float]:
    """Train on mini-batches of the ranks' labelled nodes; yield the loss before each step.

    A rank that has no more labelled nodes in an epoch takes part with empty batches.
    """
    optimizer, count = optimizer_of(model), GlobalCount()
    for batch in islice(chain.from_iterable(repeat(loader)), steps):
        optimizer.zero_grad()
        logits = model(
            batch.x,
            batch.edge_index,
            num_sampled_nodes_per_hop=batch.num_sampled_nodes,
            num_sampled_edges_per_hop=batch.num_sampled_edges,
        )[: batch.batch_size]
        loss = cross_entropy(logits, batch.y[: batch.batch_size], reduction="sum")
        loss.backward()
        count.add(batch.batch_size)
        sum_gradients(model, reduce=count)
        total, seeds = vc.all_reduce(torch.stack([loss.detach(), loss.new_tensor(len(logits))]))
        yield (total / seeds).item()
        optimizer.step()


def fit_on_all_neighbours(
    model: torch.nn.Module, graph: PartitionedGraph, steps: int
) -> Iterator[float]:
    """Train on mini-batches of all labelled nodes and all neighbours: steps of the full graph."""
    every = [-1] * model.num_layers
    loader = NeighborLoader(graph, every, graph.num_nodes, graph.train_mask)
    return fit_sampled(model, loader, steps)


def fit_alone(model: torch.nn.Module, data: Data, steps: int) -> Iterator[float]:
    """Train in one process, without varcomm."""
    return fit(model, data, lambda values, mask: values[mask].mean(), lambda model: None, steps)


def accuracy(model: torch.nn.Module, graph: PartitionedGraph) -> float:
    """Return the accuracy of a distributed model on the test nodes of all ranks; collective."""
    with torch.no_grad():
        right = model.eval()(graph.x, graph.edge_index).argmax(dim=1) == graph.y
    return graph.mean(right.double(), graph.test_mask).item()


def record(model: torch.nn.Module, losses: Iterator[float]) -> Record:
    """Run a training; return its losses, and the gradients of its first step.

    Gradients are one vector, because the gradient of a bias before a batch norm is only rounding.
    """
    first = next(losses)
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return [first, *losses], [gradients]


def precise(data: Data, dtype: torch.dtype) -> Data:
    return data.clone().apply(lambda x: x.to(dtype) if x.is_floating_point() else x)


def main(arguments: list[str] | None = None) -> int:
    smoke = {"steps": 1, "hidden": 8, "layers": 2}
    parser = Parser(__doc__, smoke=smoke)
    parser.add_argument(
        "--graph",
        choices=graphs.NAMES,
        default="copter2",
        help="graph with 55,476 or 258,569 nodes (%(default)s)",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=list(MODELS),
        metavar="NAME",
        help=f"models to train: some of {', '.join(MODELS)} (all)",
    )
    parser.add_whole("--labels", 50, "nodes with a known label in each part")
    parser.add_argument(
        "--sampled", action="store_true", help=f"also train {SAMPLED} on sampled mini-batches"
    )
    parser.add_whole("--fan-out", 10, "edges into each node of a mini-batch, per layer")
    parser.add_whole("--batch", 32, "labelled nodes per mini-batch and rank")
    parser.add_whole("--cache", 1000, "rows of other ranks' nodes that a rank keeps", least=0)
    parser.add_whole("--steps", 60, "training steps")
    parser.add_whole("--hidden", 32, "width of the models")
    parser.add_whole("--layers", 3, "layers of each model")
    parser.add_seed("the first weights")
    parser.add_picture("out/nodes.png")
    parser.add_check("5 steps")
    options = parser.parse(arguments)
    shape = options.hidden, options.layers, options.seed, options.sampled

    data = graphs.load(options.graph, options.labels)
    graph = vc.graph.partition(data)
    say(f"{graph.report()}")
    accuracies, curves = {}, {}
    for name in options.models:
        say(f"\n{name}")
        model, cost, curves[name] = new_model(name, *shape), Cost(), []
        losses = fit_on_ranks(model, graph, options.steps, curves[name])
        for _ in training(losses, options.steps, cost):
            pass
        say(cost.report())
        accuracies[name] = accuracy(model, graph)
    if options.sampled:
        name, model, cost = f"{SAMPLED}, sampled", new_model(SAMPLED, *shape), Cost()
        say(f"\n{name}")
        loader = NeighborLoader(
            graph,
            [options.fan_out] * options.layers,
            options.batch,
            graph.train_mask,
            seed=options.seed,
            cache=options.cache,
        )
        # a distributed model runs on the graph alone, so the accuracy is that of a copy
        whole = vc.graph.distribute(copy.deepcopy(model), graph)
        curves[name] = []
        for _ in training(fit_sampled(model, loader, options.steps), options.steps, cost):
            whole.load_state_dict(model.state_dict())
            curves[name].append(accuracy(whole, graph))
        say(f"{cost.report()}\nfirst rank: {loader.report()}")
        whole.load_state_dict(model.state_dict())
        model, accuracies[name] = whole, accuracy(whole, graph)
    with torch.no_grad():
        guess = graph.gather(model(graph.x, graph.edge_index).argmax(dim=1), dst=0)
    rank = graph.gather(torch.full((graph.num_owned,), graph.group.rank), dst=0)
    if graph.group.rank == 0:
        known = int(data.train_mask.sum())
        simple = {
            name: graphs.accuracy(data, found) for name, found in graphs.baselines(data).items()
        }
        say(f"\nOf {data.num_nodes - known:,} nodes, {known} being known, right in per cent:")
        for name, share in (accuracies | simple).items():
            say(f"  {100 * share:5.1f}  {name}")
        place = graphs.plane(data.x).numpy()
        draw(options.picture, place, rank.numpy(), data.y.numpy(), guess.numpy(), curves, simple)
        say(f"picture: {options.picture}")
    if not options.check:
        return 0

    passed = True
    trainings = dict.fromkeys(options.models, fit_on_ranks)
    if options.sampled:
        trainings[f"{SAMPLED}, sampled"] = fit_on_all_neighbours
    for title, fit_shared in trainings.items():
        say(f"\n5 steps of {title} on ranks and in one process:")
        name = title.partition(",")[0]

        def found(
            dtype: torch.dtype, name: str = name, fit_shared: Callable = fit_shared
        ) -> tuple[float, float]:
            floats = precise(data, dtype)
            graph = vc.graph.partition(floats)
            shared, alone = (new_model(name, *shape).to(dtype) for _ in range(2))
            return differences(
                lambda: record(shared, fit_shared(shared, graph, 5)),
                lambda: record(alone, fit_alone(alone, floats, 5)),
            )

        passed &= one_answer(found)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
