"""Several GPUs: primitives beside torch's own calls, a halo exchange, and scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

import varcomm as vc
from tests.gpu.fast import NETWORKS, mesh, stepper
from tests.gpu.report import Case, Skip, markdown
from varcomm import graph
from varcomm.cli import bench
from varcomm.cli import workload as work

HEAD = """# Several GPUs

You want to know how varcomm's calls compare with torch's own on NCCL, and how a graph network
scales. There is one rank per GPU. Both calls of a row take turns, on the same sizes; the columns
are those of nccl-tests, and times are medians of the slowest rank.
"""
COLUMNS = ("shards", "bytes", "torch us", "varcomm us", "ratio", "torch busbw", "varcomm busbw")


def cases(device: str) -> Iterator[Case]:
    """Yield the cases; on the CPU two ranks rehearse them."""
    sizes = (16 << 10, 1 << 20, 64 << 20) if device == "cuda" else (16 << 10,)
    for name in work.OPERATIONS:
        yield Case(name, partial(primitive, name, sizes, device), 90)
    edges = 1_000_000 if device == "cuda" else 2_000
    yield Case("strong scaling of MeshGraphNet", partial(scaling, edges, False, device), 200)
    yield Case("weak scaling of MeshGraphNet", partial(scaling, edges, True, device), 200)


def ranks_of(device: str) -> tuple[int, str | None]:
    """Return the number of ranks and the backend."""
    if device == "cpu":
        return 2, "gloo"
    if (gpus := torch.cuda.device_count()) < 2:
        raise Skip("needs 2 GPUs")
    return gpus, None


def primitive(name: str, sizes: tuple[int, ...], device: str) -> str:
    """Compare a call of varcomm with the calls of torch that move the same rows."""
    ranks, backend = ranks_of(device)
    rows = []
    with vc.Ranks(ranks, timeout=80, backend=backend) as pool:
        for skew in ("even", "1:8"):
            for nbytes in sizes:
                rows.append([skew, *pool.run(compared, name, nbytes, skew, ranks)[0]])
    return markdown(COLUMNS, rows)


def compared(rank: int, name: str, nbytes: int, skew: str, ranks: int) -> list[str]:
    """Return the cells of a row; collective."""
    torch.set_num_threads(1)
    device = vc.init().device
    case = work.Case(name, False, ranks, dist.get_backend(), "float32", nbytes, skew)
    load = work.workload(case, rank, device)
    call, count = load.call(name)
    x = torch.randn(count, load.width, device=device)
    runs = {"torch": torchs(name, load, x), "varcomm": partial(call, x)}
    results = {label: run() for label, run in runs.items()}
    if rank == work.ROOT or name not in ("gather_v",):
        torch.testing.assert_close(results["varcomm"], results["torch"])
    samples = bench.in_turns(runs, 0.3, None, device)
    found = [
        bench.summary(case, load.nbytes(name), 1.0, load.fewest(), 0, samples[label])
        for label in runs
    ]
    theirs, ours = samples["torch"], samples["varcomm"]
    ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
    times = [bench.microseconds(each["seconds"]) for each in found]
    return [str(found[0]["nbytes"]), *times, f"{ratio:.2f}", *(f"{e['busbw']:.3g}" for e in found)]


def torchs(name: str, load: work.Workload, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return what a program without varcomm calls for the same rows."""
    sizes, rank, send, recv = load.sizes, load.rank, load.send, load.recv
    nccl = dist.get_backend() == "nccl"

    def exchange(rows: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty(sum(recv), load.width)
        dist.all_to_all_single(out, rows, recv, send)
        return out

    if name == "all_gather_v":
        if len(set(sizes)) == 1:
            return partial(_gathered_evenly, x, len(sizes))
        return partial(_gathered, x, sizes) if nccl else partial(_padded, x, sizes)
    if name == "reduce_scatter_v":
        return partial(_scattered_sum, x, sizes, rank, nccl)
    if name == "gather_v":
        return lambda: exchange(x)
    if name == "scatter_v":
        return lambda: exchange(x)
    if name == "all_to_all_v":
        return lambda: exchange(x)
    index = torch.cat(load.indices(rank))
    if name == "indexed_all_to_all_v":
        return lambda: exchange(x.index_select(0, index))
    return partial(_halo, x, index, send, recv)


def _gathered_evenly(x: torch.Tensor, ranks: int) -> torch.Tensor:
    out = x.new_empty(ranks * len(x), x.shape[1])
    dist.all_gather_into_tensor(out, x)
    return out


def _gathered(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    out = x.new_empty(sum(sizes), x.shape[1])
    dist.all_gather(list(out.split(sizes)), x)
    return out


def _padded(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Gather as on engines that need equal sizes."""
    padded = torch.cat([x, x.new_zeros(max(sizes) - len(x), x.shape[1])])
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _scattered_sum(x: torch.Tensor, sizes: list[int], rank: int, nccl: bool) -> torch.Tensor:
    if not nccl:
        total = x.clone()
        dist.all_reduce(total)
        return total.split(sizes)[rank]
    out = x.new_empty(sizes[rank], x.shape[1])
    if len(set(sizes)) == 1:
        dist.reduce_scatter_tensor(out, x)
    else:
        dist.reduce_scatter(out, list(x.split(sizes)))
    return out


def _halo(x: torch.Tensor, index: torch.Tensor, send: list[int], recv: list[int]) -> torch.Tensor:
    """Exchange the rows of neighbours by grouped sends."""
    out = x.new_empty(sum(recv), x.shape[1])
    leaving, arriving = x.index_select(0, index).split(send), out.split(recv)
    messages = [dist.P2POp(dist.irecv, p, r) for r, p in enumerate(arriving) if len(p)]
    messages += [dist.P2POp(dist.isend, p, r) for r, p in enumerate(leaving) if len(p)]
    for request in dist.batch_isend_irecv(messages) if messages else ():
        request.wait()
    return out


def scaling(edges: int, weak: bool, device: str) -> str:
    """Measure a training step on more and more ranks."""
    most, backend = ranks_of(device)
    rows, first = [], 0.0
    ranks = 1
    while ranks <= most:
        total = edges * ranks if weak else edges
        with vc.Ranks(ranks, timeout=150, backend=backend) as pool:
            seconds = max(pool.run(step_seconds, total))
        first = first or seconds
        gain = first / seconds / (1 if weak else ranks)
        rows.append([ranks, total, f"{1e3 * seconds:.1f}", f"{gain:.2f}"])
        ranks *= 2
    return markdown(("ranks", "edges", "ms per step", "efficiency"), rows)


def step_seconds(rank: int, edges: int) -> float:
    """Return the median seconds of a training step; collective."""
    torch.set_num_threads(1)
    device = vc.init().device
    data, method = (mesh(edges), "block") if rank == 0 else (None, None)
    part = graph.partition(data, method=method, src=0).to(device)
    torch.manual_seed(0)
    model = graph.distribute(NETWORKS["MeshGraphNet"]().to(device), part)
    step = stepper(model, part, True)
    step()
    samples = bench.in_turns({"step": step}, 5.0, 5, device)
    return median(samples["step"])
