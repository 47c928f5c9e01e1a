"""torch.distributed.checkpoint reads what varcomm saves, DTensors included, and the other way."""

import copy
from collections import OrderedDict

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from varcomm import ArgumentError
from varcomm.checkpoint import load, read, save
from varcomm.sharding import Sharded, ShardSpec
from varcomm.tensor_parallel import ColumnParallelLinear

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint"
)


def layers(sharded):
    torch.manual_seed(4)
    first, second = nn.Linear(3, 5), nn.Linear(5, 3)
    first = ColumnParallelLinear.from_linear(first) if sharded else first
    return nn.Sequential(OrderedDict(first=first, second=second))


def stepped(model, steps=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    return optimizer


def by_varcomm(rank, folder):
    model = layers(True)
    save({"model": model, "optimizer": stepped(model), "epoch": 3, "lrs": [0.1, 0.2]}, folder)


def by_fully_shard(rank, folder):
    """Load into a model of DTensors and its optimizer by torch alone; save it by torch alone."""
    model = layers(False)
    fully_shard(model)
    optimizer = stepped(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "epoch": 0,
        "lrs": [],
    }
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert (state["epoch"], state["lrs"]) == (3, [0.1, 0.2])
    whole = {name: p.full_tensor().clone() for name, p in model.state_dict().items()}
    average = optimizer.state[model.first.weight]["exp_avg"].full_tensor()
    dcp.save(state, checkpoint_id=folder / "by torch")
    return whole, average


def test_varcomm_to_torch_and_back(worlds, tmp_path):
    worlds.run(3, by_varcomm, tmp_path)
    model = layers(False)
    optimizer = stepped(model)
    for whole, average in worlds.run(2, by_fully_shard, tmp_path):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(whole[name], value)
        torch.testing.assert_close(average, optimizer.state[model.first.weight]["exp_avg"])
    assert worlds.run(3, back, tmp_path / "by torch") == [True] * 3
    found = read(tmp_path / "by torch")
    assert found["epoch"] == 3
    torch.testing.assert_close(found["model"]["first.weight"], model.first.weight.data)


def back(rank, folder):
    """What torch has written of DTensors goes into sharded layers and a fresh optimizer."""
    model, expected = layers(True), layers(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5.0)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = {"model": model, "optimizer": optimizer, "epoch": 0, "lrs": None}
    load(state, folder)
    other = stepped(expected)
    return (
        (state["epoch"], state["lrs"], optimizer.param_groups[0]["lr"]) == (3, [0.1, 0.2], 0.1)
        and all(
            torch.allclose(p, q)
            for p, q in zip(model.parameters(), expected.parameters(), strict=True)
        )
        and all(
            torch.allclose(optimizer.state[p]["exp_avg_sq"], other.state[q]["exp_avg_sq"])
            for p, q in zip(model.parameters(), expected.parameters(), strict=True)
        )
    )


def dtensors(rank, folder):
    """DTensors pass through: on a mesh, of odd sizes, and on a mesh without this rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(35.0).view(5, 7)
    state = {"both": distribute_tensor(whole, mesh, [Shard(0), Shard(1)])}
    state["one"] = distribute_tensor(whole[:1], mesh["a"], [Shard(0)])
    save(state, folder)
    other = {
        "both": distribute_tensor(torch.zeros(5, 7), mesh["b"], [Shard(1)]),
        "one": distribute_tensor(torch.zeros(1, 7), mesh, [Shard(1), Shard(1)]),
    }
    load(other, folder)
    assert all(isinstance(value, DTensor) for value in other.values())
    return torch.equal(other["both"].full_tensor(), whole), other["one"].full_tensor().tolist()


def test_dtensors_on_meshes(worlds, tmp_path):
    rows = torch.arange(7.0).tolist()
    assert worlds.run(4, dtensors, tmp_path) == [(True, [rows])] * 4
    assert read(tmp_path)["one"].tolist() == [rows]


def plain_load(tmp_path, state):
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    return state


def sharded(rank, folder):
    spec = ShardSpec.of([[1, 2], [3, 0]], 1)
    whole = torch.arange(12.0).view(2, 6)
    save({"w": Sharded.of(spec.shard(whole), spec), "none": torch.zeros(0, 4)}, folder)


def test_torch_in_one_process_reads_shards(worlds, tmp_path):
    worlds.run(2, sharded, tmp_path)
    found = plain_load(tmp_path, {"w": torch.zeros(2, 6), "none": torch.ones(0, 4)})
    assert found["w"].tolist() == torch.arange(12.0).view(2, 6).tolist()


def test_torch_may_save_over_it_and_varcomm_over_that(tmp_path):
    save({"x": torch.ones(2)}, tmp_path)
    dcp.save({"x": torch.full((2,), 2.0)}, checkpoint_id=tmp_path, no_dist=True)
    assert read(tmp_path)["x"].tolist() == [2, 2]
    save({"x": torch.full((2,), 3.0)}, tmp_path)
    assert read(tmp_path)["x"].tolist() == [3, 3]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 3  # .metadata, data and manifest
    assert names[0] == ".metadata"


def test_a_cut_file_of_torch_is_found(tmp_path):
    dcp.save({"x": torch.ones(2000)}, checkpoint_id=tmp_path, no_dist=True)
    data = next(tmp_path.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-10])
    state = {"x": torch.zeros(2000)}
    with pytest.raises(ArgumentError, match=r"__0_0.distcp has been cut or changed: it has"):
        load(state, tmp_path)
    assert not state["x"].any()


def test_a_module_deep_in_a_torch_checkpoint(tmp_path):
    model = layers(False)
    twin = copy.deepcopy(model)
    dcp.save({"a": {"b": model.state_dict()}}, checkpoint_id=tmp_path, no_dist=True)
    with torch.no_grad():
        model.first.weight.zero_()
    load({"a": {"b": model}}, tmp_path)
    assert torch.equal(model.first.weight, twin.first.weight)


def test_torch_reads_keys_that_are_numbers(tmp_path):
    save({"table": {4: torch.ones(1)}}, tmp_path)
    state = {"table": {4: torch.zeros(1)}}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert state == {"table": {4: torch.ones(1)}}
    state = {"table": {4: torch.zeros(1), 5: "none"}}
    saved = {"table": {4: torch.ones(1), 5: "x"}}
    dcp.save(saved, checkpoint_id=tmp_path / "torch", no_dist=True)
    load(state, tmp_path / "torch")  # where nothing tells that they were numbers
    assert state == {"table": {4: torch.ones(1), 5: "x"}}
