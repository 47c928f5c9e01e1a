"""``PartitionedGraph.plot``: colours of owners, darker copies, and refusals on all ranks."""

import sys

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from torch_geometric.data import Data, HeteroData

import varcomm
from tests.graph.graphs import WORLDS, grid, split_by
from tests.graph.parts import refusing
from tests.graph.test_mesh import box, saved
from tests.worlds import on_ranks
from varcomm.graph import assign, partition

COLOURS = ["#77aadd", "#ee8866", "#eedd88", "#44bb99", "#ffaabb", "#bbcc33", "#99ddff", "#aaaa00"]
RGB = np.array([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in COLOURS])
DARKER = 0.5
KEY = np.s_[:-130]  # the picture without the key


def drawn(rank, path, data, method):
    graph = partition(data, method=method)
    graph.plot(path)
    assert "matplotlib.pyplot" not in sys.modules, "there may be a list of open figures"
    return graph.num_owned


def matches(picture, colour):
    return (np.abs(picture[..., :3] - colour) < 0.003).all(axis=-1)


def in_space(data):
    data.pos = torch.cat([data.pos, data.pos[:, :1] ** 2 / 9], dim=1)
    return data


@pytest.mark.parametrize("ranks", WORLDS[1:])
def test_each_rank_has_its_colour_and_copies_are_darker(worlds, tmp_path, ranks):
    data, path = grid(16, 9), tmp_path / "parts.png"
    for method in ("rcb", "a rank owns nothing"):
        given = split_by(method, data.num_nodes, ranks)
        worlds.run(ranks, drawn, str(path), data, given)
        owner = assign(data, ranks, given) if isinstance(given, str) else given
        source, target = data.edge_index
        copied = torch.zeros(data.num_nodes, dtype=torch.bool)
        copied[source[owner[source] != owner[target]]] = True
        picture = imread(path)
        for rank in range(ranks):
            for light, chosen in ((1, ~copied), (DARKER, copied)):
                nodes = int((chosen & (owner == rank)).sum())
                assert matches(picture[KEY], RGB[rank] * light).any() == (nodes > 0)


@pytest.mark.slow
def test_in_space_copies_are_drawn_again_by_themselves(worlds, tmp_path):
    path = tmp_path / "parts.png"
    worlds.run(3, drawn, str(path), in_space(grid(20, 20)), "block")
    picture = imread(path)[KEY]
    half = picture.shape[1] // 2
    for rank in range(3):
        light, dark = (matches(picture, RGB[rank] * level) for level in (1, DARKER))
        assert light[:, :half].sum() > 300
        assert light[:, half:].sum() == 0
        # edges go north and east: each rank sends the last of its rows to the next
        assert (dark[:, half:].sum() > 30) == (rank < 2)


