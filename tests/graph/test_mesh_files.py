"""Mesh files that people have: regular grids, polyhedra, pieces, series, and mesh objects."""

import base64
import gzip
import lzma
import re
import struct
import zlib
from itertools import combinations, product

import meshio
import numpy as np
import pytest
import torch

import varcomm as vc
from tests.graph.parts import same
from tests.graph.test_mesh import box, saved
from varcomm.graph import read_mesh

VTK = {"line": 3, "triangle": 5, "polygon": 7, "pixel": 8, "quad": 9, "tetra": 10, "voxel": 11}
VTK |= {"hexahedron": 12, "polyhedron": 42, "wedge": 13, "pyramid": 14}
SIDES = [(0, 3, 2, 1), (4, 5, 6, 7), (0, 1, 5, 4), (1, 2, 6, 5), (2, 3, 7, 6), (3, 0, 4, 7)]
NAMES = {"f": "Float", "i": "Int", "u": "UInt"}


def array(name, values, columns="", kind=None):
    """An array of a VTU file as text."""
    values = np.asarray(values)
    kind = kind or f"{NAMES[values.dtype.kind]}{8 * values.itemsize}"
    text = " ".join(map(str, values.reshape(-1).tolist()))
    return f'<DataArray type="{kind}" Name="{name}" {columns} format="ascii">{text}</DataArray>'


def piece(points, cells, point_data="", cell_data="", more=""):
    """A piece of a VTU file; `cells` are (name of VTK, points)."""
    ends = np.cumsum([len(ids) for _, ids in cells])
    return (
        f'<Piece NumberOfPoints="{len(points)}" NumberOfCells="{len(cells)}">'
        f"<PointData>{point_data}</PointData><CellData>{cell_data}</CellData><Points>"
        + array("Points", points, 'NumberOfComponents="3"')
        + "</Points><Cells>"
        + array("connectivity", np.concatenate([np.array(ids) for _, ids in cells]))
        + array("offsets", ends)
        + array("types", np.array([VTK[kind] for kind, _ in cells], np.uint8))
        + f"{more}</Cells></Piece>"
    )


def vtu(path, *pieces, version="2.3", more=""):
    path.write_text(
        f'<?xml version="1.0"?>\n<VTKFile type="UnstructuredGrid" version="{version}" '
        'byte_order="LittleEndian" header_type="UInt32"><UnstructuredGrid>'
        f"{more}{''.join(pieces)}</UnstructuredGrid></VTKFile>"
    )
    return path


def hexahedra(shape):
    points, blocks = box(shape, ["hexahedron"])
    return points, np.concatenate([block for _, block in blocks])


