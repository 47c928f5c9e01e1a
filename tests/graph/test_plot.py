"""Pictures of partitions: what they show, and errors on all ranks."""

import sys

import numpy as np
import pytest
import torch
from matplotlib import rcParams
from matplotlib.image import imread
from torch_geometric.data import Data, HeteroData

import varcomm
from tests.graph.graphs import WORLDS, grid, split_by
from varcomm.graph import Report, assign, partition
from varcomm.graph.files.picture import DARKER, PALETTE, _rgb, _turned, colours, draw
from varcomm.graph.files.plot import plot

RGB = _rgb(range(len(PALETTE)))


def drawn(rank, path, data, method, options=None):
    graph = partition(data, method=method)
    plot(graph, path, **(options or {}))
    assert "matplotlib.pyplot" not in sys.modules, "there may be a list of open figures"
    return graph.num_owned


def pixels(path, colour):
    """How many pixels of a picture have a colour."""
    return int((np.abs(imread(path)[..., :3] - colour) < 0.003).all(axis=-1).sum())


def in_space(data):
    data.pos = torch.cat([data.pos, data.pos[:, :1] ** 2 / 9], dim=1)
    return data


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("method", ["rcb", "random", "a rank owns nothing"])
def test_each_rank_has_its_colour_and_copies_are_darker(worlds, tmp_path, ranks, method):
    data, path = grid(16, 9), tmp_path / "parts.png"
    given = split_by(method, data.num_nodes, ranks)
    owned = worlds.run(ranks, drawn, str(path), data, given)
    owner = assign(data, ranks, given) if isinstance(given, str) else given
    source, target = data.edge_index
    copied = torch.zeros(data.num_nodes, dtype=torch.bool)
    copied[source[owner[source] != owner[target]]] = True

    # 16 columns of points in 12 inches less the margins, 9 rows: 15 x 8 and their margin of 2 %
    height = round(100 * (1.15 + 1.15 + (8 + 0.6) * 10.8 / (15 + 0.6)))
    assert abs(imread(path).shape[0] - height) <= 1
    assert imread(path).shape[1:] == (1200, 4)
    key = 17 * 17  # the patch of a colour in the key
    one = (pixels(path, RGB[0]) - key) / max(1, int(((owner == 0) & ~copied).sum()))
    for rank, count in enumerate(owned):
        for light, chosen in ((1, ~copied), (DARKER, copied)):
            nodes = int((chosen & (owner == rank)).sum())
            found = pixels(path, RGB[rank] * light)
            assert (found > 1.5 * key) == (nodes > 0), (rank, light, nodes, count)
            if method == "rcb" and ranks == 2:
                assert found - key == pytest.approx(nodes * one, rel=0.1)


@pytest.mark.parametrize("suffix", ["png", "pdf", "svg", "PNG"])
def test_formats(worlds, tmp_path, suffix):
    path = tmp_path / f"parts.{suffix}"
    worlds.run(2, drawn, str(path), grid(4, 5), "rcb")
    starts = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}
    assert path.read_bytes().startswith(starts[suffix.lower()])


def test_in_space_copies_are_drawn_again_by_themselves(worlds, tmp_path):
    data, path = in_space(grid(20, 20)), tmp_path / "parts.png"
    worlds.run(2, drawn, str(path), data, "block")
    picture = imread(path)
    assert picture.shape == (930, 1800, 4)
    height, half = 930 - 75, 900  # without the key
    for rank in range(2):
        light, dark = (
            (np.abs(picture[:height, :, :3] - RGB[rank] * level) < 0.003).all(axis=-1)
            for level in (1, DARKER)
        )
        assert light[:, :half].sum() > 500
        assert light[:, half:].sum() == 0
        # edges go north and east: rank 0 gives the last of its rows to rank 1, which gives nothing
        assert (dark[:, half:].sum() > 50) == (rank == 0)


