"""Narrow parameters: fp32 sums of gradients that travel narrow, and fp32 masters."""

import copy

import pytest
import torch
from torch import nn

import varcomm
from tests.data_parallel.cases import SOME, on
from tests.data_parallel.sharded_cases import twins
from tests.worlds import WORLDS
from varcomm.data_parallel import ShardedGradients

BF16 = torch.bfloat16


def model_of():
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).to(BF16)


def data(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(1 + rank, 5, generator=generator).to(BF16)


def sgd(lr):
    return lambda groups: torch.optim.SGD(groups, lr)


def adamw(groups):
    return torch.optim.AdamW(groups, 0.01)


def gradients_of(model, step, ranks):
    """For each rank its gradient of each parameter, as it is before any sum."""
    found = []
    for rank in range(ranks):
        model.zero_grad()
        model(data(step, rank)).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    return list(zip(*found, strict=True))


@on(*WORLDS)
def test_sums_are_within_the_bound(rank, ranks):
    """In fp32, and in their own dtype with its own unit."""
    for in_fp32, unit in ((True, 2**-24), (False, 2**-8)):
        model, twin = twins(model_of)
        own = ShardedGradients(model, sgd(0.1), fp32_reduce_scatter=in_fp32)
        model(data(0, rank)).square().sum().backward()
        own.reduce()
        of_ranks = dict(
            zip(dict(twin.named_parameters()), gradients_of(twin, 0, ranks), strict=True)
        )
        for name, piece in own.pieces.items():
            parts = [g.double().view(-1)[piece.start : piece.stop] for g in of_ranks[name]]
            error = (piece.value.grad.double() - sum(parts) / ranks).abs()
            bound = (ranks + 1) * unit * sum(part.abs() for part in parts) / ranks
            assert (error <= bound.clamp(min=1e-30)).all()


def trained(rank, ranks):
    """Twenty steps beside one process that casts gradients before it adds them."""
    model, twin = twins(model_of)
    own = ShardedGradients(model, adamw, bucket_bytes=60, overlap_forward=True)
    masters = [nn.Parameter(p.detach().float()) for p in twin.parameters()]
    one = adamw(masters)
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
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    whole = dict(zip(dict(twin.named_parameters()), masters, strict=True))
    for name, piece in own.pieces.items():
        assert piece.value.dtype == torch.float32
        assert torch.equal(piece.value, whole[name].view(-1)[piece.start : piece.stop])
    return sum(call.sent for call in calls)


@pytest.mark.parametrize("ranks", SOME)
def test_training_with_masters_is_that_of_one_process_bit_for_bit(worlds, ranks):
    """And twenty steps send two bytes per number in both directions, and the flags."""
    sent = sum(worlds.run(ranks, trained, ranks))
    numbers = sum(p.numel() for p in model_of().parameters())
    # one flag for each of four parameters in each of the other pieces
    least = 2 * 20 * 2 * (ranks - 1) * numbers
    assert least <= sent <= least + 20 * 2 * ranks * (ranks - 1) * 4


def ones(**options):
    model = nn.Linear(1, 2, bias=False).to(BF16)
    nn.init.ones_(model.weight)
    return model, ShardedGradients(model, sgd(2**-10), **options)


def step(model, own):
    own.zero_grad()
    model(torch.ones(1, 1, dtype=BF16)).sum().backward()
    own.step()


@on(2)
def test_masters_keep_small_steps(rank, ranks):
    """In bfloat16 a step of 2**-10 from 1 is lost; a master keeps it."""
    for masters, left in ((True, 1 - 8 * 2**-10), (False, 1.0)):
        model, own = ones(fp32_masters=masters)
        for _ in range(8):
            step(model, own)
        assert model.weight.tolist() == [[left]] * 2


@on(2)
def test_masters_take_over_values_written_into_parameters(rank, ranks):
    """They keep values that are left as they were; `.data` counts, of which torch knows nothing."""
    model, own = ones()
    for _ in range(2):
        step(model, own)
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.load_state_dict(state)  # rounded, as it is in the model
        model.weight[1] = 3.0
    step(model, own)
    expected = [3 - 2**-10] if rank else [1 - 3 * 2**-10]
    assert [piece.value.tolist() for piece in own.pieces.values()] == [expected]
    model = nn.Linear(3, 2).to(BF16)
    own = ShardedGradients(model, sgd(0.5))
    model(torch.ones(1, 3, dtype=BF16)).sum().backward()
    own.step()
    own.zero_grad()
    for parameter in model.parameters():
        parameter.data.clamp_(-0.125, 0.125)
    before = [p.tolist() for p in model.parameters()]
    model(torch.zeros(1, 3, dtype=BF16)).mul(0).sum().backward()
    own.step()
    assert before == [p.tolist() for p in model.parameters()]
    assert model.weight.abs().max() == 0.125
