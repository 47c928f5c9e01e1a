"""States of optimizers by name: of whole parameters, of shards and of flat pieces, one like all."""

import re

import pytest
import torch

from varcomm import ArgumentError
from varcomm.sharding import Box, Sharded
from varcomm.sharding.optimizer_state import (
    Part,
    load_optimizer_state,
    optimizer_state,
    optimizer_state_for,
)


def stepped(make, steps=3):
    """An optimizer of two parameters that has made some steps, and the parameters."""
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(3, 4))
    bias = torch.nn.Parameter(torch.randn(4))
    optimizer = make([{"params": [weight]}, {"params": [bias], "weight_decay": 0.1}])
    for _ in range(steps):
        for p in (weight, bias):
            p.grad = torch.randn_like(p)
        optimizer.step()
    return optimizer, weight, bias


def whole(name):
    return Part(name, lambda tensor: tensor)


def meta(state):
    if isinstance(state, torch.Tensor):
        return torch.empty(state.shape, dtype=state.dtype, device="meta")
    if isinstance(state, dict):
        return {key: meta(value) for key, value in state.items()}
    return [meta(value) for value in state] if isinstance(state, list) else state


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_fresh_optimizer_goes_on_where_another_was(kind):
    optimizer, weight, bias = stepped(OPTIMIZERS[kind])
    names = [["weight"], ["bias"]]
    state = optimizer_state(optimizer, {weight: whole("weight"), bias: whole("bias")}, names)
    fresh, w, b = stepped(OPTIMIZERS[kind], steps=0)
    parts = {w: whole("weight"), b: whole("bias")}
    target = optimizer_state_for(fresh, parts, names, meta(state))
    for name, own in target["state"].items():
        for key, value in own.items():
            value.copy_(state["state"][name][key])
    target["param_groups"] = [{**group, "lr": 0.01} for group in state["param_groups"]]
    load_optimizer_state(fresh, parts, names, target)
    with torch.no_grad():
        w.copy_(weight)
        b.copy_(bias)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.01
    for mine, other in ((w, weight), (b, bias)):
        mine.grad = other.grad = torch.ones_like(other)
    fresh.step()
    optimizer.step()
    assert torch.equal(w, weight)
    assert torch.equal(b, bias)


def test_of_flat_pieces_the_state_is_that_of_the_whole():
    """One optimizer of whole parameters, two of pieces: their states are the same boxes."""
    optimizer, weight, bias = stepped(OPTIMIZERS["adamw"])
    names = [["weight"], ["bias"]]
    expected = optimizer_state(optimizer, {weight: whole("weight"), bias: whole("bias")}, names)
    found = torch.full((3, 4), float("nan"))
    for low, high in ((0, 5), (5, 12)):
        piece = torch.nn.Parameter(torch.zeros(high - low))
        nothing = torch.nn.Parameter(torch.zeros(0))
        mine = OPTIMIZERS["adamw"]([{"params": [piece]}, {"params": [nothing]}])
        part = Part("weight", lambda tensor, low=low: Sharded.elements(tensor, (3, 4), low))
        parts = {piece: part}
        target = optimizer_state_for(mine, parts, names, meta(expected))
        for box in target["state"]["weight"]["exp_avg"].boxes:
            place = tuple(
                slice(a, a + n) for a, n in zip(box.offsets, box.tensor.shape, strict=True)
            )
            box.tensor.copy_(expected["state"]["weight"]["exp_avg"][place])
        load_optimizer_state(mine, parts, names, target)
        assert mine.state[piece]["exp_avg"].shape == piece.shape
        assert nothing not in mine.state
        state = optimizer_state(mine, parts, names)
        assert [group["params"] for group in state["param_groups"]] == names
        for box in state["state"]["weight"]["exp_avg"].boxes:
            place = tuple(
                slice(a, a + n) for a, n in zip(box.offsets, box.tensor.shape, strict=True)
            )
            found[place] = box.tensor
    assert torch.equal(found, optimizer.state[weight]["exp_avg"])


