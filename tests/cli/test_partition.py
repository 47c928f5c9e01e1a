"""The command `partition`: files it reads, files it writes, and bad files."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from page_code import blocks_of, run
from torch_geometric.data import Batch, Data, HeteroData

import varcomm as vc
from tests.simulate.test_partition import papers
from tests.worlds import WORLDS
from varcomm.cli.main import main
from varcomm.graph.graph_file import read_graph

RING = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "command_line.md"


LEGEND = {"owned", "halo", "edges", "sent", "neighbours", "imbalance"}


def channel(path, rows=9, columns=5):
    """Write a mesh of quads with a field of its points, in two dimensions."""
    meshio = pytest.importorskip("meshio")
    points = np.stack(np.meshgrid(range(rows), range(columns), indexing="ij"), -1).reshape(-1, 2)
    corner = np.array([columns * i + j for i in range(rows - 1) for j in range(columns - 1)])
    cells = corner[:, None] + [0, columns, columns + 1, 1]
    points = np.pad(points / 1.0, ((0, 0), (0, 1)))
    height = np.arange(len(points)) / 2
    meshio.Mesh(points, {"quad": cells}, point_data={"height": height}).write(path)
    return path


def test_the_example_of_the_page(monkeypatch, tmp_path, capsys):
    pytest.importorskip("meshio")
    monkeypatch.chdir(tmp_path)
    (code,) = blocks_of(PAGE)
    run(code, {})
    shown = re.findall(r"```console\n\$ varcomm (.*?)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    same = [(line, text) for line, text in shown if "channel" in line and "differs" not in text]
    assert [line.split()[0] for line, _ in same] == ["partition", "inspect"]
    for line, text in same:
        assert main(line.split()) == 0
        assert capsys.readouterr().out == text


def heights(rank, folder):
    graph = vc.graph.PartitionedGraph.load(folder)
    return graph.gather(graph.height), str(graph.report())


@pytest.mark.parametrize("ranks", WORLDS[1:3])
def test_a_mesh_is_cut_for_ranks_to_load(worlds, ranks, tmp_path, capsys):
    mesh, out = channel(tmp_path / "channel.vtu"), tmp_path / "parts"
    picture = tmp_path / "parts.png"
    arguments = ["--parts", "2", "--method", "rcb", "--out", str(out), "--plot", str(picture)]
    assert main(["partition", str(mesh), *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    report, _, rest = shown.out.partition("\n\n")
    assert report.startswith("45 nodes and 152 edges on 2 ranks by rcb\n")
    legend, _, files = rest.partition("parts: ")
    assert {line.split()[0].strip(",") for line in legend.strip().splitlines()} == LEGEND
    load = f"next: varcomm.graph.PartitionedGraph.load({str(out)!r}) on each rank\n"
    assert files == f"{out}\npicture: {picture}\n{load}"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    for values, of_rank in worlds.run(ranks, heights, out):
        assert torch.equal(values, torch.arange(45) / 2)
        assert ranks != 2 or of_rank == report.strip()


def test_cells_are_the_nodes(tmp_path, capsys):
    mesh = channel(tmp_path / "channel.vtu")
    command = ["partition", str(mesh), "--parts", "2", "--method", "rcb", "--nodes", "cells"]
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("32 nodes and 104 edges on 2 ranks by rcb\n")
    np.savez(tmp_path / "ring.npz", edges=RING.T)
    assert main(["partition", str(tmp_path / "ring.npz"), *command[2:]]) == 1
    assert "Leave out --nodes" in capsys.readouterr().err


def test_reports_of_arrays(monkeypatch, tmp_path, capsys):
    np.savez(tmp_path / "ring.npz", edges=RING.T)
    command = ["partition", str(tmp_path / "ring.npz"), "--parts"]
    assert main([*command, "2", "--method", "block", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["owned"], report["halo"], report["cut"]) == ([2, 2], [1, 1], [1, 1])
    assert [path.name for path in tmp_path.iterdir()] == ["ring.npz"]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)  # which shows progress
    assert main([*command, "6", "--out", str(tmp_path / "parts")]) == 0
    shown = capsys.readouterr()
    assert "4 nodes and 4 edges on 6 ranks by block" in shown.out
    assert "writing parts" in shown.err
    assert "writing parts" not in shown.out


def test_files_of_graphs(tmp_path):
    data = Data(x=torch.rand(5, 2), edge_index=RING, y=torch.arange(5))
    of_dataset = (data.to_dict(), None, Data)  # as InMemoryDataset.save writes one graph
    for content in (data, data.to_dict(), of_dataset, (data, None)):
        torch.save(content, tmp_path / "g.pt")
        found = read_graph(tmp_path / "g.pt")
        assert found.num_nodes == 5
        assert torch.equal(found.x, data.x)
        assert torch.equal(found.y, data.y)
    torch.save(Data(adj_t=torch.eye(4).to_sparse(), num_nodes=4), tmp_path / "g.pt")
    assert vc.simulate.partition(read_graph(tmp_path / "g.pt"), 2, "block").edges.tolist() == [2, 2]
    for more, nodes in (({}, 4), ({"num_nodes": np.array(7)}, 7)):
        np.savez(tmp_path / "g.npz", edge_index=RING, **more)
        assert read_graph(tmp_path / "g.npz").num_nodes == nodes


def test_files_of_types(tmp_path, capsys):
    """The parts of a HeteroData in a file equal those of the HeteroData in memory."""
    data = papers()
    expected = vc.simulate.partition(data, 3, "block").report()
    of_dataset = (data.to_dict(), None, HeteroData)
    int32 = data.clone()
    for edges in int32.edge_stores:
        edges.edge_index = edges.edge_index.int()
    for content in (data, data.to_dict(), of_dataset, int32):
        torch.save(content, tmp_path / "g.pt")
        found = read_graph(tmp_path / "g.pt")
        assert (found.node_types, found.edge_types) == (data.node_types, data.edge_types)
        arguments = ["partition", str(tmp_path / "g.pt"), "--parts", "3", "--method", "block"]
        assert main([*arguments, "--out", str(tmp_path / "parts")]) == 0
        assert capsys.readouterr().out.startswith(str(expected))
    assert main([*arguments, "--plot", str(tmp_path / "parts.png")]) == 1
    assert "node_type" in capsys.readouterr().err


def test_owners_from_a_file(tmp_path, capsys):
    """Parts that another program computed."""
    np.savez(tmp_path / "ring.npz", edges=RING.T)
    owner = torch.tensor([1, 0, 0, 1])
    (tmp_path / "ring.part.2").write_text("1\n0\n0\n1\n")
    np.save(tmp_path / "owner.npy", owner.numpy().astype(np.int32))
    torch.save(owner, tmp_path / "owner.pt")
    torch.save({"author": [1, 0, 0, 1, 0, 1, 0], "paper": torch.zeros(9).long()}, tmp_path / "t.pt")
    command = ["partition", str(tmp_path / "ring.npz"), "--parts", "2", "--method"]
    for name in ("ring.part.2", "owner.npy", "owner.pt"):
        assert main([*command, str(tmp_path / name), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["cut"] == [1, 1], name
    for text, named in (("1\n0\n", "shape"), ("a\n", "integer per line"), ("0 1\n" * 4, "shape")):
        (tmp_path / "wrong").write_text(text)
        assert main([*command, str(tmp_path / "wrong")]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert named in line
    with pytest.raises(SystemExit):
        main([*command, "metiss"])


class Runs:
    """Would write a file if it were unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


