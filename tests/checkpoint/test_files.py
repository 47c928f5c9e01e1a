"""Files that were cut, altered, lost or written to do harm: an error by name, nothing is loaded."""

import hashlib
import json
import os
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from xxhash import xxh3_128

from tests.worlds import refused_alike
from varcomm import ArgumentError, DisagreementError
from varcomm.checkpoint import load, read, save
from varcomm.sharding import Sharded, ShardSpec

SIZES = [2, 0, 3]
INDEX = "checkpoint.json"


def state_of(rank, value):
    spec = ShardSpec.of(SIZES)
    own = torch.full((SIZES[rank], 4), float(value))
    return {"w": Sharded.of(own, spec), "b": torch.full((3,), float(value)), "step": value}


def saved(rank, folder):
    save(state_of(rank, 1), folder)


def data_of(folder):
    return sorted(folder.rglob("rank-*.safetensors"))


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])  # also of an index, which ends in a newline


def longer(path):
    path.write_bytes(path.read_bytes() + b"\0")


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def device(path):
    path.unlink()
    path.symlink_to("/dev/null")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def swapped(path):
    path.write_bytes(data_of(path.parent)[-1].read_bytes())


HARM = {cut: "bytes", longer: "bytes", flipped: "digest", os.remove: "missing"}
HARM |= {device: "not a regular file", pipe: "not a regular file"}


def refused(rank, folder, harmed):
    """Loading is refused on every rank with one message, and nothing is touched."""
    for number, how, name in harmed:
        state = state_of(rank, 7)
        call = partial(load, state, folder / number)
        refused_alike(ArgumentError, call, name, match=how)
        assert state["step"] == 7
        assert state["b"].eq(7).all()
        assert all(bool((box.tensor == 7).all()) for box in state["w"].boxes)
    with pytest.raises(DisagreementError, match="ranks disagree on the digest of"):
        load(state_of(rank, 7), folder / ("other" if rank else "whole"))


def test_harmed_files(worlds, tmp_path):
    worlds.run(3, saved, tmp_path / "whole")
    worlds.run(3, saved, tmp_path / "other")
    harms = [(which, harm, how) for which in (0, -1) for harm, how in HARM.items()]
    harms += [(INDEX, harm, INDEX) for harm in (cut, flipped, os.remove, device)]
    harms += [(0, swapped, "rank-")]
    harmed = []
    for number, (which, harm, how) in enumerate(harms):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", folder)
        path = folder / INDEX if which == INDEX else data_of(folder)[which]
        harm(path)
        harmed.append((folder.name, how, path.name))
    worlds.run(3, refused, tmp_path, harmed)
    for number, how, _ in harmed:
        with pytest.raises(ArgumentError, match=how):
            read(tmp_path / number)


def resigned(folder, change, name=INDEX):
    """Change the index, and sign it."""
    index = json.loads((folder / name).read_text())
    index.pop("digest")
    change(index)
    text = json.dumps(index, sort_keys=True).encode()
    index["digest"] = hashlib.sha256(text).hexdigest()
    (folder / name).write_text(json.dumps(index))


def entry(change):
    return lambda index: index["entries"]["w"].update(change)


def elsewhere(name):
    def change(index):
        (entry,) = index["files"].values()
        index["files"] = {name: entry}

    return change


