"""``MeshWriter``: pieces of ranks, put together again, equal what one process writes."""

import sys
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

import h5py
import meshio
import numpy as np
import pytest
import torch

import varcomm
from tests.graph.graphs import WORLDS
from tests.graph.parts import refusing
from tests.graph.test_mesh import MESHES, box, saved
from tests.graph.test_openfoam import write_case
from varcomm.graph import MeshWriter, partition, read_mesh


def field_of(places):
    return torch.stack([places.sum(1), places.prod(1)], dim=1)


def written(rank, folder, file, nodes, owners, name="out.pvd"):
    """Write two steps; the mesh is on rank 0 alone."""
    mesh = read_mesh(file, nodes, src=0)
    owner = torch.tensor(owners) if rank == 0 else None
    graph = partition(mesh.data if mesh else None, method=owner, src=0)
    writer = MeshWriter(Path(folder) / name, graph, mesh)
    for time in (0.0, 0.25):
        values = field_of(graph.pos) + time
        writer.write(time, value=values.view(-1, 1, 2), flag=values[:, 0] > 0)
    return graph.num_owned


def cells_of(mesh, values, of_cells):
    """Each cell: its kind, the places of its corners, and its values or those of its corners."""
    found = []
    for k, block in enumerate(mesh.cells):
        for i, cell in enumerate(block.data):
            ids = np.concatenate(cell) if block.type.startswith("poly") else cell
            rows = values[k][i] if of_cells else values[ids]
            places = np.round(mesh.points[ids], 9).tolist()
            found.append((block.type, places, np.asarray(rows).tolist()))
    return found


def pieces_of_vtk(folder, nodes):
    """Yield the cells of each piece, at each time."""
    times = [
        (one.get("timestep"), one.get("file"))
        for one in ElementTree.parse(folder / "out.pvd").iter("DataSet")
    ]
    assert times == [("0.0", "out/00000.pvtu"), ("0.25", "out/00001.pvtu")]
    fields = "cell_data" if nodes == "cells" else "point_data"
    for _, index in times:
        root = ElementTree.parse(folder / index).getroot()
        arrays = {one.get("Name"): one for one in root.iter("PDataArray")}
        assert arrays["value"].get("NumberOfComponents") == "2"
        pieces = [meshio.read(folder / "out" / one.get("Source")) for one in root.iter("Piece")]
        assert all(getattr(piece, fields).keys() == {"value", "flag"} for piece in pieces)
        yield [
            cells_of(piece, getattr(piece, fields)["value"], nodes == "cells") for piece in pieces
        ]


# kinds of XDMF as meshio's, with the order of their corners in meshio
XDMF = {4: ("triangle", 3), 5: ("quad", 4), 6: ("tetra", 4), 7: ("pyramid", 5), 8: ("wedge", 6)}
XDMF[9] = ("hexahedron", 8)


def item(element, folder):
    """Return the array of an element, whose shape and dtype the file describes."""
    data = element.find("DataItem")
    file, key = data.text.split(":")
    with h5py.File(folder / file) as heavy:
        values = heavy[key][:]
    assert data.get("Dimensions") == " ".join(map(str, values.shape))
    kinds = {"f": "Float", "i": "Int", "u": "UInt"}
    assert data.get("NumberType") == kinds[values.dtype.kind]
    assert data.get("Precision") == str(values.dtype.itemsize)
    return values


def corners_in(stream):
    """Return the kind and the points of each cell of a mixed topology, in meshio's order."""
    found, at = [], 0
    while at < len(stream):
        kind, at = stream[at], at + 1
        if kind == 16:
            faces, at = stream[at], at + 1
            cell = []
            for _ in range(faces):
                cell += [*stream[at + 1 : at + 1 + stream[at]]]
                at += 1 + stream[at]
            found.append((f"polyhedron{len({*cell})}", np.array(cell)))
        else:
            name, count = XDMF[kind]
            cell = stream[at : at + count]
            at += count
            found.append((name, cell[[0, 2, 1, 3, 5, 4]] if name == "wedge" else cell))
    return found


def read_alone(piece, folder):
    """Return a piece as meshio reads it, which reads neither collections nor wedges of VTK."""
    text = ElementTree.tostring(piece, encoding="unicode")
    (folder / "piece.xdmf").write_text(f'<Xdmf Version="3.0"><Domain>{text}</Domain></Xdmf>')
    read = meshio.read(folder / "piece.xdmf")
    for block in read.cells:
        if block.type == "wedge":
            block.data = block.data[:, [0, 2, 1, 3, 5, 4]]
    return read


