"""Times and memory on one GPU: the cost of varcomm beside plain PyTorch and PyG."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data

import varcomm as vc
from tests.gpu.report import Case, markdown
from varcomm import graph, models
from varcomm import tensor_parallel as tp
from varcomm.cli import bench
from varcomm.ops.reduction import sum_in_rank_order
from varcomm.plan.row_sum import RowSum

HEAD = """# Fast on one GPU

You want to know what varcomm costs on one GPU beside plain PyTorch and PyG. Both run on one rank,
so no message is sent and the ratio is the time of varcomm on the host. Plain and distributed steps
take turns; times are medians, and ratios are medians of the ratios per turn.
"""
WIDTH = 64
TURNS = 7
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "MeshGraphNet": lambda: models.MeshGraphNet(
        WIDTH, 3, WIDTH, hidden_channels=WIDTH, num_blocks=4
    ),
    "GraphSAGE": lambda: pyg.GraphSAGE(WIDTH, WIDTH, 3),
    "GAT": lambda: pyg.GAT(WIDTH, WIDTH, 3, heads=4, concat=False),
}


def cases(device: str) -> Iterator[Case]:
    """Yield the cases; sizes are small on the CPU."""
    sizes = (100_000, 1_000_000, 5_000_000) if device == "cuda" else (2_000,)
    for name in NETWORKS:
        for edges in sizes:
            yield Case(f"{name}, {edges} edges", partial(network, name, edges, device), 150)
    yield Case("losses and linears of tensor parallelism", partial(tensor_parallel, device), 120)
    yield Case("partition and copy to the device", partial(set_up, sizes, device), 150)
    yield Case("sums in a fixed order", partial(sums, device), 120)
    for name in NETWORKS if device == "cuda" else ["GraphSAGE"]:
        yield Case(f"{name}, compiled", partial(compiled, name, sizes[:2][-1], device), 200)


def mesh(edges: int) -> Data:
    """Return a square grid whose nodes have up to 8 neighbours, with about that many edges."""
    side = max(3, round((edges / 8) ** 0.5))
    node = torch.arange(side * side).view(side, side)
    pairs = []
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
        one = node[: side - down, max(0, -right) : side - max(0, right)].reshape(-1)
        other = node[down:, max(0, right) : side + min(0, right)].reshape(-1)
        pairs += [torch.stack([one, other]), torch.stack([other, one])]
    edge_index = torch.cat(pairs, dim=1)
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(side * side, WIDTH, generator=generator),
        edge_index=edge_index,
        edge_attr=torch.randn(edge_index.shape[1], 3, generator=generator),
    )


def stepper(model: nn.Module, data: Data | graph.PartitionedGraph, split: bool) -> Callable:
    """Return a training step with an optimizer that a CUDA graph can hold."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        edges = (data.edge_attr,) if isinstance(model, models.MeshGraphNet) else ()
        loss = model(data.x, data.edge_index, *edges).square().mean(dim=1)
        total = data.mean(loss) if split else loss.mean()
        total.backward()
        if split:
            vc.data_parallel.sum_gradients(model)
        optimizer.step()
        return total.detach()

    return step


def started(device: str) -> torch.device:
    """Make this process the only rank, and return its device."""
    torch.set_num_threads(1 if device == "cpu" else 8)
    return vc.init("gloo" if device == "cpu" else None).device


def in_turns(runs: dict[str, Callable], device: torch.device) -> dict[str, list[float]]:
    """Return the seconds per call of each function in each turn, after a first call of each."""
    for run in runs.values():
        run()
    return bench.in_turns(runs, repetitions=TURNS, device=device)


def ratio(seconds: list[float], of: list[float]) -> str:
    """Return the median ratio per turn."""
    return f"{median(a / b for a, b in zip(seconds, of, strict=True)):.2f}"


def peak(run: Callable, device: torch.device) -> str:
    """Return the peak of allocated memory in MB while `run` runs once."""
    if device.type != "cuda":
        return "-"
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return f"{torch.cuda.max_memory_allocated() / 2**20:.0f}"


def twins(
    name: str, edges: int, device: torch.device
) -> tuple[tuple[nn.Module, Data], tuple[nn.Module, graph.PartitionedGraph]]:
    """Return a plain and a distributed model with equal parameters, each with its graph."""
    data = mesh(edges)
    part = graph.partition(data, method="block").to(device)
    torch.manual_seed(0)
    plain = NETWORKS[name]().to(device)
    torch.manual_seed(0)
    model = graph.distribute(NETWORKS[name]().to(device), part)
    return (plain, data.to(device)), (model, part)


def network(name: str, edges: int, device: str) -> str:
    """Compare a plain, a distributed and a captured step."""
    place = started(device)
    plain, split = twins(name, edges, place)
    runs = {"plain": stepper(*plain, False), "distributed": stepper(*split, True)}
    first = {label: float(run()) for label, run in runs.items()}
    torch.testing.assert_close(first["distributed"], first["plain"], rtol=1e-3, atol=1e-5)
    memory = {label: peak(run, place) for label, run in runs.items()}
    if place.type == "cuda":
        runs["captured"] = vc.capture(runs["distributed"]).replay
    seconds = in_turns(runs, place)
    rows = [
        [label, f"{1e3 * median(times):.2f}", ratio(times, seconds["plain"]), memory.get(label, "")]
        for label, times in seconds.items()
    ]
    return markdown(("step", "ms", "ratio to plain", "peak MB"), rows)


