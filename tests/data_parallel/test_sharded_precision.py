"""Narrow parameters: fp32 sums of what travels narrow, and fp32 masters."""

import copy

import pytest
import torch
from torch import nn

import varcomm
from tests.data_parallel.sharded_cases import twins
from tests.worlds import WORLDS
from varcomm.data_parallel import ShardedGradients

BF16 = torch.bfloat16


def model_of(dtype=BF16):
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)


def data(step, rank, dtype=BF16):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(1 + rank, 5, generator=generator).to(dtype)


def gradients_of(model, step, ranks):
    """For each rank its gradient of each parameter, as it is before any sum."""
    found = []
    for rank in range(ranks):
        model.zero_grad()
        model(data(step, rank, model[0].weight.dtype)).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    return list(zip(*found, strict=True))


def within_bounds(rank, ranks):
    """Return the largest error in units of what is promised; in its own dtype in other units."""
    worst = []
    for in_fp32 in (True, False):
        model, twin = twins(model_of)
        own = ShardedGradients(
            model, lambda groups: torch.optim.SGD(groups, 0.1), fp32_reduce_scatter=in_fp32
        )
        model(data(0, rank)).square().sum().backward()
        own.reduce()
        names = [name for name, _ in twin.named_parameters()]
        of_ranks = dict(zip(names, gradients_of(twin, 0, ranks), strict=True))
        errors = []
        for name, piece in own.pieces.items():
            parts = [g.double().view(-1)[piece.start : piece.stop] for g in of_ranks[name]]
            error = (piece.value.grad.double() - sum(parts) / ranks).abs()
            unit = 2**-24 if in_fp32 else 2**-8
            bound = (ranks + 1) * unit * sum(part.abs() for part in parts) / ranks
            errors.append((error / bound.clamp(min=1e-30)).max().item())
        worst.append(max(errors))
    return worst


@pytest.mark.parametrize("ranks", WORLDS)
def test_sums_in_fp32_are_within_the_bound(worlds, ranks):
    results = worlds.run(ranks, within_bounds, ranks)
    assert max(in_fp32 for in_fp32, _ in results) <= 1
    assert max(narrow for _, narrow in results) <= 1


def trained(rank, ranks):
    """Twenty steps beside one process that casts gradients before it adds them."""
    model, twin = twins(model_of)
    own = ShardedGradients(
        model, lambda groups: torch.optim.AdamW(groups, 0.01), bucket_bytes=60, overlap_forward=True
    )
    masters = [nn.Parameter(p.detach().float()) for p in twin.parameters()]
    one = torch.optim.AdamW(masters, 0.01)
    before, after = 2.0, ranks / 2.0
    with varcomm.trace() as calls:
        for step in range(20):
            model(data(step, rank)).square().sum().backward()
            own.step()
            own.zero_grad()
            for master, parts in zip(masters, gradients_of(twin, step, ranks), strict=True):
                total = parts[0].float() / before
                for part in parts[1:]:
                    total = total + part.float() / before
                master.grad = total / after
            one.step()
            for parameter, master in zip(twin.parameters(), masters, strict=True):
                parameter.data.copy_(master.detach())
    own.wait()
    same = [torch.equal(*pair) for pair in zip(model.parameters(), twin.parameters(), strict=True)]
    whole = dict(zip(dict(twin.named_parameters()), masters, strict=True))
    exact = all(
        torch.equal(piece.value, whole[name].view(-1)[piece.start : piece.stop])
        and piece.value.dtype == torch.float32
        for name, piece in own.pieces.items()
    )
    return all(same), exact, sum(call.sent for call in calls)


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_training_with_masters_is_that_of_one_process_bit_for_bit(worlds, ranks):
    """And twenty steps send two bytes a number, in both directions, as what is summed in fp32."""
    results = worlds.run(ranks, trained, ranks)
    assert [result[:2] for result in results] == [(True, True)] * ranks
    numbers = sum(p.numel() for p in model_of().parameters())
    # beside numbers, one flag for each of four parameters in each of the other pieces
    least = 2 * 20 * 2 * (ranks - 1) * numbers
    assert least <= sum(result[2] for result in results) <= least + 20 * 2 * ranks * (ranks - 1) * 4


def without_masters(rank):
    """In bfloat16 a step of 2**-10 from 1 is lost; a master keeps it."""
    found = []
    for masters in (True, False):
        model = nn.Linear(1, 2, bias=False).to(BF16)
        nn.init.ones_(model.weight)
        own = ShardedGradients(
            model, lambda groups: torch.optim.SGD(groups, 2**-10), fp32_masters=masters
        )
        for _ in range(8):
            own.zero_grad()
            model(torch.ones(1, 1, dtype=BF16)).sum().backward()
            own.step()
        found.append(model.weight.tolist())
    return found


def test_masters_keep_small_steps(worlds):
    kept, lost = 1 - 8 * 2**-10, 1.0
    assert worlds.run(2, without_masters) == [[[[kept]] * 2, [[lost]] * 2]] * 2


def loaded(rank):
    """Masters take over what is written into parameters, and keep what it leaves as it was."""
    model = nn.Linear(1, 2, bias=False).to(BF16)
    nn.init.ones_(model.weight)
    own = ShardedGradients(model, lambda groups: torch.optim.SGD(groups, 2**-10))
    for _ in range(2):
        own.zero_grad()
        model(torch.ones(1, 1, dtype=BF16)).sum().backward()
        own.step()
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.load_state_dict(state)  # rounded, as it is in the model
        model.weight[1] = 3.0
    own.zero_grad()
    model(torch.ones(1, 1, dtype=BF16)).sum().backward()
    own.step()
    return [piece.value.tolist() for piece in own.pieces.values()]


def test_masters_take_over_what_is_written_into_parameters(worlds):
    first, second = worlds.run(2, loaded)
    assert first == [[1 - 3 * 2**-10]]
    assert second == [[3 - 2**-10]]


def clamped(rank):
    """By way of .data, of which torch keeps no account."""
    model = nn.Linear(3, 2).to(BF16)
    own = ShardedGradients(model, lambda groups: torch.optim.SGD(groups, lr=0.5))
    model(torch.ones(1, 3, dtype=BF16)).sum().backward()
    own.step()
    own.zero_grad()
    for parameter in model.parameters():
        parameter.data.clamp_(-0.125, 0.125)
    before = [p.tolist() for p in model.parameters()]
    model(torch.zeros(1, 3, dtype=BF16)).mul(0).sum().backward()
    own.step()
    return before == [p.tolist() for p in model.parameters()], model.weight.abs().max().item()


def test_masters_take_over_what_is_written_by_way_of_data(worlds):
    assert worlds.run(2, clamped) == [(True, 0.125)] * 2


def on_the_cpu(rank):
    """On the CPU already, nothing moves."""
    values = []
    for offload in (False, True):
        model, _ = twins(model_of)
        own = ShardedGradients(
            model, lambda groups: torch.optim.AdamW(groups, 0.01), cpu_offload=offload
        )
        for step in range(3):
            own.zero_grad()
            model(data(step, rank)).square().sum().backward()
            own.step()
        values.append([p.detach().clone() for p in model.parameters()])
        devices = {piece.value.device.type for piece in own.pieces.values()}
    return all(map(torch.equal, *values)), devices


def test_cpu_offload_where_all_is_on_the_cpu(worlds):
    assert worlds.run(2, on_the_cpu) == [(True, {"cpu"})] * 2