def pieces_of_xdmf(folder, nodes):
    (series,) = ElementTree.parse(folder / "out.xdmf").getroot().findall("Domain/Grid")
    assert series.get("CollectionType") == "Temporal"
    steps = series.findall("Grid")
    assert [step.find("Time").get("Value") for step in steps] == ["0.0", "0.25"]
    fields = "cell_data" if nodes == "cells" else "point_data"
    for step in steps:
        assert step.get("CollectionType") == "Spatial"
        pieces = []
        for piece in step.findall("Grid"):
            points = item(piece.find("Geometry"), folder)
            cells = corners_in(item(piece.find("Topology"), folder))
            assert piece.find("Topology").get("NumberOfElements") == str(len(cells))
            arrays = {one.get("Name"): one for one in piece.findall("Attribute")}
            assert arrays.keys() == {"value", "flag"}
            assert arrays["flag"].get("AttributeType") == "Scalar"
            assert arrays["value"].get("AttributeType") == "Vector"
            assert arrays["value"].get("Center") == {"cells": "Cell", "points": "Node"}[nodes]
            values, found = item(arrays["value"], folder), []
            for i, (kind, ids) in enumerate(cells):
                rows = values[i] if nodes == "cells" else values[ids]
                found.append((kind, np.round(points[ids], 9).tolist(), rows.tolist()))
            pieces.append(found)
            if not found[0][0].startswith("poly"):  # meshio reads no polyhedra from XDMF
                read = read_alone(piece, folder)
                values = getattr(read, fields)["value"]
                assert sorted(cells_of(read, values, nodes == "cells")) == sorted(found)
        yield pieces


PIECES = {"out.pvd": pieces_of_vtk, "out.xdmf": pieces_of_xdmf}


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("nodes", ["cells", "points"])
@pytest.mark.parametrize("name", PIECES)
def test_pieces_are_the_mesh(worlds, tmp_path, name, nodes, ranks):
    """The last case, on three ranks, is of polyhedra."""
    cases = [*MESHES, None] if ranks == 3 else MESHES[::2]
    for at, case in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        file = saved(folder, *box(*case)) if case else write_case(folder / "case", (3, 2, 2))
        mesh = read_mesh(file, nodes)
        count, of_cells = mesh.data.num_nodes, nodes == "cells"
        owners = [i * i % max(1, ranks - 1) for i in range(count)]  # the last may own nothing
        sizes = worlds.run(ranks, written, str(folder), str(file), nodes, owners, name)
        assert sum(sizes) == count
        steps = PIECES[name](folder, nodes)
        for time, pieces in zip((0.0, 0.25), steps, strict=True):
            assert len(pieces) == sum(size > 0 for size in sizes)
            # what one process writes
            mesh.write(folder / "one.vtu", value=field_of(mesh.data.pos) + time)
            expected = meshio.read(folder / "one.vtu")
            values = (expected.cell_data if of_cells else expected.point_data)["value"]
            assert sorted(chain(*pieces)) == sorted(cells_of(expected, values, of_cells))


def grids_by_vtk(path, time):
    """Return the grids of a step as VTK reads them, and the times of the series."""
    vtk = pytest.importorskip("vtk")
    reader = vtk.vtkXdmfReader()
    reader.SetFileName(str(path))
    reader.UpdateInformation()
    key, info = vtk.vtkStreamingDemandDrivenPipeline.TIME_STEPS(), reader.GetOutputInformation(0)
    times = [info.Get(key, i) for i in range(info.Length(key))]
    reader.UpdateTimeStep(time)
    each = reader.GetOutputDataObject(0).NewTreeIterator()
    grids = []
    while not each.IsDoneWithTraversal():
        grids.append(each.GetCurrentDataObject())
        each.GoToNextItem()
    return grids, times


def array_by_vtk(grid, name, nodes):
    data = grid.GetCellData() if nodes == "cells" else grid.GetPointData()
    array = data.GetArray(name)
    rows = [array.GetTuple(i) for i in range(array.GetNumberOfTuples())]
    return np.array(rows).reshape(len(rows), -1)


def cells_by_vtk(grid, nodes):
    """Each cell: its kind, the places of its corners or faces, and the values of nodes."""
    values, found = array_by_vtk(grid, "value", nodes), []
    if values.shape[1] == 3:  # VTK adds a zero to two numbers
        assert not values[:, 2].any()
    for i in range(grid.GetNumberOfCells()):
        cell = grid.GetCell(i)
        parts = [cell.GetFace(k) for k in range(cell.GetNumberOfFaces())]
        corners = [
            [part.GetPointId(k) for k in range(part.GetNumberOfPoints())]
            for part in (parts if cell.GetCellType() == 42 else [cell])
        ]
        places = [[grid.GetPoint(k) for k in ids] for ids in corners]
        rows = values[i] if nodes == "cells" else values[corners[0]]
        found.append((cell.GetCellType(), sorted(places), rows[..., :2].tolist()))
    return found


