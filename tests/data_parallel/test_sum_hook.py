"""DistributedDataParallel with our hook: sums as in one process, and no sum of a sum."""

from contextlib import ExitStack, nullcontext
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
    on_energy_and_forces,
    rows,
    seeded,
    square,
)
from tests.graph.graphs import split_by, wild
from tests.worlds import WORLDS, on_ranks
from varcomm import ArgumentError, DisagreementError, GroupError
from varcomm.data_parallel import sum_hook
from varcomm.graph import distribute, partition


def layers():
    return nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 70)).double()


def slope():
    return nn.Linear(1, 1, bias=False)


def wrapped(make, group=None, **settings):
    """Return a module in DistributedDataParallel with the hook, and its twin for one process."""
    ddp = DistributedDataParallel(seeded(make), process_group=group, **settings)
    ddp.register_comm_hook(group, sum_hook)
    return ddp, seeded(make)


SETTINGS = {
    "plain": {},
    "buckets": {"bucket_cap_mb": 0.005},
    "views": {"bucket_cap_mb": 0.005, "gradient_as_bucket_view": True},
    "static": {"bucket_cap_mb": 0.005, "static_graph": True},
    "unused": {"bucket_cap_mb": 0.005, "find_unused_parameters": True},
}


@on_ranks(*WORLDS)
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


@on_ranks(*SOME)
def test_parameters_unused_on_some_ranks_or_on_all(rank, ranks):
    """A rank takes a branch of its own; none takes the parameter that is left."""
    ddp, twin = wrapped(Branches, find_unused_parameters=True, bucket_cap_mb=1e-4)
    for _ in range(2):
        ddp.zero_grad()
        twin.zero_grad()
        square(ddp(rows(2, 3), rank % 2)).backward()
        sum(square(twin(rows(2, 3), part % 2)) for part in range(ranks)).backward()
        assert_same_gradients(ddp.module, twin)
    unused = [p.grad is None for p in ddp.module.parameters()]
    assert unused == [True] + [False] * 4 + [True] * 2


@on_ranks(2)
def test_micro_batches_and_two_modules_in_one_backward(rank, ranks):
    """The buckets of two modules are summed in turns; micro-batches add up in no_sync()."""
    x, both = rows(rank, 2), [wrapped(layers, bucket_cap_mb=0.001) for _ in range(2)]
    for micros in (1, 2):  # after the first, DistributedDataParallel makes its buckets again
        for module in (module for pair in both for module in pair):
            module.zero_grad()
        for micro in range(micros):
            with ExitStack() as contexts:
                if micro < micros - 1:
                    for ddp, _ in both:
                        contexts.enter_context(ddp.no_sync())
                sum(square(ddp(x + micro)) for ddp, _ in both).backward()
            for _, twin in both:
                sum(square(twin(rows(part, 2) + micro)) for part in range(2)).backward()
        for ddp, twin in both:
            assert_same_gradients(ddp.module, twin)


@on_ranks(*SOME)
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


@pytest.mark.parametrize("how", ["without no_sync", "with no_sync", "in debug"])
@on_ranks(2)
def test_a_sum_that_would_be_summed_again(rank, how):
    """It would give 6 where two micro-batches have 4."""
    ddp, x = wrapped(slope)[0], torch.ones(1, 1)
    ddp(x).sum().backward()
    context = {"in debug": varcomm.debug, "with no_sync": ddp.no_sync}.get(how, nullcontext)
    error = DisagreementError if how == "in debug" else ArgumentError
    with context(), pytest.raises(error, match="has been summed over ranks, and this backward"):
        ddp(x).sum().backward()
    assert ddp.module.weight.grad.item() == 2.0


@on_ranks(2)
def test_wrong_group(rank):
    ddp = DistributedDataParallel(slope())
    ddp.register_comm_hook((None, "mean"), sum_hook)
    with pytest.raises(GroupError, match="group"):
        ddp(torch.ones(1, 1)).sum().backward()


