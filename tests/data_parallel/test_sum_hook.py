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
    Branches,
    Energy,
    Graphs,
    Types,
    assert_same_gradients,
    on_energy_and_forces,
    rows,
    seeded,
    square,
)
from tests.graph.graphs import split_by, wild
from tests.worlds import WORLDS
from varcomm import ArgumentError, DisagreementError
from varcomm.data_parallel import GlobalCount, sum_hook
from varcomm.graph import distribute, partition

SOME = (3, pytest.param(2, marks=pytest.mark.slow))


def layers():
    return nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 70)).double()


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


def as_alone(rank, ranks, settings, in_debug=False):
    """Rank 0 has no rows."""
    ddp, twin = wrapped(layers, **settings)
    for step in range(3):
        ddp.zero_grad(set_to_none=step == 1)
        twin.zero_grad()
        loss = square(ddp(rows(rank, ranks) + step))
        with varcomm.debug() if in_debug else nullcontext():
            loss.backward()
        sum(square(twin(rows(part, ranks) + step)) for part in range(ranks)).backward()
        assert_same_gradients(ddp.module, twin)
    return twin[0].weight.grad.abs().sum().item() > 0


def all_settings(rank, ranks):
    done = [as_alone(rank, ranks, settings) for settings in SETTINGS.values()]
    return [*done, as_alone(rank, ranks, SETTINGS["buckets"], True)]


@pytest.mark.parametrize("ranks", WORLDS)
def test_sums_as_in_one_process(worlds, ranks):
    assert worlds.run(ranks, all_settings, ranks) == [[True] * 6] * ranks


def unused(rank, ranks, reduce):
    """A rank takes a branch of its own; none takes the parameter that is left."""
    count = GlobalCount()
    given = count if reduce == "count" else reduce
    ddp, twin = wrapped(Branches, None, given, find_unused_parameters=True, bucket_cap_mb=1e-4)
    divisor = {"sum": 1, "mean": ranks, "count": 2 * ranks}[reduce]
    for _ in range(2):
        ddp.zero_grad()
        twin.zero_grad()
        count.add(2)
        square(ddp(rows(2, 3), rank % 2)).backward()
        parts = [square(twin(rows(2, 3), part % 2)) for part in range(ranks)]
        (sum(parts) / divisor).backward()
        assert_same_gradients(ddp.module, twin)
    return [p.grad is None for p in ddp.module.parameters()]


@pytest.mark.parametrize("ranks", SOME)
def test_parameters_unused_on_some_ranks_or_on_all(worlds, ranks):
    for reduce in ("sum", "mean", "count"):
        expected = [[True] + [False] * 4 + [True] * 2] * ranks
        assert worlds.run(ranks, unused, ranks, reduce) == expected


def forces(rank, ranks, settings):
    """A loss on energy, forces and curvature, made with create_graph; rank 0 has no atoms."""
    ddp, twin = wrapped(Energy, **settings)
    for _ in range(2):
        for module in (ddp, twin):
            module.zero_grad()
        on_energy_and_forces(ddp, rank, ranks).backward()
        sum(on_energy_and_forces(twin, part, ranks) for part in range(ranks)).backward()
        assert_same_gradients(ddp.module, twin, 1e-11)
    return twin.net[0].weight.grad.abs().sum().item() > 0


@pytest.mark.parametrize("ranks", SOME)
def test_losses_on_forces(worlds, ranks):
    for settings in ({}, {"bucket_cap_mb": 1e-5}):
        assert worlds.run(ranks, forces, ranks, settings) == [True] * ranks


def dtypes(rank, ranks):
    ddp, twin = wrapped(Types)
    ddp(rows(rank, ranks)).abs().square().sum().backward()
    sum(twin(rows(part, ranks)).abs().square().sum() for part in range(ranks)).backward()
    assert_same_gradients(ddp.module, twin)
    return twin.b.grad.dtype


def test_complex_parameters(worlds):
    assert worlds.run(3, dtypes, 3) == [torch.complex128] * 3


def divided(rank, ranks, settings, reduce):
    """Divide by the number of ranks, or by the rows of all micro-batches of a step."""
    count = GlobalCount()
    ddp, twin = wrapped(layers, None, count if reduce == "count" else reduce, **settings)
    for step in range(3):
        ddp.zero_grad()
        twin.zero_grad()
        number = ranks
        # in its first backward a static graph is summed at the end, and takes no micro-batches
        micros = 2 if step else 1
        for micro in range(micros):
            count.add(rank + step)
            with (
                nullcontext() if micro == micros - 1 else ddp.no_sync(),
                varcomm.debug() if micro else nullcontext(),
            ):
                square(ddp(rows(rank, ranks) + step + micro)).backward()
            sum(square(twin(rows(part, ranks) + step + micro)) for part in range(ranks)).backward()
        if reduce == "count":
            number = sum(part + step for part in range(ranks)) * micros or 1
        for parameter in twin.parameters():
            parameter.grad /= number
        assert_same_gradients(ddp.module, twin)
    return twin[0].weight.grad.abs().sum().item() > 0


@pytest.mark.parametrize("reduce", ["mean", "count"])
@pytest.mark.parametrize("ranks", SOME)
def test_means_and_global_counts(worlds, ranks, reduce):
    for settings in ("buckets", "views", "static"):
        done = worlds.run(ranks, divided, ranks, SETTINGS[settings], reduce)
        assert done == [True] * ranks


def slope():
    return nn.Linear(1, 1, bias=False)


def wrong(rank, state, words):
    ddp = DistributedDataParallel(slope())
    ddp.register_comm_hook(state, sum_hook)
    with pytest.raises(ArgumentError, match=words):
        ddp(torch.ones(1, 1)).sum().backward()


