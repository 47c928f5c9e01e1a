"""The command `inspect`: its listing of partitions and checkpoints, whole and damaged ones."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

import varcomm as vc
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
    first, summary, head, *rows = inspected(capsys, tmp_path).splitlines()
    assert first == f"{tmp_path}: a saved partition"
    assert summary.endswith(" on 3 ranks by block")
    assert head.split() == ["rank", "nodes", "edges", "halo", "bytes"]
    assert rows[-2] == "graph attributes: name str"
    assert rows[-1] == "checksums: SHA-256 of graph.json and 3 files verified"
    found = json.loads(inspected(capsys, tmp_path, "--json"))
    assert (found["kind"], found["checksums"]) == ("saved partition", "verified")
    for name, counts in (("nodes", parts.owned), ("edges", parts.edges), ("halo", parts.halo)):
        assert [rank[name] for rank in found["by_rank"]] == counts.tolist()
    for rank, one in enumerate(found["by_rank"]):
        (path,) = tmp_path.rglob(f"rank-{rank:05}.safetensors")
        assert one["bytes"] == sum(tensor.nbytes for tensor in load_file(path).values())


def test_types_of_nodes_are_named(tmp_path, capsys):
    vc.simulate.partition(papers(), 2, "block").save(tmp_path / "parts")
    shown = inspected(capsys, tmp_path / "parts")
    assert "node attributes: author.x float32 (2,), paper.x float32\n" in shown
    assert "edge attributes: author writes paper.edge_attr float32\n" in shown


def test_a_checkpoint(tmp_path, capsys):
    saved_checkpoint(tmp_path)
    first, summary, _, row, *rest = inspected(capsys, tmp_path).splitlines()
    assert first == f"{tmp_path}: a checkpoint"
    assert summary == "2 tensors of 32 bytes, 1 other values; written by 1 rank"
    assert row.split()[0] == "0"
    assert rest == [
        "model.weight: float32 (2, 3)",
        "model.bias: float32 (2,)",
        "other values: epoch",
        "checksums: SHA-256 of checkpoint.json and 1 file verified",
    ]


def save_on_ranks(rank, folder):
    rows = torch.tensor([[0, 1, 3], [2]][rank])
    save({"rows": vc.checkpoint.Rows(torch.ones(len(rows), 2), rows, total=4)}, folder)


def test_a_checkpoint_of_two_ranks_as_json(worlds, tmp_path, capsys):
    worlds.run(2, save_on_ranks, tmp_path / "step")
    found = json.loads(inspected(capsys, tmp_path / "step", "--json"))
    assert (found["kind"], found["checksums"]) == ("checkpoint", "verified")
    assert (found["tensors"]["rows"]["shape"], found["tensor_bytes"]) == ([4, 2], 32)
    assert {one["rank"] for one in found["by_rank"]} <= {0, 1}
    sizes = sum(path.stat().st_size for path in (tmp_path / "step").rglob("*.safetensors"))
    assert sum(one["bytes"] for one in found["by_rank"]) == sizes


def test_files_of_other_tools_have_no_checksums(tmp_path, capsys):
    save_file({"w": torch.ones(3, 4)}, tmp_path / "model.safetensors")
    last = "checksums: none in files of other tools; headers of 1 file verified\n"
    for path in (tmp_path, tmp_path / "model.safetensors"):
        shown = inspected(capsys, path)
        assert "\nw: float32 (3, 4)\n" in shown
        assert shown.endswith(last)


def cut(path):
    path.write_bytes(path.read_bytes()[:-40])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


def empty(path):
    path.write_text("{}")


@pytest.mark.parametrize(
    ("make", "pattern", "damages"),
    [
        (saved_partition, "rank-00001*", (cut, flip, os.remove)),
        (saved_partition, "graph.json", (cut, empty)),
        (saved_checkpoint, "rank-*", (cut, flip, os.remove)),
        (saved_checkpoint, "checkpoint.json", (flip, os.remove)),
    ],
)
def test_damage_is_printed_in_one_line(make, pattern, damages, tmp_path, capsys):
    for damage in damages:
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
    for path, message in (
        (tmp_path, "is no saved partition and no checkpoint: it has neither graph.json nor "),
        (tmp_path / "notes.txt", "notes.txt is not a folder; give the folder of a saved partition"),
        (tmp_path / "none", "there is no folder "),
        (tmp_path / "pipe", "pipe is not a folder; "),
    ):
        assert main(["inspect", str(path)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
