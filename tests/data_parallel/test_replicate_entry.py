"""Which backwards sum: those that come by the module's output, on every rank; others are errors."""

import gc
import re
import threading

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import varcomm
from tests.data_parallel.cases import DOUBLE, square
from tests.data_parallel.comparing import assert_same_gradients, replicated
from varcomm import ArgumentError
from varcomm.data_parallel import (
    ShardedGradients,
    mark_module_as_shared,
    no_sync,
    replicate,
)

BY = {"replicate": "replicate", "sharded": "ShardedGradients"}


def sgd(groups):
    return torch.optim.SGD(groups, lr=0.1)


def summed(by, model, **options):
    """Return the module, of which one of both sums the gradients, and whoever has to be kept."""
    if by == "replicate":
        return replicate(model, **options), None
    return model, ShardedGradients(model, sgd, **options)


def layers():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


class Box:
    def __init__(self, value):
        self.value = value


class Hiding(nn.Module):
    """Its result is hidden in an object, beside a tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return x.sum(), Box(self.layer(x))


ELSEWHERE = {
    "inputs": (layers, lambda m, x: m(x).sum().backward(inputs=list(m.parameters())), "1.bias"),
    "a part": (layers, lambda m, x: m[0](x).sum().backward(), "0.bias"),
    "a penalty": (layers, lambda m, x: m[1].weight.square().sum().backward(), "1.weight"),
    "hidden": (Hiding, lambda m, x: m(x)[1].value.sum().backward(), "layer.bias"),
}


def elsewhere(rank, by, what, in_debug):
    """Rank 1 has no part in it, and goes on."""
    make, backward, name = ELSEWHERE[what]
    model, _own = summed(by, make())
    said = (
        f"{BY[by]} on rank 0 of 2: parameter {name!r} gets a gradient in a backward that does not "
        "come by the module's output, as that of a rank with no rows would not get here."
    )
    if in_debug:
        error, call = varcomm.DisagreementError, lambda: varcomm.all_reduce(torch.ones(1))
        with varcomm.debug(), pytest.raises(error, match=re.escape(said)):
            call() if rank else backward(model, torch.ones(1, 2))
    elif rank == 0:
        with pytest.raises(ArgumentError, match=f"^{re.escape(said)}"):
            backward(model, torch.ones(1, 2))
    without = [parameter.grad for parameter in model.parameters()]
    out = model(torch.ones(1, 2))
    (out if what != "hidden" else out[0]).sum().backward()
    return without


@pytest.mark.parametrize("in_debug", [False, True])
@pytest.mark.parametrize("what", ELSEWHERE)
@pytest.mark.parametrize("by", BY)
def test_backwards_that_do_not_come_by_the_output(worlds, by, what, in_debug):
    count = 2 if what == "hidden" else 4
    assert worlds.run(2, elsewhere, by, what, in_debug) == [[None] * count] * 2


def beside(rank):
    """In no_sync nobody waits for anybody."""
    model, twin = replicated(lambda: layers().double())
    x = torch.ones(1, 2, dtype=DOUBLE)
    with no_sync(model):
        (rank * square(model[0].weight)).backward()
    square(model(x)).backward()
    (square(twin[0].weight) + 2 * square(twin(x))).backward()
    assert_same_gradients(model, twin)
    return True


def test_a_penalty_of_one_rank_in_no_sync(worlds):
    assert worlds.run(2, beside) == [True, True]


CONTAINERS = {
    "list": lambda: nn.ModuleList([nn.Linear(1, 1)]),
    "dict": lambda: nn.ModuleDict({"a": nn.Linear(1, 1)}),
    "parameters": lambda: nn.ParameterList([torch.ones(1)]),
}
MAKERS = {
    "replicate": replicate,
    "mark_module_as_shared": mark_module_as_shared,
    "ShardedGradients": lambda model: ShardedGradients(model.parameters(), sgd, module=model),
}


def container(rank, what, by):
    """Only rank 1 has one."""
    model = CONTAINERS[what]() if rank else nn.Linear(1, 1)
    kind = type(CONTAINERS[what]()).__name__
    said = f"{kind} has no forward, and no output by which all ranks would come to the sums. Pass "
    with pytest.raises(ArgumentError, match=re.escape(said)):
        MAKERS[by](model)
    return True


@pytest.mark.parametrize("by", MAKERS)
@pytest.mark.parametrize("what", CONTAINERS)
def test_modules_that_cannot_be_called(worlds, what, by):
    assert worlds.run(2, container, what, by) == [True, True]


def forward_of_its_own(rank):
    """A forward of the object is one, too."""
    model = nn.ModuleList([nn.Linear(1, 1, bias=False)])
    model.forward = lambda x: model[0](x)
    replicate(model)
    model(torch.ones(1, 1)).sum().backward()
    return model[0].weight.grad.item()


def test_a_forward_of_the_object(worlds):
    assert worlds.run(2, forward_of_its_own) == [2.0, 2.0]


def dropped(rank):
    """Of a module whose wrapper is gone, and its sums with it."""
    layer, others = nn.Linear(1, 1, bias=False), nn.Linear(1, 1)
    others.requires_grad_(False)
    wrapper = replicate(nn.Sequential(layer, others))
    one = torch.ones(1, 1)
    wrapper(one).sum().backward()
    del wrapper
    gc.collect()
    layer.zero_grad()
    alone = torch.autograd.grad(layer(one).sum(), layer.weight)[0].item()
    others.requires_grad_(True)
    said = "^replicate: the module that was replicated has been deleted before backward, and its "
    for module in (layer, others):
        with pytest.raises(ArgumentError, match=said):
            module(one).sum().backward()
    assert layer.weight.grad is None
    replicate(layer)
    layer(one).sum().backward()
    return alone, layer.weight.grad.item()


def test_a_wrapper_that_is_dropped(worlds):
    assert worlds.run(2, dropped) == [(1.0, 2.0)] * 2


def wrapped_part(rank, by):
    model, _own = summed(by, layers())
    model[0] = DistributedDataParallel(model[0])
    said = (
        f"^{BY[by]} on rank {rank} of 2: (DistributedDataParallel around a part|parameter '0.wei)"
    )
    with pytest.raises(ArgumentError, match=said):
        model(torch.ones(1, 2))
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("by", BY)
def test_a_part_that_is_wrapped_by_torch(worlds, by):
    assert worlds.run(2, wrapped_part, by) == [[None] * 4] * 2


def there_and_back(model):
    for parameter in model.parameters():
        values = parameter.data
        parameter.data = values.double()
        parameter.data = values


def by_methods(model):
    model.half()
    model.float()


@pytest.mark.parametrize("how", [there_and_back, by_methods])
@pytest.mark.parametrize("by", BY)
def test_conversions_there_and_back(worlds, by, how):
    """Torch makes new nodes, which nobody watches."""
    assert worlds.run(2, converted, by, how) == [True, True]


def converted(rank, by, how):
    for make in (layers, lambda: nn.Linear(2, 2, bias=False)):
        model, own = summed(by, make())
        how(model)
        said = rf"^{BY[by]} on rank {rank} of 2: parameter '[\w.]+' has been (replaced|moved)"
        with pytest.raises(ArgumentError, match=said):
            model(torch.ones(1, 2))
        if own is not None:
            with pytest.raises(ArgumentError, match="has been moved, converted or replaced"):
                own.step()
    return True


def in_threads(rank):
    """The second thread comes while the first is in the middle of its backward."""
    model = replicate(nn.Linear(1, 1, bias=False))
    within, done, found = threading.Event(), threading.Event(), []
    first, second = (model(torch.ones(1, 1)) for _ in range(2))

    def stop(gradient):
        within.set()
        done.wait(30)

    model.weight.register_hook(lambda g: stop(g) if threading.current_thread() is thread else None)
    thread = threading.Thread(target=lambda: first.sum().backward())
    thread.start()
    within.wait(30)
    try:
        second.sum().backward()
    except ArgumentError as error:
        found.append(str(error))
    done.set()
    thread.join()
    return found, model.weight.grad.item()


def test_two_threads(worlds):
    said = (
        "replicate on rank {} of 2: two threads run backward through one module at the same time, "
        "and nobody knows which of them other ranks are in. Run one after the other."
    )
    assert worlds.run(2, in_threads) == [([said.format(rank)], 2.0) for rank in range(2)]


def in_inference_mode(rank, by):
    said = r"in torch.inference_mode\(\), no gradients can be taken of the parameters. Leave that "
    with torch.inference_mode(rank == 1), pytest.raises(ArgumentError, match=said):
        summed(by, nn.Linear(1, 1))
    return True


@pytest.mark.parametrize("by", BY)
def test_inference_mode(worlds, by):
    assert worlds.run(2, in_inference_mode, by) == [True, True]