# What is wrong with a file, by name: its content, and a part of the message
USED = Data(edge_index=RING, num_nodes=4)
USED.is_node_attr("edge_index")  # keeps an enumeration in its pickle
TENSORS = {
    "used.pt": (USED, "AttrType); a .pt file must hold a Data or a HeteroData of tensors, or its"),
    "array.pt": (Data(edge_index=RING, y=np.ones(4)), "more than tensors, numpy."),
    "batch.pt": (Batch.from_data_list([Data(edge_index=RING, num_nodes=4)]), "more than tensors"),
    "many.pt": ((Data(edge_index=RING), {"x": RING}, Data), "tuple"),
    "class.pt": (Data, "holds a"),
    "keys.pt": ({("a", "b"): {"edge_index": RING}}, "keys must be names"),
    "of_a_type.pt": ({("a", "to", "a"): {"x": RING}}, "no edge_index for ('a', 'to', 'a')"),
    "list.pt": ([RING], "list"),
    "no_edges.pt": ({"x": RING}, "edge_index"),
    "floats.pt": ({"edge_index": RING.float()}, "float32"),
    "negative.pt": ({"edge_index": RING - 1}, "edge_index"),
    "sparse.pt": ({"edge_index": torch.eye(3).to_sparse()}, "sparse"),
    "face.pt": ({"edge_index": RING, "face": RING}, "face"),
}
ARRAYS = {
    "no_edges.npz": ({"a": np.ones(3)}, "edge_index"),
    "objects.npz": ({"edge_index": np.array([{}, {}])}, "Object"),
    "nodes.npz": ({"edge_index": RING, "num_nodes": np.array([1, 2])}, "nodes"),
}
BAD = {name: named for each in (TENSORS, ARRAYS) for name, (_, named) in each.items()}
BAD |= {".": "folder", "code.pt": "more than tensors", "pipe.npz": "pipe"}
BAD |= {
    "none.vtu": "none.vtu does not exist",
    "notes.txt": ".vtu",
    "cut.pt": "cut.pt",
    "cut.npz": "zip",
    "notes.vtu": "notes.vtu is not an XML file. Write",
    "empty.pvd": "empty.pvd is empty. Write",
    "cut.vtu": "cut.vtu is cut off or damaged: an error in its XML is at line 2. Write",
    "cut.pvtu": "cut.vtu is cut off or damaged",
    "notes.su2": "not in the format of its suffix. Write",
    "empty.ply": "it is empty, cut off",
}


