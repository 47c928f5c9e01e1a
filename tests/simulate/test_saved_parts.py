"""One process writes what real ranks write, and reports and draws what they do."""

import json

import numpy as np
import pytest
import torch

import varcomm as vc
from tests.graph.graphs import wild
from tests.simulate.test_partition import papers
from varcomm import ArgumentError


def graph_of(kind):
    data = wild() if kind == "one type" else papers()
    data.unit = torch.tensor([[3.0]])
    data.name = "of both"
    return data


def saved(rank, kind, method, folder):
    graph = vc.graph.partition(graph_of(kind), method=method)
    graph.save(folder)
    return str(graph.report())


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize(("kind", "method"), [("one type", "random"), ("types", "random")])
def test_files_are_those_of_real_ranks(worlds, size, kind, method, tmp_path):
    expected, *_ = worlds.run(size, saved, kind, method, tmp_path / "ranks")
    parts = vc.simulate.partition(graph_of(kind), size, method)
    done = []
    parts.save(tmp_path / "alone", done.append)
    assert done == list(range(size))
    assert str(parts.report()) == expected
    for path in (tmp_path / "ranks").iterdir():
        found = tmp_path / "alone" / path.name
        if path.suffix == ".json":  # digests of all arrays are in there
            assert json.loads(found.read_text()) == json.loads(path.read_text())
        else:
            with np.load(path) as one, np.load(found) as other:
                assert sorted(one) == sorted(other)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["alone", "ranks"]


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    parts = vc.simulate.partition(wild(), 2, "block")
    with pytest.raises(ArgumentError, match="exists and is no saved partition"):
        parts.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


SAVED = ["graph.json", "graph.npz", "part-00000.npz", "part-00001.npz"]


@pytest.mark.parametrize("manifest", ['{"format": "another"}', "no JSON", ""])
def test_a_manifest_of_something_else_is_left_alone(tmp_path, manifest):
    (tmp_path / "graph.json").write_text(manifest)
    with pytest.raises(ArgumentError, match="exists and is no saved partition; choose another"):
        vc.simulate.partition(wild(), 2, "block").save(tmp_path)
    assert (tmp_path / "graph.json").read_text() == manifest


def test_what_lies_among_the_parts_is_left_alone(tmp_path):
    parts = vc.simulate.partition(wild(), 2, "block")
    parts.save(tmp_path / "parts")
    (tmp_path / "parts" / "thesis.tex").write_text("mine")
    with pytest.raises(ArgumentError, match=r"parts has thesis\.tex besides the partition"):
        parts.save(tmp_path / "parts")
    assert names(tmp_path / "parts") == [*SAVED, "thesis.tex"]


def test_what_lies_beside_is_left_alone(tmp_path):
    parts = vc.simulate.partition(wild(), 2, "block")
    parts.save(tmp_path / "parts")
    parts.save(tmp_path / "parts.old")  # a copy that somebody keeps
    (tmp_path / "parts.saving").mkdir()
    (tmp_path / "parts.saving" / "thesis.tex").write_text("mine")
    with pytest.raises(ArgumentError, match=r"parts\.saving is in the way: files are collected"):
        parts.save(tmp_path / "parts")
    (tmp_path / "parts.saving").rename(tmp_path / "theses")
    parts.save(tmp_path / "parts")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "parts.old", "theses"]
    assert names(tmp_path / "parts") == names(tmp_path / "parts.old") == SAVED
    assert names(tmp_path / "theses") == ["thesis.tex"]


def test_what_a_killed_save_has_left_is_replaced(tmp_path):
    (tmp_path / "parts.saving").mkdir()
    (tmp_path / "parts.saving" / "part-00007.npz").write_bytes(b"the beginning")
    vc.simulate.partition(wild(), 2, "block").save(tmp_path / "parts")
    assert [path.name for path in tmp_path.iterdir()] == ["parts"]
    assert names(tmp_path / "parts") == SAVED


def test_a_damaged_one_is_replaced(tmp_path):
    parts = vc.simulate.partition(wild(), 2, "block")
    parts.save(tmp_path / "parts")
    manifest = tmp_path / "parts" / "graph.json"
    whole = manifest.read_text()
    manifest.write_text(whole[: len(whole) // 2])
    (tmp_path / "parts" / "part-00001.npz").unlink()
    parts.save(tmp_path / "parts")
    assert names(tmp_path / "parts") == SAVED
    assert manifest.read_text() == whole


def test_a_link_stays_one(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "parts").symlink_to("disk")
    parts = vc.simulate.partition(wild(), 2, "block")
    for _ in range(2):
        parts.save(tmp_path / "parts")
    assert (tmp_path / "parts").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "parts"]
    assert names(tmp_path / "disk") == SAVED


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="cannot be written"):
        vc.simulate.partition(wild(), 2, "block").save(tmp_path / "file" / "parts")


def test_what_is_interrupted_leaves_nothing(tmp_path):
    def interrupt(rank):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vc.simulate.partition(wild(), 2, "block").save(tmp_path / "parts", interrupt)
    assert not list(tmp_path.iterdir())


def test_pictures(tmp_path):
    data = vc.simulate.ocean(np.ones((8, 16), dtype=bool))
    parts = vc.simulate.partition(data, 4, "hilbert")
    for name in ("a.png", "b.svg"):
        parts.plot(tmp_path / name)
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ArgumentError, match="there is no folder"):
        parts.plot(tmp_path / "none" / "a.png")
    with pytest.raises(ArgumentError, match="node_type must be one of"):
        parts.plot(tmp_path / "a.png", node_type="sea")
    data.num_nodes = data.num_nodes
    del data.pos
    with pytest.raises(ArgumentError, match="the nodes have no positions"):
        vc.simulate.partition(data, 4, "block").plot(tmp_path / "c.png")
