"""States by the names of parameters: for other ranks, other sizes, and plain optimizers."""

import copy

import pytest
import torch
from torch import nn

from tests.data_parallel.cases import DOUBLE, assert_equal, plain, sizes_of, square
from tests.worlds import on_ranks
from varcomm import ArgumentError
from varcomm.checkpoint import load, save
from varcomm.data_parallel import ShardedGradients

BF16 = torch.bfloat16


class Net(nn.Sequential):
    def __init__(self, dtype=DOUBLE):
        torch.manual_seed(2)
        super().__init__(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        self.scale, self.empty = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(0, 3))
        self.to(dtype)

    def forward(self, x):
        return self[2](self[1](self[0](x))) * self.scale + self.empty.sum()


def adamw(groups):
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def train(model, optimizer, steps, rank=0, ranks=1):
    for step in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(7, 3, generator=generator, dtype=DOUBLE).to(model.scale.dtype)[rank::ranks]
        square(model(x)).backward()
        optimizer.step()


def six_steps_alone():
    model = Net()
    train(model, adamw(model.parameters()), range(6))
    return model


def made(dtype, kind, ranks, **options):
    model = Net(dtype)
    sizes = sizes_of(kind, ranks, sum(p.numel() for p in model.parameters()))
    options = {"reduce": "sum", "bucket_bytes": 100, **options}
    return model, ShardedGradients(model, adamw, sizes=sizes, **options)


def values_of(own):
    return {n: (p.start, p.value.flatten().tolist()) for n, p in own.pieces.items()}


def saved(rank, ranks, kind, dtype, folder):
    """Three steps, saved in a folder; return the values of this rank."""
    model, own = made(dtype, kind, ranks)
    train(model, own, range(3), rank, ranks)
    save({"model": model, "optimizer": own}, folder)
    return values_of(own)


def resumed(rank, ranks, kind, dtype, folder):
    """Load on other ranks and for other sizes, and go on."""
    model, own = made(dtype, kind, ranks)
    load({"model": model, "optimizer": own}, folder)
    values = values_of(own)
    own.step()  # takes over the values in the model, and there is no gradient
    train(model, own, range(3, 6), rank, ranks)
    if dtype == DOUBLE:
        assert_equal(model, six_steps_alone(), 1e-10)
    return values, "empty" in own.state_dict()["state"]


def resumed_by_a_plain_one(rank, folder):
    model = Net()
    one = adamw(model.parameters())
    load({"model": model, "optimizer": one}, folder)
    train(model, one, range(3, 6))
    assert_equal(model, six_steps_alone(), 1e-10)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((3, "explicit"), (1, "balanced")),
        ((1, "balanced"), (3, "whole-parameters")),
        pytest.param((2, "whole-parameters"), (3, "explicit"), marks=pytest.mark.slow),
    ],
)
def test_saved_on_some_ranks_and_loaded_on_others(worlds, tmp_path, before, after):
    folder = str(tmp_path / "c")
    worlds.run(before[0], saved, *before, DOUBLE, folder)
    results = worlds.run(after[0], resumed, *after, DOUBLE, folder)
    assert sum(has for _, has in results) == 1  # a parameter without elements has a state too
    worlds.run(1, resumed_by_a_plain_one, folder)


def together(results):
    """Values of all ranks, in full."""
    names = {name for values in results for name in values}
    parts = {name: sorted(m[name] for m in results if name in m) for name in names}
    return {name: [x for _, piece in found for x in piece] for name, found in parts.items()}


def test_masters_are_saved_and_loaded_exactly(worlds, tmp_path):
    """Also if the model, whose parameters are rounded, is loaded before or after them."""
    before = worlds.run(2, saved, 2, "whole-parameters", BF16, str(tmp_path / "c"))
    after = worlds.run(3, resumed, 3, "balanced", BF16, str(tmp_path / "c"))
    assert together(before) == together([values for values, _ in after])


@on_ranks(1)
def test_checkpoints_with_masters_and_without(rank, tmp_path):
    model, other = Net(BF16), Net(BF16)
    own, one = ShardedGradients(model, adamw), adamw(other.parameters())
    for source, optimizer, target, into in ((model, own, other, one), (other, one, model, own)):
        train(source, optimizer, range(1))
        save({"model": source, "optimizer": optimizer}, tmp_path)
        with pytest.raises(ArgumentError, match="masters"):
            load({"model": target, "optimizer": into}, tmp_path)


def state_of(dtype, sizes, optimizer=adamw):
    model = nn.Linear(3, 2).to(dtype)
    own = ShardedGradients(model, optimizer, sizes=sizes)
    model(torch.ones(1, 3, dtype=dtype)).sum().backward()
    own.step()
    return own, own.state_dict()


# sizes before and after
OTHERS = (
    ("whole-parameters", "balanced", DOUBLE, adamw),
    ([8, 0], [0, 8], DOUBLE, adamw),
    ([2, 6], [5, 3], DOUBLE, adamw),
    ([3, 5], [5, 3], BF16, plain),  # of masters
)


@on_ranks(2)
def test_states_of_other_pieces_are_refused_on_all(rank, ranks):
    """And no states; on both ranks, and nothing is changed."""
    for before, after, dtype, optimizer in OTHERS:
        _, state = state_of(dtype, before, optimizer)
        own = ShardedGradients(nn.Linear(3, 2).to(dtype), optimizer, sizes=after)
        with pytest.raises(ArgumentError, match=r"load_state_dict: refused on rank"):
            own.load_state_dict(state)
        assert own.state_dict()["state"] == {}
    own, state = state_of(DOUBLE, [3, 5])
    groups = [{**state["param_groups"][0], "params": ["others"]}]
    wrongs = [None, {}, {"state": {}}, state | {"state": 3}, state | {"param_groups": groups}]
    for wrong in wrongs:
        with pytest.raises(ArgumentError, match=r"load_state_dict: refused on rank 1 of 2"):
            own.load_state_dict(wrong if rank else state)
    own.load_state_dict(copy.deepcopy(state))
    again = own.state_dict()["state"]
    for name, states in state["state"].items():
        assert torch.equal(again[name]["exp_avg"].local, states["exp_avg"].local)
    own = ShardedGradients(model := Net(), adamw)
    train(model, own, range(1), rank, ranks)
    state = own.state_dict()
    for states in (states for name, states in state["state"].items() if name == "scale"):
        states["exp_avg"] = torch.zeros(1)  # would broadcast
    with pytest.raises(ArgumentError, match="exp_avg of parameter 'scale', of shape"):
        own.load_state_dict(state)
