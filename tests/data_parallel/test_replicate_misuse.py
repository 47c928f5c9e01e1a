"""Backwards that fail, and what replicate cannot sum: errors on every rank that leave no trace."""

import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import varcomm
from tests.data_parallel.cases import Energy, Layers, rows, square
from tests.data_parallel.comparing import assert_same_gradients, replicated
from varcomm import ArgumentError, DisagreementError
from varcomm.data_parallel import replicate, sum_gradients


class Failing(torch.autograd.Function):
    """Identity, whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("out of memory, say")


class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)).double()

    def forward(self, x, fails_before=None):
        for number, layer in enumerate(self.layers):
            x = layer(Failing.apply(x) if number == fails_before else x)
        return x


def failed(rank, ranks, keeps_error):
    """Rank 0 fails when all sums but one are begun, the others before all but one."""
    model, twin = replicated(Fragile, bucket_bytes=1)
    square(model(rows(rank, ranks))).backward()
    sum(square(twin(rows(part, ranks))) for part in range(ranks)).backward()
    x = rows(rank, ranks).requires_grad_()
    kept = None
    with pytest.raises(ValueError, match="out of memory, say") as caught:
        square(model(x, 1 if rank == 0 else 2)).backward()
    if keeps_error:  # and with it all frames
        kept = caught
    assert_same_gradients(model, twin)
    said = f"^replicate on rank {rank} of {ranks}: an earlier backward ended in an error on this"
    with pytest.raises(DisagreementError, match=said):
        model(x)
    with torch.no_grad():
        model(x)
    with pytest.raises(DisagreementError, match=said):
        square(model.layers(x)).backward()
    assert_same_gradients(model, twin)
    replicate(model, bucket_bytes=1)
    square(model(rows(rank, ranks))).backward()
    sum(square(twin(rows(part, ranks))) for part in range(ranks)).backward()
    assert_same_gradients(model, twin)
    return kept is None


@pytest.mark.parametrize("keeps_error", [False, True])
def test_a_failed_backward_leaves_nothing_behind(worlds, keeps_error):
    """Nor do sums that some ranks had begun get mixed up with those after it."""
    assert worlds.run(3, failed, 3, keeps_error) == [not keeps_error] * 3


def refused(rank, backward, said):
    """Refuse on every rank, without harm: the next backward is summed."""
    model, twin = replicated(Energy)
    with pytest.raises(ArgumentError) as caught:
        backward(model)
    assert str(caught.value).startswith(f"replicate on rank {rank} of 2: {said}")
    square(model(rows(rank, 2))).backward()
    sum(square(twin(rows(part, 2))) for part in range(2)).backward()
    assert_same_gradients(model, twin)
    return True


def create_graph(model):
    with pytest.warns(UserWarning, match="create_graph"):
        square(model(rows(1, 2))).backward(create_graph=True)


def accumulate_hook(model):
    handle = model.net[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    try:
        square(model(rows(1, 2))).backward()
    finally:
        handle.remove()


def other_parameters(model):
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.func.functional_call(model, values, rows(1, 2))


def wrapped(model):
    DistributedDataParallel(model)(rows(1, 2))


REFUSED = {
    "DistributedDataParallel": (
        wrapped,
        "DistributedDataParallel around a replicated module would add its gradients to the sums. ",
    ),
    "create_graph": (
        create_graph,
        "backward(create_graph=True) would need derivatives of what has been summed. Take ",
    ),
    "a hook after accumulation": (
        accumulate_hook,
        "parameter 'net.0.weight' has a hook of register_post_accumulate_grad_hook, which ",
    ),
    "other parameters": (
        other_parameters,
        "parameter 'net.0.weight' has been replaced, converted, added or removed since ",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_summed_is_refused(worlds, what):
    assert worlds.run(2, refused, *REFUSED[what]) == [True, True]


def convert(model):
    model.float()


def change(model):
    model.shared.weight = nn.Parameter(torch.ones(2, 2).double())


def add(model):
    model.register_parameter("more", nn.Parameter(torch.ones(2)))


def remove(model):
    del model.unused.bias


def reshape(model):
    model.unused.bias.data = torch.ones(3).double()


CHANGED = {
    convert: "scale",
    change: "shared.weight",
    add: "more",
    remove: "unused.bias",
    reshape: "unused.bias",
}


def changed(rank, change, name):
    model, _ = replicated(Layers)
    change(model)
    with pytest.raises(ArgumentError, match=re.escape(f"parameter {name!r} has been replaced, ")):
        model(rows(1, 2).to(model.scale.dtype))
    with torch.no_grad():
        model(rows(1, 2).to(model.scale.dtype))
    replicate(model)
    square(model(torch.ones(1, 3, dtype=model.scale.dtype))).backward()
    again = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    square(model(torch.ones(1, 3, dtype=model.scale.dtype)) * rank).backward()
    return all(
        torch.allclose(2 * p.grad, g)
        for p, g in zip((p for p in model.parameters() if p.grad is not None), again, strict=True)
    )


@pytest.mark.parametrize("change", CHANGED)
def test_other_parameters_than_were_replicated(worlds, change):
    """Torch would forget the hooks of some, and has none for others."""
    assert worlds.run(2, changed, change, CHANGED[change]) == [True, True]


class Late(nn.Module):
    """A layer is used both in a reentrant checkpoint and after it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(checkpoint(self.layer, x, use_reentrant=True))


