"""Files of safetensors and Hugging Face, and states in torch.distributed.checkpoint."""

import json
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from varcomm import ArgumentError
from varcomm.checkpoint import Rows, export, load, read, save
from varcomm.sharding import Sharded, ShardSpec
from varcomm.tensor_parallel import ColumnParallelLinear, RowParallelLinear

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint"
)


def layers(sharded):
    torch.manual_seed(4)
    first, second = nn.Linear(3, 7), nn.Linear(7, 3)
    if sharded:
        first = ColumnParallelLinear.from_linear(first)
        second = RowParallelLinear.from_linear(second)
    return nn.Sequential(first, second)


def zeroed(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def saved(rank, folder):
    ids = torch.arange(rank, 5, 3)
    save({"model": layers(True), "step": 3, "u": Rows(1.0 * ids, ids, 5)}, folder)


def test_an_exported_file_is_read_by_safetensors(worlds, tmp_path):
    worlds.run(3, saved, tmp_path)
    expected = layers(False).state_dict()
    export(tmp_path, tmp_path / "model.safetensors", "model")
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    export(tmp_path, tmp_path / "all.safetensors")
    with safe_open(tmp_path / "all.safetensors", "pt") as file:
        assert {*file.keys()} == {"u", *(f"model.{name}" for name in expected)}
        assert file.get_tensor("u").tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ArgumentError, match="'optimizer'"):
        export(tmp_path, tmp_path / "x.safetensors", "optimizer")
    with pytest.raises(ArgumentError, match=r"there is no .*none"):
        export(tmp_path / "none", tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()
    save({"z": torch.ones(2, dtype=torch.complex64)}, tmp_path)
    with pytest.raises(ArgumentError, match="'z' is complex"):
        export(tmp_path, tmp_path / "x.safetensors")


def in_two_files(folder, tensors):
    """Shards of whole tensors with an index, as Hugging Face writes them."""
    folder.mkdir()
    names = list(tensors)
    weight_map = {}
    for number, some in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in some}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(some, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def loaded(rank, folder):
    """Each rank reads its part: of one file, a folder, an index; by names or as a module."""
    model, whole = layers(True), layers(False)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for where in ("one.safetensors", "two", "two/model.safetensors.index.json"):
        load(zeroed(model), folder / where)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected[name])
    load({"0": zeroed(model)[0]}, folder / "two")
    assert not model[1].weight.any()
    load({"model": zeroed(model)}, folder / "named.safetensors")
    ids = torch.arange(rank, 7, 3)
    state = {"0.weight": Rows(torch.zeros(len(ids), 3), ids, 7), "1.bias": torch.zeros(3)}
    load(state, folder / "two")
    assert torch.equal(state["0.weight"].tensor, whole[0].weight[ids])
    return all(torch.equal(p, expected[name]) for name, p in model.named_parameters())


def test_files_of_other_tools(worlds, tmp_path):
    tensors = layers(False).state_dict()
    save_file(tensors, tmp_path / "one.safetensors")
    named = {f"model.{name}": value for name, value in tensors.items()}
    save_file(named, tmp_path / "named.safetensors")
    in_two_files(tmp_path / "two", tensors)
    assert worlds.run(3, loaded, tmp_path) == [True] * 3
    found = read(tmp_path / "two")
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_dtypes_of_other_tools(tmp_path):
    tensors = {"half": torch.ones(3).bfloat16(), "z": torch.ones(2, dtype=torch.complex64)}
    tensors |= {"scalar": torch.tensor(5), "none": torch.zeros(0, 4), "b": torch.tensor([True])}
    save_file(tensors, tmp_path / "x.safetensors")
    state = {name: torch.zeros_like(value) for name, value in tensors.items()}
    load(state, tmp_path / "x.safetensors")
    assert all(torch.equal(state[name], value) for name, value in tensors.items())


def refused(rank, folder, words):
    with pytest.raises(ArgumentError, match=words):
        load(layers(False), folder)
    return True


def test_files_of_other_tools_that_do_not_fit(worlds, tmp_path):
    tensors = layers(False).state_dict()
    more = tensors | {"more": torch.ones(1)}
    save_file(more, tmp_path / "model.safetensors")
    assert worlds.run(3, refused, tmp_path, "not in the state: 'more'") == [True] * 3
    path = tmp_path / "cut.safetensors"
    save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:-5])
    assert worlds.run(3, refused, path, "cut.safetensors is damaged") == [True] * 3
    in_two_files(tmp_path / "two", tensors)
    index = tmp_path / "two" / "model.safetensors.index.json"
    for weight_map in ({"a": "../x.safetensors"}, {"a": "/etc/passwd"}, {"a": "b.pt"}, {"a": 5}):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ArgumentError, match="which is not a file of its folder"):
            read(tmp_path / "two")
    for text in ("{}", "[1]", "no json"):
        index.write_text(text)
        with pytest.raises(ArgumentError, match=r"index\.json is not an index"):
            read(tmp_path / "two")
    os.remove(index)
    with pytest.raises(ArgumentError, match="nothing is saved there"):
        read(tmp_path / "two")


def dtensors(rank, folder):
    """DTensors on a mesh of three, of odd sizes, and on a mesh without this rank."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("a",))
    whole = torch.arange(35.0).view(5, 7)
    save({"w": distribute_tensor(whole, mesh, [Shard(0)]), "one": whole[:1]}, folder)
    other = {
        "w": distribute_tensor(torch.zeros(5, 7), mesh, [Shard(1)]),
        "one": distribute_tensor(torch.zeros(1, 7), mesh, [Shard(0)]),
    }
    load(other, folder)
    assert all(isinstance(value, DTensor) for value in other.values())
    return torch.equal(other["w"].full_tensor(), whole), other["one"].full_tensor().tolist()


def test_dtensors(worlds, tmp_path):
    rows = torch.arange(7.0).tolist()
    assert worlds.run(3, dtensors, tmp_path) == [(True, [rows])] * 3
    assert read(tmp_path)["one"].tolist() == [rows]


def on_two_dimensions(rank, folder):
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
    return torch.equal(other["both"].full_tensor(), whole), other["one"].full_tensor().tolist()


@pytest.mark.slow
def test_dtensors_on_two_dimensions(worlds, tmp_path):
    rows = torch.arange(7.0).tolist()
    assert worlds.run(4, on_two_dimensions, tmp_path) == [(True, [rows])] * 4


def by_torch(rank, folder):
    """torch.distributed.checkpoint saves and loads Sharded tensors, with other shards too."""
    whole = torch.arange(12.0).view(2, 6)
    spec = ShardSpec.of([[1, 2, 0], [2, 0, 1]], 1)
    dcp.save({"w": Sharded.of(spec.shard(whole), spec), "n": 5}, checkpoint_id=folder)
    spec = ShardSpec.of([0, 2, 0])
    target = torch.zeros(spec.local, 6)
    state = {"w": Sharded.of(target, spec), "n": 0}
    dcp.load(state, checkpoint_id=folder)
    return torch.equal(target, spec.shard(whole)) and state["n"] == 5


def test_torch_distributed_checkpoint(worlds, tmp_path):
    assert worlds.run(3, by_torch, tmp_path) == [True] * 3
    plain = {"w": torch.zeros(2, 6)}
    dcp.load(plain, checkpoint_id=tmp_path, no_dist=True)
    assert plain["w"].tolist() == torch.arange(12.0).view(2, 6).tolist()
