"""Checks before anything is loaded: names, parts of states, targets, objects that refuse."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from varcomm import ArgumentError
from varcomm.checkpoint import PerRank, Rows, load, read, save
from varcomm.sharding import Sharded, ShardSpec


def other_names(rank, folder):
    """Each rank loads other parts; what one of them lacks, all are told."""
    parts = {f"stage {n}": {"u": torch.ones(1), "v": torch.ones(2)} for n in range(3)}
    save({"a": torch.ones(1), **parts}, folder)
    mine, x = f"stage {rank}", torch.zeros(1)
    state = {mine: {"u": x, "v": torch.zeros(2)}} if rank else {mine: {"u": x}}
    with pytest.raises(ArgumentError, match=r"1 of its keys are not in the state: 'stage 0\.v'\."):
        load(state, folder)
    assert x.item() == 0
    state[mine]["v"] = torch.zeros(2)
    if rank:
        state["a"] = torch.zeros(1)
    load(state, folder)
    assert all(bool(t.all()) for t in (x, state[mine]["v"], state.get("a", x)))


def in_inference_mode(*shape):
    with torch.inference_mode():
        return torch.zeros(shape)


TARGETS = {
    "expanded": lambda: torch.zeros(1, 2).expand(3, 2),
    "inference mode": lambda: in_inference_mode(3, 2),
    "meta": lambda: torch.zeros(3, 2, device="meta"),
    "expanded tensor": lambda: Rows(torch.zeros(1, 2).expand(3, 2), torch.arange(3), 3),
}


def no_target(rank, folder):
    """Targets that cannot be overwritten."""
    save({"a": torch.ones(2), "b": torch.zeros(3, 2), "s": 1}, folder)
    for word, make in TARGETS.items():
        state = {"a": torch.zeros(2), "b": torch.zeros(3, 2), "s": 0}
        if word == "expanded tensor":
            state["b"] = Rows(torch.zeros(3, 2), torch.arange(3), 3)
        if rank == 1:
            state["b"] = make()
        with pytest.raises(ArgumentError, match=rf"refused on rank 1 of 3: 'b' .*{word}"):
            load(state, folder)
        assert not state["a"].any()
        assert state["s"] == 0


def uneven(rank, folder):
    """A DTensor of uneven shards tells of even ones."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    own = torch.full(([1, 0, 4][rank],), float(rank))
    tensor = DTensor.from_local(
        own, mesh, [Shard(0)], run_check=False, shape=torch.Size([5]), stride=(1,)
    )
    save({"good": 1}, folder / "there")
    said = r"'n', a tensor of shape \(5,\), declares boxes of shapes \[\(2,\)\]"
    with pytest.raises(ArgumentError, match=said):
        save({"n": tensor}, folder / "there")
    save({"n": torch.zeros(5)}, folder / "even")
    with pytest.raises(ArgumentError, match=said):
        load({"n": tensor}, folder / "even")
    assert read(folder / "there") == {"good": 1}


class Version(nn.Module):
    """Refuses what another version has saved."""

    def __init__(self, version, value):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value))
        self.version = version

    def get_extra_state(self):
        return {"version": self.version}

    def set_extra_state(self, state):
        if state["version"] != self.version:
            raise ValueError(f"made for version {self.version}")


class Held:
    def __init__(self, value, refuses=False):
        self.value, self.refuses = value, refuses

    def state_dict(self):
        return {"value": self.value, "inner": [torch.ones(2), {}]}

    def load_state_dict(self, state):
        assert state["inner"][1] == {}
        if self.refuses:
            raise ValueError("not this one")
        self.value = state["value"]


def who_refuses(rank, folder):
    """A module or an object refuses before tensors are overwritten."""
    first, module, last = Held(5), Version(2, 4.0), Held(5)
    save({"x": torch.ones(2), "first": first, "module": module, "last": last, "s": 1}, folder)
    first.value = last.value = 0
    other = Version(1 if rank == 1 else 2, 0.0)
    state = {"x": torch.zeros(2), "first": first, "module": other, "last": last, "s": 0}
    said = r"refused on rank 1 of 3: 'module' refuses its saved state: made for version 1"
    for message in (said, r"'last' refuses .*not this one"):
        with pytest.raises(ArgumentError, match=message):
            load(state, folder)
        assert not other.weight.any()
        assert not state["x"].any()
        assert (first.value, state["s"]) == (5, 0)
        other.version, last.refuses = 2, not last.refuses
    load(state, folder)
    assert other.weight.tolist() == [4, 4]
    assert (last.value, state["s"]) == (5, 1)


