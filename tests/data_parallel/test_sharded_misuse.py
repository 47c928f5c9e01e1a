"""Wrong use of a ShardedGradients: an error on every rank, and no harm."""

import io
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import varcomm
from tests.data_parallel.cases import plain
from tests.worlds import on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.data_parallel import ShardedGradients


def replace(model, own):
    model[0].weight = nn.Parameter(torch.ones(2, 2))


def move(model, own):
    model[0].weight.data = model[0].weight.data.clone()


def grow(model, own):
    own.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


# on rank 1
CHANGES = (
    (lambda model, own: model.double(), "has been moved, converted or replaced"),
    (replace, "parameter '0.weight' has been moved, converted or replaced"),
    (move, "parameter '0.weight' has been moved, converted or replaced"),
    (lambda model, own: model[1].bias.requires_grad_(True), "parameter '1.bias' was frozen"),
    (grow, "the optimizer has other groups"),
    (lambda model, own: own.close(), "close.. was called before"),
)


@on_ranks(2)
def test_other_parameters_than_at_the_start(rank, ranks):
    """Each method raises on all ranks, whatever has been done to one of them."""
    for change, words in CHANGES:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
        own = ShardedGradients(model, plain)
        model(torch.ones(1, 2)).sum().backward()
        own.step()
        if rank == 1:
            change(model, own)
        for call in (own.reduce, own.step, own.zero_grad, partial(own.clip_grad_norm_, 1.0)):
            with pytest.raises(ArgumentError, match=f"refused on rank 1 of 2: .*{words}"):
                call()


@pytest.mark.parametrize("what", ["frozen", "lr", "max_norm"])
@on_ranks(2)
def test_debug_compares(rank, what):
    model = nn.Linear(2, 2)
    own = ShardedGradients(model, plain)
    model(torch.ones(1, 2)).sum().backward()
    if rank == 1 and what == "frozen":
        model.bias.requires_grad_(False)
    if what == "lr":
        own.param_groups[0]["lr"] = 0.5 * (rank + 1)
    call = {"max_norm": partial(own.clip_grad_norm_, rank + 1.0), "frozen": own.reduce}
    with varcomm.debug(), pytest.raises(DisagreementError, match=f"ranks disagree on .*{what}"):
        call.get(what, own.step)()


@on_ranks(2)
def test_wrong_steps(rank, ranks):
    """Refusals of the inner optimizer's step, of wrong norms, and of pickles."""
    model = nn.Linear(2, 2)
    own = ShardedGradients(model, lambda groups: torch.optim.Adam(groups, lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ArgumentError, match=r"^ShardedGradients: the inner optimizer updates piec"):
        own.optimizer.step()
    for arguments, wrong in (
        ((-1.0,), "max_norm"),
        (("1",), "not supported"),
        ((1.0, 0), "norm_type"),
    ):
        with pytest.raises(ArgumentError, match=f"refused on rank 1 of 2: .*{wrong}"):
            own.clip_grad_norm_(*(arguments if rank else (1.0,)))
    own.step()
    with pytest.raises(ArgumentError, match="a Sharded tensor cannot be pickled"):
        torch.save(own.state_dict(), io.BytesIO())


class Upwards(torch.autograd.Function):
    """The sum of a narrow tensor, with a gradient in fp32."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.float().sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(ctx.shape)


@on_ranks(2)
def test_gradients_of_another_dtype(rank, ranks):
    """At first any is allowed, and ranks cannot know in which it comes; then it is declared."""
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.ones(1, 1).bfloat16())
    layer.weight.grad_dtype = None
    own = ShardedGradients(layer, plain)
    with pytest.raises(ArgumentError, match=r"of parameter 'weight' is of torch.float32, and not"):
        Upwards.apply(layer.weight).backward()
    own.close()
    layer.weight.grad = None
    layer.weight.grad_dtype = torch.float32
    own = ShardedGradients(layer, plain, sizes=[1, 0], reduce="sum")
    (Upwards.apply(layer.weight) * (0.75 if rank else 256.0)).backward()
    own.reduce()
    found = [piece.value.grad.item() for piece in own.pieces.values()]
    assert found == ([] if rank else [256.75])


@on_ranks(2)
def test_debug_begins_and_ends_between_backward_and_step(rank, ranks):
    """Sums that have started outside debug() end inside, and the other way round."""
    for inside in (False, True):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        own = ShardedGradients(model, plain, reduce="sum", bucket_bytes=1)
        if rank or inside:
            with varcomm.debug() if inside else nullcontext():
                model(torch.ones(1, 2)).sum().backward()
        with nullcontext() if inside else varcomm.debug():
            own.reduce()
        assert all(p.value.grad is not None for p in own.pieces.values())


@on_ranks(3)
def test_a_scheduler_that_follows_this_ranks_loss(rank):
    """Each rank would update its pieces with another learning rate."""
    model = nn.Linear(4, 5)
    own = ShardedGradients(model, partial(torch.optim.SGD, lr=0.1))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(own, patience=0)
    for loss in (3.0, 2.0):
        scheduler.step(loss if rank else 3.0)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(DisagreementError, match="such as lr"):
        own.step()
    own.param_groups[0]["lr"] = 0.1
    own.step()
