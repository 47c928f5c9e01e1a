"""The command `partition`: what it reads, what it writes, what it says of bad files."""

import json
import os

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import varcomm as vc
from tests.cli.graph_files import channel
from varcomm.cli.main import main
from varcomm.graph.files.graph_file import read_graph

RING = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])


def heights(rank, folder):
    graph = vc.graph.PartitionedGraph.load(folder)
    return graph.gather(graph.height), str(graph.report())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_mesh_is_cut_for_ranks_to_load(worlds, ranks, tmp_path, capsys):
    pytest.importorskip("meshio")
    mesh, out = channel(tmp_path / "channel.vtu"), tmp_path / "parts"
    picture = tmp_path / "parts.png"
    arguments = ["--parts", "2", "--method", "rcb", "--out", str(out), "--plot", str(picture)]
    assert main(["partition", str(mesh), *arguments]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    report, _, files = told.out.partition("parts: ")
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
    assert main(["inspect", str(out)]) == 0
    assert "4 nodes and 4 edges on 6 ranks by block" in capsys.readouterr().out


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


@pytest.mark.parametrize(("told", "nodes"), [(None, 4), (7, 7)])
def test_arrays_may_tell_of_more_nodes(tmp_path, told, nodes):
    more = {} if told is None else {"num_nodes": np.array(told)}
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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.vtu", "there is no file "),
        (".", "is a folder; give the file of a mesh or graph."),
        ("data.pt", "it holds more than tensors; a .pt file must hold a dict of tensors"),
        ("code.pt", "it holds more than tensors; a .pt file must hold a dict of tensors"),
        ("list.pt", "it holds a list; a .pt file must hold a dict of tensors"),
        ("no_edges.pt", "it has no edge_index, but x; a .pt file"),
        ("floats.pt", "its edges are torch.float32 of shape (2, 4); a .pt file"),
        ("negative.pt", "negative.pt: data.edge_index[0] spans -1...2, out of range for 3 nodes."),
        ("sparse.pt", "sparse.pt: its edge_index is a sparse tensor; make it (2, E): "),
        ("face.pt", "data.face"),
        ("cut.pt", "it cannot be read ("),
        ("no_edges.npz", "it has no edge_index, but a; an .npz file must hold edge_index (2, E)"),
        ("objects.npz", "it cannot be read (Object arrays cannot be loaded"),
        ("nodes.npz", "num_nodes"),
        ("cut.npz", "it cannot be read (File is not a zip file); an .npz file must hold"),
        ("cut.vtu", "cut.vtu cannot be read: "),
        ("notes.txt", "notes.txt cannot be read: "),
        ("empty.stl", "empty.stl: it has no points."),
        ("noise.msh", "noise.msh cannot be read: "),
        ("pipe.npz", "pipe.npz is no file, but a pipe or a device; give one that ends."),
        ("words.graph", "METIS's format has integers alone, and this has others."),
        ("bytes.graph", "METIS's format has integers alone, and this has others."),
        ("empty.graph", "METIS's format begins with a line of the numbers of nodes and edges."),
        ("cut.graph", "it tells of 4 nodes, and has 2 lines of neighbours."),
        ("long.graph", "it tells of 1 nodes, and has 2 lines of neighbours."),
        ("few.graph", "it tells of 2 edges, which are 4 neighbours, and lists 2."),
        ("far.graph", "it lists neighbours 2...3 of 2 nodes."),
        ("one_way.graph", "not every edge is listed at both of its ends."),
        ("kind.graph", "METIS's format has no kind 009."),
        ("weights.graph", "a line lacks weights that its first line tells of."),
    ],
)
def test_a_bad_file_gets_one_line(name, message, tmp_path, capsys):
    pytest.importorskip("meshio")
    bad_files(tmp_path)
    out = tmp_path / "parts"
    assert main(["partition", str(tmp_path / name), "--parts", "2", "--out", str(out)]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert line.startswith("python -m varcomm partition: ")
    assert message in line
    assert len(line) < 600
    assert not out.exists()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "0"], "'0' is no positive whole number"),
        (["--parts", "99999999999"], "99999999999 are more parts than 1,000,000"),
        (["--parts", "few"], "'few' is no positive whole number"),
        ([], "the following arguments are required: --parts"),
        (["--parts", "2", "--method", "scissors"], "invalid choice: 'scissors'"),
    ],
)
def test_wrong_use(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["partition", "ring.npz", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plot", "parts.txt"], "the picture 'parts.txt' must end in one of ."),
        (["--plot", "none/parts.png"], "there is no folder none."),
        (["--plot", "parts.png"], "the nodes have no positions."),
        (["--plot", "parts.png", "--out", "parts"], "the nodes have no positions."),
        (["--out", "."], "exists and is no saved partition; choose another."),
        (["--method", "rcb"], "ring.npz: "),
        (["--out", "ring.npz/parts"], "cannot be written: "),
    ],
)
def test_nowhere_to_write(arguments, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    np.savez("ring.npz", edge_index=RING)
    assert main(["partition", "ring.npz", "--parts", "2", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert [path.name for path in tmp_path.iterdir()] == ["ring.npz"]


def test_a_place_is_looked_at_before_the_work(monkeypatch, tmp_path, capsys):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "notes.txt").write_text("mine")
    arguments = ["--parts", "2", "--out", str(tmp_path / "parts")]
    monkeypatch.setattr("varcomm.simulate.partition", None)
    np.savez(tmp_path / "ring.npz", edge_index=RING)
    assert main(["partition", str(tmp_path / "ring.npz"), *arguments]) == 1
    assert "exists and is no saved partition; choose another." in capsys.readouterr().err


def test_what_numpy_warns_of_on_the_way_is_not_told(tmp_path, caplog):
    path = tmp_path / "two.stl"
    facet = "facet normal 0 0 1\nouter loop\n{}endloop\nendfacet\n"
    corners = [((0, 0, 0), (1, 0, 0), (1, 1, 0)), ((0, 0, 0), (1, 1, 0), (0, 1, 0))]
    facets = "".join(
        facet.format("".join(f"vertex {x} {y} {z}\n" for x, y, z in three)) for three in corners
    )
    path.write_text(f"solid two\n{facets}endsolid two\n")  # as text, which looks binary at first
    assert read_graph(path).num_nodes == 4
    assert not caplog.records


def test_a_bar_is_for_those_who_look_on(monkeypatch, tmp_path, capsys):
    np.savez(tmp_path / "ring.npz", edge_index=RING)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    arguments = ["--parts", "2", "--out", str(tmp_path / "parts")]
    assert main(["partition", str(tmp_path / "ring.npz"), *arguments]) == 0
    told = capsys.readouterr()
    assert "writing parts" in told.err
    assert "writing parts" not in told.out