def test_what_the_optimizer_has_is_written_into():
    optimizer, weight, bias = stepped(OPTIMIZERS["sgd"])
    parts = {weight: whole("weight"), bias: whole("bias")}
    state = optimizer_state(optimizer, parts, [["weight"], ["bias"]])
    buffer = optimizer.state[weight]["momentum_buffer"]
    state["state"] = {"weight": {"momentum_buffer": torch.ones(3, 4)}}
    load_optimizer_state(optimizer, parts, [["weight"], ["bias"]], state)
    assert optimizer.state[weight]["momentum_buffer"] is buffer
    assert buffer.eq(1).all()
    assert bias not in optimizer.state  # of which nothing was saved


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([["weight", "bias"]], "has 1 groups of [2] parameters, and this one 2 of [1, 1]"),
        ([["weight"], ["scale"]], "it has ['scale'], which are not here, and lacks ['bias']"),
        ([["weight"], ["bias"], []], "has 3 groups of [1, 1, 0] parameters"),
    ],
)
def test_another_optimizer_is_refused(names, message):
    optimizer, weight, bias = stepped(OPTIMIZERS["sgd"])
    parts = {weight: whole("weight"), bias: whole("bias")}
    state = {"state": {}, "param_groups": [{"params": group, "lr": 5.0} for group in names]}
    with pytest.raises(ArgumentError, match=re.escape(message)):
        load_optimizer_state(optimizer, parts, [["weight"], ["bias"]], state)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert weight in optimizer.state


def with_piece(value):
    """A state of the second half of a weight of eight, and what is to load it."""
    piece = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([piece], lr=0.1, momentum=0.9)
    parts = {piece: Part("weight", lambda tensor: Sharded.elements(tensor, (8,), 4))}
    state = {
        "state": {"weight": {"momentum_buffer": value}},
        "param_groups": [{**optimizer.param_groups[0], "params": ["weight"]}],
    }
    return optimizer, parts, [["weight"]], state


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            Sharded.elements(torch.ones(4), (8,), 0),
            "is Sharded(shape=(8,), dtype=torch.float32, box",
        ),
        (
            Sharded.elements(torch.ones(4), (9,), 4),
            "is Sharded(shape=(9,), dtype=torch.float32, box",
        ),
        (
            Sharded((8,), [Box((4,), torch.ones(4))]),
            "and here it is Sharded(shape=(8,), dtype=torch.",
        ),
        (torch.ones(8), "is a tensor of shape (8,), and here it is Sharded(shape=(8,), "),
        (torch.ones(4), "is a tensor of shape (4,), and here it is Sharded(shape=(8,), "),
    ],
)
def test_states_of_other_parts_are_refused(value, said):
    optimizer, *rest = with_piece(value)
    with pytest.raises(ArgumentError, match=re.escape(said)):
        load_optimizer_state(optimizer, *rest)
    assert not optimizer.state


def test_states_of_the_same_part_or_of_other_shapes_are_loaded():
    for value in (Sharded.elements(torch.ones(4), (8,), 4), torch.ones(3)):
        optimizer, *rest = with_piece(value)
        load_optimizer_state(optimizer, *rest)
        (state,) = optimizer.state.values()
        assert state["momentum_buffer"].eq(1).all()


def test_states_of_other_shapes_than_the_optimizer_has_are_refused():
    optimizer, weight, bias = stepped(OPTIMIZERS["sgd"])
    parts = {weight: whole("weight"), bias: whole("bias")}
    names = [["weight"], ["bias"]]
    state = optimizer_state(optimizer, parts, names)
    state["state"]["weight"]["momentum_buffer"] = torch.ones(4, 3)
    said = (
        "momentum_buffer of parameter 'weight' is a tensor of shape (4, 3), and here it is a tensor"
    )
    with pytest.raises(ArgumentError, match=re.escape(said)):
        load_optimizer_state(optimizer, parts, names, state)
    del state["state"]["weight"]
    state["state"]["others"] = {"momentum_buffer": torch.ones(2)}
    with pytest.raises(
        ArgumentError, match="the state holds a part of parameter 'others', of which"
    ):
        load_optimizer_state(optimizer, parts, names, state)