def around_the_world():
    """A band around the globe in three forms, the same for the eye."""
    lon = torch.arange(-180.0, 180, 5, dtype=torch.float64).repeat(9)
    lat = torch.arange(-40.0, 50, 10, dtype=torch.float64).repeat_interleave(72)
    up, round_ = lat.deg2rad(), lon.deg2rad()
    vectors = torch.stack([up.cos() * round_.cos(), up.cos() * round_.sin(), up.sin()], dim=1)
    return {
        "lonlat": torch.stack([lon, lat], dim=1),
        "latlon": torch.stack([lat, lon + 360], dim=1),
        "sphere": 6371 * vectors,
    }


def three_maps(rank, folder, forms):
    for projection, pos in forms.items():
        edges = torch.stack([torch.arange(647), torch.arange(1, 648)])
        graph = partition(Data(pos=pos, edge_index=edges), method="block")
        plot(graph, f"{folder}/{projection}.png", projection)


def test_a_map_from_degrees_or_vectors(worlds, tmp_path):
    worlds.run(3, three_maps, str(tmp_path), around_the_world())
    maps = [imread(tmp_path / f"{name}.png")[..., :3] for name in ("lonlat", "latlon", "sphere")]
    assert np.array_equal(maps[0], maps[1])
    # rounding may move what is at 180 degrees, or on the edge of a pixel
    assert (np.abs(maps[0] - maps[2]).max(axis=-1) > 0.02).mean() < 0.01
    assert pixels(tmp_path / "lonlat.png", RGB[1]) > 5000


def test_a_map_is_cut_where_there_is_nothing():
    pacific = np.array([[170.0, 60], [179, 60], [-179, 60], [-165, 60]])
    turned, stretch = _turned(pacific)
    assert np.ptp(turned[:, 0]) == 25
    assert np.all(np.diff(turned[:, 0]) > 0)
    assert stretch == pytest.approx(2)  # a degree of longitude is half as long there
    globe = np.stack([np.arange(-180, 180, 2.0), np.zeros(180)], axis=1)
    assert np.array_equal(_turned(globe)[0], globe)
    assert _turned(np.array([[0.0, 90]]))[1] == 5
    assert len(_turned(np.zeros((0, 2)))[0]) == 0


def test_many_nodes_are_drawn_in_part(worlds, tmp_path):
    data = grid(40, 40)
    paths = [tmp_path / name for name in ("whole.png", "part.png", "again.png", "enough.png")]
    for path, most in zip(paths, (1_000_000, 200, 200, 1600), strict=True):
        worlds.run(3, drawn, str(path), data, "rcb", {"most": most})
    whole, part, again, enough = (imread(path) for path in paths)
    assert np.array_equal(part, again)
    assert np.array_equal(whole, enough)
    # what says so is below what is drawn, to the right; the rank's colours are to the left
    note = np.s_[-60:, 450:]
    assert (whole[note] == 1).all()
    assert not (part[note] == 1).all()