def assert_same_graphs(found, expected, names=()):
    for nodes in ("points", "cells"):
        a, b = read_mesh(found, nodes).data, read_mesh(expected, nodes).data
        assert torch.equal(a.edge_index, b.edge_index), nodes
        torch.testing.assert_close(a.pos, b.pos, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(a.edge_attr, b.edge_attr, rtol=1e-13, atol=1e-14)
        if nodes == "cells":
            torch.testing.assert_close(a.volume, b.volume, rtol=1e-13, atol=0)
        for name in names:
            assert name not in b or same(a[name], b[name]), name


def test_voxels_and_pixels(tmp_path):
    points, cells = hexahedra((3, 2, 2))
    cells = [*cells[:-1], cells[-1]]
    voxel = [0, 1, 3, 2, 4, 5, 7, 6]
    mixed = [("voxel", c[voxel]) if i % 3 else ("hexahedron", c) for i, c in enumerate(cells)]
    mixed.insert(5, ("pixel", cells[0][[0, 1, 3, 2]]))
    mixed.append(("line", cells[0][[0, 6]]))
    plain = [("hexahedron", [c]) for c in cells]
    plain[5:5] = [("quad", [cells[0][:4]])]
    plain.append(("line", [cells[0][[0, 6]]]))
    expected = saved(tmp_path, points, plain)
    found = vtu(tmp_path / "voxels.vtu", piece(points, mixed))
    assert_same_graphs(found, expected)
    read_mesh(found, "cells").write(tmp_path / "out.vtu")
    assert [block.type for block in meshio.read(tmp_path / "out.vtu").cells] == ["hexahedron"]
    flat, quads = box((3, 2), ["quad"])
    pixels = [("pixel", block[0][[0, 1, 3, 2]]) for _, block in quads]
    assert_same_graphs(vtu(tmp_path / "p.vtu", piece(flat, pixels)), saved(tmp_path, flat, quads))


def polyhedra(kind, cells, rng, form):
    """Some cells as polyhedra, whose faces are in any order and turned either way."""
    faces, first, numbers, of_cell = [], [], [], []
    for (name, ids), wanted in zip(cells, kind, strict=True):
        own = []
        if wanted:
            sides = SIDES if name == "hexahedron" else list(combinations(range(4), 3))
            own = [list(np.roll(ids[list(s)], rng.integers(4))) for s in sides]
            own = [face[:: rng.choice([1, -1])] for face in own]
        of_cell.append(own)
        faces += own
    counts = np.cumsum([len(own) for own in of_cell])
    if form == "2.3":
        ids = np.arange(counts[-1])
        return (
            array("face_connectivity", np.concatenate(faces))
            + array("face_offsets", np.cumsum([len(face) for face in faces]))
            + array("polyhedron_to_faces", ids)
            + array("polyhedron_offsets", counts)
        )
    for own in of_cell:
        words = [len(own)] * bool(own) + [n for face in own for n in (len(face), *face)]
        numbers += words
        first.append(len(numbers) if own else -1)
    return array("faces", np.array(numbers)) + array("faceoffsets", np.array(first))


@pytest.mark.parametrize("form", ["0.1", "2.3"])
def test_polyhedra_beside_other_cells(tmp_path, form):
    rng = np.random.default_rng(0)
    points, blocks = box((3, 3, 2), ["hexahedron", "pyramid"])
    cells = [(name, ids) for name, block in blocks for ids in block]
    boundary = [("quad", cells[0][1][:4]), ("line", cells[0][1][[0, 6]])]
    cells[4:4] = boundary
    points = points @ (np.eye(3) + rng.random((3, 3)) / 3)
    expected = saved(tmp_path, points, [(name, [ids]) for name, ids in cells])
    chosen = [name == "hexahedron" and rng.random() < 0.7 for name, _ in cells]
    shown = [
        ("polyhedron" if c else name, sorted(ids) if c else ids)
        for (name, ids), c in zip(cells, chosen, strict=True)
    ]
    number = np.arange(len(cells))
    cell_data = array("number", number) + array("stress", rng.random((len(cells), 3)), columns(3))
    content = piece(
        points, shown, array("h", points[:, 0]), cell_data, polyhedra(chosen, cells, rng, form)
    )
    path = vtu(tmp_path / "poly.vtu", content, version=form)
    assert_same_graphs(path, expected)
    mesh = read_mesh(path, "cells")
    solid = [i for i, (name, _) in enumerate(cells) if name in ("hexahedron", "pyramid")]
    assert mesh.data.number.tolist() == solid
    assert mesh.data.stress.shape == (len(solid), 3)
    assert "h" in read_mesh(path).data
    # what is written is read again, as polyhedra
    mesh.write(tmp_path / "out.vtu", back=mesh.data.volume)
    again = read_mesh(tmp_path / "out.vtu", "cells").data
    assert torch.equal(again.edge_index, mesh.data.edge_index)
    torch.testing.assert_close(again.back, again.volume, rtol=1e-13, atol=0)
    # a face of three cells
    one = ("polyhedron", cells[0][1])
    twice = piece(points, [one] * 3, more=polyhedra([True] * 3, [cells[0]] * 3, rng, form))
    with pytest.raises(vc.ArgumentError, match=r"same face.*\.$"):
        read_mesh(vtu(tmp_path / "three.vtu", twice, version=form))


def columns(count):
    return f'NumberOfComponents="{count}"'


def test_polyhedra_of_meshio(tmp_path):
    points, cells = hexahedra((2, 2, 3))
    number = np.arange(12)
    poly = [[cell[list(side)] for side in SIDES] for cell in cells[:7]]
    mesh = meshio.Mesh(
        points,
        [("polyhedron8", poly), ("hexahedron", cells[7:])],
        cell_data={"number": [number[:7], number[7:]]},
    )
    fields = {"number": [number]}
    assert_same_graphs(
        mesh, saved(tmp_path, points, [("hexahedron", cells)], cell_data=fields), ["number"]
    )


def test_face_areas_of_edges():
    """Two cells that share two faces have one edge, with the area of both."""
    points, cells = hexahedra((1, 1, 2))
    points = np.concatenate([points, [[0.5, 0, 1], [0.5, 1, 1]]]) * [3, 1, 1]
    a, b = cells[0], cells[1]
    middle = [[a[4], 12, 13, a[7]], [12, a[5], a[6], 13]]
    low = [a[list(s)] for s in SIDES if s != SIDES[1]] + middle
    high = [b[list(s)] for s in SIDES if s != SIDES[0]] + middle
    mesh = read_mesh(meshio.Mesh(points, [("polyhedron10", [low, high])]), "cells")
    assert mesh.data.edge_index.tolist() == [[0, 1], [1, 0]]
    assert mesh.data.edge_area.tolist() == [3, 3]
    assert mesh.data.volume.tolist() == [3, 3]
    assert np.linalg.norm(mesh.source.area, axis=1).sum() == pytest.approx(2 * 3 + 4 * 3 + 4 + 3)


UNPACKED = {
    "": None,
    "vtkZLibDataCompressor": zlib.compress,
    "vtkLZMADataCompressor": lzma.compress,
}


CUT_OFF = {"raw": "cut off, damaged", "base64": "cut off, damaged", "binary": "cut off or damaged"}


@pytest.mark.parametrize("form", CUT_OFF)
def test_encodings(tmp_path, form):
    points, blocks = box((3, 2, 2), ["tetra"])
    tetra = np.concatenate([block for _, block in blocks])
    expected = meshio.Mesh(points, [("tetra", tetra)], {"h": points[:, 0].astype("f4")})
    for compressor, order, wide in product(UNPACKED, "<>", (4, 8)):
        path = encoded(tmp_path / "mesh.vtu", expected, form, compressor, order, wide)
        assert_same_graphs(path, expected, ["h"])
        path.write_bytes(path.read_bytes()[:-600])
        with pytest.raises(vc.ArgumentError, match=CUT_OFF[form]):
            read_mesh(path)


def encoded(path, mesh, form, compressor, order, wide):
    """Write tetrahedra as VTU in one of its encodings."""
    compress, appended, offset = UNPACKED[compressor], [], 0
    head = np.dtype(f"{order}u{wide}")
    tetra = mesh.cells[0].data
    arrays = {
        "Points": mesh.points,
        "connectivity": tetra.reshape(-1),
        "offsets": 4 * np.arange(1, len(tetra) + 1),
        "types": np.full(len(tetra), 10, np.uint8),
        **mesh.point_data,
    }
    parts = {}
    for name, values in arrays.items():
        raw = values.astype(values.dtype.newbyteorder(order)).tobytes()
        if compress:
            cut = [raw[i : i + 100] for i in range(0, len(raw), 100)]
            packed = [compress(part) for part in cut]
            lengths = [len(cut), 100, len(raw) % 100, *map(len, packed)]
            both = [np.array(lengths, head).tobytes(), b"".join(packed)]
        else:
            both = [np.array([len(raw)], head).tobytes() + raw]
        data = b"".join(both if form == "raw" else map(base64.b64encode, both))
        where = f'format="appended" offset="{offset}"/>' if form != "binary" else 'format="binary">'
        where += "" if form != "binary" else f"\n  {data.decode()}\n</DataArray>"
        appended.append(data)
        offset += len(data)
        kind = f"{NAMES[values.dtype.kind]}{8 * values.itemsize}"
        more = columns(3) if name == "Points" else ""
        parts[name] = f'<DataArray type="{kind}" Name="{name}" {more} {where}'
    text = (
        f'<VTKFile type="UnstructuredGrid" version="1.0" header_type="UInt{8 * wide}" '
        f'byte_order="{"Little" if order == "<" else "Big"}Endian"'
        + (f' compressor="{compressor}"' if compressor else "")
        + f'><UnstructuredGrid><Piece NumberOfPoints="{len(mesh.points)}" '
        f'NumberOfCells="{len(tetra)}"><PointData>{parts["h"]}</PointData>'
        f"<Points>{parts['Points']}</Points><Cells>{parts['connectivity']}{parts['offsets']}"
        f"{parts['types']}</Cells></Piece></UnstructuredGrid>"
    ).encode()
    if form != "binary":
        text += b'<AppendedData encoding="%b">\n_' % form.encode() + b"".join(appended)
        text += b"\n</AppendedData>"
    path.write_bytes(text + b"</VTKFile>")
    return path


def test_fields_of_bools_and_strings(tmp_path, caplog):
    points, blocks = box((3, 2), ["quad"])
    cells = [("quad", block[0]) for _, block in blocks]
    rng = np.random.default_rng(0)
    wall, mark = rng.random(12) < 0.5, rng.random((6, 3)) < 0.5
    bits = np.packbits(mark).tobytes()
    bits = base64.b64encode(np.array([len(bits)], "<u4").tobytes() + bits).decode()
    marked = '<Array type="String" Name="_PYVISTA_BITARRAY_POINT_" format="ascii">{}</Array>'
    words = " ".join(str(byte) for byte in b"wall\0")
    path = vtu(
        tmp_path / "bools.vtu",
        piece(
            points,
            cells,
            array("wall", wall.astype(np.uint8)) + array("count", wall.astype(np.uint8)),
            f'<DataArray type="Bit" Name="mark" {columns(3)} format="binary">{bits}</DataArray>'
            '<Array type="String" Name="name" format="ascii">' + "97 0 " * 6 + "</Array>",
        ),
        more=f"<FieldData>{marked.format(words)}</FieldData>",
    )
    data = read_mesh(path).data
    assert same(data.wall, torch.from_numpy(wall))
    assert same(data["count"], torch.from_numpy(wall.astype(np.uint8)))
    caplog.clear()
    mesh = read_mesh(path, "cells")
    assert same(mesh.data.mark, torch.from_numpy(mark))
    assert "name" in caplog.text
    # an object with bools, there and back
    plain = meshio.Mesh(points, blocks, {"wall": wall}, {"m": [row[None] for row in mark]})
    mesh = read_mesh(plain)
    assert same(mesh.data.wall, torch.from_numpy(wall))
    mesh.write(tmp_path / "out.vtu", inside=~mesh.data.wall)
    out = read_mesh(tmp_path / "out.vtu").data
    assert torch.equal(out.wall.bool(), ~out.inside.bool())


def test_pieces(tmp_path):
    """Pieces share points at one place; cells of other pieces are in it as ghosts."""
    points, cells = hexahedra((4, 3, 2))
    height = np.arange(len(points)) / 2
    order = np.random.default_rng(0).permutation(len(cells))
    parts = np.split(order, [9, 9, 16])  # one is empty
    texts = []
    for part in parts:
        near = [c for c in order if c not in part][:4] if len(part) else []
        shown = np.array([*near[:2], *part, *near[2:]], int)
        ghost = np.isin(shown, near).astype(np.uint8)
        used = np.unique(cells[shown])
        own = [("hexahedron", np.searchsorted(used, cells[c])) for c in shown]
        data = array("number", shown) + array("vtkGhostType", ghost)
        if own:
            texts.append(piece(points[used], own, array("h", height[used]), data))
    sources = [vtu(tmp_path / f"{i}.vtu", text).name for i, text in enumerate(texts)]
    index = '<VTKFile type="PUnstructuredGrid"><PUnstructuredGrid GhostLevel="1">{}'
    index += "</PUnstructuredGrid></VTKFile>"
    (tmp_path / "all.pvtu").write_text(
        index.format("".join(f'<Piece Source="{name}"/>' for name in sources))
    )
    one = vtu(tmp_path / "one.vtu", *texts)
    for path in (one, tmp_path / "all.pvtu"):
        data = read_mesh(path, "cells").data
        assert data.number.tolist() == [c for part in parts for c in part]
        whole = read_mesh(meshio.Mesh(points, [("hexahedron", cells[order])]), "cells").data
        assert torch.equal(data.edge_index, whole.edge_index)
        data = read_mesh(path).data
        assert data.num_nodes == len(points)
        at = torch.from_numpy(points).tolist()
        assert data.h.tolist() == [height[at.index(row)] for row in data.pos.tolist()]
        assert (
            data.num_edges == read_mesh(meshio.Mesh(points, {"hexahedron": cells})).data.num_edges
        )
    # pieces that cannot be put together
    twice = piece(np.concatenate([points, points]), [("hexahedron", c) for c in cells])
    plain = piece(points, [("hexahedron", c) for c in cells])
    other = piece(points, [("hexahedron", c) for c in cells], array("h", height))
    for texts, word in (([twice, plain], "Clean to Grid"), ([plain, other], "fields")):
        with pytest.raises(vc.ArgumentError, match=word):
            read_mesh(vtu(tmp_path / "bad.vtu", *texts))


def written(rank, folder):
    mesh = read_mesh(f"{folder}/box.vtu", src=0)
    graph = vc.graph.partition(mesh.data if mesh else None, src=0)
    for suffix in ("pvd", "xdmf"):
        writer = vc.graph.MeshWriter(f"{folder}/out.{suffix}", graph, mesh)
        for step in range(3):
            writer.write(step / 2, h=graph.h + step)
    series = [read_mesh(f"{folder}/out.pvd", step=step).data for step in (0, 2, -1)]
    with pytest.raises(vc.ArgumentError, match=r"3 steps. Pass a step"):
        read_mesh(f"{folder}/out.pvd", step=3, src=1)
    return series


def test_series_of_the_writer_are_read(worlds, tmp_path):
    points, cells = hexahedra((3, 2, 2))
    height = {"h": np.arange(len(points)) / 4}
    whole = read_mesh(saved(tmp_path, points, {"hexahedron": cells}, "box.vtu", point_data=height))
    for series in worlds.run(3, written, str(tmp_path)):
        for step, data in zip((0, 2, 2), series, strict=True):
            rows = [whole.data.pos.tolist().index(row) for row in data.pos.tolist()]
            assert torch.equal(data.h, whole.data.h[rows] + step)
            assert data.num_edges == whole.data.num_edges


@pytest.mark.parametrize("form", ["XML", "HDF"])
def test_series_in_xdmf(tmp_path, monkeypatch, form):
    if form == "HDF":
        pytest.importorskip("h5py")
    monkeypatch.chdir(tmp_path)
    points, cells = hexahedra((2, 2, 1))
    fields = {"u": np.arange(18.0), "wall": np.arange(18) % 2}
    with meshio.xdmf.TimeSeriesWriter("series.xdmf", data_format=form) as series:
        series.write_points_cells(points, [("hexahedron", cells)])
        for step in range(3):
            at_points = {name: values + step for name, values in fields.items()}
            series.write_data(step / 2, at_points, {"p": [np.arange(4.0) * step]})
    for step, place in ((0, 0), (1, 1), (-1, 2)):
        data = read_mesh("series.xdmf", step=step).data
        assert data.u.tolist() == list(range(place, 18 + place))
        assert read_mesh("series.xdmf", "cells", step=step).data.p.tolist() == [
            place * i for i in range(4)
        ]
    for step in (3, -4):
        with pytest.raises(vc.ArgumentError, match=r"3 steps\. Pass a step"):
            read_mesh("series.xdmf", step=step)
    with pytest.raises(vc.ArgumentError, match=r"1 steps\. Pass a step"):
        read_mesh(saved(tmp_path, points, {"hexahedron": cells}), step=1)
    if form == "XML":  # points that move
        text = (tmp_path / "series.xdmf").read_text()
        mesh = re.search(r'<Grid Name="mesh" .*?>(.*?)</Grid>', text, re.DOTALL)[1]
        last = text.rindex("<Time")
        moved = mesh.replace("2.00", "5.00")
        (tmp_path / "moved.xdmf").write_text(text[:last] + moved + text[last:])
        assert read_mesh("moved.xdmf", step=1).data.pos.max() == 2
        assert read_mesh("moved.xdmf", step=2).data.pos.max() == 5
        geometry = re.search(r"<Geometry.*?</Geometry>", moved, re.DOTALL)[0]
        (tmp_path / "points.xdmf").write_text(text[:last] + geometry + text[last:])
        for step, place in ((1, 2), (2, 5)):
            found = read_mesh("points.xdmf", step=step).data
            assert (found.pos.max(), found.num_edges) == (place, data.num_edges)
        other = '<Geometry Reference="XML">/Xdmf/Domain/Grid</Geometry>'
        (tmp_path / "other.xdmf").write_text(text[:last] + other + text[last:])
        with pytest.raises(vc.ArgumentError, match=r"Geometry.*Write one file per step\."):
            read_mesh("other.xdmf", step=2)


GMSH = """$MeshFormat
4.1 {} 8
{}$EndMeshFormat
$PhysicalNames
2
1 7 "inlet"
2 8 "right"
$EndPhysicalNames
$Entities
"""


def msh41(path, is_binary):
    """Two quads, of which one has a physical group, and two lines, of which one has."""
    points = [(0, 0, 0), (1, 0, 0), (2, 0, 0), (0, 1, 0), (1, 1, 0), (2, 1, 0)]
    blocks = [(1, 4, 1, [(1, 1, 2)]), (2, 1, 3, [(2, 1, 2, 5, 4)]), (2, 2, 3, [(3, 2, 3, 6, 5)])]
    if not is_binary:
        nodes = ["1 6 1 6", "2 1 0 6", *map(str, range(1, 7))]
        nodes += [" ".join(map(str, row)) for row in points]
        cells = [f"{len(blocks)} 3 1 3"]
        for dim, tag, kind, rows in blocks:
            cells += [f"{dim} {tag} {kind} {len(rows)}"]
            cells += [" ".join(map(str, row)) for row in rows]
        entities = ["0 1 2 0", "4 0 0 0 1 0 0 0 0", "1 0 0 0 1 1 0 0 0", "2 1 0 0 2 1 0 1 8 0"]
        body = "\n".join(entities) + "\n$EndEntities\n$Nodes\n" + "\n".join(nodes)
        body += "\n$EndNodes\n$Elements\n" + "\n".join(cells) + "\n$EndElements\n"
        path.write_text(GMSH.format(0, "") + body)
        return path
    entities = struct.pack("<4Q", 0, 1, 2, 0) + struct.pack("<i6dQQ", 4, 0, 0, 0, 1, 0, 0, 0, 0)
    entities += struct.pack("<i6dQQ", 1, 0, 0, 0, 1, 1, 0, 0, 0)
    entities += struct.pack("<i6dQiQ", 2, 1, 0, 0, 2, 1, 0, 1, 8, 0)
    nodes = struct.pack("<4Q3iQ6Q", 1, 6, 1, 6, 2, 1, 0, 6, *range(1, 7))
    nodes += np.array(points, float).tobytes()
    cells = struct.pack("<4Q", 3, 3, 1, 3)
    for dim, tag, kind, rows in blocks:
        cells += struct.pack("<3iQ", dim, tag, kind, len(rows)) + np.array(rows, "<u8").tobytes()
    one = struct.pack("<i", 1).decode()
    text = GMSH.format(1, one + "\n").encode() + entities + b"\n$EndEntities\n$Nodes\n" + nodes
    path.write_bytes(text + b"\n$EndNodes\n$Elements\n" + cells + b"\n$EndElements\n")
    return path


@pytest.mark.parametrize("is_binary", [False, True])
def test_some_entities_of_gmsh_have_a_group(tmp_path, is_binary):
    path = msh41(tmp_path / "some.msh", is_binary)
    mesh = read_mesh(path, "cells")
    assert mesh.data.gmsh_physical.tolist() == [0, 8]
    assert mesh.data.gmsh_geometrical.tolist() == [1, 2]
    assert mesh.data.edge_index.tolist() == [[0, 1], [1, 0]]
    assert read_mesh(path).data.num_edges == 14
    assert mesh.source.field_data["right"].tolist() == [8, 2]


def test_some_cells_of_gmsh_2_have_a_group(tmp_path):
    nodes = "6\n1 0 0 0\n2 1 0 0\n3 2 0 0\n4 0 1 0\n5 1 1 0\n6 2 1 0\n"
    cells = ["1 1 0 1 2", "2 3 1 8 1 2 5 4", "3 3 2 9 4 2 3 6 5", "4 15 0 1"]
    text = "$MeshFormat\n2.2 0 8\n$EndMeshFormat\n$Nodes\n" + nodes + "$EndNodes\n$Elements\n"
    (tmp_path / "two.msh").write_text(text + "4\n" + "\n".join(cells) + "\n$EndElements\n")
    data = read_mesh(tmp_path / "two.msh", "cells").data
    assert data.gmsh_physical.tolist() == [8, 9]
    assert data.gmsh_geometrical.tolist() == [0, 4]
    assert read_mesh(tmp_path / "two.msh").data.num_edges == 14


# Pairs of corners on whose edges points stand, in the order of meshio and VTK
ON_EDGES = {
    "line3": "01",
    "triangle6": "01 12 20",
    "quad8": "01 12 23 30",
    "tetra10": "01 12 20 03 13 23",
    "pyramid13": "01 12 23 30 04 14 24 34",
    "wedge15": "01 12 20 34 45 53 03 14 25",
    "hexahedron20": "01 12 23 30 45 56 67 74 04 15 26 37",
}


@pytest.mark.parametrize("kind", ON_EDGES)
def test_cells_of_second_order(tmp_path, kind):
    """A point on an edge joins the two ends of the edge."""
    rng = np.random.default_rng(0)
    ends = [(int(a), int(b)) for a, b in ON_EDGES[kind].split()]
    corners = rng.random((max(max(pair) for pair in ends) + 1, 3))
    points = np.concatenate([corners, [(corners[a] + corners[b]) / 2 for a, b in ends]])
    number = {"line3": 21, "triangle6": 22, "quad8": 23, "tetra10": 24, "pyramid13": 27}
    VTK.update(number, wedge15=26, hexahedron20=25)
    path = vtu(tmp_path / "second.vtu", piece(points, [(kind, np.arange(len(points)))]))
    mesh = read_mesh(path)
    expected = {(end, len(corners) + i) for i, pair in enumerate(ends) for end in pair}
    found = {(int(a), int(b)) for a, b in mesh.data.edge_index.T if a < b}
    assert found == expected
    # written with all points, read again
    mesh.write(tmp_path / "out.vtu", z=mesh.data.pos[:, 2])
    assert torch.equal(read_mesh(tmp_path / "out.vtu").data.edge_index, mesh.data.edge_index)
    assert read_mesh(path, "cells").data.num_nodes == 1


@pytest.mark.parametrize("dim", [2, 3])
def test_points_inside_of_facets_and_cells(dim):
    """The points of a cell with 3 points a side are joined as a grid of 3 points a side."""
    unit = np.array([c[:dim] for c in [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0)]])
    if dim == 3:
        unit = np.concatenate(
            [np.pad(unit[:, :2], ((0, 0), (0, 1)), constant_values=z) for z in (0, 1)]
        )
    kind = "quad9" if dim == 2 else "hexahedron27"
    pairs = ON_EDGES["quad8" if dim == 2 else "hexahedron20"].split()
    points = [*unit * 2, *(unit[int(a)] + unit[int(b)] for a, b in pairs)]
    if dim == 3:
        points += [(0, 1, 1), (2, 1, 1), (1, 0, 1), (1, 2, 1), (1, 1, 0), (1, 1, 2)]
    points = np.array([*points, (1,) * dim], float)
    data = read_mesh(meshio.Mesh(points, [(kind, [np.arange(len(points))])])).data
    near = np.abs(points[:, None] - points[None]).sum(axis=2) == 1
    assert data.edge_index.T.tolist() == np.argwhere(near).tolist()


