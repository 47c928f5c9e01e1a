"""DistributedDataParallel with our hook: sums as in one process, and no sum of a sum."""

import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import varcomm
from tests.data_parallel.cases import Branches, Types, rows, square
from tests.data_parallel.comparing import assert_same_gradients, seeded
from tests.graph.graphs import split_by, wild
from varcomm import ArgumentError, DisagreementError
from varcomm.data_parallel import GlobalCount, sum_hook
from varcomm.graph import distribute, partition


def layers():
    return nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 70)).double()


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


def as_alone(rank, ranks, settings, in_debug=False):
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


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sums_as_in_one_process(worlds, ranks, settings):
    assert worlds.run(ranks, as_alone, ranks, SETTINGS[settings]) == [True] * ranks


def test_sums_in_debug(worlds):
    assert worlds.run(3, as_alone, 3, SETTINGS["buckets"], True) == [True] * 3


def unused(rank, ranks):
    """A rank takes a branch of its own; none takes the parameter that is left."""
    ddp, twin = wrapped(Branches, find_unused_parameters=True)
    square(ddp(rows(2, 3), rank % 2)).backward()
    sum(square(twin(rows(2, 3), part % 2)) for part in range(ranks)).backward()
    assert_same_gradients(ddp.module, twin)
    return [p.grad is None for p in ddp.module.parameters()]


@pytest.mark.parametrize("ranks", [2, 3])
def test_parameters_unused_on_some_ranks_or_on_all(worlds, ranks):
    assert worlds.run(ranks, unused, ranks) == [[True] + [False] * 4 + [True] * 2] * ranks


def dtypes(rank, ranks):
    ddp, twin = wrapped(Types)
    ddp(rows(rank, ranks)).abs().square().sum().backward()
    sum(twin(rows(part, ranks)).abs().square().sum() for part in range(ranks)).backward()
    assert_same_gradients(ddp.module, twin)
    return twin.b.grad.dtype


def test_complex_parameters(worlds):
    assert worlds.run(3, dtypes, 3) == [torch.complex128] * 3


def slope(rank):
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    ddp.register_comm_hook(None, sum_hook)
    return ddp, torch.ones(1, 1)


def divided(rank, ranks, settings, reduce):
    """Divide by the number of ranks, or by what is counted in all micro-batches of a step."""
    count = GlobalCount()
    ddp = DistributedDataParallel(seeded(layers), **settings)
    ddp.register_comm_hook((None, count if reduce == "count" else reduce), sum_hook)
    twin = seeded(layers)
    for step in range(3):
        ddp.zero_grad()
        twin.zero_grad()
        number = ranks
        # in its first backward a static graph is summed at the end, and takes no micro-batches
        for micro in range(2 if step else 1):
            last = micro == (1 if step else 0)
            count.add(rank + step)
            with (
                nullcontext() if last else ddp.no_sync(),
                varcomm.debug() if micro else nullcontext(),
            ):
                square(ddp(rows(rank, ranks) + step + micro)).backward()
        for micro in range(2 if step else 1):
            sum(square(twin(rows(part, ranks) + step + micro)) for part in range(ranks)).backward()
        if reduce == "count":
            number = sum(part + step for part in range(ranks)) * (2 if step else 1) or 1
        for parameter in twin.parameters():
            parameter.grad /= number
        assert_same_gradients(ddp.module, twin)
    return twin[0].weight.grad.abs().sum().item() > 0


@pytest.mark.parametrize("settings", ["plain", "buckets", "views", "static"])
@pytest.mark.parametrize("reduce", ["mean", "count"])
def test_means_and_global_counts(worlds, settings, reduce):
    for ranks in (2, 3):
        done = worlds.run(ranks, divided, ranks, SETTINGS[settings], reduce)
        assert done == [True] * ranks


def wrong_state(rank, state, said):
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    ddp.register_comm_hook(state, sum_hook)
    with pytest.raises(ArgumentError, match=said):
        ddp(torch.ones(1, 1)).sum().backward()


def test_wrong_reductions(worlds):
    said = r"^sum_hook on rank . of 2: reduce must be .* got 'max'\.$"
    assert worlds.run(2, wrong_state, (None, "max"), said) == [None, None]
    said = r"^sum_hook on rank . of 2: on 2 of 2 ranks GlobalCount\.add was not called before this"
    assert worlds.run(2, wrong_state, (None, GlobalCount()), said) == [None, None]


def micro_batches(rank, set_to_none):
    """Two backwards a step with slope 1 on each of two ranks; the first one is not summed."""
    ddp, x = slope(rank)
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
    ddp, x = slope(rank)
    ddp(x).sum().backward()
    said = (
        f"sum_hook on rank {rank} of 2: the gradient of a parameter of shape (1, 1) has been "
        "summed over ranks, and what this backward adds to it would sum it again. Call "
        "zero_grad() before; run all micro-batches but the last in ddp.no_sync()."
    )
    if how == "in debug":
        with varcomm.debug(), pytest.raises(DisagreementError, match=re.escape(said[-100:])):
            ddp(x).sum().backward()
    elif how == "with no_sync":
        with ddp.no_sync(), pytest.raises(ArgumentError, match=f"^{re.escape(said)}$"):
            ddp(x).sum().backward()
    else:
        with pytest.raises(ArgumentError, match=f"^{re.escape(said)}$"):
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
    ddp = DistributedDataParallel(Weight(dtype))
    ddp.register_comm_hook(None, sum_hook)
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


def in_a_part(rank):
    group = dist.new_group([1, 2])
    grad = None
    if rank:
        ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=group)
        ddp.register_comm_hook(group, sum_hook)
        ddp(torch.full((1, 1), float(rank))).sum().backward()
        grad = ddp.module.weight.grad.item()
    dist.barrier()
    return grad


def test_subgroup(worlds):
    assert worlds.run(3, in_a_part) == [None, 3.0, 3.0]


class Graphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = pyg.SAGEConv(4, 6), pyg.SAGEConv(6, 2)
        self.double()

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index).tanh(), edge_index)


def on_a_graph(rank, method):
    """The model is distributed first, and DistributedDataParallel has a group to itself."""
    data, group = wild(), dist.new_group()
    graph = partition(data, method=method)
    ddp = DistributedDataParallel(
        distribute(seeded(Graphs), graph), process_group=group, bucket_cap_mb=1e-4
    )
    ddp.register_comm_hook(group, sum_hook)
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


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_distributed_model(worlds, ranks):
    owned = worlds.run(ranks, on_a_graph, split_by("a rank owns nothing", 24, ranks))
    assert (sum(owned), min(owned)) == (24, 0)


def elsewhere(rank):
    ddp, _ = wrapped(layers)
    loss = ddp(rows(1, 2)).sum()
    said = "on operation: rank 0 has 'reduce_scatter_v'; rank 1 has 'broadcast'"
    call = partial(varcomm.broadcast, torch.ones(1)) if rank else loss.backward
    with varcomm.debug(), pytest.raises(DisagreementError, match=said):
        call()


def test_debug_tells_ranks_that_are_elsewhere(worlds):
    assert worlds.run(2, elsewhere) == [None, None]
