"""Mesh files: points or cells as nodes, against brute force, and results back out."""

import re
import sys
from itertools import combinations, product
from pathlib import Path

import meshio
import numpy as np
import pytest
import torch
from page_code import blocks_of, run

import varcomm
from tests.graph.parts import same
from varcomm.graph import read_mesh

# The corners of a cube, bottom and top, each counterclockwise from above.
CUBE = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1), (0, 1, 1)]
# How a cube is cut into cells; its middle is point 8.
CUTS = {
    "hexahedron": [range(8)],
    "wedge": [(0, 1, 2, 4, 5, 6), (0, 2, 3, 4, 6, 7)],
    "tetra": [(0, 1, 2, 6), (0, 2, 3, 6), (0, 3, 7, 6), (0, 7, 4, 6), (0, 4, 5, 6), (0, 5, 1, 6)],
    "pyramid": [
        (0, 1, 2, 3, 8),
        (4, 7, 6, 5, 8),
        (0, 4, 5, 1, 8),
        (1, 5, 6, 2, 8),
        (2, 6, 7, 3, 8),
        (3, 7, 4, 0, 8),
    ],
    "quad": [range(4)],
    "triangle": [(0, 1, 2), (0, 2, 3)],
}
VOLUMES = {"hexahedron": 1, "wedge": 1 / 2, "tetra": 1 / 6, "pyramid": 1 / 6, "quad": 1}
VOLUMES["triangle"] = 1 / 2


def box(shape, kinds):
    """A box of unit cubes, or of squares in the plane, cut into cells of each kind in turn.

    Only cuts whose facets fit may stand side by side. Returns points (N, 3) and a list of
    (kind, corners), a block for each cube.
    """
    flat = len(shape) == 2
    numbers = {}
    blocks = []
    for i, cube in enumerate(product(*map(range, shape))):
        base = np.array((*cube, 0) if flat else cube)
        kind = kinds[i % len(kinds)]
        corners = [tuple(base + corner) for corner in CUBE[: 4 if flat else 8]]
        if kind == "pyramid":
            corners.append(tuple(base + 0.5))
        ids = [numbers.setdefault(corner, len(numbers)) for corner in corners]
        blocks.append((kind, np.array([[ids[k] for k in cell] for cell in CUTS[kind]])))
    return np.array(list(numbers), dtype=float), blocks


def saved(folder, points, blocks, name="mesh.vtu", **fields):
    path = folder / name
    meshio.Mesh(points, blocks, **fields).write(path)
    return path


def edges_of(pairs):
    """Both directions of some pairs, sorted."""
    return sorted({*pairs, *((b, a) for a, b in pairs)})


MESHES = [
    ((4, 5), ["quad", "triangle", "triangle"]),
    ((2, 3, 2), ["tetra"]),
    ((2, 2, 3), ["wedge"]),
    ((3, 3, 3), ["hexahedron", "pyramid"]),
]


def corners_of(blocks):
    return [(kind, list(map(int, cell))) for kind, block in blocks for cell in block]


def assert_edges(data, pairs):
    assert data.edge_index.T.tolist() == list(map(list, edges_of(pairs)))
    source, target = data.pos[data.edge_index]
    assert torch.equal(data.edge_attr[:, :-1], target - source)
    lengths = (target - source).norm(dim=1)
    torch.testing.assert_close(data.edge_attr[:, -1], lengths, rtol=1e-15, atol=0)


