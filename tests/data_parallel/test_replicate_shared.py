"""Modules marked as shared: what ``replicate`` does, under the names that other code uses."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import varcomm
from tests.data_parallel.cases import CASES, DOUBLE, Layers, rows, square
from tests.data_parallel.comparing import assert_same_gradients, seeded
from varcomm import ArgumentError, DisagreementError, GroupError
from varcomm.data_parallel import (
    mark_module_as_shared,
    no_sync,
    replicate,
    sum_gradients,
    unmark_module_as_shared,
)


def as_alone(rank, ranks, name):
    make, loss = CASES[name]
    model, twin = seeded(make, rank), seeded(make, 0)  # rank 0 decides
    assert mark_module_as_shared(model) is model
    for step in range(3):
        if step == 1:
            with no_sync(model):
                loss(model, rank, ranks).backward()
        else:
            loss(model, rank, ranks).backward()
        sum(loss(twin, r, ranks) for r in range(ranks)).backward()
        if step != 1:
            assert_same_gradients(model, twin)
    return sum(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["layers", "branches", "containers", "energy and forces"])
def test_as_in_one_process(worlds, ranks, name):
    """On rank 0 the output depends on nothing, where there are other ranks."""
    learning = worlds.run(ranks, as_alone, ranks, name)
    assert learning == [learning[0]] * ranks
    assert learning[0] > 0


class Whole(nn.Module):
    """A module with a parameter and a buffer of its own beside those of a layer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.layer = nn.Linear(1, 1, bias=False)
        self.register_buffer("shift", torch.zeros(1))

    def forward(self, x):
        return self.scale * self.layer(x) + self.shift


def own_alone(rank):
    model = Whole()
    with torch.no_grad():
        for value in (*model.parameters(), model.shift):
            value.fill_(rank + 1.0)
    mark_module_as_shared(model, recurse=False)
    values = [model.scale.item(), model.shift.item(), model.layer.weight.item()]
    model(torch.ones(1, 1)).sum().backward()
    return values, model.scale.grad.item(), model.layer.weight.grad.item()


def test_own_parameters_alone(worlds):
    """Those of modules within stay as they are, and their gradients too."""
    assert worlds.run(2, own_alone) == [([1.0, 1.0, r + 1.0], 3.0, 1.0) for r in range(2)]


def narrow(rank, use_fp32):
    layer = nn.Linear(1, 1, bias=False).bfloat16()
    mark_module_as_shared(layer, use_fp32_reduction=use_fp32)
    layer(torch.tensor([[256.0 if rank == 0 else 0.75]]).bfloat16()).sum().backward()
    return layer.weight.grad.item()


def test_how_narrow_gradients_are_summed(worlds):
    """Beside 256 the spacing is 2, and 3/4 is lost each time."""
    assert worlds.run(3, narrow, True) == [258.0] * 3
    assert worlds.run(3, narrow, False) == [256.0] * 3


def unmarked(rank, ranks):
    """A part of what is marked leaves, then all; each rank has its own gradients of that then."""
    model, twin = seeded(Layers), seeded(Layers)
    mark_module_as_shared(model)
    unmark_module_as_shared(model.first)
    for _ in range(2):
        square(model(rows(rank, ranks))).backward()
        sum(square(twin(rows(r, ranks))) for r in range(ranks)).backward()
    own = seeded(Layers)
    for _ in range(2):
        square(own(rows(rank, ranks))).backward()
    twin.first = own.first
    assert_same_gradients(model, twin)
    unmark_module_as_shared(model, recurse=False)
    for module in (model, own):
        module.zero_grad()
        square(module(rows(rank, ranks))).backward()
    assert torch.equal(model.scale.grad, own.scale.grad)
    unmark_module_as_shared(model.convolution)
    unmark_module_as_shared(model.shared)
    unmark_module_as_shared(model.unused)
    with varcomm.trace() as calls:
        for module in (model, own):
            module.zero_grad()
            square(module(rows(rank, ranks))).backward()
    assert_same_gradients(model, own)
    mark_module_as_shared(model)
    return calls, len(model._forward_hooks)


def test_unmarked(worlds):
    assert worlds.run(3, unmarked, 3) == [([], 1)] * 3


def beside_replicate(rank):
    """On one rank of its own, and on both together."""
    alone = [dist.new_group([r]) for r in range(2)][rank]
    model = replicate(nn.Linear(1, 1, bias=False), alone, reduce="mean")
    mark_module_as_shared(model)
    model(torch.ones(1, 1)).sum().backward()
    unmark_module_as_shared(model)
    model(torch.ones(1, 1)).sum().backward()
    return model.weight.grad.item()


def test_marked_and_replicated(worlds):
    assert worlds.run(2, beside_replicate) == [3.0, 3.0]


def misused(rank):
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.Linear(2, 3))
    nn.init.ones_(model[1].weight)
    mark_module_as_shared(layer)
    told = []

    def note(call, *args, **options):
        with pytest.raises((ArgumentError, GroupError)) as caught:
            call(*args, **options)
        told.append(str(caught.value))

    start = "refused on rank 0 of 2 (and on 1 more: [1]): "
    note(mark_module_as_shared, model)
    note(mark_module_as_shared, layer)
    note(replicate, layer)
    note(unmark_module_as_shared, model)
    note(unmark_module_as_shared, [layer])
    note(mark_module_as_shared, layer, recurse=1)
    note(mark_module_as_shared, [layer])
    note(sum_gradients, layer)
    model(torch.ones(1, 2)).sum().backward()  # and nothing has changed
    assert layer.bias.grad.tolist() == [6.0, 6.0]
    return [text.replace(start, "") for text in told]


def test_misuse(worlds):
    mark = "data_parallel.mark_module_as_shared: "
    again = "has been marked as shared already. Call unmark_module_as_shared before."
    told = [
        f"{mark}parameter '0.weight' {again}",
        f"{mark}parameter 'weight' {again}",
        "data_parallel.replicate: parameter 'weight' is in another module that is replicated ",
        "unmark_module_as_shared: parameter '1.weight' is not marked as shared. Pass the module ",
        "unmark_module_as_shared: module must be a torch.nn.Module; got list.",
        f"{mark}recurse must be True or False; got 1.",
        f"{mark}model must be a torch.nn.Module; got list.",
        "sum_gradients on rank",
    ]
    for texts in worlds.run(2, misused):
        assert len(texts) == len(told)
        assert [text[: len(said)] for text, said in zip(texts, told, strict=True)] == told


def differ(rank):
    said = "data_parallel.mark_module_as_shared: ranks disagree on recurse: for 'recurse', rank 0 "
    with pytest.raises(DisagreementError, match=re.escape(said)):
        mark_module_as_shared(nn.Linear(2, 2).to(DOUBLE), recurse=rank == 0)


def test_ranks_that_differ(worlds):
    assert worlds.run(2, differ) == [None, None]
