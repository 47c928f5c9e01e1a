"""Optimizers that compute with whole tensors are refused for a rank's part of one."""

import pytest
import torch

import varcomm
from tests.worlds import on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.sharding import ShardSpec, mark


class SOAP(torch.optim.SGD):
    pass


class Mine(SOAP):
    pass


WHOLE = (torch.optim.LBFGS, torch.optim.Muon, torch.optim.Adafactor, SOAP, Mine)


def parameters(rank):
    """Return a sharded matrix, of which rank 1 has no rows, and a replicated one."""
    torch.manual_seed(0)
    weight = mark(torch.nn.Parameter(torch.randn([2, 0, 1][rank], 3)), ShardSpec.of([2, 0, 1]))
    return [weight, torch.nn.Parameter(torch.randn(3, 3))]


def step(optimizer, parameters):
    def closure():
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in parameters)
        loss.backward()
        return loss

    return optimizer.step(closure)


@pytest.mark.parametrize("kind", WHOLE)
@on_ranks(3)
def test_of_whole_tensors(rank, kind):
    both = parameters(rank)
    with pytest.raises(ArgumentError, match=f"^{kind.__name__} .*whole parameters"):
        step(kind(both, lr=0.1), both)
    late = kind(both[1:], lr=0.1)
    step(late, both[1:])  # a replicated parameter is whole
    if kind is not torch.optim.LBFGS:
        late.add_param_group({"params": both[:1]})
        with pytest.raises(ArgumentError, match="whole parameters"):
            step(late, both)


@on_ranks(3)
def test_of_elements(rank):
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop):
        both = parameters(rank)
        step(kind(both, lr=0.1), both)


@on_ranks(3)
def test_a_step_that_one_rank_skips(rank):
    """Rank 2 alone has an infinite gradient, and its GradScaler skips the step."""
    both = parameters(rank)
    optimizer = torch.optim.SGD(both, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def train(of_one):
        optimizer.zero_grad()
        scaler.scale(sum(p.square().sum() for p in both)).backward()
        if rank == 2:
            both[0].grad[0, 0] *= of_one
        scaler.step(optimizer)
        scaler.update()
        varcomm.all_reduce(torch.ones(1))

    train(1.0)
    with pytest.raises(DisagreementError, match="step of sharded parameters"):
        train(torch.inf)
    train(1.0)