@pytest.mark.parametrize(("shape", "kinds"), MESHES)
def test_linear_cells(tmp_path, shape, kinds):
    """Cells that share a facet, and points joined by edges of cells."""
    points, blocks = box(shape, kinds)
    dim, all_cells = len(shape), corners_of(blocks)
    lonely = np.array([[9.0, 9.0, 9.0 * (dim == 3)]])
    shifted = [(kind, cell + 1) for kind, cell in blocks]
    data = read_mesh(saved(tmp_path, np.concatenate([lonely, points]), shifted)).data
    assert data.num_nodes == len(points) + 1
    pairs = {
        (c[a] + 1, c[b] + 1) for kind, c in all_cells for a, b in pairs_within(kind, points[c])
    }
    assert_edges(data, pairs)
    torch.testing.assert_close(data.pos[1:], torch.tensor(points[:, :dim]))

    stretch = np.eye(3)
    stretch[:dim, :dim] += 0.3 * np.random.default_rng(0).standard_normal((dim, dim))
    points = points @ stretch
    data = read_mesh(saved(tmp_path, points, blocks), nodes="cells").data
    # in a mesh that fits, two cells have a facet in common if they have `dim` corners in common
    both = combinations(enumerate(all_cells), 2)
    assert_edges(data, [(i, j) for (i, (_, a)), (j, (_, b)) in both if len({*a} & {*b}) >= dim])
    means = torch.tensor(np.array([points[c].mean(axis=0) for _, c in all_cells])[:, :dim])
    torch.testing.assert_close(data.pos, means, rtol=1e-14, atol=1e-14)
    volumes = np.array([VOLUMES[kind] for kind, _ in all_cells]) * abs(np.linalg.det(stretch))
    torch.testing.assert_close(data.volume, torch.from_numpy(volumes), rtol=1e-13, atol=0)


def pairs_within(kind, corners):
    """Edges of a cell by their geometry."""
    count = len(corners)
    if kind in ("triangle", "tetra"):
        return list(combinations(range(count), 2))
    if kind == "wedge":
        bottom = [(0, 1), (1, 2), (0, 2)]
        return [*bottom, *((a + 3, b + 3) for a, b in bottom), (0, 3), (1, 4), (2, 5)]
    is_apex = 4 if kind == "pyramid" else count
    return [p for p in combinations(range(count), 2) if is_apex in p or near(corners, *p, 1)]


def near(corners, a, b, distance):
    return np.isclose(np.linalg.norm(corners[a] - corners[b]), distance)


def test_polygons_and_branching_and_degenerate_cells(tmp_path):
    ring = np.array([(np.cos(a), np.sin(a), 0) for a in np.arange(5) * 2 * np.pi / 5])
    above = ring[:2] + np.array([0, 0, 1])
    points = np.concatenate([ring, above, [[3, 0, 0]]])
    blocks = [
        ("polygon", np.array([[0, 1, 2, 3, 4]])),
        ("quad", np.array([[0, 1, 6, 5], [0, 1, 7, 7]])),  # the second has collapsed to a triangle
        ("triangle", np.array([[0, 7, 5]])),
    ]
    path = saved(tmp_path, points, blocks)
    # three at the edge of 0 and 1; 0-7 and 0-5 are edges of the triangle too
    expected = edges_of([(0, 1), (0, 2), (1, 2), (2, 3), (1, 3)])
    mesh = read_mesh(path, nodes="cells")
    assert mesh.data.edge_index.T.tolist() == list(map(list, expected))
    pentagon = 5 / 2 * np.sin(2 * np.pi / 5)
    assert mesh.data.volume[0].item() == pytest.approx(pentagon, rel=1e-14)
    joined = read_mesh(path).data.edge_index.T.tolist()
    assert [3, 4] in joined
    assert [4, 0] in joined
    assert [0, 2] not in joined
    assert [7, 7] not in joined


