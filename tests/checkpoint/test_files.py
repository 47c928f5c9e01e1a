"""Files that were cut, altered, lost or made to do harm: an error by name, nothing is loaded."""

import io
import json
import os
import pickle
import re
import shutil

import pytest
import torch
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from varcomm import ArgumentError, DisagreementError
from varcomm.checkpoint import load, read, save
from varcomm.sharding import Sharded, ShardSpec

SIZES = [2, 0, 3]


def state_of(rank, value):
    spec = ShardSpec.of(SIZES)
    own = torch.full((SIZES[rank], 4), float(value))
    return {"w": Sharded.of(own, spec), "b": torch.full((3,), float(value)), "step": value}


def saved(rank, folder):
    save(state_of(rank, 1), folder)


def refused(rank, folder, message):
    """Loading is refused on every rank with one message, and nothing is touched."""
    state = state_of(rank, 7)
    with pytest.raises(ArgumentError, match=message) as caught:
        load(state, folder)
    untouched = (
        state["step"] == 7
        and bool((state["b"] == 7).all())
        and all(bool((box.tensor == 7).all()) for box in state["w"].boxes)
    )
    return str(caught.value) if untouched else "something was loaded"


def refused_by_all(worlds, folder, message):
    one, *others = worlds.run(3, refused, folder, message)
    with pytest.raises(ArgumentError, match=message):
        read(folder)
    return all(other == one for other in others) and one != "something was loaded"


def data_of(folder):
    return sorted(folder.glob("*.distcp"))


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def longer(path):
    path.write_bytes(path.read_bytes() + b"\0")


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


HARM = {
    "cut": (cut, "has been cut or changed: it has"),
    "longer": (longer, "has been cut or changed: it has"),
    "altered": (flipped, "has been altered: its SHA-256 is not that of what was written"),
    "lost": (os.remove, "is missing"),
}


@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("how", HARM)
def test_a_data_file(worlds, tmp_path, how, which):
    worlds.run(3, saved, tmp_path)
    path = data_of(tmp_path)[which]
    harm, message = HARM[how]
    harm(path)
    assert refused_by_all(worlds, tmp_path, f"{re.escape(path.name)} {message}")


def test_a_data_file_of_the_same_checkpoint_in_the_place_of_another(worlds, tmp_path):
    worlds.run(3, saved, tmp_path)
    one, other = data_of(tmp_path)[0], data_of(tmp_path)[-1]
    one.write_bytes(other.read_bytes())
    assert refused_by_all(worlds, tmp_path, re.escape(one.name))


@pytest.mark.parametrize("share", [0.0, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 0.999])
def test_any_byte_of_the_metadata(worlds, tmp_path, share):
    worlds.run(3, saved, tmp_path)
    path = tmp_path / ".metadata"
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 1
    path.write_bytes(content)
    assert refused_by_all(worlds, tmp_path, re.escape(str(tmp_path)))


@pytest.mark.parametrize("how", ["cut", "lost"])
def test_the_metadata(worlds, tmp_path, how):
    worlds.run(3, saved, tmp_path)
    HARM[how][0](tmp_path / ".metadata")
    message = "has no checkpoint in it" if how == "lost" else r"\.metadata cannot be read: it is"
    assert refused_by_all(worlds, tmp_path, message)


def test_the_manifest(worlds, tmp_path):
    worlds.run(3, saved, tmp_path)
    path = next(tmp_path.glob("varcomm-*.json"))
    text = path.read_text()
    altered = json.loads(text)
    altered["files"][data_of(tmp_path)[0].name]["sha256"] = "0" * 64
    path.write_text(json.dumps(altered))
    assert refused_by_all(worlds, tmp_path, f"{path.name} is damaged: it is not what was written")
    path.write_text(text[:-20])
    assert refused_by_all(worlds, tmp_path, f"{path.name} is damaged")
    path.write_text("[]")
    assert refused_by_all(worlds, tmp_path, f"{path.name} is damaged")
    path.unlink()
    assert refused_by_all(worlds, tmp_path, f"lacks {path.name}, so nothing tells whether")


@pytest.mark.parametrize("name", [".metadata", "varcomm-*.json", "*.distcp"])
def test_what_is_no_file_is_not_read(tmp_path, name):
    """Of a device there may be no end."""
    save({"x": torch.zeros(3)}, tmp_path)
    (path,) = tmp_path.glob(name)
    path.unlink()
    path.symlink_to("/dev/null")
    message = rf"{re.escape(str(path))} cannot be read: {re.escape(path.name)} is no file"
    with pytest.raises(ArgumentError, match=message):
        read(tmp_path)


def test_a_manifest_of_a_later_version(tmp_path, monkeypatch):
    monkeypatch.setattr("varcomm.checkpoint.manifest._VERSION", 2)
    save({"x": 1}, tmp_path)
    monkeypatch.undo()
    with pytest.raises(ArgumentError, match="version 2; this varcomm reads version 1"):
        read(tmp_path)


