"""Wrong use of a ShardedGradients: an error on every rank, and no harm."""

import io
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import varcomm
from tests.data_parallel.sharded_cases import plain
from varcomm import ArgumentError, DisagreementError
from varcomm.data_parallel import ShardedGradients


def changed(model, own, what):
    if what == "converted":
        model.double()
    elif what == "replaced":
        model[0].weight = nn.Parameter(torch.ones(2, 2))
    elif what == "moved":
        model[0].weight.data = model[0].weight.data.clone()
    elif what == "unfrozen":
        model[1].bias.requires_grad_(True)
    elif what == "grown":
        own.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    else:
        own.close()


# on rank 1
CHANGES = {
    "converted": "has been moved, converted or replaced",
    "replaced": "parameter '0.weight' has been moved, converted or replaced",
    "moved": "parameter '0.weight' has been moved, converted or replaced",
    "unfrozen": "parameter '1.bias' was frozen",
    "grown": "the optimizer has other groups",
    "closed": "close.. was called before",
}


def after_a_change(rank):
    """Each method tells all ranks, whatever has been done to one of them."""
    for what, words in CHANGES.items():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
        own = ShardedGradients(model, plain, overlap_forward=what == "converted")
        model(torch.ones(1, 2)).sum().backward()
        own.step()
        if rank == 1:
            changed(model, own, what)
        for call in (own.reduce, own.step, own.zero_grad, partial(own.clip_grad_norm_, 1.0)):
            with pytest.raises(ArgumentError, match=f"refused on rank 1 of 2: .*{words}"):
                call()
        if what == "grown" and rank == 1:
            for call in (own.state_dict, partial(own.state_dict_for, {})):
                with pytest.raises(ArgumentError, match=words):
                    call()


def test_other_parameters_than_it_was_made_of(worlds):
    worlds.run(2, after_a_change)


def apart(rank):
    """Ranks that call different methods are told so, and go on."""
    model = nn.Linear(2, 2)
    own = ShardedGradients(model, plain, reduce="sum")
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(DisagreementError, match="disagree on operation"):
        own.zero_grad() if rank else own.step()
    own.reduce()
    return {x for p in own.pieces.values() for x in p.value.grad.flatten().tolist()}


def test_ranks_that_call_different_methods(worlds):
    assert worlds.run(2, apart) == [{2.0}] * 2


def compared(rank, what):
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


@pytest.mark.parametrize("what", ["frozen", "lr", "max_norm"])
def test_debug_compares(worlds, what):
    worlds.run(2, compared, what)


def stepping(rank):
    """Refusals of the inner optimizer's step, of GradScaler, and of wrong norms."""
    model = nn.Linear(2, 2)
    own = ShardedGradients(model, plain)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ArgumentError, match=r"^ShardedGradients: the inner optimizer updates piec"):
        own.optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ArgumentError, match=r"^ShardedGradients: a GradScaler"):
        scaler.step(own)
    where = f"^ShardedGradients.clip_grad_norm_ on rank {rank} of 2: "
    for arguments, wrong in (
        ((-1.0,), "max_norm"),
        (("1",), "max_norm"),
        ((1.0, 0), "norm_type"),
        ((1.0, 2.0, 1), "error_if_nonfinite"),
    ):
        with pytest.raises(ArgumentError, match=f"{where}{wrong} must be"):
            own.clip_grad_norm_(*arguments)
    own.step()
    return len(own.pieces)


def test_wrong_steps(worlds):
    assert worlds.run(2, stepping) == [2, 1]


class Upwards(torch.autograd.Function):
    """The sum of a narrow tensor, with a gradient in fp32."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.float().sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(ctx.shape)


class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1).bfloat16())
        self.weight.grad_dtype = None

    def forward(self):
        return Upwards.apply(self.weight)


def of_another_dtype(rank):
    """At first any is allowed, and the ranks cannot know in which it comes; then it is said."""
    layer = Up()
    own = ShardedGradients(layer, plain)
    with pytest.raises(ArgumentError, match=r"of parameter 'weight' is of torch.float32, and not"):
        layer().backward()
    own.close()
    layer.weight.grad = None
    layer.weight.grad_dtype = torch.float32
    own = ShardedGradients(layer, plain, sizes=[1, 0], reduce="sum")
    (layer() * (0.75 if rank else 256.0)).backward()
    own.reduce()
    return [piece.value.grad.item() for piece in own.pieces.values()]


def test_gradients_of_another_dtype(worlds):
    assert worlds.run(2, of_another_dtype) == [[256.75], []]


def pickled(rank):
    model = nn.Linear(2, 2)
    own = ShardedGradients(model, lambda groups: torch.optim.Adam(groups, lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    own.step()
    with pytest.raises(ArgumentError, match="a Sharded tensor cannot be pickled"):
        torch.save(own.state_dict(), io.BytesIO())


def test_states_are_not_pickled(worlds):
    worlds.run(2, pickled)


def out_of_debug(rank):
    """Sums that have started outside debug() end inside, and the other way round."""
    found = []
    for inside in (False, True):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        own = ShardedGradients(model, plain, reduce="sum", bucket_bytes=1)
        if rank or inside:
            with varcomm.debug() if inside else nullcontext():
                model(torch.ones(1, 2)).sum().backward()
        with nullcontext() if inside else varcomm.debug():
            own.reduce()
        found.append([p.value.grad is None for p in own.pieces.values()])
    return not any(map(any, found))


def test_debug_begins_and_ends_between_backward_and_step(worlds):
    assert worlds.run(2, out_of_debug) == [True, True]