def late(rank):
    model = replicate(Late(), bucket_bytes=1)
    loss = model(torch.ones(1, 3, requires_grad=True)).sum()
    said = f"replicate on rank {rank} of 2: parameter 'layer.bias' gets another gradient, from "
    with pytest.raises(ArgumentError, match=said):
        loss.backward()
    return model.layer.bias.grad, model.layer.weight.grad


def test_a_parameter_within_and_beside_a_reentrant_checkpoint(worlds):
    assert worlds.run(2, late) == [(None, None)] * 2


class Up(nn.Module):
    """Its weight, summed by :class:`Upwards`."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1).bfloat16())
        self.weight.grad_dtype = None

    def forward(self):
        return Upwards.apply(self.weight)


class Upwards(torch.autograd.Function):
    """The sum of a narrow tensor, with a gradient in fp32."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.float().sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(ctx.shape)


def of_another_dtype(rank):
    """At first any is allowed, and the ranks cannot know in which it comes; then it is said."""
    model = replicate(Up())
    said = "of parameter 'weight' is of torch.float32, and not of torch.bfloat16 as on the other"
    with pytest.raises(ArgumentError, match=re.escape(said)):
        model().backward()
    model.weight.grad_dtype = torch.float32
    replicate(model)
    (model() * (0.75 if rank else 256.0)).backward()
    return model.weight.grad.dtype, model.weight.grad.item()


def test_gradients_of_another_dtype(worlds):
    assert worlds.run(2, of_another_dtype) == [(torch.float32, 256.75)] * 2


def deleted(rank):
    layer = nn.Linear(2, 2)
    model = replicate(nn.Sequential(layer))
    of_part, of_whole = layer(torch.ones(1, 2)).sum(), model(torch.ones(1, 2)).sum()
    del model
    of_whole.backward()  # the graph kept what sums
    summed = layer.bias.grad.tolist()
    del of_whole
    with pytest.raises(ArgumentError, match=r"^replicate: the module .* deleted before backward"):
        of_part.backward()
    return summed


def test_a_module_that_is_deleted_before_backward(worlds):
    assert worlds.run(2, deleted) == [[2.0, 2.0]] * 2


class Opaque(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layer, self.make = nn.Linear(2, 2), make

    def forward(self, x):
        return self.make(self.layer(x))


class Box:
    def __init__(self, value):
        self.value = value


def hidden(rank):
    x = torch.ones(1, 2)
    said = (
        f"replicate on rank {rank} of 2: the module returned no tensor that is seen, but Box. "
        "Return tensors, or lists, tuples, dicts or dataclasses of them."
    )
    with pytest.raises(ArgumentError, match=f"^{re.escape(said)}$"):
        replicate(Opaque(lambda y: [Box(y), y.argmax()]))(x)
    beside, box = replicate(Opaque(lambda y: (y, Box(y))))(x)
    index = replicate(Opaque(lambda y: (y.argmax(), "label", None)))(x)[0]
    return beside.shape == box.value.shape, index.dtype


def test_outputs_in_which_no_tensor_is_seen(worlds):
    assert worlds.run(2, hidden) == [(True, torch.int64)] * 2


def summed_again(rank, in_debug):
    model = replicate(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    said = "replicate has summed the gradient of parameter {}, of shape {}, in backward already."
    if in_debug:
        given = [nn.Parameter(torch.ones(1)), model.bias] if rank else [nn.Parameter(torch.ones(1))]
        error, said = DisagreementError, said.format(1, (2,))
    else:
        given, error, said = model, ArgumentError, said.format(0, (2, 2))
    comparing = varcomm.debug() if in_debug else nullcontext()
    with comparing, pytest.raises(error, match=re.escape(said)):
        sum_gradients(given)
    model.requires_grad_(False)
    sum_gradients(model)
    return model.bias.grad.tolist()


@pytest.mark.parametrize("in_debug", [False, True])
def test_sum_gradients_of_a_replicated_module_is_refused(worlds, in_debug):
    assert worlds.run(2, summed_again, in_debug) == [[2.0, 2.0]] * 2


def apart(rank, what):
    """In debug(), ranks that do something else than to end a backward are told so."""
    model = replicate(nn.Linear(2, 2))
    loss = model(torch.ones(1, 2)).sum()
    if what == "frozen" and rank == 1:
        model.bias.requires_grad_(False)
    call = loss.backward
    if what == "elsewhere" and rank == 1:
        call = partial(varcomm.all_reduce, torch.ones(1))
    if what == "refused" and rank == 1:
        call = partial(model.double(), torch.ones(1, 2).double())
    with varcomm.debug(), pytest.raises(DisagreementError) as caught:
        call()
    # it starts with the call of the rank that tells
    told = str(caught.value).splitlines()[0]
    for start in ("replicate, at the end of backward: ", "the end of backward: "):
        told = told.removeprefix(start)
    return told.removeprefix("replicate: "), model.weight.grad


APART = {
    "frozen": ("ranks disagree on frozen parameters: rank 0 has []; rank 1 has ['bias']."),
    "elsewhere": (
        "ranks disagree on operation: rank 0 has 'the end of backward'; rank 1 has 'all_reduce'."
    ),
    "refused": (
        "not called, since on rank 1: replicate on rank 1 of 2: parameter 'weight' has been "
        "replaced, converted, added or removed since replicate(module) was called. Call it again, "
        "on all ranks."
    ),
}


@pytest.mark.parametrize("what", APART)
def test_debug_tells_all_ranks(worlds, what):
    assert worlds.run(2, apart, what) == [(APART[what], None)] * 2
