"""The command `inspect`: its listing of partitions and checkpoints, whole and damaged ones."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

import varcomm as vc
from tests.checkpoint.test_files import flipped
from tests.graph.graphs import wild
from tests.simulate.test_partition import papers
from varcomm.checkpoint import save
from varcomm.cli.main import main


def saved_partition(folder):
    data = wild()
    data.name = "wild"
    parts = vc.simulate.partition(data, 3, "block")
    parts.save(folder)
    return parts


def saved_checkpoint(folder):
    save({"model": torch.nn.Linear(3, 2), "epoch": 4}, folder)


def inspected(capsys, *arguments):
    assert main(["inspect", *map(str, arguments)]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def test_a_partition(tmp_path, capsys):
    parts = saved_partition(tmp_path)
    lines = inspected(capsys, tmp_path).splitlines()
    assert lines[:3] == [f"{tmp_path}: a saved partition", "ranks: 3", "method: block"]
    assert lines[6].split() == ["rank", "nodes", "edges", "halo", "bytes"]
    assert lines[-3:] == ["graph attributes:", "  name: str", "checksums: verified"]
    found = json.loads(inspected(capsys, tmp_path, "--json"))
    assert (found["kind"], found["checksums"]) == ("saved partition", "verified")
    for name, counts in (("nodes", parts.owned), ("edges", parts.edges), ("halo", parts.halo)):
        assert [rank[name] for rank in found["by_rank"]] == counts.tolist()
    for rank, one in enumerate(found["by_rank"]):
        (path,) = tmp_path.rglob(f"rank-{rank:05}.safetensors")
        assert one["bytes"] == sum(tensor.nbytes for tensor in load_file(path).values())


def test_types_of_nodes_are_named(tmp_path, capsys):
    vc.simulate.partition(papers(), 2, "block").save(tmp_path / "parts")
    found = json.loads(inspected(capsys, tmp_path / "parts", "--json"))
    assert found["node_attributes"] == {"author.x": "float64 (2,)", "paper.x": "float64 (1,)"}
    of_writes = [n for n in found["edge_attributes"] if n.startswith("author writes paper.")]
    assert [found["edge_attributes"][name] for name in of_writes] == ["float64", "float64 (2,)"]
    assert found["graph_attributes"] == {}


def test_graphs(tmp_path, capsys):
    data = wild()
    for content, nodes in ((data, data.num_nodes), (papers(), papers().num_nodes)):
        torch.save(content, tmp_path / "g.pt")
        found = json.loads(inspected(capsys, tmp_path / "g.pt", "--json"))
        assert (found["kind"], found["nodes"]) == ("graph", nodes)
        assert found["edges"] == content.num_edges
    assert found["by_type"]["author writes paper"] == 20
    assert found["node_attributes"] == {"author.x": "float64 (2,)", "paper.x": "float64 (1,)"}
    text = inspected(capsys, tmp_path / "g.pt")
    assert text.startswith(f"{tmp_path}/g.pt: a graph\nnodes: ")
    torch.save({"edge_index": torch.zeros(2, 3), "x": torch.ones(3)}, tmp_path / "g.pt")
    assert main(["inspect", str(tmp_path / "g.pt")]) == 1
    assert "float32" in capsys.readouterr().err


def test_a_checkpoint(tmp_path, capsys):
    saved_checkpoint(tmp_path)
    *head, row = inspected(capsys, tmp_path).splitlines()[:5]
    assert head[:3] == [f"{tmp_path}: a checkpoint", "ranks: 1", "tensor bytes: 32"]
    assert row.split()[0] == "0"
    assert inspected(capsys, tmp_path).splitlines()[5:] == [
        *("tensors:", "  model.weight: float32 (2, 3)", "  model.bias: float32 (2,)"),
        *("other values: epoch", "checksums: verified"),
    ]


def test_files_of_other_tools_have_no_checksums(tmp_path, capsys):
    save_file({"w": torch.ones(3, 4)}, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        shown = inspected(capsys, path)
        assert "\n  w: float32 (3, 4)\n" in shown
        assert shown.endswith("\nchecksums: none in files of other tools\n")


@pytest.mark.parametrize(
    ("make", "pattern"), [(saved_partition, "rank-00001*"), (saved_checkpoint, "rank-*")]
)
def test_damage_is_printed_in_one_line(make, pattern, tmp_path, capsys):
    for damage in (flipped, os.remove):
        folder = tmp_path / damage.__name__
        make(folder)
        (path,) = folder.rglob(pattern)
        damage(path)
        assert main(["inspect", str(folder)]) == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        (line,) = shown.err.splitlines()
        assert line.startswith("python -m varcomm inspect: ")
        assert path.name in line


def test_a_folder_of_something_else(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    for name, end in (
        (".", "nothing is saved there."),
        ("none", "nothing is saved there."),
        ("pipe", "nothing is saved there."),
        ("notes.txt", "wkt .xdmf .xmf .xml)."),  # the formats of graphs
    ):
        assert main(["inspect", str(tmp_path / name)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(end)
