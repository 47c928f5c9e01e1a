"""Backwards that fail, and what cannot be summed or stepped: errors, and no harm."""

import re
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import varcomm
from tests.data_parallel.cases import Energy, rows, square
from tests.data_parallel.sharded_cases import assert_gradients, plain, twins
from tests.data_parallel.test_replicate_misuse import (
    Fragile,
    Late,
    Up,
    accumulate_hook,
    wrapped,
)
from varcomm import ArgumentError, DisagreementError
from varcomm.data_parallel.sharded import ShardedGradients


def failed(rank, ranks):
    """Rank 0 fails when all sums but one are begun, the others before all but one."""
    model, twin = twins(Fragile)
    own = ShardedGradients(model, plain, reduce="sum", bucket_bytes=1)
    x = rows(rank, ranks).requires_grad_()
    with pytest.raises(ValueError, match="out of memory, say"):
        square(model(x, 1 if rank == 0 else 2)).backward()
    said = f"^ShardedGradients on rank {rank} of {ranks}: an earlier backward ended in an error"
    for call in (lambda: model(x), own.step, lambda: square(model.layers(x)).backward()):
        with pytest.raises(DisagreementError, match=said):
            call()
    assert own.state_dict()["state"] == {}
    own.close()
    own = ShardedGradients(model, plain, reduce="sum", bucket_bytes=1)
    square(model(rows(rank, ranks))).backward()
    sum(square(twin(rows(part, ranks))) for part in range(ranks)).backward()
    return assert_gradients(own, twin) > 0


def test_a_failed_backward_is_not_mixed_up_with_what_comes_after(worlds):
    assert worlds.run(3, failed, 3) == [True] * 3


class Requiring(torch.autograd.Function):
    """Its gradient requires a gradient, though nobody has asked for a graph."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            return gradient.clone().requires_grad_() * 2


def requiring(model):
    # the module is used too, in a way that brings the weight nothing
    (Requiring.apply(model.net[0].weight).sum() + model(rows(1, 2), alone=True)).backward()


def with_graph(loss):
    with warnings.catch_warnings():  # of torch, once a process
        warnings.simplefilter("ignore")
        loss.backward(create_graph=True)


def create_graph(model):
    with_graph(square(model(rows(1, 2))))


def in_no_sync(model):
    with KEEP[0].no_sync():
        create_graph(model)


def moved_away(model):
    model.net[0].weight.data = model.net[0].weight.data.clone()
    square(model.net(rows(1, 2))).backward()


KEEP = []

REFUSED = {
    "create_graph": (
        create_graph,
        "backward(create_graph=True) would need derivatives of what has been summed. Take ",
    ),
    "in no_sync": (
        in_no_sync,
        "backward(create_graph=True) would need derivatives of what has been summed. Take ",
    ),
    "a gradient with a gradient": (
        requiring,
        "the gradient of parameter 'net.0.weight' requires a gradient itself, which its sum ",
    ),
    "a hook after accumulation": (
        accumulate_hook,
        "parameter 'net.0.weight' has a hook of register_post_accumulate_grad_hook, which ",
    ),
    "moved": (
        moved_away,
        "parameter 'net.0.weight' has been moved, converted or replaced since ShardedGradients ",
    ),
    "DistributedDataParallel": (
        wrapped,
        "DistributedDataParallel around this module would wait for gradients that are taken ",
    ),
}


def refused(rank, what, debug):
    backward, said = REFUSED[what]
    model, twin = twins(Energy)
    own = ShardedGradients(model, plain, reduce="sum")
    KEEP[:] = [own]
    with varcomm.debug() if debug else nullcontext(), pytest.raises(ArgumentError) as caught:
        backward(model)
    assert str(caught.value).startswith(f"ShardedGradients on rank {rank} of 2: {said}")
    own.close()
    own = ShardedGradients(model, plain, reduce="sum")
    square(model(rows(rank, 2))).backward()
    sum(square(twin(rows(part, 2))) for part in range(2)).backward()
    assert_gradients(own, twin)
    return True


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_summed_is_refused(worlds, what):
    assert worlds.run(2, refused, what, False) == [True, True]


def of_one_rank(rank):
    """In debug(), what one rank refuses is an error on the other, which waits in its backward."""
    model = nn.Linear(2, 2)
    own = ShardedGradients(model, plain)
    loss = model(torch.ones(1, 2)).sum()
    call = partial(with_graph, loss) if rank else loss.backward
    with varcomm.debug(), pytest.raises(DisagreementError) as caught:
        call()
    own.close()
    return str(caught.value)


def test_debug_tells_the_others(worlds):
    said = "not called, since on rank 1: ShardedGradients on rank 1 of 2: backward(create_graph=Tr"
    assert all(said in text for text in worlds.run(2, of_one_rank))


def apart(rank, what):
    model = nn.Linear(2, 2)
    own = ShardedGradients(model, plain)
    loss = model(torch.ones(1, 2)).sum()
    if rank == 1 and what == "frozen":
        model.bias.requires_grad_(False)
    own.param_groups[0]["lr"] = 0.5 * (rank + 1)
    calls = {"options": own.step, "clip": partial(own.clip_grad_norm_, rank + 1.0)}
    call = calls.get(what, loss.backward)
    unsummed = own.no_sync() if what == "no_sync" and rank else nullcontext()
    with varcomm.debug(), unsummed, pytest.raises(DisagreementError) as caught:
        call()
    own.close()
    return str(caught.value)


APART = {
    "no_sync": "ShardedGradients, at the end of backward: ranks disagree on no_sync: rank 0 has ",
    "frozen": (
        "ShardedGradients, at the end of backward: ranks disagree on frozen parameters: rank 0 has "
        "[]; rank 1 has ['bias']."
    ),
    "options": "ShardedGradients.step: ranks disagree on lr of group 0: rank 0 has '0.5'; rank 1 ",
    "clip": "ShardedGradients.clip_grad_norm_: ranks disagree on max_norm: rank 0 has 1.0; rank 1 ",
}


@pytest.mark.parametrize("what", APART)
def test_debug_compares(worlds, what):
    assert all(text.startswith(APART[what]) for text in worlds.run(2, apart, what))


def changed(rank, what):
    """Found in forward as well as in a step."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    own = ShardedGradients(model, plain)
    x = torch.ones(1, 2)
    model(x).sum().backward()
    if what == "converted":
        model.double()
        x = x.double()
    elif what == "replaced":
        model[0].weight = nn.Parameter(torch.ones(2, 2))
    else:
        model[1].bias.requires_grad_(True)
    said = {
        "converted": r"parameter '0.\w+' has been moved, converted or replaced since",
        "replaced": "parameter '0.weight' has been moved, converted or replaced since",
        "unfrozen": "parameter '1.bias' was frozen when ShardedGradients was made",
    }[what]
    with pytest.raises(ArgumentError, match=said):
        model(x)
    if what != "replaced":  # which nobody can see but from the module
        with pytest.raises(ArgumentError, match=said):
            own.step()
    return True


