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
    one, other = (
        json.loads((tmp_path / of / "graph.json").read_text()) for of in ("ranks", "alone")
    )
    for index in (one, other):  # files have the name of their save
        index["files"] = list(index["files"].values())
        del index["save"], index["digest"]
    assert one == other  # digests of all files too
    assert sorted(p.name for p in tmp_path.iterdir()) == ["alone", "ranks"]


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    parts = vc.simulate.partition(wild(), 2, "block")
    with pytest.raises(ArgumentError, match="exists and is no saved partition"):
        parts.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def names(folder):
    """Names of files, without those of saves."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


SAVED = ["graph.json", "rank-00000.safetensors", "rank-00001.safetensors"]


@pytest.mark.parametrize("manifest", ['{"format": "another"}', "no JSON", ""])
def test_a_manifest_of_something_else_is_left_alone(tmp_path, manifest):
    (tmp_path / "graph.json").write_text(manifest)
    with pytest.raises(ArgumentError, match="exists and is no saved partition; choose another"):
        vc.simulate.partition(wild(), 2, "block").save(tmp_path)
    assert (tmp_path / "graph.json").read_text() == manifest


def test_what_lies_among_the_parts_and_beside_is_left_alone(tmp_path):
    parts = vc.simulate.partition(wild(), 2, "block")
    parts.save(tmp_path / "parts")
    parts.save(tmp_path / "parts.old")  # a copy that somebody keeps
    (tmp_path / "parts" / "thesis.tex").write_text("mine")
    parts.save(tmp_path / "parts")
    assert names(tmp_path / "parts") == [*SAVED, "thesis.tex"]
    assert names(tmp_path / "parts.old") == SAVED


def test_leftovers_of_a_killed_save_are_removed(tmp_path):
    left = tmp_path / "parts" / f"graph-{'0' * 16}"
    left.mkdir(parents=True)
    (left / "rank-00007.safetensors").write_bytes(b"the beginning")
    vc.simulate.partition(wild(), 2, "block").save(tmp_path / "parts")
    assert names(tmp_path / "parts") == SAVED


def test_a_damaged_one_is_replaced(tmp_path):
    parts = vc.simulate.partition(wild(), 2, "block")
    parts.save(tmp_path / "parts")
    index = tmp_path / "parts" / "graph.json"
    whole = index.read_text()
    index.write_text(whole[: len(whole) // 2])
    parts.save(tmp_path / "parts")
    assert names(tmp_path / "parts") == SAVED
    assert json.loads(index.read_text())["format"] == "varcomm graph"


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
