"""Checks before anything is loaded: names, parts of states, targets, objects that refuse."""

import re

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
    return all(bool(t.all()) for t in (x, state[mine]["v"], state.get("a", x)))


def test_ranks_that_load_other_parts(worlds, tmp_path):
    assert worlds.run(3, other_names, tmp_path) == [True] * 3


def test_names_with_dots(tmp_path):
    save({"a": {"p": 1, "l": [1]}, "a.x": {"q": 2}, "a.l.y": 3}, tmp_path)
    state = {"a": {"p": 0, "l": []}}
    load(state, tmp_path)
    assert state == {"a": {"p": 1, "l": [1]}}
    state = {"a.x": {"q": 0}}
    load(state, tmp_path)
    assert state == {"a.x": {"q": 2}}


def wrapped_in(folder, state, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        load(state, folder)
    return True


def test_names_that_differ_by_a_wrapper(tmp_path):
    model = nn.Linear(2, 1)
    outer = nn.Module()
    outer.module = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hint = "Names differ by 'module.' or '_orig_mod.'"
    save({"model": outer, "optimizer": optimizer}, tmp_path)
    assert wrapped_in(tmp_path, {"model": model}, hint)
    assert wrapped_in(tmp_path, {"optimizer": optimizer, "model": model}, hint)


def test_a_dict_takes_what_it_has_the_keys_of(tmp_path):
    save({"h": {"loss": 1}}, tmp_path)
    assert wrapped_in(tmp_path, {"h": {}}, "1 of its keys are not in the state: 'h.loss'")
    state = {"h": None}
    load(state, tmp_path)
    assert state == {"h": {"loss": 1}}


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
    return True


def test_targets_that_cannot_be_overwritten(worlds, tmp_path):
    assert worlds.run(3, no_target, tmp_path) == [True] * 3


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
    return read(folder / "there")


def test_shards_of_other_sizes_than_they_tell(worlds, tmp_path):
    assert worlds.run(3, uneven, tmp_path) == [{"good": 1}] * 3


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
        return {"value": self.value}

    def load_state_dict(self, state):
        if self.refuses:
            raise ValueError("not this one")
        self.value = state["value"]


def who_refuses(rank, folder):
    first, module, last = Held(5), Version(2, 4.0), Held(5)
    x = torch.ones(2)
    save({"x": x, "first": first, "module": module, "last": last, "s": 1}, folder)
    first.value = last.value = 0
    other = Version(1 if rank == 1 else 2, 0.0)
    state = {"x": torch.zeros(2), "first": first, "module": other, "last": last, "s": 0}
    said = r"refused on rank 1 of 3: 'module' refuses its saved state: made for version 1"
    with pytest.raises(ArgumentError, match=said):
        load(state, folder)
    assert not other.weight.any()
    assert not state["x"].any()
    assert (first.value, state["s"]) == (5, 0)
    other.version = 2
    load(state, folder)
    return other.weight.tolist(), last.value, state["s"]


def test_a_module_refuses_before_tensors_are_overwritten(worlds, tmp_path):
    assert worlds.run(3, who_refuses, tmp_path) == [([4, 4], 5, 1)] * 3


def other_model(rank, folder):
    spec = ShardSpec.of([2, 1, 0])
    w = Sharded.of(torch.ones(spec.local, 4), spec)
    save({"net": {"w": w, "b": torch.ones(3), "s": 5, "same": torch.ones(2)}, "x": 1}, folder)
    own = torch.zeros(2)
    spec = ShardSpec.of([1, 1, 0])
    net = {"w": Sharded.of(torch.zeros(spec.local, 4), spec), "b": torch.zeros(3).double()}
    net |= {"same": own, "new": torch.zeros(1), **{f"n{number}": 0 for number in range(7)}}
    with pytest.raises(ArgumentError) as caught:
        load({"net": net}, folder)
    assert not own.any()
    return str(caught.value)


def test_a_checkpoint_of_another_model(worlds, tmp_path):
    (said,) = set(worlds.run(3, other_model, tmp_path))
    for words in (
        "8 keys are missing in the checkpoint: 'net.new', 'net.n0', 'net.n1', 'net.n2', 'net.n3', ",
        "1 of its keys are not in the state: 'net.s'",
        "2 have another shape or dtype: 'net.w' is saved as (3, 4), torch.float32 and is (2, 4), ",
        "'net.b' is saved as (3,), torch.float32 and is (3,), torch.float64 here",
    ):
        assert words in said


def test_kinds_that_do_not_fit(tmp_path):
    x = torch.zeros(2)
    for saved, state, word in (
        ({"x": x}, {"x": 5}, "'x' is saved as tensors and is a plain value"),
        ({"x": 5}, {"x": x}, r"'x' is saved as a plain value and is \(2,\)"),
        ({"x": x}, {"y": x}, "1 keys are missing in the checkpoint: 'y'"),
        ({"x": x}, {"x": PerRank(x)}, "missing in the checkpoint: 'x.0'"),
        ({"x": x}, {"y": nn.Linear(1, 1)}, "in the checkpoint: 'y'"),
        ({"x": {}}, {"x": {"y": 5}}, "missing in the checkpoint: 'x.y'"),
        ({"x": {"y": 5}}, {"x": {}}, "not in the state: 'x.y'"),
        ({}, {"x": x}, "1 keys are missing in the checkpoint: 'x'"),
        ({"x": nn.Linear(2, 1)}, {"x": nn.Linear(2, 1, device="meta")}, "'x.weight' is on the me"),
    ):
        save(saved, tmp_path)
        with pytest.raises(ArgumentError, match=word):
            load(state, tmp_path)
    assert not x.any()


class Choosy:
    def state_dict(self):
        return {"number": 5, "inner": [torch.ones(2), {}]}

    def load_state_dict(self, state):
        assert state == {"number": 5, "inner": [state["inner"][0], {}]}
        raise ValueError("not this one")


def choosy(rank, folder):
    x = torch.ones(2)
    save({"a": x, "b": Choosy()}, folder)
    x.zero_()
    with pytest.raises(ArgumentError, match=r"'b' refuses .*not this one"):
        load({"a": x, "b": Choosy()}, folder)
    return not x.any()


def test_an_object_refuses_before_tensors_are_overwritten(worlds, tmp_path):
    assert worlds.run(3, choosy, tmp_path) == [True] * 3