def one_count(rank):
    """Two modules in one backward, with a count for both."""
    count = GlobalCount()
    count.add(1)
    first, second = (wrapped(slope, None, count)[0] for _ in range(2))
    with pytest.raises(ArgumentError, match="GlobalCount"):
        (first(torch.ones(1, 1)) + second(torch.ones(1, 1))).sum().backward()


def test_wrong_reductions(worlds):
    for state, words in (
        ((None, "max"), "reduce must be"),
        ((None, "sum", 1), "state must be"),
        ("group", "state must be"),
        ((None, GlobalCount()), "on 2 of 2 ranks GlobalCount.add was not called"),
    ):
        worlds.run(2, wrong, state, words)


def micro_batches(rank, set_to_none):
    """Two backwards per step with slope 1 on each of two ranks; the first one is not summed."""
    ddp, x = wrapped(slope)[0], torch.ones(1, 1)
    sums = []
    for _ in range(2):
        ddp.zero_grad(set_to_none=set_to_none)
        with ddp.no_sync():
            ddp(x).sum().backward()
        ddp(x).sum().backward()
        sums.append(ddp.module.weight.grad.item())
    return sums


def test_accumulated_micro_batches_are_summed_once(worlds):
    for set_to_none in (True, False):
        assert worlds.run(2, micro_batches, set_to_none) == [[4.0, 4.0]] * 2


def summed_twice(rank, how):
    ddp, x = wrapped(slope)[0], torch.ones(1, 1)
    ddp(x).sum().backward()
    said = "has been summed over ranks, and this backward would sum it again"
    context = {"in debug": varcomm.debug, "with no_sync": ddp.no_sync}.get(how, nullcontext)
    error = DisagreementError if how == "in debug" else ArgumentError
    with context(), pytest.raises(error, match=said):
        ddp(x).sum().backward()
    return ddp.module.weight.grad.item()


@pytest.mark.parametrize("how", ["without no_sync", "with no_sync", "in debug"])
def test_a_sum_is_not_summed_again(worlds, how):
    """It would give 6 where two micro-batches have 4."""
    assert worlds.run(2, summed_twice, how) == [2.0, 2.0]


class Weight(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x):
        return self.weight * x


def narrow(rank, dtype, big):
    ddp, _ = wrapped(partial(Weight, dtype))
    with varcomm.trace() as calls:
        ddp(torch.tensor([big if rank == 0 else 0.75], dtype=dtype)).backward()
    return ddp.module.weight.grad.item(), sum(call.sent for call in calls)


@pytest.mark.parametrize(("dtype", "big"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)])
def test_narrow_floats_are_summed_in_fp32_and_travel_narrow(worlds, dtype, big):
    assert worlds.run(3, narrow, dtype, big) == [(big + 2, 2 * 2)] * 3


def cost(rank):
    ddp, _ = wrapped(layers)
    loss = ddp(rows(1, 2)).sum()
    with varcomm.trace() as calls:
        loss.backward()
    return [call.name for call in calls], sum(call.sent for call in calls)


def test_bytes_are_those_of_a_sum(worlds):
    numbers = 3 * 40 + 40 + 40 * 70 + 70
    for names, sent in worlds.run(3, cost):
        assert names == ["reduce_scatter_v", "all_gather_v"]
        assert abs(sent - 2 * 2 / 3 * numbers * 8) <= 3 * 8


def overlapped(rank):
    """The first bucket is on its way when backward comes to the first layer."""
    seen = []
    ddp, _ = wrapped(layers, bucket_cap_mb=0.005)
    for _ in range(2):  # after the first, DistributedDataParallel makes its buckets again
        ddp.zero_grad()
        x = torch.ones(2, 3, dtype=DOUBLE, requires_grad=True)
        with varcomm.trace() as calls:
            out = ddp(x)
            ddp.module[0].weight.register_hook(lambda _, calls=calls: seen.append(len(calls)))
            out.sum().backward()
    return seen[-1]


def test_sums_begin_while_backward_goes_on(worlds):
    assert min(worlds.run(2, overlapped)) >= 1


def in_a_part(rank):
    group = dist.new_group([1, 2])
    grad = None
    if rank:
        ddp, _ = wrapped(slope, group)
        ddp(torch.full((1, 1), float(rank))).sum().backward()
        grad = ddp.module.weight.grad.item()
    dist.barrier()
    return grad


def test_subgroup(worlds):
    assert worlds.run(3, in_a_part) == [None, 3.0, 3.0]


def on_a_graph(rank, method):
    """The model is distributed first, and DistributedDataParallel has a group to itself."""
    data, group = wild(), dist.new_group()
    graph = partition(data, method=method)
    ddp, twin = wrapped(lambda: distribute(seeded(Graphs), graph), group, bucket_cap_mb=1e-4)
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
    return graph.num_owned


@pytest.mark.parametrize("ranks", SOME)
def test_a_distributed_model(worlds, ranks):
    owned = worlds.run(ranks, on_a_graph, split_by("a rank owns nothing", 24, ranks))
    assert (sum(owned), min(owned)) == (24, 0)


def elsewhere(rank):
    ddp, _ = wrapped(layers)
    loss = ddp(rows(1, 2)).sum()
    call = partial(varcomm.broadcast, torch.ones(1)) if rank else loss.backward
    with varcomm.debug(), pytest.raises(DisagreementError, match="disagree on operation"):
        call()


def test_debug_tells_ranks_that_are_elsewhere(worlds):
    worlds.run(2, elsewhere)
    worlds.run(2, one_count)
