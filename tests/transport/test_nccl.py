"""Every primitive on GPUs against one process: one rank a GPU, and two ranks that share one."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import varcomm
from tests.ops.comparing import Failures, assert_none
from tests.ops.primitives import PATTERNS, PRIMITIVES, Setting, case, setting
from tests.transport.twin import compare
from varcomm.testing import dot_test

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.complex128)


@pytest.fixture(scope="module")
def ranks():
    with varcomm.Ranks(GPUS, timeout=100, backend=None) as pool:
        yield pool


# the others of the table are bound to indices on the CPU: see below
ON_GPU = [name for name in PRIMITIVES if "ind" not in name and "needed" not in name]


def check_on_gpu(rank):
    failures, device, ranks = Failures(), torch.device("cuda", rank % GPUS), dist.get_world_size()
    for name in ON_GPU:
        for pattern in PATTERNS:
            for dim in (0, 1):
                for dtype in DTYPES:
                    c = case(name, pattern, ranks, dim)
                    compare(failures, c, dtype, (name, pattern, dim), device=device)
    for name in ("all_reduce", "reduce", "broadcast", "all_gather_v"):
        c = PRIMITIVES[name](Setting((50_001, *[7] * (ranks - 1)), 0, (3,)))
        compare(failures, c, torch.float32, ("large", name), device=device)
    return failures


def check_plan(rank):
    """A plan made on the CPU, by Gloo, and moved; and one made on the GPU, by NCCL."""
    failures = Failures()
    device = torch.device("cuda", rank)
    for pattern in PATTERNS:
        s = setting(pattern, GPUS, 1)
        c = PRIMITIVES["plan_from_needed"](s)
        inputs = c.draw(torch.float64)
        x, needed = inputs[rank].to(device), s.needed[rank]
        moved = varcomm.ExchangePlan.from_needed(needed, s.sizes).to(device)
        made_there = varcomm.ExchangePlan.from_needed(needed.to(device), s.sizes)
        indices = [index.to(device) for index in s.indices[rank]]
        counts = [[len(index) for index in row] for row in s.indices]
        picked = varcomm.indexed_all_to_all_v(x, indices, counts, dim=1)
        results = moved(x, 1), made_there(x, 1)
        with failures.named(pattern):
            for y in results:
                assert y.device == device
                assert torch.equal(y.cpu(), c.reference(inputs)[rank])
            want = PRIMITIVES["indexed_all_to_all_v"](s).reference(inputs)[rank]
            assert torch.equal(picked.cpu(), want)
        for plan in (moved, made_there):
            dot_test(partial(plan, dim=1), x)
    return failures


def check_asynchronous(rank):
    x = torch.full((rank + 1, 1000), float(rank), device=torch.device("cuda", rank))
    sizes = list(range(1, GPUS + 1))
    handle = varcomm.all_gather_v(x, sizes, async_op=True)
    other = varcomm.all_reduce(torch.ones(1, device=x.device))
    return handle.wait()[:, 0].tolist(), other.item()


def test_values_and_gradients(ranks):
    assert_none(ranks.run(check_on_gpu))
    assert_none(ranks.run(check_plan))
    whole = [float(rank) for rank in range(GPUS) for _ in range(rank + 1)]
    assert ranks.run(check_asynchronous) == [(whole, float(GPUS))] * GPUS


def test_two_ranks_on_one_gpu():
    """Gloo serves them, through pinned memory; NCCL refuses two ranks on a GPU."""
    with varcomm.Ranks(2, timeout=200, backend="gloo") as pool:
        assert_none(pool.run(check_on_gpu))