def write_bad_files(folder):
    for name, (content, _) in TENSORS.items():
        torch.save(content, folder / name)
    for name, (arrays, _) in ARRAYS.items():
        np.savez(folder / name, **arrays)
    torch.save({"edge_index": RING, "x": Runs(folder / "ran")}, folder / "code.pt")
    for name in ("notes.txt", "notes.vtu", "notes.su2"):
        (folder / name).write_text("This is no mesh.\n")
    for name in ("empty.pvd", "empty.ply"):
        (folder / name).touch()
    (folder / "cut.vtu").write_text('<VTKFile type="UnstructuredGrid">\n<UnstructuredGrid>')
    part = '<PUnstructuredGrid><Piece Source="cut.vtu"/></PUnstructuredGrid>'
    (folder / "cut.pvtu").write_text(f'<VTKFile type="PUnstructuredGrid">{part}</VTKFile>')
    os.mkfifo(folder / "pipe.npz")
    for whole in ("list.pt", "no_edges.npz"):
        content = (folder / whole).read_bytes()
        (folder / f"cut{Path(whole).suffix}").write_bytes(content[: len(content) // 2])


def test_a_bad_file_gets_one_line(tmp_path, capsys):
    write_bad_files(tmp_path)
    out = tmp_path / "parts"
    for name, named in BAD.items():
        assert main(["partition", str(tmp_path / name), "--parts", "2", "--out", str(out)]) == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        (line,) = shown.err.splitlines()
        assert line.startswith("python -m varcomm partition: ")
        assert named in line, name
        assert len(line) < 600
        assert not out.exists()
        assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--plot none/parts.png", "none"),
        ("--plot parts.png --out parts", "positions"),
        ("--out .", "saved partition"),
        ("--method rcb", "ring.npz"),
        ("--out ring.npz/parts", "ring.npz"),
    ],
)
def test_a_target_is_refused_before_the_work(arguments, named, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    np.savez("ring.npz", edge_index=RING)
    assert main(["partition", "ring.npz", "--parts", "2", *arguments.split()]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line
    assert [path.name for path in tmp_path.iterdir()] == ["ring.npz"]