@pytest.mark.parametrize("what", ["converted", "replaced", "unfrozen"])
def test_other_parameters_than_it_was_made_of(worlds, what):
    assert worlds.run(2, changed, what) == [True, True]


def stepping(rank):
    """What a step, a norm and the inner optimizer refuse."""
    model = nn.Linear(2, 2)
    own = ShardedGradients(model, plain)
    with own.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    said = f"^ShardedGradients.step on rank {rank} of 2: parameter 'weight' has a gradient of no_sy"
    with pytest.raises(ArgumentError, match=said):
        own.step()
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ArgumentError, match=r"^ShardedGradients: the inner optimizer updates piec"):
        own.optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(
        ArgumentError, match=r"^ShardedGradients: a GradScaler looks for infinities"
    ):
        scaler.step(own)
    where = f"^ShardedGradients.clip_grad_norm_ on rank {rank} of 2: "
    for arguments, wrong in (
        ((-1.0,), r"max_norm must be a number that is not negative; got -1\.0"),
        (("1",), r"max_norm must be a number that is not negative; got '1'"),
        ((1.0, 0), r"norm_type must be a number that is positive; got 0"),
        ((1.0, 2.0, 1), r"error_if_nonfinite must be True or False; got 1"),
    ):
        with pytest.raises(ArgumentError, match=where + wrong):
            own.clip_grad_norm_(*arguments)
    own.step()
    return len(own.pieces)


def test_wrong_steps(worlds):
    assert worlds.run(2, stepping) == [2, 1]


def late(rank):
    model = Late()
    own = ShardedGradients(model, plain, bucket_bytes=1)
    loss = model(torch.ones(1, 3, requires_grad=True)).sum()
    said = (
        f"ShardedGradients on rank {rank} of 2: parameter 'layer.bias' gets another gradient, fro"
    )
    with pytest.raises(ArgumentError, match=said):
        loss.backward()
    own.close()
    return model.layer.bias.grad


def test_a_parameter_within_and_beside_a_reentrant_checkpoint(worlds):
    assert worlds.run(2, late) == [None, None]


def of_another_dtype(rank):
    """At first any is allowed, and the ranks cannot know in which it comes; then it is said."""
    layer = Up()
    own = ShardedGradients(layer, plain)
    said = "of parameter 'weight' is of torch.float32, and not of torch.bfloat16 as on the other"
    with pytest.raises(ArgumentError, match=re.escape(said)):
        layer().backward()
    own.close()
    layer.weight.grad_dtype = torch.float32
    own = ShardedGradients(layer, plain, sizes=[1, 0], reduce="sum")
    (layer() * (0.75 if rank else 256.0)).backward()
    return [piece.value.grad.item() for piece in own.pieces.values()]


def test_gradients_of_another_dtype(worlds):
    assert worlds.run(2, of_another_dtype) == [[256.75], []]


def frozen_later(rank):
    """What is frozen after forward gets nothing, and is not stepped; nor is it in the next one."""
    model = nn.Linear(2, 2)
    own = ShardedGradients(model, plain, reduce="sum")
    loss = model(torch.ones(1, 2)).sum()
    model.bias.requires_grad_(False)
    bias = model.bias.tolist()
    loss.backward()
    model(torch.ones(1, 2)).sum().backward()
    own.step()
    grads = {name: piece.value.grad for name, piece in own.pieces.items()}
    assert grads.get("bias") is None
    model.requires_grad_(False)
    assert not model(torch.ones(1, 2)).requires_grad
    return model.bias.tolist() == bias, grads["weight"].unique().tolist()


def test_parameters_that_are_frozen_later(worlds):
    assert worlds.run(2, frozen_later) == [(True, [4.0])] * 2