def other_model(rank, folder):
    """A checkpoint of another model: one message names all differences."""
    saved, own = (ShardSpec.of(sizes) for sizes in ([2, 1, 0], [1, 1, 0]))
    w, same = Sharded.of(torch.ones(saved.local, 4), saved), torch.zeros(2)
    save({"net": {"w": w, "b": torch.ones(3), "s": 5, "same": torch.ones(2)}, "x": 1}, folder)
    net = {"w": Sharded.of(torch.zeros(own.local, 4), own), "b": torch.zeros(3).double()}
    net |= {"same": same, "new": torch.zeros(1), **{f"n{number}": 0 for number in range(7)}}
    with pytest.raises(ArgumentError) as caught:
        load({"net": net}, folder)
    assert not same.any()
    for words in (
        "8 keys are missing in the checkpoint: 'net.new', 'net.n0', 'net.n1', 'net.n2', 'net.n3', ",
        "1 of its keys are not in the state: 'net.s'",
        "2 have another shape or dtype: 'net.w' is saved as (3, 4), torch.float32 and is (2, 4), ",
        "'net.b' is saved as (3,), torch.float32 and is (3,), torch.float64 here",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize("check", [other_names, no_target, uneven, who_refuses, other_model])
def test_on_ranks(worlds, tmp_path, check):
    worlds.run(3, check, tmp_path)


def test_names_with_dots(tmp_path):
    save({"a": {"p": 1, "l": [1]}, "a.x": {"q": 2}, "a.l.y": 3}, tmp_path)
    for expected, state in (
        ({"p": 1, "l": [1]}, {"a": {"p": 0, "l": []}}),
        ({"q": 2}, {"a.x": {"q": 0}}),
    ):
        load(state, tmp_path)
        assert [*state.values()] == [expected]


def wrapped():
    outer = nn.Module()
    outer.module = nn.Linear(2, 1)
    return outer


def with_optimizer(model, parameters):
    return {"model": model, "optimizer": torch.optim.SGD(parameters, lr=0.1)}


X, MODEL, OUTER = torch.zeros(2), nn.Linear(2, 1), wrapped()
HINT = r"Names differ by 'module\.' or '_orig_mod\.'"
DIFFERENT = [  # saved, state, word of the message
    ({"x": X}, {"x": 5}, "'x' is saved as tensors and is a plain value"),
    ({"x": 5}, {"x": X}, r"'x' is saved as a plain value and is \(2,\)"),
    ({"x": X}, {"y": X}, "1 keys are missing in the checkpoint: 'y'"),
    ({"x": X}, {"x": PerRank(X)}, "missing in the checkpoint: 'x.0'"),
    ({"x": X}, {"y": nn.Linear(1, 1)}, "in the checkpoint: 'y'"),
    ({"x": {}}, {"x": {"y": 5}}, "missing in the checkpoint: 'x.y'"),
    ({"x": {"y": 5}}, {"x": {}}, "1 of its keys are not in the state: 'x.y'"),
    ({}, {"x": X}, "1 keys are missing in the checkpoint: 'x'"),
    ({"x": nn.Linear(2, 1)}, {"x": nn.Linear(2, 1, device="meta")}, "'x.weight' is on the me"),
    ({"model": OUTER}, {"model": MODEL}, HINT),
    (with_optimizer(OUTER, OUTER.parameters()), with_optimizer(MODEL, MODEL.parameters()), HINT),
]


def test_states_that_do_not_fit(tmp_path):
    for saved, state, word in DIFFERENT:
        save(saved, tmp_path)
        with pytest.raises(ArgumentError, match=word):
            load(state, tmp_path)
    assert not X.any()
    save({"h": {"loss": 1}}, tmp_path)
    state = {"h": None}
    load(state, tmp_path)
    assert state == {"h": {"loss": 1}}
