"""Every primitive on GPUs against one process: one rank a GPU, and two ranks that share one.

The same checks run on CPUs, by Gloo and by the NCCL engine over strict_nccl.
"""

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist

import varcomm
from tests.ops.comparing import Failures, assert_none
from tests.ops.primitives import PATTERNS, PRIMITIVES, Setting, case, setting
from tests.transport.strict_nccl import strict_nccl
from tests.transport.twin import compare
from varcomm.testing import dot_test

GPUS = torch.cuda.device_count()
on_gpus = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.complex128)


@pytest.fixture(scope="module")
def ranks():
    with varcomm.Ranks(GPUS, timeout=100, backend=None) as pool:
        yield pool


@pytest.fixture(scope="module")
def two_ranks():
    with varcomm.Ranks(2, timeout=200, backend="gloo") as pool:
        yield pool


@pytest.fixture(scope="module")
def sharing_ranks():
    """Two ranks of NCCL on the first GPU, which take turns."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", first)
        patch.setenv("VARCOMM_SHARE_GPU", "1")
        with varcomm.Ranks(2, timeout=400, backend="cpu:gloo,cuda:nccl") as pool:
            yield pool


# the others of the table are bound to indices on the CPU: see check_plan
WITHOUT_INDICES = [name for name in PRIMITIVES if "ind" not in name and "needed" not in name]


def place_of(device):
    """Return the device of this rank; ranks may share a GPU."""
    return torch.device("cuda", dist.get_rank() % GPUS) if device == "cuda" else device


def check_primitives(rank, device):
    failures, place, ranks = Failures(), place_of(device), dist.get_world_size()
    for name in WITHOUT_INDICES:
        for pattern in PATTERNS:
            for dim in (0, 1):
                for dtype in DTYPES:
                    c = case(name, pattern, ranks, dim)
                    compare(failures, c, dtype, (name, pattern, dim), device=place)
    for name in ("all_reduce", "reduce", "broadcast", "all_gather_v"):
        c = PRIMITIVES[name](Setting((50_001, *[7] * (ranks - 1)), 0, (3,)))
        compare(failures, c, torch.float32, ("large", name), device=place)
    return failures


def check_plan(rank, device):
    """A plan made on the CPU, by Gloo, and moved; and one made on the device, by its engine."""
    failures, place, ranks = Failures(), place_of(device), dist.get_world_size()
    for pattern in PATTERNS:
        s = setting(pattern, ranks, 1)
        c = PRIMITIVES["plan_from_needed"](s)
        inputs = c.draw(torch.float64)
        x, needed = inputs[rank].to(place), s.needed[rank]
        moved = varcomm.ExchangePlan.from_needed(needed, s.sizes).to(place)
        made_there = varcomm.ExchangePlan.from_needed(needed.to(place), s.sizes)
        indices = [index.to(place) for index in s.indices[rank]]
        counts = [[len(index) for index in row] for row in s.indices]
        picked = varcomm.indexed_all_to_all_v(x, indices, counts, dim=1)
        results = moved(x, 1), made_there(x, 1)
        with failures.named(pattern):
            for y in results:
                assert y.device == x.device
                assert torch.equal(y.cpu(), c.reference(inputs)[rank])
            want = PRIMITIVES["indexed_all_to_all_v"](s).reference(inputs)[rank]
            assert torch.equal(picked.cpu(), want)
        for plan in (moved, made_there):
            dot_test(partial(plan, dim=1), x)
    return failures


def check_asynchronous(rank, device):
    failures, ranks = Failures(), dist.get_world_size()
    x = torch.full((rank + 1, 1000), float(rank), device=place_of(device))
    handle = varcomm.all_gather_v(x, range(1, ranks + 1), async_op=True)
    other = varcomm.all_reduce(torch.ones(1, device=x.device))
    whole = [float(src) for src in range(ranks) for _ in range(src + 1)]
    with failures.named("asynchronous"):
        assert handle.wait()[:, 0].tolist() == whole
        assert other.item() == ranks
    return failures


CHECKS = (check_primitives, check_plan, check_asynchronous)


@on_gpus
@pytest.mark.parametrize("check", CHECKS)
def test_one_rank_a_gpu(ranks, check):
    assert_none(ranks.run(check, "cuda"))


@on_gpus
@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks_through_pinned_memory(two_ranks, check):
    assert_none(two_ranks.run(check, "cuda"))


@on_gpus
@pytest.mark.timeout(400)
@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks_of_nccl_on_one_gpu(sharing_ranks, check):
    assert_none(sharing_ranks.run(check, "cuda"))


def through_nccl(rank, check):
    with strict_nccl(["cpu"]):
        return check(rank, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_on_cpus(worlds, check):
    assert_none(worlds.run(3, check, "cpu"))
    assert_none(worlds.run(3, through_nccl, check))