@pytest.mark.parametrize("nodes", ["cells", "points"])
def test_vtk_reads_the_mesh_from_xdmf(worlds, tmp_path, nodes):
    """The extra `test` leaves out VTK; docs/explanation/architecture.md names the version tried."""
    vtk = pytest.importorskip("vtk")
    kinds = set()
    cases = [*MESHES, *([None] if nodes == "cells" else [])]  # the last is of polyhedra
    for at, case in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        file = saved(folder, *box(*case)) if case else write_case(folder / "case", (3, 2, 2))
        mesh = read_mesh(file, nodes)
        owners = [i * i % 2 for i in range(mesh.data.num_nodes)]  # rank 2 owns nothing
        worlds.run(3, written, str(folder), str(file), nodes, owners, "out.xdmf")
        for time in (0.0, 0.25):
            grids, times = grids_by_vtk(folder / "out.xdmf", time)
            assert times == [0.0, 0.25]
            assert len(grids) == 2
            mesh.write(folder / "one.vtu", value=field_of(mesh.data.pos) + time)
            reader = vtk.vtkXMLUnstructuredGridReader()
            reader.SetFileName(str(folder / "one.vtu"))
            reader.Update()
            whole = cells_by_vtk(reader.GetOutput(), nodes)
            assert len(whole) == reader.GetOutput().GetNumberOfCells() > 0
            found = [cell for grid in grids for cell in cells_by_vtk(grid, nodes)]
            assert sorted(found) == sorted(whole)
            kinds |= {cell[0] for cell in found}
    assert kinds == {5, 9, 10, 12, 13, 14} | ({42} if nodes == "cells" else set())


def lines_in_xdmf(rank, folder, file):
    mesh = read_mesh(file)
    writer = MeshWriter(f"{folder}/out.xdmf", partition(mesh.data, method="block"), mesh)
    writer.write()


def test_kinds_without_a_number_of_points(worlds, tmp_path):
    points = np.array([[0.0, 0, 0], [1, 0, 0], [2, 1, 0]])
    file = saved(tmp_path, points, [("line", [[0, 1], [1, 2]]), ("vertex", [[2]])])
    worlds.run(1, lines_in_xdmf, str(tmp_path), str(file))
    with h5py.File(tmp_path / "out" / "mesh_0.h5") as heavy:
        assert heavy["cells"][:].tolist() == [2, 2, 0, 1, 2, 2, 1, 2, 1, 1, 2]


def interrupted(rank, folder, file, name):
    """Write a step; the next one fails on a rank, and the writer goes on."""
    mesh = read_mesh(file, nodes="cells")
    graph = partition(mesh.data, method="block")
    writer = MeshWriter(f"{folder}/{name}", graph, mesh)
    writer.write(0.0, x=graph.pos)
    suffix = {"out.pvd": "vtu", "out.xdmf": "h5"}[name]
    blocked = Path(folder) / "out" / f"00001_1.{suffix}"
    if rank == 1:
        blocked.mkdir()
    write = refusing(writer.write)
    write(varcomm.ArgumentError, ("rank 1 of 2", "cannot be written"), 1.0, x=graph.pos)
    text = (Path(folder) / name).read_text()
    varcomm.all_reduce(torch.zeros(1))  # all have read
    if rank == 1:
        blocked.rmdir()
    writer.write(2.0, x=graph.pos)
    return text


@pytest.mark.parametrize("name", ["out.pvd", "out.xdmf"])
def test_a_failed_step_leaves_the_series_as_it_was(worlds, tmp_path, name):
    file = saved(tmp_path, *box((2, 2), ["quad"]))
    text, _ = worlds.run(2, interrupted, str(tmp_path), str(file), name)
    assert text.count("00000")
    assert not text.count("00001")
    ElementTree.fromstring(text)
    after = (tmp_path / name).read_text()
    assert "2.0" in after
    assert "00001" in after


INDEXES = (".pvd", ".pvtu", ".xdmf")