def test_metadata_of_another_checkpoint(tmp_path):
    for name in ("a", "b"):
        save({"x": torch.zeros(3)}, tmp_path / name)
    (tmp_path / "a" / ".metadata").write_bytes((tmp_path / "b" / ".metadata").read_bytes())
    with pytest.raises(ArgumentError, match=r"lacks varcomm-\w+.json, so nothing tells"):
        read(tmp_path / "a")
    (manifest,) = (tmp_path / "b").glob("varcomm-*.json")
    (tmp_path / "a" / manifest.name).write_bytes(manifest.read_bytes())
    with pytest.raises(ArgumentError, match="distcp is missing"):
        read(tmp_path / "a")


def two_folders(rank, folder):
    with pytest.raises(DisagreementError, match=r"ranks \[1\] find another checkpoint"):
        load({"x": torch.zeros(3)}, folder / str(rank))
    return True


def test_ranks_that_find_different_checkpoints(worlds, tmp_path):
    for name in ("0", "1"):
        save({"x": torch.zeros(3)}, tmp_path / name)
    assert worlds.run(2, two_folders, tmp_path) == [True, True]


class Harm:
    """What a hostile file says is to be called when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("where", ["instead", "in a list of classes", "as a path"])
def test_hostile_metadata_is_not_run(worlds, tmp_path, where):
    folder, mark = tmp_path / "folder", tmp_path / "harm was done"
    worlds.run(3, saved, folder)
    known = pickle.loads((folder / ".metadata").read_bytes())
    if where == "instead":
        known = Harm(mark)
    elif where == "as a path":
        known.planner_data["w"] = (Harm(mark),)
    else:
        known.state_dict_metadata["w"] = [torch_metadata.BytesStorageMetadata(), Harm(mark)]
    (folder / ".metadata").write_bytes(pickle.dumps(known))
    assert refused_by_all(worlds, folder, "asks for posix.mkdir, which no checkpoint needs")
    assert not mark.exists()


def test_a_hostile_file_cannot_alter_classes(tmp_path):
    """A pickle may also set attributes, of a class as of an object."""
    save({"x": 1}, tmp_path)
    module = torch_metadata.__name__.encode()
    for name in (b"Metadata", b"TensorProperties"):
        altered = b"\x80\x02c" + module + b"\n" + name + b"\n(N}X\x04\x00\x00\x00harmK\x01stb."
        (tmp_path / ".metadata").write_bytes(altered)
        with pytest.raises(ArgumentError, match=r"\.metadata cannot be read: it is damaged"):
            read(tmp_path)
        assert not hasattr(getattr(torch_metadata, name.decode()), "harm")


WRONG = {
    "no metadata": (lambda known: {"a": 1}, "a Metadata is expected, and there is a dict"),
    "sizes": (lambda known: put(known, "size", torch.Size([5, -1])), "are no sizes"),
    "dtype": (lambda known: put(known.properties, "dtype", 5), "5 is no dtype"),
    "key": (lambda known: known.state_dict_metadata.update({5: None}), "5 is no text"),
    "path": (lambda known: place(known, "../x"), "points to '../x', which is no data file"),
    "absolute": (lambda known: place(known, "/etc/passwd"), "points to '/etc/passwd'"),
    "nowhere": (lambda known: known.storage_data.clear(), "does not tell where all of 'w' is"),
}


def put(thing, name, value):
    setattr(thing, name, value)


def place(known, path):
    index = next(iter(known.storage_data))
    known.storage_data[index] = _StorageInfo(path, 0, 1)


@pytest.mark.parametrize("what", WRONG)
def test_metadata_that_makes_no_sense(tmp_path, what):
    alter, message = WRONG[what]
    save({"w": torch.zeros(5, 4)}, tmp_path)
    path = tmp_path / ".metadata"
    known = pickle.loads(path.read_bytes())
    known.storage_meta = None  # as torch alone might have written it
    (tmp_path / "__0_0.distcp").write_bytes(data_of(tmp_path)[0].read_bytes())
    place(known, "__0_0.distcp")
    entry = known.state_dict_metadata["w"]
    target = {"sizes": entry, "dtype": entry}.get(what, known)
    known = alter(target) or known
    path.write_bytes(pickle.dumps(known))
    with pytest.raises(ArgumentError, match=re.escape(message)):
        read(tmp_path)


def by_torch(folder, contents, entries):
    """A checkpoint without a manifest, whose data file holds anything."""
    data, storage = b"", {}
    for key, content in contents.items():
        chunks = getattr(entries[key], "chunks", None)
        offset = chunks[0].offsets if chunks else None
        info = _StorageInfo("__0_0.distcp", len(data), len(content))
        storage[torch_metadata.MetadataIndex(key, offset)] = info
        data += content
    (folder / "__0_0.distcp").write_bytes(data)
    known = torch_metadata.Metadata(entries, {key: (key,) for key in entries}, storage)
    (folder / ".metadata").write_bytes(pickle.dumps(known))


def torch_bytes(value):
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def vector():
    box = torch_metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))
    properties = torch_metadata.TensorProperties(torch.float32)
    return torch_metadata.TensorStorageMetadata(properties, torch.Size([3]), [box])


def load_hostile(rank, folder, message):
    state = {"x": torch.zeros(3), "step": 7}
    with pytest.raises(ArgumentError, match=message):
        load(state, folder)
    return state["step"] == 7 and not state["x"].any()


@pytest.mark.parametrize("key", ["step", "x"])
@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_hostile_data_is_not_run(worlds, tmp_path, key, form):
    folder, mark = tmp_path / "folder", tmp_path / "harm was done"
    folder.mkdir()
    contents = {"x": torch_bytes(torch.ones(3)), "step": torch_bytes(5)}
    contents[key] = torch_bytes(Harm(mark)) if form == "torch" else pickle.dumps(Harm(mark))
    by_torch(folder, contents, {"x": vector(), "step": torch_metadata.BytesStorageMetadata()})
    why = "cannot be read without running what is in the file" if form == "torch" else "is damaged"
    message = f"'{key}' {why}"
    assert worlds.run(2, load_hostile, folder, message) == [True, True]
    with pytest.raises(ArgumentError, match=message):
        read(folder)
    assert not mark.exists()


def test_an_archive_that_tells_of_more_than_it_has(tmp_path):
    """As torch would make room for it."""
    content = bytearray(torch_bytes(torch.ones(3)))
    entry = content.rindex(b"PK\x01\x02", 0, content.rindex(b"data/0"))
    content[entry + 24 : entry + 28] = (1 << 31).to_bytes(4, "little")  # its length, unpacked
    by_torch(tmp_path, {"x": bytes(content)}, {"x": vector()})
    with pytest.raises(ArgumentError, match=r"'x' is damaged: it tells of more than there is in"):
        read(tmp_path)


@pytest.mark.parametrize("content", [torch.ones(4), torch.ones(3).double(), 5])
def test_data_that_is_not_what_the_metadata_tells(tmp_path, content):
    by_torch(tmp_path, {"x": torch_bytes(content)}, {"x": vector()})
    with pytest.raises(ArgumentError, match=r"tells of 'x' that it is .* and the data file has"):
        read(tmp_path)


def test_what_an_extension_of_torch_has_compressed(tmp_path):
    save({"step": 5}, tmp_path)
    known = pickle.loads((tmp_path / ".metadata").read_bytes())
    (info,) = known.storage_data.values()
    content = data_of(tmp_path)[0].read_bytes()[info.offset : info.offset + info.length]
    by_torch(tmp_path, {"step": content}, known.state_dict_metadata)
    known = pickle.loads((tmp_path / ".metadata").read_bytes())
    next(iter(known.storage_data.values())).transform_descriptors = ["stream.zstd"]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(known))
    with pytest.raises(ArgumentError, match=r"'step' has gone through 'stream.zstd'"):
        read(tmp_path)


def saved_texts(rank, folder):
    texts = {f"t{n}": f"text number {n}" for n in range(9)}
    save({"texts": texts, "x": torch.ones(100)}, folder)


def refused_texts(rank, folders):
    found = []
    for folder in folders:
        state = {"texts": {f"t{n}": "" for n in range(9)}, "x": torch.zeros(100)}
        with pytest.raises(ArgumentError) as caught:
            load(state, folder)
        untouched = not state["x"].any() and not any(state["texts"].values())
        found.append(str(caught.value) if untouched else "something was loaded")
    return found


def test_no_rank_reads_values_of_a_file_that_another_finds_altered(worlds, tmp_path):
    """All ranks read all plain values, and each checks some of the files."""
    worlds.run(3, saved_texts, tmp_path / "good")
    names = [path.name for path in data_of(tmp_path / "good")]
    assert len(names) == 3
    places = [(name, what) for name in names for what in (b"\x80\x02X", b"PK\x01\x02", b"version")]
    for number, (name, what) in enumerate(places):
        shutil.copytree(tmp_path / "good", tmp_path / str(number))
        path = tmp_path / str(number) / name
        content = path.read_bytes()
        assert what in content
        path.write_bytes(content.replace(what, bytes([what[0] ^ 4]) + what[1:], 1))
    folders = [tmp_path / str(number) for number in range(len(places))]
    one, *others = worlds.run(3, refused_texts, folders)
    assert others == [one, one]
    for number, (name, _) in enumerate(places):
        expected = f"{folders[number] / name} has been altered: its SHA-256 is not that of what"
        assert expected in one[number]
