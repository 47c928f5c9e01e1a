"""Ranks that have gone apart: told on all of them in debug(); and groups that are gone."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import varcomm
from tests.data_parallel.test_replicate_misuse import Failing
from varcomm import ArgumentError, DisagreementError, GroupError
from varcomm.data_parallel import (
    ShardedGradients,
    mark_module_as_shared,
    no_sync,
    replicate,
    unmark_module_as_shared,
)

X = torch.ones(1, 2)


def sgd(groups):
    return torch.optim.SGD(groups, lr=0.1)


def summed(by, model):
    return (replicate(model), None) if by == "replicate" else (model, ShardedGradients(model, sgd))


def told(call):
    with varcomm.debug(), pytest.raises(DisagreementError) as caught:
        call()
    return str(caught.value)


def others(rank, by, also):
    """Ranks end the backward of one module and of another, or of one more."""
    kept = [summed(by, nn.Linear(2, 1, bias=False)) for _ in range(2)]
    first, second = (model for model, _ in kept)
    loss = (second if rank else first)(X).sum()
    if also and rank == 0:
        loss = loss + second(X).sum()
        return told(loss.backward)
    return told((first(X).sum() if also else loss).backward)


@pytest.mark.parametrize("also", [False, True])
@pytest.mark.parametrize("by", ["replicate", "sharded"])
def test_backwards_of_other_modules(worlds, by, also):
    said = r"^the end of backward: ranks disagree on what it is of: rank 0 has \['.* of 1 parameter"
    first, second = worlds.run(2, others, by, also)
    assert first == second
    assert re.match(said, first)


def unmarked(rank):
    """Only rank 1 sums the first layer no longer."""
    model = mark_module_as_shared(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    if rank:
        unmark_module_as_shared(model[0])
    return told(model(X).sum().backward)


def test_parameters_that_are_unmarked_on_a_rank(worlds):
    said = (
        "replicate, at the end of backward: ranks disagree on unmarked parameters: rank 0 has []; "
        "rank 1 has ['0.weight', '0.bias']."
    )
    one, other = worlds.run(2, unmarked)
    assert one == other
    assert one.startswith(said)


def changed(rank):
    """What rank 1 has of an earlier backward cannot be summed."""
    model = replicate(nn.Linear(2, 1))
    model(X).sum().backward()
    with no_sync(model):
        model(X).sum().backward()
    if rank:
        model.bias.grad.mul_(2)
    return told(model(X).sum().backward)


def test_changed_gradients_on_a_rank(worlds):
    said = "rank 1: replicate on rank 1 of 2: the gradient of parameter 'bias' has been changed or"
    assert [said in text for text in worlds.run(2, changed)] == [True, True]


def failed(rank, by):
    """An earlier backward has failed on rank 1, and it alone comes to its next forward."""
    model, _own = summed(by, nn.Linear(2, 1))
    loss = model(X).sum()
    if rank:
        with pytest.raises(ValueError, match="out of memory, say"):
            model(Failing.apply(X.clone().requires_grad_())).sum().backward()
    return told((lambda: model(X)) if rank else loss.backward)


@pytest.mark.parametrize("by", ["replicate", "sharded"])
def test_a_failed_backward_on_a_rank(worlds, by):
    said = "on rank 1 of 2: an earlier backward ended in an error on this rank, and what other"
    # on one rank nothing had been begun
    assert [said in text for text in worlds.run(2, failed, by)] == [True, True]


def destroyed(rank, whole):
    """The group over which a module is replicated is gone, then it is replicated over another."""
    group = dist.new_group([0, 1])
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    replicate(model if whole else model[0], group)
    dist.destroy_process_group(group)
    del group
    with pytest.raises(GroupError):
        model(X).sum().backward()
    if whole:
        replicate(model)
    else:
        replicate(model[0])
        with pytest.raises(ArgumentError, match="replicated already"):
            replicate(model)
        with pytest.raises(ArgumentError, match="does not come by the module's output"):
            model[0].weight.sum().backward()
    model(X).sum().backward()
    return model[0].weight.grad.tolist()


@pytest.mark.parametrize("whole", [True, False])
def test_groups_that_are_destroyed(worlds, whole):
    assert worlds.run(2, destroyed, whole) == [[[2.0, 2.0]] * 2] * 2


def made_anew(rank):
    """The whole world is destroyed, and another one made."""
    model = replicate(nn.Linear(2, 1, bias=False))
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    again = dist.PrefixStore("again", store)
    dist.init_process_group("gloo", store=again, rank=rank, world_size=2)
    with pytest.raises(GroupError):
        model(X).sum().backward()
    replicate(model)
    model(X).sum().backward()
    return model.weight.grad.tolist()


def test_a_world_that_is_made_anew():
    assert varcomm.launch(made_anew, 2) == [[[2.0, 2.0]]] * 2
