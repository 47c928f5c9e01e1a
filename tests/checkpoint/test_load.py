"""Checks before anything is loaded: names, parts of states, targets, objects that refuse."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from tests.worlds import on_ranks
from varcomm import ArgumentError
from varcomm.checkpoint import PerRank, RowsById, load, read, save
from varcomm.sharding import Sharded, ShardSpec


@on_ranks(3)
def test_other_names(rank, tmp_path):
    """Each rank loads other parts; what one of them lacks, all are told."""
    parts = {f"stage {n}": {"u": torch.ones(1), "v": torch.ones(2)} for n in range(3)}
    save({"a": torch.ones(1), **parts}, tmp_path)
    mine, x = f"stage {rank}", torch.zeros(1)
    state = {mine: {"u": x, "v": torch.zeros(2)}} if rank else {mine: {"u": x}}
    with pytest.raises(ArgumentError, match=r"1 keys are not in the state: 'stage 0\.v'\."):
        load(state, tmp_path)
    assert x.item() == 0
    state[mine]["v"] = torch.zeros(2)
    if rank:
        state["a"] = torch.zeros(1)
    load(state, tmp_path)
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


@on_ranks(3)
def test_no_target(rank, tmp_path):
    """Targets that cannot be overwritten."""
    save({"a": torch.ones(2), "b": torch.zeros(3, 2), "s": 1}, tmp_path)
    for word, make in TARGETS.items():
        state = {"a": torch.zeros(2), "b": torch.zeros(3, 2), "s": 0}
        if word == "expanded tensor":
            state["b"] = RowsById(torch.zeros(3, 2), torch.arange(3), 3)
        if rank == 1:
            state["b"] = make()
        with pytest.raises(ArgumentError, match=rf"refused on rank 1 of 3: 'b' .*{word}"):
            load(state, tmp_path)
        assert not state["a"].any()
        assert state["s"] == 0


@on_ranks(3)
def test_targets_that_share_memory(rank, tmp_path):
    """Tied parameters are loaded from equal values, NaN included, and from no others."""
    nan, spec = torch.full((2, 3), torch.nan), ShardSpec.of([1, 0, 1])
    saved = {"a": nan, "b": nan.clone(), "c": torch.zeros(2, 3), "d": torch.zeros(2, 3)}
    save(saved, tmp_path)
    x = torch.ones(2, 3)
    load({"a": x, "b": x, "c": torch.ones(2, 3), "d": torch.ones(2, 3)}, tmp_path)
    assert x.isnan().all()
    with pytest.raises(ArgumentError, match=r"'c' and 'b' share their memory.*Nothing has"):
        load({"a": torch.ones(2, 3), "b": x, "c": x}, tmp_path)
    assert x.isnan().all()
    rows = torch.ones(spec.sizes[rank], 3)
    with pytest.raises(ArgumentError, match="'d' and 'a' share their memory"):
        load({name: Sharded.of(rows, spec) for name in ("a", "d")}, tmp_path)
    assert (rows == 1).all()


@on_ranks(3)
def test_uneven(rank, tmp_path):
    """A DTensor of uneven shards tells of even ones."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    own = torch.full(([1, 0, 4][rank],), float(rank))
    tensor = DTensor.from_local(
        own, mesh, [Shard(0)], run_check=False, shape=torch.Size([5]), stride=(1,)
    )
    save({"good": 1}, tmp_path / "there")
    said = r"'n', a tensor of shape \(5,\), declares boxes of shapes \[\(2,\)\]"
    with pytest.raises(ArgumentError, match=said):
        save({"n": tensor}, tmp_path / "there")
    save({"n": torch.zeros(5)}, tmp_path / "even")
    with pytest.raises(ArgumentError, match=said):
        load({"n": tensor}, tmp_path / "even")
    assert read(tmp_path / "there") == {"good": 1}


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


@on_ranks(3)
def test_who_refuses(rank, tmp_path):
    """An object of one rank refuses: an error on all."""
    held, x = Held(5), torch.zeros(2)
    save({"x": torch.ones(2), "held": held, "s": 1}, tmp_path)
    held.value, held.refuses = 0, rank == 1
    state = {"x": x, "held": held, "s": 0}
    said = "refused on rank 1 of 3: 'held' refuses its saved state: not this one"
    with pytest.raises(ArgumentError, match=said):
        load(state, tmp_path)
    held.refuses = False
    load(state, tmp_path)
    assert (x.tolist(), held.value, state["s"]) == ([1, 1], 5, 1)


@on_ranks(3)
def test_other_model(rank, tmp_path):
    """A checkpoint of another model: one message names all differences."""
    saved, own = (ShardSpec.of(sizes) for sizes in ([2, 1, 0], [1, 1, 0]))
    w, same = Sharded.of(torch.ones(saved.local, 4), saved), torch.zeros(2)
    save({"net": {"w": w, "b": torch.ones(3), "s": 5, "same": torch.ones(2)}, "x": 1}, tmp_path)
    net = {"w": Sharded.of(torch.zeros(own.local, 4), own), "b": torch.zeros(3).double()}
    net |= {"same": same, "new": torch.zeros(1), **{f"n{number}": 0 for number in range(7)}}
    with pytest.raises(ArgumentError) as caught:
        load({"net": net}, tmp_path)
    assert not same.any()
    for words in (
        "10 keys of the state do not match: 'net.w' is saved as (3, 4), torch.float32 and is (2",
        "'net.b' is saved as (3,), torch.float32 and is (3,), torch.float64 here, 'net.new' is mis",
        "1 keys are not in the state: 'net.s'",
    ):
        assert words in str(caught.value)


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
