"""The command `partition`: files it reads, files it writes, and bad files."""

import json
import os

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import varcomm as vc
from tests.cli.graph_files import channel
from tests.worlds import WORLDS
from varcomm.cli.main import main
from varcomm.graph.files.graph_file import read_graph

RING = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])


def heights(rank, folder):
    graph = vc.graph.PartitionedGraph.load(folder)
    return graph.gather(graph.height), str(graph.report())


@pytest.mark.parametrize("ranks", WORLDS[1:3])
def test_a_mesh_is_cut_for_ranks_to_load(worlds, ranks, tmp_path, capsys):
    pytest.importorskip("meshio")
    mesh, out = channel(tmp_path / "channel.vtu"), tmp_path / "parts"
    picture = tmp_path / "parts.png"
    arguments = ["--parts", "2", "--method", "rcb", "--out", str(out), "--plot", str(picture)]
    assert main(["partition", str(mesh), *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    report, _, files = shown.out.partition("parts: ")
    assert report.startswith("45 nodes and 152 edges on 2 ranks by rcb\n")
    assert files == f"{out}\npicture: {picture}\n"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    for values, of_rank in worlds.run(ranks, heights, out):
        assert torch.equal(values, torch.arange(45) / 2)
        if ranks == 2:
            assert of_rank == report.strip()


def test_a_report_alone_as_json(tmp_path, capsys):
    np.savez(tmp_path / "ring.npz", edges=RING.T)
    arguments = ["--parts", "2", "--method", "block", "--json"]
    assert main(["partition", str(tmp_path / "ring.npz"), *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["owned"], report["halo"], report["cut"]) == ([2, 2], [1, 1], [1, 1])
    assert [path.name for path in tmp_path.iterdir()] == ["ring.npz"]


def test_more_parts_than_nodes(tmp_path, capsys):
    np.savez(tmp_path / "ring.npz", edge_index=RING)
    out = tmp_path / "parts"
    assert main(["partition", str(tmp_path / "ring.npz"), "--parts", "6", "--out", str(out)]) == 0
    assert "4 nodes and 4 edges on 6 ranks by block" in capsys.readouterr().out
    assert out.is_dir()


def test_metis_with_all_weights(tmp_path):
    path = tmp_path / "path.graph"
    path.write_text("% 0 - 1 - 2\n3 2 111 2\n9 5 1 2 7\n% between\n8 1 1 1 7 3 6\n7 2 2 2 6\n")
    data = read_graph(path)
    assert data.num_nodes == 3
    assert data.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    assert data.node_size.tolist() == [9, 8, 7]
    assert data.node_weight.tolist() == [[5, 1], [1, 1], [2, 2]]
    assert data.edge_weight.tolist() == [7, 7, 6, 6]


def test_metis_with_nodes_of_no_edge(tmp_path):
    (tmp_path / "a.metis").write_text("4 1\n\n4\n\n2\n\n")
    data = read_graph(tmp_path / "a.metis")
    assert (data.num_nodes, data.edge_index.tolist()) == (4, [[1, 3], [3, 1]])
    (tmp_path / "b.graph").write_text("2 0\n\n\n")
    assert read_graph(tmp_path / "b.graph").edge_index.shape == (2, 0)


def test_tensors_of_a_data(tmp_path):
    data = Data(x=torch.rand(5, 2), edge_index=RING, y=torch.arange(5))
    torch.save(data.to_dict(), tmp_path / "g.pt")
    found = read_graph(tmp_path / "g.pt")
    assert found.num_nodes == 5
    assert torch.equal(found.x, data.x)
    assert torch.equal(found.y, data.y)


@pytest.mark.parametrize(("shown", "nodes"), [(None, 4), (7, 7)])
def test_arrays_may_tell_of_more_nodes(tmp_path, shown, nodes):
    more = {} if shown is None else {"num_nodes": np.array(shown)}
    np.savez(tmp_path / "g.npz", edge_index=RING, **more)
    assert read_graph(tmp_path / "g.npz").num_nodes == nodes


class Runs:
    """Would write a file if it were unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def bad_files(folder):
    """Write files that are no graph."""
    torch.save(Data(edge_index=RING), folder / "data.pt")
    torch.save({"edge_index": RING, "x": Runs(folder / "ran")}, folder / "code.pt")
    torch.save([RING], folder / "list.pt")
    torch.save({"x": RING}, folder / "no_edges.pt")
    torch.save({"edge_index": RING.float()}, folder / "floats.pt")
    torch.save({"edge_index": RING - 1}, folder / "negative.pt")
    torch.save({"edge_index": torch.eye(3).to_sparse()}, folder / "sparse.pt")
    torch.save({"edge_index": RING, "face": RING}, folder / "face.pt")
    whole = (folder / "list.pt").read_bytes()
    (folder / "cut.pt").write_bytes(whole[: len(whole) // 2])
    np.savez(folder / "no_edges.npz", a=np.ones(3))
    np.savez(folder / "objects.npz", edge_index=np.array([{}, {}]))
    np.savez(folder / "nodes.npz", edge_index=RING, num_nodes=np.array([1, 2]))
    whole = (folder / "no_edges.npz").read_bytes()
    (folder / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (folder / "cut.vtu").write_bytes(channel(folder / "channel.vtu").read_bytes()[:900])
    (folder / "notes.txt").write_text("hello")
    (folder / "empty.stl").write_bytes(b"")
    (folder / "noise.msh").write_bytes(bytes(range(128, 256)) * 40)
    os.mkfifo(folder / "pipe.npz")
    for name, text in {
        "words": "two nodes\n",
        "empty": "",
        "cut": "4 4\n2 4\n1 3\n",
        "long": "1 0\n\n1\n",
        "few": "2 2\n2\n1\n",
        "far": "2 1\n2\n3\n",
        "one_way": "2 1\n2\n2\n",
        "kind": "2 1 9\n2\n1\n",
        "weights": "2 1 1\n2 5\n1\n",
    }.items():
        (folder / f"{name}.graph").write_text(text)
    (folder / "bytes.graph").write_bytes(bytes(range(256)))


BAD = {
    "none.vtu": "no file",
    ".": "folder",
    "data.pt": "more than tensors",
    "code.pt": "more than tensors",
    "list.pt": "list",
    "no_edges.pt": "edge_index",
    "floats.pt": "float32",
    "negative.pt": "edge_index",
    "sparse.pt": "sparse",
    "face.pt": "face",
    "cut.pt": "cut.pt",
    "no_edges.npz": "edge_index",
    "objects.npz": "Object",
    "nodes.npz": "nodes",
    "cut.npz": "zip",
    "cut.vtu": "cut.vtu",
    "notes.txt": "notes.txt",
    "empty.stl": "points",
    "noise.msh": "noise.msh",
    "pipe.npz": "pipe",
    "words.graph": "integers",
    "bytes.graph": "integers",
    "empty.graph": "METIS",
    "cut.graph": "4 nodes",
    "long.graph": "1 nodes",
    "few.graph": "2 edges",
    "far.graph": "2...3",
    "one_way.graph": "edge",
    "kind.graph": "009",
    "weights.graph": "weights",
}


def test_a_bad_file_gets_one_line(tmp_path, capsys):
    pytest.importorskip("meshio")
    bad_files(tmp_path)
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


def test_progress_is_for_a_terminal(monkeypatch, tmp_path, capsys):
    np.savez(tmp_path / "ring.npz", edge_index=RING)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    arguments = ["--parts", "2", "--out", str(tmp_path / "parts")]
    assert main(["partition", str(tmp_path / "ring.npz"), *arguments]) == 0
    shown = capsys.readouterr()
    assert "writing parts" in shown.err
    assert "writing parts" not in shown.out
