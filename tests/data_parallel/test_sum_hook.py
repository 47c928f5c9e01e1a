"""DistributedDataParallel with our hook: sums as in one process, and no sum of a sum."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import varcomm
from tests.data_parallel.cases import (
    DOUBLE,
    SOME,
    Branches,
    Energy,
    Graphs,
    Types,
    assert_same_gradients,
    on,
    on_energy_and_forces,
    rows,
    seeded,
    square,
)
from tests.graph.graphs import split_by, wild
from tests.worlds import WORLDS
from varcomm import ArgumentError, DisagreementError, GroupError
from varcomm.data_parallel import GlobalCount, sum_hook
from varcomm.graph import distribute, partition


def layers():
    return nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 70)).double()


def slope():
    return nn.Linear(1, 1, bias=False)


def wrapped(make, group=None, reduce="sum", **settings):
    """Return a module in DistributedDataParallel with the hook, and its twin for one process."""
    ddp = DistributedDataParallel(seeded(make), process_group=group, **settings)
    ddp.register_comm_hook(group if reduce == "sum" else (group, reduce), sum_hook)
    return ddp, seeded(make)


SETTINGS = {
    "plain": {},
    "buckets": {"bucket_cap_mb": 0.005},
    "views": {"bucket_cap_mb": 0.005, "gradient_as_bucket_view": True},
    "static": {"bucket_cap_mb": 0.005, "static_graph": True},
    "unused": {"bucket_cap_mb": 0.005, "find_unused_parameters": True},
}


@on(*WORLDS)
def test_sums_as_in_one_process(rank, ranks):
    """Rank 0 has no rows."""
    for name, in_debug in [*((name, False) for name in SETTINGS), ("buckets", True)]:
        ddp, twin = wrapped(layers, **SETTINGS[name])
        for step in range(3):
            ddp.zero_grad(set_to_none=step == 1)
            twin.zero_grad()
            loss = square(ddp(rows(rank, ranks) + step))
            with varcomm.debug() if in_debug else nullcontext():
                loss.backward()
            sum(square(twin(rows(part, ranks) + step)) for part in range(ranks)).backward()
            assert_same_gradients(ddp.module, twin)
        assert twin[0].weight.grad.any()


@on(*SOME)
def test_parameters_unused_on_some_ranks_or_on_all(rank, ranks):
    """A rank takes a branch of its own; none takes the parameter that is left."""
    count = GlobalCount()
    for reduce, divisor in (("sum", 1), ("mean", ranks), (count, 2 * ranks)):
        options = {"find_unused_parameters": True, "bucket_cap_mb": 1e-4}
        ddp, twin = wrapped(Branches, None, reduce, **options)
        for _ in range(2):
            ddp.zero_grad()
            twin.zero_grad()
            count.add(2)
            square(ddp(rows(2, 3), rank % 2)).backward()
            parts = [square(twin(rows(2, 3), part % 2)) for part in range(ranks)]
            (sum(parts) / divisor).backward()
            assert_same_gradients(ddp.module, twin)
        unused = [p.grad is None for p in ddp.module.parameters()]
        assert unused == [True] + [False] * 4 + [True] * 2
        count.reset()


@on(*SOME)
def test_losses_on_forces_and_complex_parameters(rank, ranks):
    """A loss on energy, forces and curvature, made with create_graph; rank 0 has no atoms."""
    for settings in ({}, {"bucket_cap_mb": 1e-5}):
        ddp, twin = wrapped(Energy, **settings)
        for _ in range(2):
            for module in (ddp, twin):
                module.zero_grad()
            on_energy_and_forces(ddp, rank, ranks).backward()
            sum(on_energy_and_forces(twin, part, ranks) for part in range(ranks)).backward()
            assert_same_gradients(ddp.module, twin, 1e-11)
        assert twin.net[0].weight.grad.any()
    ddp, twin = wrapped(Types)
    ddp(rows(rank, ranks)).abs().square().sum().backward()
    sum(twin(rows(part, ranks)).abs().square().sum() for part in range(ranks)).backward()
    assert_same_gradients(ddp.module, twin)


@on(*SOME)
def test_means_and_global_counts(rank, ranks):
    """Divide by the number of ranks, or by the rows of all micro-batches of a step."""
    for name, reduce in [(n, r) for n in ("buckets", "views", "static") for r in ("mean", "count")]:
        count = GlobalCount()
        given = count if reduce == "count" else reduce
        ddp, twin = wrapped(layers, None, given, **SETTINGS[name])
        for step in range(3):
            ddp.zero_grad()
            twin.zero_grad()
            # in its first backward a static graph is summed at the end: no micro-batches
            micros = 2 if step else 1
            for micro in range(micros):
                count.add(rank + step)
                with (
                    nullcontext() if micro == micros - 1 else ddp.no_sync(),
                    varcomm.debug() if micro else nullcontext(),
                ):
                    square(ddp(rows(rank, ranks) + step + micro)).backward()
                parts = (rows(part, ranks) + step + micro for part in range(ranks))
                sum(square(twin(part)) for part in parts).backward()
            counted = sum(part + step for part in range(ranks)) * micros or 1
            for parameter in twin.parameters():
                parameter.grad /= counted if reduce == "count" else ranks
            assert_same_gradients(ddp.module, twin)
        assert twin[0].weight.grad.any()


@on(2)
def test_two_modules_with_a_count_each(rank, ranks):
    """In one backward, in which their buckets are summed in turns."""
    counts, x = [GlobalCount(), GlobalCount()], rows(rank, 2)
    both = [wrapped(layers, None, count, bucket_cap_mb=0.001) for count in counts]
    for _ in range(2):  # after the first, DistributedDataParallel makes its buckets again
        for (ddp, twin), count, number in zip(both, counts, (1, 3), strict=True):
            ddp.zero_grad()
            twin.zero_grad()
            count.add(number)
            (sum(square(twin(rows(part, 2))) for part in range(2)) / (2 * number)).backward()
        sum(square(ddp(x)) for ddp, _ in both).backward()
        for ddp, twin in both:
            assert_same_gradients(ddp.module, twin)


def test_wrong_reductions(worlds):
    """In worlds of their own, because a DistributedDataParallel cannot be used after an error."""
    for state, error, words in (
        ((None, "max"), ArgumentError, "reduce must be"),
        ((None, "sum", 1), ValueError, "unpack"),
        ("group", GroupError, "group"),
        ((None, GlobalCount()), ArgumentError, "on 2 of 2 ranks GlobalCount.add was not called"),
    ):
        worlds.run(2, wrong, state, error, words)
    worlds.run(2, one_count)


def wrong(rank, state, error, words):
    ddp = DistributedDataParallel(slope())
    ddp.register_comm_hook(state, sum_hook)
    with pytest.raises(error, match=words):
        ddp(torch.ones(1, 1)).sum().backward()


def one_count(rank):
    """Two modules in one backward, with a count for both."""
    count = GlobalCount()
    count.add(1)
    first, second = (wrapped(slope, None, count)[0] for _ in range(2))
    with pytest.raises(ArgumentError, match="GlobalCount"):
        (first(torch.ones(1, 1)) + second(torch.ones(1, 1))).sum().backward()


def summed_twice(rank, how):
    ddp, x = wrapped(slope)[0], torch.ones(1, 1)
    ddp(x).sum().backward()
    said = "has been summed over ranks, and this backward would sum it again"
    context = {"in debug": varcomm.debug, "with no_sync": ddp.no_sync}.get(how, nullcontext)
    error = DisagreementError if how == "in debug" else ArgumentError
    with context(), pytest.raises(error, match=said):
        ddp(x).sum().backward()
    assert ddp.module.weight.grad.item() == 2.0


def test_a_sum_is_not_summed_again(worlds):
    """It would give 6 where two micro-batches have 4."""
    for how in ("without no_sync", "with no_sync", "in debug"):
        worlds.run(2, summed_twice, how)


class Weight(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x):
        return self.weight * x


@on(3)
def test_bytes_are_those_of_a_sum(rank, ranks):
    """Narrow floats travel narrow, and are summed in fp32."""
    for dtype, big in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        ddp, _ = wrapped(partial(Weight, dtype))
        with varcomm.trace() as calls:
            ddp(torch.tensor([big if rank == 0 else 0.75], dtype=dtype)).backward()
        assert ddp.module.weight.grad.item() == big + 2
        assert sum(call.sent for call in calls) == 2 * 2
    ddp, _ = wrapped(layers)
    loss = ddp(rows(1, 2)).sum()
    with varcomm.trace() as calls:
        loss.backward()
    assert [call.name for call in calls] == ["reduce_scatter_v", "all_gather_v"]
    numbers = 3 * 40 + 40 + 40 * 70 + 70
    assert abs(sum(call.sent for call in calls) - 2 * 2 / 3 * numbers * 8) <= 3 * 8


@on(2)
def test_sums_begin_while_backward_goes_on(rank, ranks):
    """The first bucket is on its way when backward comes to the first layer."""
    seen = []
    ddp, _ = wrapped(layers, bucket_cap_mb=0.005)
    for _ in range(2):
        ddp.zero_grad()
        x = torch.ones(2, 3, dtype=DOUBLE, requires_grad=True)
        with varcomm.trace() as calls:
            out = ddp(x)
            ddp.module[0].weight.register_hook(lambda _, calls=calls: seen.append(len(calls)))
            out.sum().backward()
    assert seen[-1] >= 1


@on(3)
def test_subgroup(rank, ranks):
    group = dist.new_group([1, 2])
    if rank:
        ddp, _ = wrapped(slope, group)
        ddp(torch.full((1, 1), float(rank))).sum().backward()
        assert ddp.module.weight.grad.item() == 3.0
    dist.barrier()


@on(*SOME)
def test_a_distributed_model(rank, ranks):
    """The model is distributed first, and DistributedDataParallel has a group to itself."""
    data, group = wild(), dist.new_group()
    graph = partition(data, method=split_by("a rank owns nothing", 24, ranks))
    ddp, _ = wrapped(lambda: distribute(seeded(Graphs), graph), group, bucket_cap_mb=1e-4)
    twin = seeded(Graphs)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.01) for module in (ddp, twin)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        graph.mean((ddp(graph.x, graph.edge_index) - graph.y).square()).backward()
        (twin(data.x, data.edge_index) - data.y).square().mean().backward()
        assert_same_gradients(ddp.module, twin, 1e-11)
        for optimizer in optimizers:
            optimizer.step()


@on(2)
def test_debug_names_ranks_that_are_elsewhere(rank, ranks):
    ddp, _ = wrapped(layers)
    loss = ddp(rows(1, 2)).sum()
    call = partial(varcomm.broadcast, torch.ones(1)) if rank else loss.backward
    with varcomm.debug(), pytest.raises(DisagreementError, match="disagree on operation"):
        call()