@pytest.mark.parametrize("kind", ["hexahedron20", "hexahedron27", "hexahedron"])
def test_points_of_exodus(tmp_path, monkeypatch, kind):
    """Upright edges come before those at the top; then the middle, bottom, top, and four sides."""
    low, high = ([(x, y, z) for x, y in ((0, 0), (2, 0), (2, 2), (0, 2))] for z in (0, 2))
    around = [(1, 0), (2, 1), (1, 2), (0, 1)]
    points = [*low, *high, *((x, y, 0) for x, y in around), *((x, y, 1) for x, y, _ in low)]
    points += [(x, y, 2) for x, y in around]
    points += [(1, 1, 1), (1, 1, 0), (1, 1, 2), (0, 1, 1), (2, 1, 1), (1, 0, 1), (1, 2, 1)]
    points = np.array(points[: int(kind[10:] or 8)], float)
    mesh = meshio.Mesh(points, [(kind, np.arange(len(points))[None])])
    monkeypatch.setattr(meshio, "read", lambda path: mesh)  # netCDF4 reads the file
    (tmp_path / "cell.exo").touch()
    data = read_mesh(tmp_path / "cell.exo").data
    near = np.abs(points[:, None] - points[None]).sum(axis=2) == (2 if len(points) == 8 else 1)
    assert data.edge_index.T.tolist() == np.argwhere(near).tolist()


