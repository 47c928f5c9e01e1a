"""Files of safetensors and Hugging Face, and DTensors."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.checkpoint.of_other_tools import write
from tests.worlds import on_ranks
from varcomm import ArgumentError
from varcomm.checkpoint import RowsById, export, load, read, save
from varcomm.tensor_parallel import ColumnParallelLinear, RowParallelLinear


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
    save({"model": layers(True), "step": 3, "u": RowsById(1.0 * ids, ids, 5)}, folder)


def test_an_exported_file_is_read_by_safetensors(worlds, tmp_path):
    worlds.run(3, saved, tmp_path)
    expected, file = layers(False).state_dict(), tmp_path / "x.safetensors"
    export(tmp_path, file, "model")
    found = load_file(file)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    export(tmp_path, file)
    found = load_file(file)
    assert found.keys() == {"u", *(f"model.{name}" for name in expected)}
    assert found["u"].tolist() == [0, 1, 2, 3, 4]
    file.unlink()
    for folder, name, word in (
        (tmp_path, "optimizer", "'optimizer'"),
        (tmp_path / "none", None, "there is no .*none"),
    ):
        with pytest.raises(ArgumentError, match=word):
            export(folder, file, name)
        assert not file.exists()


def loaded(rank, folder):
    """Each rank reads its part: of one file, a folder, an index; by names or as a module."""
    model, whole = layers(True), layers(False)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}

    def check():
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected[name])

    for where in ("one.safetensors", "two", "two/model.safetensors.index.json"):
        load(zeroed(model), folder / where)
        check()
    load({"0": zeroed(model)[0]}, folder / "two")
    assert not model[1].weight.any()
    load({"model": zeroed(model)}, folder / "named.safetensors")
    check()
    ids = torch.arange(rank, 7, 3)
    state = {"0.weight": RowsById(torch.zeros(len(ids), 3), ids, 7), "1.bias": torch.zeros(3)}
    load(state, folder / "two")
    assert torch.equal(state["0.weight"].tensor, whole[0].weight[ids])
    for name, words in (("more", "not in the state: 'more'"), ("cut", "tensors is damaged")):
        with pytest.raises(ArgumentError, match=words):
            load(whole, folder / f"{name}.safetensors")


def test_files_of_other_tools(worlds, tmp_path):
    tensors = layers(False).state_dict()
    for name, content in (
        ("one", tensors),
        ("named", {f"model.{name}": value for name, value in tensors.items()}),
        ("more", tensors | {"more": torch.ones(1)}),
        ("cut", tensors),
    ):
        save_file(content, tmp_path / f"{name}.safetensors")
    write(tmp_path / "two", tensors, files=2)
    path = tmp_path / "cut.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    worlds.run(3, loaded, tmp_path)
    found = read(tmp_path / "two")
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_dtypes_of_other_tools(tmp_path):
    tensors = {"w": torch.ones(3).bfloat16(), "w.z": torch.ones(2, dtype=torch.complex64)}
    tensors |= {"scalar": torch.tensor(5), "none": torch.zeros(0, 4), "w.b": torch.tensor([True])}
    save_file(tensors, tmp_path / "x.safetensors")
    state = {name: torch.zeros_like(value) for name, value in tensors.items()}
    load(state, tmp_path / "x.safetensors")
    assert all(torch.equal(state[name], value) for name, value in tensors.items())


def test_a_hostile_index_of_other_tools(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    for text, words in (
        *(
            (f'{{"weight_map": {{"a": "{name}"}}}}', "not a file of its")
            for name in ("../x", "b.pt")
        ),
        ('{"weight_map": {"a": "/etc/x.safetensors"}}', "not a file of its folder"),
        ('{"weight_map": {"a": 5}}', "not a file of its folder"),
        *((text, r"index\.json is not an index") for text in ("{}", "[1]", "no json")),
    ):
        index.write_text(text)
        with pytest.raises(ArgumentError, match=words):
            read(tmp_path)
    os.remove(index)
    with pytest.raises(ArgumentError, match="nothing is saved there"):
        read(tmp_path)


@on_ranks(3)
def test_dtensors(rank, tmp_path):
    """Of odd sizes on a mesh of three."""
    folder = tmp_path
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("a",))
    whole = torch.arange(35.0).view(5, 7)
    save({"w": distribute_tensor(whole, mesh, [Shard(0)]), "one": whole[:1]}, folder / "ours")
    other = {
        "w": distribute_tensor(torch.zeros(5, 7), mesh, [Shard(1)]),
        "one": distribute_tensor(torch.zeros(1, 7), mesh, [Shard(0)]),
    }
    load(other, folder / "ours")
    assert all(isinstance(value, DTensor) for value in other.values())
    assert torch.equal(other["w"].full_tensor(), whole)
    assert torch.equal(other["one"].full_tensor(), whole[:1])
    assert read(folder / "ours")["one"].tolist() == [torch.arange(7.0).tolist()]


@pytest.mark.slow
@on_ranks(4)
def test_dtensors_on_two_dimensions(rank, tmp_path):
    """On two dimensions of a mesh, and on one without this rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(35.0).view(5, 7)
    state = {"both": distribute_tensor(whole, mesh, [Shard(0), Shard(1)])}
    state["one"] = distribute_tensor(whole[:1], mesh["a"], [Shard(0)])
    save(state, tmp_path)
    other = {
        "both": distribute_tensor(torch.zeros(5, 7), mesh["b"], [Shard(1)]),
        "one": distribute_tensor(torch.zeros(1, 7), mesh, [Shard(1), Shard(1)]),
    }
    load(other, tmp_path)
    assert torch.equal(other["both"].full_tensor(), whole)
    assert torch.equal(other["one"].full_tensor(), whole[:1])