def with_boundary():
    """Tetrahedra, between two blocks of which stands a boundary of triangles; fields of all."""
    points, blocks = box((2, 2, 2), ["tetra"])
    tetra = np.concatenate([block for _, block in blocks])
    blocks = [
        ("tetra", tetra[:20]),
        ("triangle", np.array([[0, 1, 2], [0, 2, 3]])),
        ("tetra", tetra[20:]),
        ("vertex", np.array([[5]])),
    ]
    rng, sizes = np.random.default_rng(1), [len(block) for _, block in blocks]
    points_fields = {
        "height above sea": rng.random(len(points)),
        "stress": rng.random((len(points), 9)).astype(np.float32),
        "pos": np.arange(len(points), dtype=np.int32),
    }
    cell_fields = {
        "gmsh:physical": [np.arange(n) + 100 * i for i, n in enumerate(sizes)],
        "flux": [rng.random((n, 3)) for n in sizes],
        "volume": [np.full(n, i, np.uint16) for i, n in enumerate(sizes)],
    }
    return points, blocks, points_fields, cell_fields


def test_fields(tmp_path):
    points, blocks, fields, cell_fields = with_boundary()
    path = saved(tmp_path, points, blocks, point_data=fields, cell_data=cell_fields)
    data = read_mesh(path).data
    names = {"height above sea": "height_above_sea", "pos": "field_pos", "stress": "stress"}
    assert set(data.keys()) == {"pos", "edge_index", "edge_attr", *names.values()}
    assert all(same(data[name], torch.from_numpy(fields[field])) for field, name in names.items())
    narrow = read_mesh(path, dtype=torch.float32).data
    floats = {key: value.dtype for key, value in narrow if value.is_floating_point()}
    assert floats == dict.fromkeys(("pos", "edge_attr", "height_above_sea", "stress"), torch.float)
    torch.testing.assert_close(narrow.edge_attr.double(), data.edge_attr, rtol=1e-7, atol=0)
    # of cells, those of the highest dimension
    data = read_mesh(path, nodes="cells").data
    expected = {
        "gmsh_physical": torch.tensor([*range(20), *range(200, 228)]),
        "flux": torch.from_numpy(np.concatenate([cell_fields["flux"][i] for i in (0, 2)])),
        "field_volume": torch.tensor([0] * 20 + [2] * 28),
    }
    assert set(data.keys()) == {"pos", "edge_index", "edge_attr", "volume", *expected}
    assert all(same(data[name], values) for name, values in expected.items())
    assert data.volume.sum().item() == pytest.approx(8, rel=1e-14)


AWKWARD = {
    "face": "field_face",
    "x": "x",
    "owned_ids": "field_owned_ids",
    "edge_index": "edge_number",
    "cell idx": "cell_number",
    "cell-number": "field_cell_number",
    "cell number": "field_field_cell_number",
    "3rd": "field_3rd",
    "class": "field_class",
    "__": "field_",
    "µ (Pa s)": "µ_Pa_s",
}


def test_names_are_free_in_data_and_in_a_partitioned_graph(tmp_path):
    points, blocks = box((2, 2), ["quad"])
    fields = {name: np.arange(9) + 10 * i for i, name in enumerate(AWKWARD)}
    data = read_mesh(saved(tmp_path, points, blocks, point_data=fields)).data
    assert set(data.keys()) == {"pos", "edge_index", "edge_attr", *AWKWARD.values()}
    parts = varcomm.simulate.partition(data, 2, "block")  # accepts all names
    assert parts.report().owned == (5, 4)
    for field, name in AWKWARD.items():
        assert torch.equal(getattr(data, name), torch.from_numpy(fields[field])), field


