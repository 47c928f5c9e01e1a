"""States of optimizers by name: of whole parameters, of shards and of flat pieces, one like all."""

import re

import pytest
import torch

from varcomm import ArgumentError
from varcomm.sharding import Box, Sharded
from varcomm.sharding.optimizer_state import OptimizerStates, Part

NAMES = [["weight"], ["bias"]]
OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.1),
}


def stepped(kind, steps=3):
    """An optimizer that has made some steps with its parts and names, and its two parameters."""
    torch.manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(4))]
    groups = [{"params": [params[0]]}, {"params": [params[1]], "weight_decay": 0.1}]
    optimizer = OPTIMIZERS[kind](groups)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    named = zip(params, ("weight", "bias"), strict=True)
    parts = {p: Part(name, lambda tensor: tensor) for p, name in named}
    return OptimizerStates(optimizer, parts, NAMES), params


def meta(state):
    if isinstance(state, torch.Tensor):
        return state.to("meta")
    if isinstance(state, dict):
        return {key: meta(value) for key, value in state.items()}
    return [meta(value) for value in state] if isinstance(state, list) else state


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_fresh_optimizer_goes_on_where_another_was(kind):
    trained, params = stepped(kind)
    fresh, others = stepped(kind, steps=0)
    state = trained.state_dict()
    target = fresh.state_dict_for(meta(state))
    for name, own in target["state"].items():
        for key, value in own.items():
            value.copy_(state["state"][name][key])
    target["param_groups"] = [{**group, "lr": 0.01} for group in state["param_groups"]]
    fresh.load_state_dict(target)
    for group in trained.optimizer.param_groups:
        group["lr"] = 0.01
    for mine, other in zip(others, params, strict=True):
        mine.data.copy_(other)
        mine.grad = other.grad = torch.ones_like(other)
    fresh.optimizer.step()
    trained.optimizer.step()
    assert all(torch.equal(mine, other) for mine, other in zip(others, params, strict=True))


def test_of_flat_pieces_the_state_is_that_of_the_whole():
    """One optimizer of whole parameters, two of pieces: their states are the same boxes."""
    trained, (weight, _) = stepped("adamw")
    expected = trained.state_dict()
    found = torch.full((3, 4), float("nan"))
    for low, high in ((0, 5), (5, 12)):
        piece, nothing = (torch.nn.Parameter(torch.zeros(n)) for n in (high - low, 0))
        mine = OPTIMIZERS["adamw"]([{"params": [piece]}, {"params": [nothing]}])
        part = Part("weight", lambda tensor, low=low: Sharded.elements(tensor, (3, 4), low))
        own = OptimizerStates(mine, {piece: part}, NAMES)
        target = own.state_dict_for(meta(expected))
        for box in target["state"]["weight"]["exp_avg"].boxes:
            box.tensor.copy_(place(expected["state"]["weight"]["exp_avg"], box))
        own.load_state_dict(target)
        assert mine.state[piece]["exp_avg"].shape == piece.shape
        assert nothing not in mine.state
        state = own.state_dict()
        assert [group["params"] for group in state["param_groups"]] == NAMES
        for box in state["state"]["weight"]["exp_avg"].boxes:
            place(found, box).copy_(box.tensor)
    assert torch.equal(found, trained.optimizer.state[weight]["exp_avg"])


def place(tensor, box):
    """The elements of a full tensor that a box has."""
    ends = zip(box.offsets, box.tensor.shape, strict=True)
    return tensor[tuple(slice(first, first + size) for first, size in ends)]


def with_piece(value):
    """A state of the second half of a weight of eight, and what is to load it."""
    piece = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([piece], lr=0.1, momentum=0.9)
    parts = {piece: Part("weight", lambda tensor: Sharded.elements(tensor, (8,), 4))}
    group = {**optimizer.param_groups[0], "params": ["weight"]}
    state = {"state": {"weight": {"momentum_buffer": value}}, "param_groups": [group]}
    return OptimizerStates(optimizer, parts, [["weight"]]), state


def with_whole(names=NAMES, **states):
    """A state of whole parameters in other groups or with other tensors, and what is to load it."""
    own, _ = stepped("sgd")
    groups = zip(own.state_dict()["param_groups"] * 2, names, strict=False)
    groups = [{**group, "params": params} for group, params in groups]
    state = {name: {"momentum_buffer": value} for name, value in states.items()}
    return own, {"state": state, "param_groups": groups}


HERE = "and here it is Sharded(shape=(8,), "
REFUSED = [
    (with_piece(Sharded.elements(torch.ones(4), (8,), 0)), "is Sharded(shape=(8,), dtype=torch"),
    (with_piece(Sharded.elements(torch.ones(4), (9,), 4)), "is Sharded(shape=(9,), dtype=torch"),
    (with_piece(Sharded((8,), [Box((4,), torch.ones(4))])), HERE),
    (with_piece(torch.ones(8)), f"is a tensor of shape (8,), {HERE}"),
    (with_piece(torch.ones(4)), f"is a tensor of shape (4,), {HERE}"),
    (with_whole([["weight", "bias"]]), "has 1 groups of [2] parameters, and this one 2 of [1, 1]"),
    (with_whole([["weight"], ["scale"]]), "it has ['scale'], which are not here, and lacks ['bi"),
    (with_whole([["weight"], ["bias"], []]), "has 3 groups of [1, 1, 0] parameters"),
    (with_whole(weight=torch.ones(4, 3)), "momentum_buffer of parameter 'weight' is a tensor of"),
    (with_whole(others=torch.ones(2)), "the state holds a part of parameter 'others', of which"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_states_of_other_optimizers_or_parts_are_refused(given, said):
    own, state = given
    before = dict(own.optimizer.state)
    with pytest.raises(ArgumentError, match=re.escape(said)):
        own.load_state_dict(state)
    assert own.optimizer.state == before
    assert own.optimizer.param_groups[0]["lr"] == 0.1


def test_states_that_are_loaded():
    """Of the same part or of other shapes; what the optimizer has is written into."""
    for value in (Sharded.elements(torch.ones(4), (8,), 4), torch.ones(3)):
        own, state = with_piece(value)
        own.load_state_dict(state)
        (found,) = own.optimizer.state.values()
        assert found["momentum_buffer"].eq(1).all()
    own, state = with_whole(weight=torch.ones(3, 4))
    weight, bias = own.parts
    buffer = own.optimizer.state[weight]["momentum_buffer"]
    own.load_state_dict(state)
    assert own.optimizer.state[weight]["momentum_buffer"] is buffer
    assert buffer.eq(1).all()
    assert bias not in own.optimizer.state  # of which nothing was saved