HOSTILE = {
    "another version": lambda index: index.update(version=2),
    "another format": lambda index: index.update(format="varcomm graph"),
    "a parent folder": elsewhere("../../etc/passwd"),
    "an absolute path": elsewhere("/etc/passwd"),
    "a path through the save": lambda i: elsewhere(f"{i['save']}/../x.safetensors")(i),
    "another save": lambda i: i.update(save="checkpoint-" + "0" * 16),
    "no save": lambda index: index.pop("save"),
    "files in a list": lambda index: index.update(files=[1]),
    "no entries": lambda index: index.pop("entries"),
    "entries in a list": lambda index: index.update(entries=[]),
    "a larger shape": entry({"shape": [1 << 40, 4]}),
    "a negative shape": entry({"shape": [-5, -4]}),
    "an endless shape": entry({"shape": [0, 1 << 80], "boxes": []}),
    "a text as shape": entry({"shape": "54"}),
    "another dtype": entry({"dtype": "int32"}),
    "a wider dtype": entry({"dtype": "float64"}),
    "no dtype": entry({"dtype": "load"}),
    "no box": entry({"boxes": []}),
    "a box twice": lambda i: i["entries"]["w"]["boxes"].append(i["entries"]["w"]["boxes"][0]),
    "a box outside": entry({"boxes": [[0, [1, 0], [5, 4]]]}),
    "boxes not in the file": entry({"boxes": [[0, [0, 0], [2, 4]], [0, [2, 0], [3, 4]]]}),
    "a file that is not there": entry({"boxes": [[7, [0, 0], [5, 4]]]}),
    "another path": entry({"path": ["x"]}),
    "a path through a value": lambda i: i["entries"].update(
        {"step.a": {"path": ["step", "a"], "value": 1}}
    ),
    "no value": lambda i: i["entries"].update({"y": {"path": ["y"]}}),
    "an unknown tag": lambda i: i["entries"].update({"y": {"path": ["y"], "value": {"!f": 1}}}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_index(tmp_path, what):
    save({"w": torch.ones(5, 4), "step": 7}, tmp_path)
    resigned(tmp_path, lambda index: None)
    assert read(tmp_path)["step"] == 7
    resigned(tmp_path, HOSTILE[what])
    state = {"w": torch.zeros(5, 4), "step": 0}
    with pytest.raises(ArgumentError):
        load(state, tmp_path)
    assert state["step"] == 0
    assert not state["w"].any()
    with pytest.raises(ArgumentError):
        read(tmp_path)


@pytest.mark.parametrize("tensor", [torch.ones(4), torch.ones(3).double(), torch.ones(3, 1)])
def test_a_hostile_file(tmp_path, tensor):
    """A file of another content than the index has, with the right digest."""
    save({"w": torch.ones(3)}, tmp_path)
    (path,) = data_of(tmp_path)
    save_file({"w": tensor}, path)
    content = path.read_bytes()
    signed = {"bytes": len(content), "xxh3_128": xxh3_128(content).hexdigest()}
    resigned(tmp_path, lambda index: index["files"].update(dict.fromkeys(index["files"], signed)))
    with pytest.raises(ArgumentError, match="'w' is torch"):
        read(tmp_path)


def test_without_digests(tmp_path):
    """Altered values are loaded without an error; cut files and other dtypes are refused."""
    save({"w": torch.ones(300)}, tmp_path)
    (path,) = data_of(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:-4] + torch.tensor(5.0).numpy().tobytes())
    target = {"w": torch.zeros(300)}
    with pytest.raises(ArgumentError, match="digest"):
        load(target, tmp_path)
    assert not target["w"].any()
    load(target, tmp_path, verify=False)
    assert target["w"].tolist() == [1] * 299 + [5]
    path.write_bytes(content[:-4])
    with pytest.raises(ArgumentError, match="bytes"):
        load(target, tmp_path, verify=False)
    with pytest.raises(ArgumentError, match="verify must be True or False"):
        load(target, tmp_path, verify=0)


def test_written_files_are_those_of_the_package(tmp_path):
    """Tensors of every dtype, odd strides and shared memory; aligned, and read by safetensors."""
    drawn = torch.arange(24).view(2, 3, 4)
    dtypes = ("float64", "float16", "bfloat16", "float8_e4m3fn", "uint8", "int16", "uint32", "bool")
    tensors = {name: drawn.to(getattr(torch, name)) for name in dtypes}
    tensors |= {"transposed": drawn.mT, "again": drawn}
    tensors |= {"scalar": torch.tensor(5.0), "slice": drawn[:, ::2], "one": drawn[:1, :1, :1]}
    save(tensors, tmp_path)
    (path,) = data_of(tmp_path)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].double(), value.double()), name
        assert found[name].data_ptr() % value.itemsize == 0
    assert xxh3_128(path.read_bytes()).hexdigest() in (tmp_path / INDEX).read_text()