def drawn_by_type(rank, folder):
    data = HeteroData()
    data["paper"].pos = torch.arange(16.0).view(8, 2) ** 2
    data["author"].pos = torch.arange(12.0).view(4, 3) ** 2
    data["venue"].num_nodes = 2
    data["author", "writes", "paper"].edge_index = torch.tensor([[3, 0], [0, 7]])
    graph = partition(data, method={k: torch.arange(n) * 2 // n for k, n in sizes(data)})
    plot(graph, f"{folder}/paper.png", node_type="paper")
    plot(graph, f"{folder}/author.png", node_type="author")
    told = []
    for node_type in ("venue", None, "reader"):
        with pytest.raises(varcomm.ArgumentError) as caught:
            plot(graph, f"{folder}/none.png", node_type=node_type)
        told.append(str(caught.value))
    return told


def sizes(data):
    return [(key, data[key].num_nodes) for key in data.node_types]


def test_nodes_of_one_type(worlds, tmp_path):
    told, same = worlds.run(2, drawn_by_type, str(tmp_path))
    assert told == same
    assert "the nodes have no positions. Give the whole graph a data.pos." in told[0]
    assert "node_type must be one of ['paper', 'author', 'venue']; got None" in told[1]
    assert "got 'reader'" in told[2]
    # no rank has copies of papers: what is dark is in the key
    assert pixels(tmp_path / "paper.png", RGB[0] * DARKER) == 17 * 17
    assert pixels(tmp_path / "author.png", RGB[0] * DARKER) > 17 * 17
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize(
    "pos",
    [torch.zeros(0, 2), torch.zeros(0, 3), torch.ones(1, 2), torch.ones(5, 2), torch.ones(5, 3)],
    ids=lambda pos: str(tuple(pos.shape)),
)
def test_hardly_anything_to_draw(worlds, tmp_path, pos):
    data = Data(pos=pos, edge_index=torch.zeros(2, 0, dtype=torch.int64))
    worlds.run(3, drawn, str(tmp_path / "parts.png"), data, "block")
    assert imread(tmp_path / "parts.png").shape[0] >= 500
    # those at the same place hide each other
    seen = [pixels(tmp_path / "parts.png", colour) > 17 * 17 for colour in RGB[:3]]
    assert sum(seen) == min(len(pos), 1)


def wrong_use(rank, folder):
    """Every message, as each rank gets it; then a picture after all."""
    data = grid(4, 5)
    flat = partition(data, method="block")
    bare = partition(Data(edge_index=data.edge_index, num_nodes=20), method="block")
    solid = partition(in_space(grid(4, 5)), method="block")
    data.pos = data.pos * 30
    far = partition(data, method="block")
    data.pos = data.pos.clone()
    data.pos[0, 0] = torch.inf
    unknown = partition(data, method="block")
    line = partition(Data(pos=torch.ones(20), edge_index=data.edge_index), method="block")
    path = f"{folder}/parts.png"
    calls = {
        "no pos": lambda: plot(bare, path),
        "projection": lambda: plot(flat, path, "mercator"),
        "a line": lambda: plot(line, path),
        "flat sphere": lambda: plot(flat, path, "sphere"),
        "solid degrees": lambda: plot(solid, path, "lonlat"),
        "the centre": lambda: plot(solid, path, "sphere"),
        "order": lambda: plot(far, path, "lonlat"),
        "infinite": lambda: plot(unknown, path),
        "most": lambda: plot(flat, path, most=0),
        "most is no number": lambda: plot(flat, path, most=True),
        "suffix": lambda: plot(flat, f"{folder}/parts.bmp"),
        "no suffix": lambda: plot(flat, f"{folder}/parts"),
        "folder": lambda: plot(flat, f"{folder}/nowhere/parts.png"),
        "a folder": lambda: plot(flat, f"{folder}/folder.png"),
        "no path": lambda: plot(flat, 3),
        "one rank": lambda: plot(flat, path, "lonlat" if rank == 1 else None),
        "another type": lambda: plot(flat, path, node_type=["x"] if rank == 1 else None),
    }
    told = {}
    for name, call in calls.items():
        with pytest.raises(varcomm.VarcommError) as caught:
            call()
        told[name] = (type(caught.value).__name__, str(caught.value))
    known = sys.modules["matplotlib.backends.backend_agg"] if rank == 0 else None
    sys.modules["matplotlib.backends.backend_agg"] = None
    try:
        plot(flat, path)
    except varcomm.MissingPackageError as error:
        told["matplotlib"] = ("MissingPackageError", str(error))
    finally:
        del sys.modules["matplotlib.backends.backend_agg"]
        if known is not None:
            sys.modules["matplotlib.backends.backend_agg"] = known
    plot(flat, f"{folder}/last.png")
    return told


def test_wrong_use_is_an_error_on_every_rank(worlds, tmp_path):
    (tmp_path / "folder.png").mkdir()
    told, *others = worlds.run(3, wrong_use, str(tmp_path))
    assert others == [told] * 2
    expected = {
        "no pos": "the nodes have no positions. Give the whole graph a data.pos.",
        "projection": 'projection must be None, "sphere", "lonlat" or "latlon"; got \'mercator\'',
        "a line": "projection=None needs pos of shape (n, 2) or (n, 3); got torch.float32 of shape",
        "flat sphere": "projection='sphere' needs pos of shape (n, 3); got torch.float64 of shape",
        "solid degrees": "projection='lonlat' needs pos of shape (n, 2); got",
        "the centre": "pos holds the centre of the sphere, which is nowhere on a map.",
        "order": "latitudes are 0.0...120.0, beyond the poles. In which order are the columns of",
        "infinite": "pos holds positions that are not finite.",
        "most": "most must be a positive integer; got 0.",
        "most is no number": "most must be a positive integer; got True.",
        "suffix": "must end in one of .",
        "no suffix": "must end in one of .",
        "folder": f"there is no folder {tmp_path}/nowhere.",
        "a folder": f"{tmp_path}/folder.png cannot be written: [Errno 21] Is a directory",
        "no path": "path must be one of a file; got 3.",
        "one rank": "ranks disagree on projection, node_type, most or the columns of pos: rank 0 h",
        "another type": "refused on rank 1 of 3",
        "matplotlib": 'plot needs matplotlib: pip install "varcomm[plot]".',
    }
    for name, message in expected.items():
        assert message in told[name][1], name
    assert told["one rank"][0] == "DisagreementError"
    kinds = {kind for name, (kind, _) in told.items() if name not in ("one rank", "matplotlib")}
    assert kinds == {"ArgumentError"}
    assert {path.name for path in tmp_path.iterdir()} == {"folder.png", "last.png"}


def parts_of_a_grid(parts):
    """Rows of a picture for many ranks, without them: positions, owners, neighbours."""
    data = grid(40, 40)
    owner = assign(data, parts, "rcb")
    source, target = owner[data.edge_index]
    adjacent = [sorted({*target[source == r].tolist()} - {r}) for r in range(parts)]
    for rank, others in enumerate(adjacent):
        for other in others:
            adjacent[other] = sorted({*adjacent[other], rank})
    rows = np.column_stack([data.pos.numpy(), np.arange(1600) % 7 == 0])
    return rows, owner.numpy(), adjacent


@pytest.mark.parametrize("parts", [9, 33, 64])
def test_ranks_that_exchange_differ_in_colour(tmp_path, parts):
    rows, owner, adjacent = parts_of_a_grid(parts)
    found = colours(adjacent)
    for rank, others in enumerate(adjacent):
        assert others
        assert all(found[rank] != found[other] for other in others)
    counts = (0,) * parts
    report = Report("rcb", counts, counts, counts, counts, counts, counts)
    before = dict(rcParams)
    draw(tmp_path / "parts.png", rows, owner, adjacent, 1600, report, None)
    assert dict(rcParams) == before
    picture = imread(tmp_path / "parts.png")
    assert all(pixels(tmp_path / "parts.png", RGB[c]) > 100 for c in set(found))
    white = (picture[..., :3] == 1).all(axis=-1)
    assert 0.05 < white.mean() < 0.7
    # all of whose ranks are everywhere: there is no middle to write a number at
    scattered = np.random.default_rng(0).permutation(owner)
    draw(tmp_path / "chance.png", rows, scattered, adjacent, 1600, report, None)
    assert ink(tmp_path / "chance.png") < 0.3 * ink(tmp_path / "parts.png")


def ink(path):
    """How much is written, in dark grey, where nodes are drawn."""
    inner = imread(path)[115:-115, 84:-30, :3]
    return int((inner < 0.2).all(axis=-1).sum())


def test_where_all_ranks_exchange_colours_are_shared_evenly():
    everyone = [[b for b in range(24) if b != a] for a in range(24)]
    assert sorted(colours(everyone)) == sorted([*range(8)] * 3)
