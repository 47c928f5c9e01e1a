"""States by the names of parameters: for other ranks, other sizes, and plain optimizers."""

import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.data_parallel.cases import DOUBLE, square
from tests.data_parallel.sharded_cases import sizes_of
from varcomm import ArgumentError
from varcomm.data_parallel import ShardedGradients
from varcomm.sharding import Sharded
from varcomm.sharding.optimizer_state import Part, load_optimizer_state, optimizer_state_for

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias", "scale"]


class Net(nn.Sequential):
    def __init__(self, dtype):
        torch.manual_seed(2)
        super().__init__(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.to(dtype)

    def forward(self, x):
        return self[2](self[1](self[0](x))) * self.scale


def adamw(groups):
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def share(step, rank, ranks, dtype):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(7, 3, generator=generator, dtype=DOUBLE).to(dtype)[rank::ranks]


def train(model, optimizer, steps, rank, ranks):
    for step in steps:
        optimizer.zero_grad()
        square(model(share(step, rank, ranks, model.scale.dtype))).backward()
        optimizer.step()


def made(dtype, kind, ranks):
    model = Net(dtype)
    sizes = sizes_of(kind, ranks, sum(p.numel() for p in model.parameters()))
    return model, ShardedGradients(model, adamw, sizes=sizes, reduce="sum", bucket_bytes=100)


def saved(rank, ranks, kind, dtype, folder):
    """Three steps, and what they leave: in a folder, and what it looks like."""
    model, own = made(dtype, kind, ranks)
    train(model, own, range(3), rank, ranks)
    state = own.state_dict()
    tensors = {key: state[key] for key in state if key != "param_groups"}
    assert all(
        type(value) is (Sharded if key != "step" else torch.Tensor)
        for states in state["state"].values()
        for key, value in states.items()
        if states["exp_avg"].dim()
    )
    dcp.save(tensors, checkpoint_id=folder)
    masters = {name: piece.value.tolist() for name, piece in own.pieces.items()}
    return state["param_groups"], [p.detach().clone() for p in model.parameters()], masters


def structure(dtype):
    """What a saved state looks like, without values."""
    found = {"state": {}, "masters": {}}
    wide = torch.promote_types(dtype, torch.float32)
    for name, parameter in Net(dtype).named_parameters():
        meta = torch.empty(parameter.shape, dtype=wide, device="meta")
        step = torch.empty((), device="meta")
        found["state"][name] = {"step": step, "exp_avg": meta, "exp_avg_sq": meta}
        found["masters"][name] = meta
    if dtype == wide:
        del found["masters"]  # as there are none
    return found


def with_values(model, values):
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


def loaded(rank, ranks, kind, dtype, folder, groups, values):
    """Load on other ranks and for other sizes, and go on."""
    model, own = made(dtype, kind, ranks)
    into = own.state_dict_for(structure(dtype))
    groups_of_own = into.pop("param_groups")
    dcp.load(into, checkpoint_id=folder)
    own.load_state_dict({**into, "param_groups": groups})
    with_values(model, values)
    masters = {
        name: (piece.start, piece.value.flatten().tolist()) for name, piece in own.pieces.items()
    }
    assert groups_of_own == groups
    train(model, own, range(3, 6), rank, ranks)
    return [p.detach().clone() for p in model.parameters()], masters


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((3, "explicit"), (2, "balanced")),
        ((2, "balanced"), (3, "whole-parameters")),
        ((1, "whole-parameters"), (3, "explicit")),
    ],
)
def test_saved_on_some_ranks_and_loaded_on_others(worlds, tmp_path, before, after):
    folder = str(tmp_path)
    groups, values, _ = worlds.run(before[0], saved, *before, DOUBLE, folder)[0]
    results = worlds.run(after[0], loaded, *after, DOUBLE, folder, groups, values)
    model = Net(DOUBLE)
    train(model, adamw(model.parameters()), range(6), 0, 1)
    for value, one in zip(results[0][0], model.parameters(), strict=True):
        torch.testing.assert_close(value, one.detach(), rtol=1e-10, atol=1e-10)


def loaded_by_a_plain_one(rank, folder, groups, values):
    model = Net(DOUBLE)
    with_values(model, values)
    one = adamw(model.parameters())
    parts = {p: Part(name, lambda value: value) for name, p in model.named_parameters()}
    names = [[name for name, _ in model.named_parameters()]]
    into = optimizer_state_for(one, parts, names, structure(DOUBLE))
    del into["param_groups"]
    dcp.load(into, checkpoint_id=folder)
    load_optimizer_state(one, parts, names, {**into, "param_groups": groups})
    train(model, one, range(3, 6), 0, 1)
    return [p.detach().clone() for p in model.parameters()]


def test_a_plain_optimizer_loads_it(worlds, tmp_path):
    """The keys are the same, whatever optimizer of the same kind has written them."""
    folder = str(tmp_path)
    groups, values, _ = worlds.run(3, saved, 3, "balanced", DOUBLE, folder)[0]
    (found,) = worlds.run(1, loaded_by_a_plain_one, folder, groups, values)
    whole = Net(DOUBLE)
    train(whole, adamw(whole.parameters()), range(6), 0, 1)
    for value, expected in zip(found, whole.parameters(), strict=True):
        torch.testing.assert_close(value, expected.detach(), rtol=1e-10, atol=1e-10)


def test_masters_are_saved_and_loaded_exactly(worlds, tmp_path):
    """Also if the model, whose parameters are rounded, is loaded after them."""
    bf16 = torch.bfloat16
    results = worlds.run(2, saved, 2, "whole-parameters", bf16, str(tmp_path))
    groups, values, _ = results[0]
    before = {name: value for _, _, masters in results for name, value in masters.items()}
    after = worlds.run(3, loaded, 3, "balanced", bf16, str(tmp_path), groups, values)
    for name in NAMES:
        pieces = sorted(masters[name] for _, masters in after if name in masters)
        whole = [x for _, piece in pieces for x in piece]
        assert whole == torch.tensor(before[name], dtype=torch.float64).flatten().tolist(), name
    for first, second in zip(after[0][0], after[1][0], strict=True):
        assert torch.equal(first, second)


def refused(rank):
    """Groups of other names, on one rank; and what had been loaded before stays."""
    model, own = made(DOUBLE, "balanced", 2)
    train(model, own, range(1), rank, 2)
    state = own.state_dict()
    if rank:
        state["param_groups"] = [{**state["param_groups"][0], "params": ["others"]}]
    said = (
        "ShardedGradients.load_state_dict: refused on rank 1 of 2: the saved optimizer has 1 grou"
    )
    with pytest.raises(ArgumentError, match=re.escape(said)):
        own.load_state_dict(state)
    return len(own.state_dict()["state"]) == len(own.pieces)


def test_states_of_other_parameters_are_refused_on_all_ranks(worlds):
    assert worlds.run(2, refused) == [True, True]
