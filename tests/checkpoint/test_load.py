"""Checks before anything is loaded: names, parts of states, targets, objects that refuse."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from varcomm import ArgumentError
from varcomm.checkpoint import PerRank, RowsById, load, read, save
from varcomm.sharding import Sharded, ShardSpec


def other_names(rank, folder):
    """Each rank loads other parts; what one of them lacks, all are told."""
    parts = {f"stage {n}": {"u": torch.ones(1), "v": torch.ones(2)} for n in range(3)}
    save({"a": torch.ones(1), **parts}, folder)
    mine, x = f"stage {rank}", torch.zeros(1)
    state = {mine: {"u": x, "v": torch.zeros(2)}} if rank else {mine: {"u": x}}
    with pytest.raises(ArgumentError, match=r"1 keys are not in the state: 'stage 0\.v'\."):
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
    "expanded tensor": lambda: RowsById(torch.zeros(1, 2).expand(3, 2), torch.arange(3), 3),
}


def no_target(rank, folder):
    """Targets that cannot be overwritten."""
    save({"a": torch.ones(2), "b": torch.zeros(3, 2), "s": 1}, folder)
    for word, make in TARGETS.items():
        state = {"a": torch.zeros(2), "b": torch.zeros(3, 2), "s": 0}
        if word == "expanded tensor":
            state["b"] = RowsById(torch.zeros(3, 2), torch.arange(3), 3)
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
    """An object of one rank refuses: an error on all."""
    held, x = Held(5), torch.zeros(2)
    save({"x": torch.ones(2), "held": held, "s": 1}, folder)
    held.value, held.refuses = 0, rank == 1
    state = {"x": x, "held": held, "s": 0}
    said = "refused on rank 1 of 3: 'held' refuses its saved state: not this one"
    with pytest.raises(ArgumentError, match=said):
        load(state, folder)
    held.refuses = False
    load(state, folder)
    assert (x.tolist(), held.value, state["s"]) == ([1, 1], 5, 1)


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
        "10 keys of the state do not match: 'net.w' is saved as (3, 4), torch.float32 and is (2",
        "'net.b' is saved as (3,), torch.float32 and is (3,), torch.float64 here, 'net.new' is mis",
        "1 keys are not in the state: 'net.s'",
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


X = torch.zeros(2)
DIFFERENT = [  # saved, state, word of the message
    ({"x": X}, {"x": 5}, r"'x' is saved as \(2,\), torch.float32 and is a plain value"),
    ({"x": 5}, {"x": X}, r"'x' is saved as a plain value and is \(2,\)"),
    ({"x": X}, {"y": X}, "'y' is missing in the checkpoint"),
    ({"x": X}, {"x": PerRank(X)}, "'x.0' is missing in the checkpoint"),
    ({"x": X}, {"y": nn.Linear(1, 1)}, "'y' is missing in the checkpoint"),
    ({"x": {}}, {"x": {"y": 5}}, "'x.y' is missing in the checkpoint"),
    ({"x": {"y": 5}}, {"x": {}}, "1 keys are not in the state: 'x.y'"),
    ({}, {"x": X}, "'x' is missing in the checkpoint"),
    ({"x": nn.Linear(2, 1)}, {"x": nn.Linear(2, 1, device="meta")}, "'x.weight' is on the me"),
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
