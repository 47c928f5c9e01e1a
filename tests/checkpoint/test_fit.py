"""What is told before anything is loaded: names, parts of states, targets, those that refuse."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from varcomm import ArgumentError
from varcomm.checkpoint import Rows, load, read, save


def other_names(rank, folder):
    """Each rank loads other parts; what one of them lacks, all are told."""
    parts = {f"stage {n}": {"u": torch.ones(1), "v": torch.ones(2)} for n in range(2)}
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
    assert worlds.run(2, other_names, tmp_path) == [True, True]


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
    hint = "Names differ by 'module.' or '_orig_mod.', which DistributedDataParallel and"
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
    "expanded": (lambda: torch.zeros(1, 2).expand(3, 2), "'b' is an expanded tensor, several"),
    "inference": (lambda: in_inference_mode(3, 2), "'b' was made in inference mode"),
    "meta": (lambda: torch.zeros(3, 2, device="meta"), "'b' is on the meta device"),
    "rows": (
        lambda: Rows(torch.zeros(1, 2).expand(3, 2), torch.arange(3), 3),
        "'b' is an expanded tensor",
    ),
}


def no_target(rank, folder, what):
    make, message = TARGETS[what]
    state = {"a": torch.zeros(2), "b": torch.zeros(3, 2), "s": 0}
    save({**state, "a": torch.ones(2), "s": 1}, folder)
    if what == "rows":
        state["b"] = Rows(torch.zeros(3, 2), torch.arange(3), 3)
    if rank == 1:
        state["b"] = make()
    with pytest.raises(ArgumentError, match=rf"refused on rank 1 of 2: {message}"):
        load(state, folder)
    return not state["a"].any() and state["s"] == 0


@pytest.mark.parametrize("what", TARGETS)
def test_targets_that_cannot_be_overwritten(worlds, tmp_path, what):
    assert worlds.run(2, no_target, tmp_path, what) == [True, True]


def uneven(rank, folder):
    """A DTensor of uneven shards tells of even ones."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    own = torch.full(([1, 0, 4][rank],), float(rank))
    tensor = DTensor.from_local(
        own, mesh, [Shard(0)], run_check=False, shape=torch.Size([5]), stride=(1,)
    )
    save({"good": 1}, folder / "there")
    said = r"'n' tells that of a tensor of shape \(5,\) this rank has boxes of shapes \[\(2,\)\]"
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
    said = r"refused on rank 1 of 2: 'module' refuses what was saved of it: made for version 1"
    with pytest.raises(ArgumentError, match=said):
        load(state, folder)
    assert not other.weight.any()
    assert not state["x"].any()
    assert (first.value, state["s"]) == (5, 0)
    other.version = 2
    load(state, folder)
    return other.weight.tolist(), last.value, state["s"]


def test_a_module_refuses_before_tensors_are_overwritten(worlds, tmp_path):
    assert worlds.run(2, who_refuses, tmp_path) == [([4, 4], 5, 1)] * 2


def test_states_that_have_themselves_in_them(tmp_path):
    state = {"a": 1}
    state["inner"] = [state]
    with pytest.raises(ArgumentError, match="the state has itself in it, or is nested too deep"):
        save(state, tmp_path)


def test_ragged_tensors(tmp_path):
    ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with pytest.raises(ArgumentError, match="'x' is not a dense tensor with values: it is a nest"):
        save({"x": ragged}, tmp_path)


def test_ints_that_are_too_large(tmp_path):
    with pytest.raises(ArgumentError, match=r"'x' is of int and could not .* ints below 2\*\*2000"):
        save({"x": 10**5000}, tmp_path)
    save({"x": -(2**1999)}, tmp_path)
    assert read(tmp_path) == {"x": -(2**1999)}