def compiled(name: str, edges: int, device: str) -> str:
    """Compare compiled steps; the first call compiles."""
    place = started(device)
    pairs = dict(zip(("plain", "distributed"), twins(name, edges, place), strict=True))
    quick = {label: torch.compile(model) for label, (model, _) in pairs.items()}

    def run(label: str) -> None:
        of = pairs[label][1]
        edge_attr = (of.edge_attr,) if name == "MeshGraphNet" else ()
        quick[label](of.x, of.edge_index, *edge_attr).square().mean().backward()

    start = time.perf_counter()
    run("plain")
    middle = time.perf_counter()
    run("distributed")
    first = {"plain": middle - start, "distributed": time.perf_counter() - middle}
    seconds = in_turns({label: partial(run, label) for label in quick}, place)
    rows = [
        [label, f"{1e3 * median(t):.2f}", ratio(t, seconds["plain"]), f"{first[label]:.1f}"]
        for label, t in seconds.items()
    ]
    return markdown(("compiled step", "ms", "ratio to plain", "s of the first call"), rows)


def tensor_parallel(device: str) -> str:
    """Compare layers on one rank with torch's functions."""
    place = started(device)
    tokens, hidden, classes = (4096, 4096, 32_003) if device == "cuda" else (64, 32, 103)
    x = torch.randn(tokens, hidden, device=place, requires_grad=True)
    weight = torch.randn(hidden, hidden, device=place, requires_grad=True)
    logits = torch.randn(tokens, classes, device=place, requires_grad=True)
    target = torch.arange(tokens, device=place) % classes

    def both(call: Callable, *leaves: torch.Tensor) -> Callable:
        return lambda: torch.autograd.grad(call(*leaves).sum(), leaves)

    def cross_entropy(z: torch.Tensor) -> torch.Tensor:
        return tp.vocab_parallel_cross_entropy(z, target, [classes])

    pairs = {
        "cross entropy": (
            both(lambda z: F.cross_entropy(z, target, reduction="none"), logits),
            both(cross_entropy, logits),
        ),
        "column linear": (both(F.linear, x, weight), both(tp.column_parallel_linear, x, weight)),
        "row linear": (both(F.linear, x, weight), both(tp.row_parallel_linear, x, weight)),
    }
    rows = []
    for name, (theirs, ours) in pairs.items():
        memory = peak(theirs, place), peak(ours, place)
        seconds = in_turns({"torch": theirs, "varcomm": ours}, place)
        times = [f"{1e3 * median(t):.3f}" for t in seconds.values()]
        rows.append([name, *times, ratio(seconds["varcomm"], seconds["torch"]), *memory])
    columns = ("forward and backward", "torch ms", "varcomm ms", "ratio", "torch MB", "varcomm MB")
    return markdown(columns, rows)


def set_up(sizes: tuple[int, ...], device: str) -> str:
    """Measure the partition on the CPU and its copy to the device."""
    place = started(device)
    rows = []
    for edges in sizes:
        data = mesh(edges)
        start = time.perf_counter()
        part = graph.partition(data, method="rcb" if "pos" in data else "block")
        cut = time.perf_counter()
        part.to(place)
        if place.type == "cuda":
            torch.cuda.synchronize()
        end = time.perf_counter()
        rows.append([data.num_edges, f"{cut - start:.3f}", f"{end - cut:.3f}"])
    return markdown(("edges", "s of the partition", "s of the copy"), rows)


def sums(device: str) -> str:
    """Compare sums in a fixed order with sums of torch."""
    place = started(device)
    rows = []
    copies, kinds = (1_000_000, (4, 64, 256)) if device == "cuda" else (1_000, (4,))
    index = torch.randint(copies // 4, (copies,), generator=torch.Generator().manual_seed(0))
    index = index.to(place)
    order, number = index.argsort(stable=True), copies // 4
    lengths = torch.bincount(index, minlength=number)
    ours = RowSum(index, number)
    for width in kinds:
        values = torch.randn(copies, width, device=place)
        ordered = values[order]
        runs = {
            "RowSum": lambda values=values: ours(values),
            "index_add_": lambda values=values, width=width: torch.zeros(
                number, width, device=place
            ).index_add_(0, index, values),
            "segment_reduce": lambda ordered=ordered: torch.segment_reduce(
                ordered, "sum", lengths=lengths, unsafe=True
            ),
        }
        torch.testing.assert_close(runs["RowSum"](), runs["index_add_"](), rtol=1e-4, atol=1e-4)
        seconds = in_turns(runs, place)
        rows += [
            [f"{copies} copies of rows of {width}", name, f"{1e6 * median(t):.0f}"]
            for name, t in seconds.items()
        ]
    for ranks in (2, 8, 16):
        parts = torch.randn(ranks, copies, device=place)
        runs = {
            "sum_in_rank_order": lambda parts=parts: sum_in_rank_order(parts, True, 1),
            "sum(0)": lambda parts=parts: parts.sum(0),
        }
        seconds = in_turns(runs, place)
        rows += [
            [f"{ranks} parts of {copies}", name, f"{1e6 * median(t):.0f}"]
            for name, t in seconds.items()
        ]
    return markdown(("sum", "by", "us"), rows)