@pytest.mark.slow
@on_ranks(3)
def test_nodes_of_one_type(rank, tmp_path):
    data = HeteroData()
    data["paper"].pos = torch.arange(16.0).view(8, 2) ** 2
    data["author"].pos = torch.arange(12.0).view(4, 3) ** 2
    data["venue"].num_nodes = 2
    data["author", "writes", "paper"].edge_index = torch.tensor([[3, 0], [0, 7]])
    sizes = {key: data[key].num_nodes for key in data.node_types}
    graph = partition(data, method={key: torch.arange(n) * 2 // n for key, n in sizes.items()})
    graph.plot(tmp_path / "paper.png", node_type="paper")
    graph.plot(tmp_path / "author.png", node_type="author")
    for node_type, word in (("venue", "positions"), (None, "node_type"), ("reader", "node_type")):
        with pytest.raises(varcomm.ArgumentError, match=word):
            graph.plot(tmp_path / "none.png", node_type=node_type)
    # no rank has copies of papers
    dark = [imread(tmp_path / f"{name}.png")[KEY] for name in ("paper", "author")]
    assert [matches(one, RGB[0] * DARKER).any() for one in dark] == [False, True]
    assert not (tmp_path / "none.png").exists()


@pytest.mark.slow
@on_ranks(3)
def test_hardly_anything_to_draw_and_formats(rank, tmp_path):
    """Nodes at one place, or none, in the plane and in space; another format."""
    no_edges = torch.zeros(2, 0, dtype=torch.int64)
    for at, shape in enumerate(((0, 2), (0, 3), (5, 2), (5, 3))):
        graph = partition(Data(pos=torch.ones(shape), edge_index=no_edges), method="block")
        graph.plot(tmp_path / f"{at}.PNG")
        picture = imread(tmp_path / f"{at}.PNG", format="png")[KEY]
        seen = [matches(picture, colour).any() for colour in RGB[:3]]
        assert sum(seen) == (at > 1)  # nodes at the same place hide each other
    graph.plot(tmp_path / "parts.pdf")
    assert (tmp_path / "parts.pdf").read_bytes().startswith(b"%PDF")


@on_ranks(3)
def test_refused_on_all_ranks(rank, tmp_path):
    """The only picture is that of the right call."""
    (tmp_path / "folder.png").mkdir(exist_ok=True)
    data = grid(4, 5)
    wrong = [data.pos / 0, torch.ones(20), torch.ones(20, 4), None]
    graphs = [
        partition(Data(pos=pos, edge_index=data.edge_index, num_nodes=20), method="block")
        for pos in (data.pos, *wrong)
    ]
    flat, path = graphs[0], f"{tmp_path}/parts.png"
    calls = [("pos", graph, (path,)) for graph in graphs[1:]]
    for name in ("parts.bmp", "parts", "nowhere/parts.png", "folder.png"):
        calls.append((name.partition("/")[0], flat, (f"{tmp_path}/{name}",)))
    types = HeteroData()
    types["paper"].pos = types["author"].pos = torch.ones(3, 2)
    types = partition(types, method="block")
    calls += [
        ("PathLike", flat, (3,)),
        ("node_type", flat, (path, "x")),
        ("node_type", types, (path, ("paper", "author")[rank % 2])),
    ]
    refused = refusing(lambda graph, path: graph.plot(*path))
    for word, graph, args in calls:
        refused(varcomm.VarcommError, (word,), graph, args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(varcomm.MissingPackageError, match="matplotlib"):
            flat.plot(path)
    flat.plot(f"{tmp_path}/last.png")
    assert {path.name for path in tmp_path.iterdir()} == {"folder.png", "last.png"}


@pytest.mark.slow
def test_more_ranks_than_colours(tmp_path):
    """Each of 16 ranks has a colour of its own."""
    varcomm.simulate.partition(grid(40, 40), 16, "rcb").plot(tmp_path / "parts.png")
    colours = (imread(tmp_path / "parts.png")[KEY][..., :3] * 255).round().astype(int)
    _, counts = np.unique(colours.reshape(-1, 3), axis=0, return_counts=True)
    assert (counts > 10_000).sum() >= 16 + 2  # and the two of the ground


def drawn_cells(rank, folder, file):
    for nodes in ("cells", "points"):
        mesh = varcomm.graph.read_mesh(file, nodes)
        graph = partition(mesh.data, method="block")
        graph.plot(f"{folder}/{nodes}.png", mesh=mesh if rank == 0 else None)
    with pytest.raises(varcomm.ArgumentError, match="mesh of the graph"):
        graph.plot(f"{folder}/none.png", mesh=varcomm.graph.read_mesh(file, "cells"))


@pytest.mark.parametrize("shape", [(6, 6), pytest.param((3, 3, 3), marks=pytest.mark.slow)])
def test_a_mesh_is_drawn_as_cells(worlds, tmp_path, shape):
    """No ground is seen between them: in the plane they fill their box."""
    file = saved(tmp_path, *box(shape, ["quad" if len(shape) == 2 else "hexahedron"]))
    worlds.run(3, drawn_cells, str(tmp_path), str(file))
    assert not (tmp_path / "none.png").exists()
    for nodes in ("cells", "points"):
        picture = imread(tmp_path / f"{nodes}.png")[KEY]
        seen = [matches(picture, colour * level) for colour in RGB[:3] for level in (1, DARKER)]
        assert all(seen[k].any() or seen[k + 1].any() for k in (0, 2, 4))
        if len(shape) == 2:
            inside = np.any(seen, axis=0)
            rows, columns = (np.flatnonzero(inside.any(axis=k)) for k in (1, 0))
            area = np.s_[rows[0] : rows[-1], columns[0] : columns[-1]]
            assert inside[area].mean() > 0.9