NEXT = r"\b(Write|Pass|Install|Convert|Run|Split|Join|Keep|Leave|pip install)\b[^\n]*\.$"
INTERNALS = r"Traceback|\w+Error\(|Exit|object at|<class"


def test_refusals_end_with_the_next_step(tmp_path):
    points, blocks = box((2, 1, 1), ["hexahedron"])
    path = saved(tmp_path, points, blocks)
    bad = {
        f"bad.{suffix}": b"not a mesh"
        for suffix in ("vtu", "pvtu", "pvd", "vts", "vtp", "vtm", "vtkhdf", "vtk")
    } | {f"bad.{suffix}": b"not a mesh" for suffix in ("msh", "xdmf", "stl", "off", "inp", "txt")}
    bad["cut.vtu"] = path.read_bytes()[:-300]
    bad["wrong.vtu"] = path.read_bytes().replace(b'NumberOfCells="2"', b'NumberOfCells="3"')
    bad["lz4.vtu"] = path.read_bytes().replace(b"vtkZLibData", b"vtkLZ4Data")
    bad["none.vtu"] = b'<VTKFile type="UnstructuredGrid"><UnstructuredGrid/></VTKFile>'
    bad["poly.vtu"] = b'<VTKFile type="PolyData"><PolyData/></VTKFile>'
    bad["dangling.pvtu"] = (
        b'<VTKFile type="PUnstructuredGrid"><PUnstructuredGrid><Piece Source="gone.vtu"/>'
        b"</PUnstructuredGrid></VTKFile>"
    )
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    for name in [*bad, "missing.vtu", ""]:
        with pytest.raises(vc.VarcommError) as caught:
            read_mesh(tmp_path / name)
        message = str(caught.value)
        assert re.search(NEXT, message), message
        assert not re.search(INTERNALS, message), message
    for wrong in (3, None, {"points": points}):
        with pytest.raises(vc.ArgumentError, match=NEXT):
            read_mesh(wrong)


