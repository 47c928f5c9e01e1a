"""``MeshWriter``: pieces of ranks, put together again, equal what one process writes."""

from pathlib import Path
from xml.etree import ElementTree

import meshio
import numpy as np
import pytest
import torch

import varcomm
from tests.graph.graphs import WORLDS
from tests.graph.parts import Refused, assert_told
from tests.graph.test_mesh import MESHES, box, saved
from tests.graph.test_openfoam import write_case
from varcomm.graph import MeshWriter, partition, read_mesh


def field_of(places):
    return torch.stack([places.sum(1), places.prod(1)], dim=1)


def written(rank, folder, file, nodes, owners):
    """Write two steps; the mesh is on rank 0 alone."""
    mesh = read_mesh(file, nodes, src=0)
    owner = torch.tensor(owners) if rank == 0 else None
    graph = partition(mesh.data if mesh else None, method=owner, src=0)
    writer = MeshWriter(Path(folder) / "out.pvd", graph, mesh)
    for time in (0.0, 0.25):
        values = field_of(graph.pos) + time
        writer.write(time, value=values.view(-1, 1, 2), flag=values[:, 0] > 0)
    return graph.num_owned


def cells_of(mesh, values, of_cells):
    """Each cell as the places of its corners, with its values or those of its corners."""
    found = []
    for k, block in enumerate(mesh.cells):
        for i, cell in enumerate(block.data):
            ids = np.concatenate(cell) if block.type.startswith("poly") else cell
            rows = values[k][i] if of_cells else values[ids]
            found.append((np.round(mesh.points[ids], 9).tolist(), np.asarray(rows).tolist()))
    return found


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("nodes", ["cells", "points"])
def test_pieces_are_the_mesh(worlds, tmp_path, ranks, nodes):
    for at, (shape, kinds) in enumerate(MESHES[:: 1 if ranks == 3 else 2]):
        folder = tmp_path / str(at)
        folder.mkdir()
        file = saved(folder, *box(shape, kinds))
        assert_pieces(worlds, folder, file, nodes, ranks)


def assert_pieces(worlds, folder, file, nodes, ranks):
    mesh = read_mesh(file, nodes)
    count = mesh.data.num_nodes
    owners = [i * i % max(1, ranks - 1) for i in range(count)]  # the last of several owns nothing
    sizes = worlds.run(ranks, written, str(folder), str(file), nodes, owners)
    assert sum(sizes) == count
    times = [
        (one.get("timestep"), one.get("file"))
        for one in ElementTree.parse(folder / "out.pvd").iter("DataSet")
    ]
    assert times == [("0.0", "out/00000.pvtu"), ("0.25", "out/00001.pvtu")]
    for time, index in times:
        root = ElementTree.parse(folder / index).getroot()
        arrays = {one.get("Name"): one for one in root.iter("PDataArray")}
        assert arrays["value"].get("NumberOfComponents") == "2"
        pieces = [meshio.read(folder / "out" / one.get("Source")) for one in root.iter("Piece")]
        assert len(pieces) == sum(size > 0 for size in sizes)
        # what one process writes
        mesh.write(folder / "one.vtu", value=field_of(mesh.data.pos) + float(time))
        fields = "cell_data" if nodes == "cells" else "point_data"
        expected = meshio.read(folder / "one.vtu")
        whole = cells_of(expected, getattr(expected, fields)["value"], nodes == "cells")
        found = []
        for piece in pieces:
            assert getattr(piece, fields).keys() == {"value", "flag"}
            found += cells_of(piece, getattr(piece, fields)["value"], nodes == "cells")
        assert sorted(found) == sorted(whole)


@pytest.mark.parametrize("nodes", ["cells", "points"])
def test_pieces_of_an_openfoam_case(worlds, tmp_path, nodes):
    case = write_case(tmp_path / "case", (3, 2, 2))
    assert_pieces(worlds, tmp_path, case, nodes, 3)


def refusals(rank, folder, file):
    mesh = read_mesh(file)
    graph = partition(mesh.data, method="block")
    other = read_mesh(file, nodes="cells")
    make = Refused(lambda *args: MeshWriter(*args))
    for word, args in (
        ("pvd", (f"{folder}/out.vtu", graph, mesh)),
        ("nowhere", (f"{folder}/nowhere/out.pvd", graph, mesh)),
        ("rank 0 must pass", (f"{folder}/out.pvd", graph, other)),
        ("None", (f"{folder}/out.pvd", graph, None if rank == 0 else mesh)),
    ):
        make(varcomm.VarcommError, (word,), *args)
    writer = MeshWriter(f"{folder}/out.pvd", graph, mesh)
    write = Refused(writer.write)
    own = torch.zeros(graph.num_owned)
    write(varcomm.VarcommError, ("one row",), 0.0, x=own[: len(own) - (rank == 1)])
    write(varcomm.VarcommError, ("real",), 0.0, x=own.to(torch.complex64))
    write(varcomm.VarcommError, ("finite",), float("nan"))
    write(varcomm.VarcommError, ("disagree on time",), float(rank))
    write(varcomm.VarcommError, ("disagree on fields",), 0.0, x=own.double() if rank else own)
    return make.told + write.told


def test_refused_on_all_ranks(worlds, tmp_path):
    file = saved(tmp_path, *box((2, 2), ["quad"]))
    assert_told(worlds.run(3, refusals, str(tmp_path), str(file)))
    assert not [*(tmp_path / "out").iterdir()]
