"""Right on one GPU: the NCCL engine, ranks that share the GPU, host waits, and captured steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

import varcomm as vc
from tests.gpu.fast import mesh, started, stepper
from tests.gpu.report import Case, Skip
from tests.gpu.scenarios import CLASSES, SCENARIOS, numbers
from tests.ops.comparing import assert_none
from tests.transport import test_nccl
from tests.transport.strict_nccl import strict_nccl
from varcomm import graph, models
from varcomm import tensor_parallel as tp
from varcomm.errors import MissingPackageError
from varcomm.transport.engine import Route, broadcast_route
from varcomm.transport.engines.nccl import NCCL
from varcomm.transport.group import resolve

HEAD = """# Right on one GPU

You want to know whether varcomm computes the same on a GPU as on a CPU. The cases run the engine of
NCCL, several ranks that share the GPU, every scenario of [the table](../gpu.md) under torch's check
for synchronization, and captured training steps.
"""
ROOT = Path(__file__).parents[2]
DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128),
    *(torch.int64, torch.int8, torch.bool),
)
# Several ranks of NCCL on one GPU talk by sockets on the loopback interface.
SHARED = {
    "VARCOMM_SHARE_GPU": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}
JOBS = 4  # cases at a time: none of them measures
SOME = 20  # scenarios in a process: an error of a kernel fails the others as well


def cases(device: str) -> Iterator[Case]:
    """Yield the cases of both devices in one order."""
    yield Case("engine of NCCL called directly, one rank", partial(engine, device), 60)
    for ranks in (2, 3):
        name = f"NCCL, {ranks} ranks on one GPU"
        yield Case(name, partial(nccl_ranks, ranks, device), 150)
    yield Case("Gloo through pinned memory, 2 ranks", partial(pinned_ranks, device), 120)
    for first in range(0, len(SCENARIOS), SOME):
        names = list(SCENARIOS)[first : first + SOME]
        name = f"scenarios without a host wait, {first + 1} to {first + len(names)}"
        yield Case(name, partial(scenarios, names, device), 90)
    yield Case("captured step of MeshGraphNet", partial(captured_graph_network, device), 90)
    yield Case("captured step on 2 ranks on one GPU", partial(captured_on_ranks, device), 120)
    yield Case("captured step of a tensor-parallel GPT", partial(captured_gpt, device), 90)
    yield Case("sharded gradients on 2 ranks on one GPU", partial(sharded_on_ranks, device), 90)
    for name, files in TESTS.items():
        yield Case(name, partial(tests, files, device), 200)


def engine(device: str) -> str:
    """Send each schedule of one rank through the engine, which varcomm does not call for it."""
    place = started(device)
    count = 0
    with strict_nccl(["cpu"]) if device == "cpu" else nullcontext():
        group = resolve(None)
        for dtype in DTYPES:
            for rows in (0, 1, 1000):
                x = torch.randn(rows, device=place).to(dtype)
                n = x.nbytes
                for schedule in ("all_gather", "all", "neighbours", "copies", "one"):
                    out = torch.empty_like(x)
                    start = NCCL().prepare(Route(schedule, group, [n], [n]))
                    for work in start(out, x):
                        work.wait()
                    assert torch.equal(out, x), (schedule, dtype, rows)
                    count += 1
                if n:
                    own = x.clone()
                    for work in NCCL().prepare(broadcast_route(group, n, 0))(own, own):
                        work.wait()
                    assert torch.equal(own, x), ("broadcast", dtype, rows)
                    count += 1
    return f"{count} calls"


def nccl_ranks(ranks: int, device: str) -> str:
    """Run primitives and plans on several ranks of NCCL on one GPU."""
    with _sharing(ranks, 140, device) as pool:
        for check in test_nccl.CHECKS:
            if device == "cpu":
                assert_none(pool.run(test_nccl.through_nccl, check))
            else:
                assert_none(pool.run(check, device))
    return f"{len(test_nccl.CHECKS)} checks: primitives, plans, asynchronous calls"


def _sharing(ranks: int, seconds: float, device: str) -> vc.Ranks:
    """Start ranks of NCCL that share the GPU."""
    os.environ |= SHARED
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    return vc.Ranks(ranks, timeout=seconds, backend=backend)


def pinned_ranks(device: str) -> str:
    """Run primitives and plans on two ranks that share the GPU through pinned memory."""
    with vc.Ranks(2, timeout=110, backend="gloo") as pool:
        for check in test_nccl.CHECKS:
            assert_none(pool.run(check, device))
    return f"{len(test_nccl.CHECKS)} checks: primitives, plans, asynchronous calls"


def scenarios(names: Sequence[str], device: str) -> str:
    """Run scenarios on one rank: the values of the CPU, and no wait of the host if none is due."""
    place = started(device)
    passed, left, failed = 0, [], []
    for name in names:
        try:
            _compare(name, place)
            passed += 1
        except MissingPackageError as error:
            left.append(f"{name}: {error}")
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    if failed:
        raise AssertionError("; ".join(failed))
    return f"{passed} passed" + (f", not run: {'; '.join(left)}" if left else "")


def _compare(name: str, place: torch.device) -> None:
    scenario = SCENARIOS[name]
    on_cpu = scenario.make(torch.device("cpu"), 0, 1)
    on_cpu()
    want = on_cpu()
    step = scenario.make(place, 0, 1)
    step()
    if place.type == "cuda" and scenario.looks == 0:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        got = step()
    finally:
        if place.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    # a norm in fp64 of gradients in fp32 has their rounding
    narrow = any(expected is not None and expected.dtype == torch.float32 for expected in want)
    close = {"rtol": 1e-3, "atol": 1e-4} if narrow else {}
    for value, expected in zip(got, want, strict=True):
        assert (value is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(value.detach().cpu(), expected.detach().cpu(), **close)


def captured_graph_network(device: str) -> str:
    """Compare replays of a captured step with a second model that trains step by step."""
    started(device)
    return _captured_graph_network(0)


def captured_on_ranks(device: str) -> str:
    """The same on two ranks that share the GPU: the graph holds messages of NCCL."""
    with _sharing(2, 110, device) as pool:
        return pool.run(_captured_graph_network)[0]


def _captured_graph_network(rank: int) -> str:
    place = vc.init().device
    data, method = (mesh(2000), "block") if rank == 0 else (None, None)
    part = graph.partition(data, method=method, src=0).to(place)

    def make() -> Callable[[], torch.Tensor]:
        torch.manual_seed(0)
        net = models.MeshGraphNet(64, 3, 64, hidden_channels=16, num_blocks=2)
        return stepper(graph.distribute(net.to(place), part), part, True)

    return _replayed(make, place)


def sharded_on_ranks(device: str) -> str:
    """Sum gradients into shards: a second communicator beside that of the world."""
    with _sharing(2, 80, device) as pool:
        assert pool.run(_sharded) == [[1.5] * 4, [1.5] * 2]
    return "gradients of two shards"


def _sharded(rank: int) -> list[float]:
    place = vc.init().device
    model = nn.Linear(2, 3, bias=False).to(place)
    optimizer = vc.data_parallel.ShardedGradients(model, torch.optim.SGD, sizes=[4, 2])
    model(torch.full((1, 2), rank + 1.0, device=place)).sum().backward()
    optimizer.step()
    return optimizer.pieces["weight"].value.grad.tolist()


def captured_gpt(device: str) -> str:
    """The same for a GPT whose layers are tensor-parallel."""
    place = started(device)
    text = numbers(place, CLASSES, 33)

    def make() -> Callable[[], torch.Tensor]:
        torch.manual_seed(0)
        model = models.GPT(CLASSES, 12, num_layers=2, num_heads=3).to(place)
        tp.parallelize(model, model.tensor_parallel_plan())
        return _gpt_step(model, text)

    return _replayed(make, place)


def _gpt_step(model: nn.Module, text: torch.Tensor) -> Callable[[], torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = model.loss(text[:-1], text[1:])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _replayed(make: Callable[[], Callable[[], torch.Tensor]], place: torch.device) -> str:
    warmup, replays = 3, 4
    plain, own = make(), make()
    want = [float(plain()) for _ in range(warmup + replays)][warmup:]
    if place.type == "cuda":
        own = vc.capture(own, warmup=warmup).replay
    else:
        for _ in range(warmup):
            own()
    got = [float(own()) for _ in range(replays)]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-4, atol=1e-6)
    return f"{replays} replays, losses {got[0]:.4f} to {got[-1]:.4f}"


# Files of tests, which pytest runs with the options of this device.
TESTS = {
    "tests of NCCL": ["tests/transport/test_nccl.py"],
    "tests of CUDA graphs": ["tests/transforms/test_cuda_graphs.py"],
    "tests of collectives on the device": ["tests/ops/test_like.py", "tests/ops", "tests/plan"],
    "tests of distributed networks on the device": [
        "tests/graph/test_distribute.py::test_cached_layers",
        "tests/graph/test_layers.py::test_models",
        "tests/models/test_painn.py::test_on_ranks_as_alone",
    ],
}


def tests(files: Sequence[str], device: str) -> str:
    """Run files of tests by pytest, without the project's settings, which need plugins."""
    ours = "transport" in files[0] or "transforms" in files[0]
    if ours and device == "cpu":
        raise Skip("these tests need a GPU")
    options = ["-q", "-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    if find_spec("xdist") is not None:
        options += ["-n", "4"]
    if not ours:  # tensors of these tests are on the CPU without the option
        options += ["--device", "cuda:0" if device == "cuda" else "cpu"]
        options += ["-k", "not compiled and not refus and not memory"]
    files = files if device == "cuda" else files[:1]  # the first is the smallest
    command = [sys.executable, "-m", "pytest", *options, "--import-mode=importlib", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = [
        line for line in done.stdout.splitlines() if re.search(r"\d (passed|failed|error)", line)
    ]
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode:
        raise AssertionError("\n".join([*failures[:20], *last, done.stderr[-500:]]))
    return last[-1] if last else done.stdout[-200:]