def test_meshes_of_pyvista(tmp_path):
    pyvista = pytest.importorskip("pyvista")
    image = pyvista.ImageData(dimensions=(4, 3, 3))
    image.point_data["h"] = np.arange(36.0)
    image.cell_data["wall"] = np.arange(12) % 2 == 0
    grid = image.cast_to_structured_grid()
    voxels, cells = image.cast_to_unstructured_grid(), grid.cast_to_unstructured_grid()
    faces = [[list(f.point_ids) for f in cells.get_cell(i).faces] for i in range(12)]
    whole = meshio.Mesh(
        np.asarray(cells.points, float),
        [("hexahedron", cells.cells_dict[12])],
        {"h": np.arange(36.0)},
        {"wall": [np.arange(12) % 2 == 0]},
    )
    words = [[6, *(n for face in own for n in (4, *face))] for own in faces]
    stream = np.concatenate([[len(own), *own] for own in words])
    poly = pyvista.UnstructuredGrid(stream, [42] * 12, cells.points)
    poly.point_data["h"] = np.arange(36.0)
    poly.cell_data["wall"] = np.arange(12) % 2 == 0
    objects = {"vti": image, "vts": grid, "vtkhdf": cells, "vtk": voxels, "vtu": voxels}
    meshes = [image, grid, voxels, cells, poly, pyvista.MultiBlock([None, cells])]
    for i, (suffix, mesh) in enumerate(
        [*objects.items(), *dict.fromkeys(("vtk", "vtu", "vtkhdf"), poly).items()]
    ):
        for binary in (True, False):
            path = tmp_path / f"{i}_{binary}.{suffix}"
            mesh.save(path, **({} if suffix == "vtkhdf" else {"binary": binary}))
            meshes.append(path)
    for mesh in meshes:
        assert_same_graphs(mesh, whole, ["h", "wall"])
    sphere = pyvista.Sphere(theta_resolution=6, phi_resolution=5)
    sphere.save(tmp_path / "sphere.vtp")
    for mesh in (sphere, tmp_path / "sphere.vtp"):
        assert read_mesh(mesh, "cells").data.num_nodes == sphere.n_cells
    # what cannot be one graph, or is cut off, is refused with the next step
    with pytest.raises(vc.ArgumentError, match=r"2 meshes\. Pass one"):
        read_mesh(pyvista.MultiBlock([cells, sphere]))
    content = (tmp_path / "3_True.vtk").read_bytes()
    for length in range(200, len(content), 150):
        (tmp_path / "cut.vtk").write_bytes(content[:length])
        with pytest.raises(vc.ArgumentError, match=NEXT):
            read_mesh(tmp_path / "cut.vtk")


def of_object(rank):
    """One rank has the mesh; all raise if it cannot be a graph."""
    mesh = meshio.Mesh(np.eye(3), [("triangle", [[0, 1, 2]])])
    found = read_mesh(mesh if rank == 1 else None, src=1)
    graph = vc.graph.partition(found.data if found else None, src=1)
    with pytest.raises(vc.ArgumentError, match=r"refused on rank 2 .*got int"):
        read_mesh(7, src=2)
    return graph.num_nodes


def test_one_rank_has_the_mesh(worlds):
    assert worlds.run(3, of_object) == [3, 3, 3]


def test_a_file_in_gzip_is_no_mesh(tmp_path):
    (tmp_path / "mesh.vtu").write_bytes(gzip.compress(b"<VTKFile/>"))
    with pytest.raises(vc.ArgumentError, match=NEXT):
        read_mesh(tmp_path / "mesh.vtu")