def test_results_go_back(tmp_path):
    points, blocks, fields, cell_fields = with_boundary()
    path = saved(tmp_path, points, blocks, point_data=fields, cell_data=cell_fields)
    mesh, count = read_mesh(path), len(points)
    tensor = torch.rand(count, 3, 3, dtype=torch.float64, requires_grad=True)
    # values, and how they are stored
    results = {
        "stress": (-fields["stress"], -fields["stress"]),
        "gradient": (tensor, tensor.detach().numpy().reshape(count, 9)),
        'a "name" <b> & c': (torch.arange(count).bfloat16(), np.arange(count, dtype=np.float32)),
        "half": (np.arange(count, dtype=np.float16), np.arange(count, dtype=np.float32)),
        "inside": (torch.arange(count) % 2 == 0, np.uint8(np.arange(count) % 2 == 0)),
    }
    mesh.write(tmp_path / "out.vtu", **{name: value for name, (value, _) in results.items()})
    out = meshio.read(tmp_path / "out.vtu")
    assert np.array_equal(out.points, points)
    assert [(b.type, b.data.tolist()) for b in out.cells] == [(k, b.tolist()) for k, b in blocks]
    expected = fields | {name: stored for name, (_, stored) in results.items()}
    assert out.point_data.keys() == expected.keys()
    for name, values in expected.items():
        assert out.point_data[name].dtype == values.dtype, name
        assert np.array_equal(out.point_data[name], values), name
    for name, parts in cell_fields.items():
        assert all(map(np.array_equal, out.cell_data[name], parts)), name
    assert mesh.source.point_data.keys() == fields.keys(), "the file that was read has changed"

    mesh = read_mesh(path, nodes="cells")
    heat = torch.rand(48, 2, dtype=torch.float64)
    mesh.write(str(tmp_path / "out.VTU"), heat=heat)
    out = meshio.read(tmp_path / "out.VTU")
    (block,) = out.cells  # those of the boundary are gone, and the rest is one block
    assert np.array_equal(block.data, np.concatenate([blocks[0][1], blocks[2][1]]))
    assert np.array_equal(out.cell_data["heat"][0], heat.numpy())
    assert np.array_equal(out.cell_data["volume"][0], [0] * 20 + [2] * 28)
    # a second time, from the written file
    again = read_mesh(tmp_path / "out.VTU", nodes="cells").data
    assert torch.equal(again.edge_index, mesh.data.edge_index)
    assert torch.equal(again.heat, heat)


def test_other_formats(tmp_path):
    """Medit keeps plane meshes in two columns; legacy VTK files are big-endian."""
    points = np.array([[0, 0], [2, 0], [2, 2], [0, 2]], dtype=float)
    fields = {"a": np.arange(4, dtype=np.float32), "b": np.arange(4, dtype=np.uint32)}
    quad = [("quad", [[0, 1, 2, 3]])]
    mesh = read_mesh(saved(tmp_path, points, quad, "plane.mesh"))
    assert mesh.data.pos.tolist() == points.tolist()
    mesh.write(tmp_path / "out.vtu", height=np.arange(4))
    assert meshio.read(tmp_path / "out.vtu").points.tolist() == [[*p, 0] for p in points.tolist()]
    points = np.pad(points, ((0, 0), (0, 1)))
    data = read_mesh(saved(tmp_path, points, quad, "mesh.vtk", point_data=fields)).data
    assert (data.a.dtype, data.b.dtype) == (torch.float32, torch.int64)
    assert data.a.tolist() == data.b.tolist() == list(range(4))


def test_what_meshio_has_to_say_goes_to_the_log(tmp_path, caplog, capfd):
    text = "MeshVersionFormatted 2\nDimension 2\nVertices\n3\n0 0 1\n1 0 1\n0 1 1\n"
    text += "Ridges\n1\n2\nTriangles\n1\n1 2 3 1\nEnd\n"
    (tmp_path / "odd.mesh").write_text(text)
    assert read_mesh(tmp_path / "odd.mesh").data.num_edges == 6
    assert capfd.readouterr() == ("", "")
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("varcomm", "WARNING")
    assert re.search("odd.mesh: .*Ridges", record.getMessage())


def saved_text(path, text):
    path.write_text(text)
    return path


def refused(path, words="", **options):
    with pytest.raises(varcomm.ArgumentError, match=rf"^read_mesh: (.|\n)*{words}"):
        read_mesh(path, **options)