@on_ranks(3)
def test_bytes_are_those_of_a_sum(rank, ranks):
    """Narrow floats travel narrow, and are summed in fp32."""
    for dtype, big in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        ddp, _ = wrapped(lambda dtype=dtype: slope().to(dtype))
        with varcomm.trace() as calls:
            ddp(torch.full((1, 1), 0.75 if rank else big, dtype=dtype)).sum().backward()
        assert ddp.module.weight.grad.item() == big + 2
        assert sum(call.sent for call in calls) == 2 * (2 + 32)  # and the comparison
    ddp, _ = wrapped(layers)
    loss = ddp(rows(1, 2)).sum()
    with varcomm.trace() as calls:
        loss.backward()
    assert [call.name for call in calls] == ["reduce_scatter_v", "all_gather_v"]
    numbers = 3 * 40 + 40 + 40 * 70 + 70 + 2
    assert abs(sum(call.sent for call in calls) - 2 * 2 / 3 * numbers * 8) <= 3 * 8


@on_ranks(2)
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


@on_ranks(3)
def test_subgroup(rank, ranks):
    group = dist.new_group([1, 2])
    if rank:
        ddp, _ = wrapped(slope, group)
        ddp(torch.full((1, 1), float(rank))).sum().backward()
        assert ddp.module.weight.grad.item() == 3.0
    dist.barrier()


@on_ranks(*SOME)
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


class Between(nn.Module):
    """A layer before and one after a sum over ranks; rank 2 leaves out the first, 0 the last."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()

    def first(self, x, rank):
        return x.clone().requires_grad_() if rank == 2 else self.before(x).tanh()

    def rest(self, total, rank):
        return square(total if rank == 0 else self.after(total))

    def forward(self, x, rank, group):
        return self.rest(varcomm.all_reduce(self.first(x, rank), group=group), rank)


@pytest.mark.parametrize("in_debug", [False, True])
@on_ranks(3)
def test_a_model_that_communicates_and_leaves_out_parameters(rank, in_debug):
    """The last bucket of rank 2 is full before its backward comes to the sum over ranks."""
    (group, own), x = (dist.new_group(), dist.new_group()), rows(2, 3)
    for cap in (25, 1e-5):
        ddp, twin = wrapped(Between, own, find_unused_parameters=True, bucket_cap_mb=cap)
        for _ in range(3):
            ddp.zero_grad()
            twin.zero_grad()
            with varcomm.debug() if in_debug else nullcontext():
                ddp(x, rank, group).backward()
            total = sum(twin.first(x, part) for part in range(3))
            sum(twin.rest(total, part) for part in range(3)).backward()
            assert_same_gradients(ddp.module, twin)


@on_ranks(2)
def test_debug_names_ranks_that_are_elsewhere(rank, ranks):
    ddp, _ = wrapped(layers)
    loss = ddp(rows(1, 2)).sum()
    call = partial(varcomm.broadcast, torch.ones(1)) if rank else loss.backward
    with varcomm.debug(), pytest.raises(DisagreementError, match="disagree on operation"):
        call()


@on_ranks(3)
def test_ranks_with_other_numbers_of_batches(rank):
    """Ranks that have run out of batches take part in the sums of DDP's join()."""
    torch.manual_seed(0)
    batches = [torch.randn(n, 3, dtype=torch.float64) for n in (4, 2, 5, 1, 3, 2)]
    of_ranks = [batches[:1], batches[1:4], batches[4:]]
    ddp, alone = wrapped(layers)
    rows_of_steps = torch.zeros(3, dtype=torch.int64)
    rows_of_steps[: len(of_ranks[rank])] = torch.tensor([len(x) for x in of_ranks[rank]])
    totals = varcomm.all_reduce(rows_of_steps)  # before the epoch
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    with ddp.join():
        for step, x in enumerate(of_ranks[rank]):
            optimizer.zero_grad()
            (ddp(x).square().sum() / totals[step]).backward()
            optimizer.step()
    twin = torch.optim.SGD(alone.parameters(), 0.1)
    for step in range(3):
        twin.zero_grad()
        together = torch.cat([own[step] for own in of_ranks if step < len(own)])
        (alone(together).square().sum() / len(together)).backward()
        twin.step()
    for mine, expected in zip(ddp.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)