def replaced(rank, folder, file, name):
    """Replace a series by one of another partition, which fails before its first index."""
    mesh, folder = read_mesh(file, nodes="cells"), Path(folder)

    def started(ranks):
        owner = torch.arange(mesh.data.num_nodes) % ranks
        graph = partition(mesh.data, method=owner)
        return graph.pos, MeshWriter(folder / name, graph, mesh)

    x, writer = started(3)
    writer.write(x=x)
    writer.write(x=x)
    piece = folder / "out" / {"out.pvd": "00000_0.vtu", "out.xdmf": "mesh_0.h5"}[name]
    before = piece.read_bytes()
    x, writer = started(2)
    blocked = folder / {"out.pvd": "out/00000.pvtu.part", "out.xdmf": "out.xdmf.part"}[name]
    if rank == 0:
        blocked.mkdir()
    with piece.open("rb") as reader:
        refusing(writer.write)(varcomm.ArgumentError, ("cannot be written",), x=x)
        assert reader.read() == before != piece.read_bytes()
    left = [path.name for path in folder.rglob("*") if path.suffix in INDEXES]
    varcomm.all_reduce(torch.zeros(1))  # all have read
    if rank == 0:
        blocked.rmdir()
    writer.write(x=x)
    return left


@pytest.mark.parametrize("name", ["out.pvd", "out.xdmf"])
def test_a_new_series_never_lists_pieces_of_an_old_one(worlds, tmp_path, name):
    file = saved(tmp_path, *box((3, 2), ["quad"]))
    assert worlds.run(3, replaced, str(tmp_path), str(file), name) == [[], [], []]
    indexes = [path for path in tmp_path.rglob("*") if path.suffix in INDEXES]
    assert len(indexes) == {"out.pvd": 2, "out.xdmf": 1}[name]
    lines = "".join(path.read_text() for path in indexes)
    assert lines.count("00000_0")
    assert lines.count("00000_1")
    assert not lines.count("00000_2")
    assert not lines.count("00001")


def refusals(rank, folder, file):
    mesh = read_mesh(file)
    graph = partition(mesh.data, method="block")
    other = read_mesh(file, nodes="cells")
    make = refusing(MeshWriter)
    for word, args in (
        (".pvd or .xdmf", (f"{folder}/out.vtu", graph, mesh)),
        (".pvd or .xdmf", (f"{folder}/out.{'vtu' if rank else 'pvd'}", graph, mesh)),
        ("ASCII", (f"{folder}/{'a' if rank else 'a:b'}.xdmf", graph, mesh)),
        ("disagree on path", (f"{folder}/out.{'xdmf' if rank else 'pvd'}", graph, mesh)),
        ("nowhere", (f"{folder}/nowhere/out.pvd", graph, mesh)),
        ("rank 0 must pass", (f"{folder}/out.pvd", graph, other)),
        ("None", (f"{folder}/out.pvd", graph, None if rank == 0 else mesh)),
    ):
        make(varcomm.VarcommError, (word,), *args)
    if rank == 1:
        sys.modules["h5py"] = None
    try:
        make(varcomm.MissingPackageError, ("pip install h5py",), f"{folder}/out.xdmf", graph, mesh)
    finally:
        sys.modules["h5py"] = h5py
    assert not [path for path in Path(folder).iterdir() if path.is_dir()]
    writer = MeshWriter(f"{folder}/out.pvd", graph, mesh)
    write = refusing(writer.write)
    own = torch.zeros(graph.num_owned)
    write(varcomm.VarcommError, ("one row",), 0.0, x=own[: len(own) - (rank == 1)])
    write(varcomm.VarcommError, ("real",), 0.0, x=own.to(torch.complex64))
    write(varcomm.VarcommError, ("real",), 0.0, x=own.numpy().astype(np.longdouble))
    write(varcomm.VarcommError, ("name of a field",), 0.0, **{"\0" if rank else "a": own})
    write(varcomm.VarcommError, ("finite",), float("nan"))
    write(varcomm.VarcommError, ("disagree on time",), float(rank))
    write(varcomm.VarcommError, ("disagree on fields",), 0.0, x=own.double() if rank else own)
    in_xdmf = refusing(MeshWriter(f"{folder}/out.xdmf", graph, mesh).write)
    for wrong in ("a/b", "a:b", ".", "", "a ", "\u03b8"):
        in_xdmf(varcomm.VarcommError, ("name of a field",), 0.0, **{wrong if rank else "a": own})
    wide = own.numpy().astype(np.uint64)
    in_xdmf(varcomm.VarcommError, ("uint64",), 0.0, x=wide if rank == 0 else own)
    assert not [*(Path(folder) / "out").iterdir()]


def test_refused_on_all_ranks(worlds, tmp_path):
    file = saved(tmp_path, *box((2, 2), ["quad"]))
    worlds.run(3, refusals, str(tmp_path), str(file))