def test_files_that_are_refused(tmp_path, capfd):
    refused(tmp_path / "none.vtu", "none.vtu")
    refused(tmp_path)
    (tmp_path / "mesh.txt").write_text("no mesh")
    refused(tmp_path / "mesh.txt")
    (tmp_path / "bad.vtu").write_text("<VTKFile type='PolyData'></VTKFile>")
    refused(tmp_path / "bad.vtu")
    points, blocks = box((2, 2), ["quad"])
    path = saved(tmp_path, points, blocks)
    path.write_bytes(path.read_bytes()[:-200])
    refused(path)
    # a strip of triangles
    assert capfd.readouterr() == ("", ""), "meshio has printed"
    meshio.vtu.write(str(tmp_path / "mesh.vtu"), meshio.Mesh(points, blocks), binary=False)
    capfd.readouterr()  # a warning of the writer
    text = (tmp_path / "mesh.vtu").read_text()
    types = re.search('Name="types" .*?</DataArray>', text, re.DOTALL).group()
    (tmp_path / "strip.vtu").write_text(text.replace(types, types.replace("9", "6", 1)))
    refused(tmp_path / "strip.vtu", r"types \[6\]")
    # cells without edges, of kinds without a graph, and with points that do not exist
    refused(saved(tmp_path, np.eye(3), [("vertex", [[0], [1]])]), "no cells")
    cubic = meshio.Mesh(np.random.default_rng(0).random((10, 3)), [("triangle10", [range(10)])])
    with pytest.raises(varcomm.ArgumentError, match="triangle10"):
        read_mesh(cubic)
    assert read_mesh(cubic, nodes="cells").data.num_nodes == 1
    (tmp_path / "off.off").write_text("OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n3 0 1 7\n")
    refused(tmp_path / "off.off", "out of range")
    path = saved(tmp_path, np.eye(3), [("triangle", [[0, 1, 2]])])
    refused(path, "nodes", nodes="faces")
    refused(path, "dtype", dtype=torch.int64)
    assert capfd.readouterr() == ("", ""), "meshio has printed"


def test_writing_is_refused(tmp_path):
    mesh = read_mesh(saved(tmp_path, np.eye(3), [("triangle", [[0, 1, 2]])]))
    (tmp_path / "folder.vtu").mkdir()
    wrong = [torch.rand(0, 2), torch.rand(3).to(torch.complex64), "word", torch.tensor(1.0)]
    calls = [("out.vtk", "vtu", {"a": torch.rand(3)}), ("nowhere/out.vtu", "nowhere", {})]
    calls += [("out.vtu", "a must", {"a": value}) for value in wrong]
    for name, words, fields in [*calls, ("folder.vtu", "folder.vtu", {})]:
        with pytest.raises(varcomm.ArgumentError, match=f"^mesh.write: .*{words}"):
            mesh.write(tmp_path / name, **fields)
    assert not (tmp_path / "out.vtu").exists()


def test_without_meshio(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "meshio", None)
    with pytest.raises(varcomm.MissingPackageError, match="pip install meshio"):
        read_mesh(saved_text(tmp_path / "mesh.off", "OFF"))


@pytest.mark.slow
def test_the_page_in_the_docs(tmp_path, monkeypatch):
    """Its code runs as it stands, and prints what it says there."""
    page = Path(__file__).parents[2] / "docs" / "meshes.md"
    monkeypatch.chdir(tmp_path)
    printed = run("".join(blocks_of(page)), {"__name__": "__main__"})
    assert meshio.read("out.vtu").point_data["prediction"].shape == (126, 1)
    assert Path("parts.png").exists()
    assert printed.startswith("126 nodes and 594 edges on 2 ranks by ")
    losses = re.findall(r"^# (.*loss.*)$", blocks_of(page)[1], re.MULTILINE)
    assert len(losses) == 2
    assert set(losses) <= set(printed.splitlines())
    _, *told = blocks_of(page, "text")[0].splitlines()
    assert told[0] in printed.splitlines()
    assert re.sub(r"\d+\.\d", "", told[1]) == re.sub(r"\d+\.\d", "", printed.splitlines()[-1])
