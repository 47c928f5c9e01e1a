"""OpenFOAM cases, written here by hand: cells or points as nodes, fields, and refusals."""

import gzip
from dataclasses import replace
from itertools import product

import meshio
import numpy as np
import pytest
import torch

import varcomm
from tests.graph.test_mesh import box, saved
from varcomm.graph import read_mesh
from varcomm.graph.mesh.openfoam import _check, read_case

NAMES = ("points", "faces", "owner", "neighbour", "boundary")


def block(shape):
    """A box of unit cubes as OpenFOAM has it: points, faces, owner, neighbour, patches."""
    points, blocks = box(shape, ["hexahedron"])
    sides = [(0, 3, 2, 1), (4, 5, 6, 7), (0, 1, 5, 4), (1, 2, 6, 5), (2, 3, 7, 6), (3, 0, 4, 7)]
    found = {}
    for cell, (_, corners) in enumerate(blocks):
        for side in sides:
            face = [int(corners[0][k]) for k in side]
            found.setdefault(frozenset(face), []).append((cell, face))
    inner = sorted((a[0], b[0], a[1]) for a, b in (f for f in found.values() if len(f) == 2))
    outer = [f[0] for f in found.values() if len(f) == 1]
    floor = [f for f in outer if (points[f[1]][:, 2] == 0).all()]
    walls = [f for f in outer if f not in floor]
    faces = [face for *_, face in inner] + [face for _, face in floor + walls]
    owner = [a for a, *_ in inner] + [cell for cell, _ in floor + walls]
    patches = {"floor": (len(inner), len(floor)), "walls": (len(inner) + len(floor), len(walls))}
    return points, faces, owner, [b for _, b, _ in inner], patches


def head(kind, name, form, arch=""):
    return (
        "/*--------*- C++ -*--------*\\\n| // a banner |\n\\*------------------*/\n"
        f"FoamFile\n{{\n    version 2.0;\n    format {form};\n    {arch}    class {kind};\n"
        f'    note "nCells: 1";\n    object {name};\n}}\n// * * //\n\n'
    ).encode()


def listed(values, dtype, is_binary):
    if is_binary:
        raw = np.asarray(values).astype(dtype).tobytes()
        return f"{len(values)}\n(".encode() + raw + b")\n" if len(values) else b"0\n"
    rows = [str(v) if np.ndim(v) == 0 else f"({' '.join(map(str, v))})" for v in values]
    return f"{len(values)}\n(\n{chr(10).join(rows)}\n)\n// end\n".encode()


def write_case(folder, shape, form="ascii", label=32, scalar=64, zipped=False, fields=()):
    points, faces, owner, neighbour, patches = block(shape)
    mesh, binary = folder / "constant" / "polyMesh", form == "binary"
    mesh.mkdir(parents=True)
    ints, floats = f"<i{label // 8}", f"<f{scalar // 8}"
    arch = f'arch "LSB;label={label};scalar={scalar}";\n' if binary else ""
    text = {
        "points": ("vectorField", listed(points, floats, binary)),
        "owner": ("labelList", listed(owner, ints, binary)),
        "neighbour": ("labelList", listed(neighbour, ints, binary)),
    }
    if binary:
        ends = np.cumsum([0, *map(len, faces)])
        content = listed(ends, ints, True) + listed(np.concatenate(faces), ints, True)
        text["faces"] = ("faceCompactList", content)
    else:
        rows = [f"{len(f)}({' '.join(map(str, f))})" for f in faces]
        text["faces"] = ("faceList", f"{len(faces)}\n(\n{chr(10).join(rows)}\n)\n".encode())
    entries = "".join(
        f"{name}\n{{ type wall; inGroups 1(wall); nFaces {n}; startFace {first}; }}\n"
        for name, (first, n) in patches.items()
    )
    text["boundary"] = ("polyBoundaryMesh", f"{len(patches)}\n(\n{entries})\n".encode())
    for name, (kind, content) in text.items():
        content = head(kind, name, form, arch) + content
        path = mesh / (f"{name}.gz" if zipped else name)
        path.write_bytes(gzip.compress(content) if zipped else content)
    time = folder / "0.5"
    time.mkdir()
    for name, kind, values in fields:
        noun = kind.removeprefix("vol").removeprefix("point").removesuffix("Field").lower()
        values = (
            b"nonuniform List<" + noun.encode() + b">\n" + listed(values, floats, binary)
            if isinstance(values, np.ndarray)
            else f"uniform {values}".encode()
        )
        content = head(kind, name, form, arch) + b"dimensions [0 1 -1 0 0 0 0];\n\ninternalField "
        (time / name).write_bytes(content + values + b";\n\nboundaryField\n{\n floor { }\n}\n")
    return folder


FORMS = [
    {},
    {"form": "binary"},
    {"form": "binary", "label": 64, "scalar": 32},
    {"zipped": True},
    {"form": "binary", "label": 64, "zipped": True},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_case_is_the_same_mesh_as_a_vtu_file(tmp_path, form):
    shape = (3, 2, 4)
    rng, cells = np.random.default_rng(0), 24
    velocity, height = rng.random((cells, 3)).astype("f4"), rng.random(60).astype("f4")
    fields = [("U", "volVectorField", velocity), ("p", "volScalarField", "2.5")]
    fields += [("h", "pointScalarField", height), ("phi", "surfaceScalarField", "0")]
    case = write_case(tmp_path / "case", shape, fields=fields, **form)
    (case / "0.5" / "notes").write_text("no field")
    points, blocks = box(shape, ["hexahedron"])
    reference = saved(tmp_path, points, blocks)
    for nodes in ("cells", "points"):
        found, expected = (read_mesh(path, nodes).data for path in (case, reference))
        assert torch.equal(found.edge_index, expected.edge_index)
        torch.testing.assert_close(found.pos.double(), expected.pos, rtol=1e-6, atol=1e-6)
        if nodes == "cells":
            torch.testing.assert_close(found.volume.double(), expected.volume, rtol=1e-6, atol=0)
    found = read_mesh(case / "0.5", "cells")
    torch.testing.assert_close(found.data.U, torch.from_numpy(velocity).to(found.data.U.dtype))
    assert found.data.p.tolist() == [2.5] * cells
    assert [*found.source.patches] == ["floor", "walls"]
    on_floor = found.data.pos[:, 2] == 0.5
    assert torch.equal(found.data.patches[:, 0], on_floor)
    assert torch.equal(found.data.patches[:, 1].nonzero().view(-1), walls_of(shape))
    at_points = read_mesh(case / "0.5").data
    assert {"h", "patches"} <= {*at_points.keys()}
    assert "U" not in at_points
    assert torch.equal(at_points.patches[:, 0], at_points.pos[:, 2] == 0)
    # results go back as polyhedra
    found.write(tmp_path / "out.vtu", heat=torch.arange(cells))
    out = meshio.read(tmp_path / "out.vtu")
    (polyhedra,) = out.cells
    assert (polyhedra.type, len(polyhedra.data)) == ("polyhedron8", cells)
    assert out.cell_data["heat"][0].tolist() == list(range(cells))
    for cell, faces in enumerate(polyhedra.data):
        middle = out.points[np.unique(np.concatenate(faces))].mean(axis=0)
        np.testing.assert_allclose(middle, found.data.pos[cell], rtol=1e-6)


def by_openfoam(points, faces, owner, neighbour):
    """Volumes of cells and area vectors of faces, by the loops of OpenFOAM's primitiveMesh."""
    areas, centres = [], []
    for face in faces:
        corners = [points[i] for i in face]
        middle = sum(corners) / len(corners)
        total, weights, moment = np.zeros(3), 0.0, np.zeros(3)
        for a, b in zip(corners, corners[1:] + corners[:1], strict=True):
            normal = np.cross(b - a, middle - a)
            weight = np.linalg.norm(normal)
            total, weights = total + normal, weights + weight
            moment = moment + weight * (a + b + middle)
        areas.append(total / 2)
        centres.append(moment / weights / 3)
    cells = max(owner) + 1
    around = [[] for _ in range(cells)]
    for i, cell in enumerate(owner):
        around[cell].append((i, 1))
    for i, cell in enumerate(neighbour):
        around[cell].append((i, -1))
    volumes = np.zeros(cells)
    for cell, own in enumerate(around):
        apex = sum(centres[i] for i, _ in own) / len(own)
        volumes[cell] = sum(sign * areas[i] @ (centres[i] - apex) for i, sign in own) / 3
    return volumes, np.array(areas)


def test_volumes_and_areas_are_those_of_openfoam(tmp_path):
    shape = (3, 2, 2)
    case = write_case(tmp_path / "case", shape)
    points, faces, owner, neighbour, _ = block(shape)
    points = points + np.random.default_rng(0).uniform(-0.3, 0.3, points.shape) + [1e4, 0, 0]
    content = head("vectorField", "points", "ascii") + listed(points, "<f8", False)
    (case / "constant" / "polyMesh" / "points").write_bytes(content)
    volumes, areas = by_openfoam(points - [1e4, 0, 0], faces, owner, neighbour)
    mesh = read_mesh(case, "cells")
    np.testing.assert_allclose(mesh.data.volume, volumes, rtol=1e-11)
    np.testing.assert_allclose(mesh.source.area, areas, atol=1e-11)
    pairs = list(zip(owner, neighbour, strict=False))
    lengths = dict(zip(pairs, np.linalg.norm(areas, axis=1), strict=False))
    expected = [lengths[min(a, b), max(a, b)] for a, b in mesh.data.edge_index.T.tolist()]
    np.testing.assert_allclose(mesh.data.edge_area, expected, rtol=1e-11)
    # a prism with five sides, whose faces are not flat
    ring = [(np.cos(k), np.sin(k)) for k in 2 * np.pi / 5 * np.arange(5)]
    points = np.array([(*place, z) for z in (0, 1) for place in ring])
    points += np.random.default_rng(1).uniform(-0.2, 0.2, points.shape)
    faces = [[4, 3, 2, 1, 0], [5, 6, 7, 8, 9]]
    faces += [[k, (k + 1) % 5, (k + 1) % 5 + 5, k + 5] for k in range(5)]
    mesh = read_mesh(meshio.Mesh(points, [("polyhedron10", [faces])]), "cells")
    volumes, areas = by_openfoam(points, faces, [0] * 7, [])
    np.testing.assert_allclose(mesh.data.volume, volumes, rtol=1e-12)
    total = np.linalg.norm(areas, axis=1).sum()
    assert np.linalg.norm(mesh.source.area, axis=1).sum() == pytest.approx(total, rel=1e-12)


def test_a_face_of_five_corners_that_is_not_flat():
    """By hand, around its mean corner, which is the origin; the volume has the centre of v2212.

    The triangles' normals are (0, 0, 4), twice (3, 0, 4), (3, 0, 0) and (0, -12, 0), of lengths 4,
    5, 5, 3 and 12; the centre is (24, 1, -15) / 87. The sides are flat, with a volume of 11.
    """
    points = np.array([[4, 0, 0], [0, 1, 0], [-4, 0, 3], [0, -1, 0], [0, 0, -3], [-2, 2, -2.0]])
    faces = [[0, 1, 2, 3, 4], *([(k + 1) % 5, k, 5] for k in range(5))]
    mesh = read_mesh(meshio.Mesh(points + 7, [("polyhedron6", [faces])]), "cells")
    assert np.isclose(np.abs(mesh.source.area), [4.5, 6, 6], rtol=1e-12).all(axis=1).any()
    np.testing.assert_allclose(mesh.data.volume, [11 + 4 / 87], rtol=1e-12)


def test_fields_that_are_left_out_are_named(tmp_path, caplog):
    fields = [("U", "volVectorField", np.ones((2, 3))), ("phi", "surfaceScalarField", "0")]
    fields += [("h", "pointScalarField", "1"), ("s", "volSphericalTensorField", np.ones(2))]
    case = write_case(tmp_path / "case", (2, 1, 1), fields=fields)
    inner = (case / "0.5" / "U").read_bytes().replace(b"internalField", b"value")
    inner = inner.replace(b"volVectorField", b"volVectorField::Internal")
    (case / "0.5" / "V").write_bytes(inner.replace(b"object U", b"object V"))
    data = read_mesh(case / "0.5", "cells").data
    assert data.V.tolist() == data.U.tolist() == [[1, 1, 1], [1, 1, 1]]
    assert data.s.tolist() == [1, 1]
    first, second = (record.getMessage() for record in caplog.records)
    assert first.endswith("fields left out: phi (surfaceScalarField)")
    assert second.endswith('fields left out: h. nodes="points" reads them.')
    caplog.clear()
    read_mesh(case / "0.5")
    assert 'U, V, s. nodes="cells"' in caplog.text
    with pytest.raises(varcomm.ArgumentError, match="folder of a time"):
        read_mesh(case, step=1)


def walls_of(shape):
    """Cells with a face at the boundary, other than the floor."""
    last = [n - 1 for n in shape]
    cells = enumerate(product(*map(range, shape)))
    at = [i for i, c in cells if any(c[k] in (0, last[k]) for k in (0, 1)) or c[2] == last[2]]
    return torch.tensor(at)


def test_folders_and_files_that_name_a_case(tmp_path):
    case = write_case(tmp_path / "case", (2, 1, 1))
    (case / "case.foam").touch()
    for path in (case, case / "case.foam", case / "constant" / "polyMesh", case / "0.5"):
        assert read_mesh(path, "cells").data.edge_index.tolist() == [[0, 1], [1, 0]]
    # a moved mesh has points of its own
    (case / "0.5" / "polyMesh").mkdir()
    moved = head("vectorField", "points", "ascii") + b"12{(1 2 3)}\n"
    (case / "0.5" / "polyMesh" / "points").write_bytes(moved)
    assert read_mesh(case / "0.5").data.pos.tolist() == [[1, 2, 3]] * 12


BROKEN = {
    "points": [(b"(0.0 0.0 0.0)", b"(0.0 0.0)"), (b"(0.0 0.0 0.0)", b"(nan 0 0)"), (b"12", b"13")],
    "faces": [(b"4(", b"3("), (b"11\n", b"12\n"), (b"faceList", b"faceBook")],
    "owner": [(b"11\n(", b"10\n("), (b"labelList", b"scalarList"), (b"\n0\n", b"\n-1\n")],
    "neighbour": [(b"1\n(\n1", b"1\n(\n7"), (b"1\n(\n1", b"1\n(\nx"), (b"FoamFile", b"Foam")],
    "boundary": [(b"nFaces 2", b"nFaces 20"), (b"startFace", b"start")],
}


def test_the_last_cell_may_own_no_face(tmp_path):
    mesh = read_case(write_case(tmp_path / "case", (3, 3, 3)))
    number = np.r_[:13, 26, 13:26]  # the middle cell is last
    pairs = number[[mesh.owner[: len(mesh.neighbour)], mesh.neighbour]]
    owner = np.r_[pairs.min(axis=0), number[mesh.owner[len(mesh.neighbour) :]]]
    changed = replace(mesh, owner=owner, neighbour=pairs.max(axis=0))
    assert changed.owner.max() == 25
    assert changed.num_cells == 27
    _check(changed, tmp_path)


def test_broken_cases(tmp_path):
    for name, changes in BROKEN.items():
        for at, (old, new) in enumerate(changes):
            case = write_case(tmp_path / f"{name}{at}", (2, 1, 1))
            path = case / "constant" / "polyMesh" / name
            assert old in path.read_bytes(), (name, old)
            path.write_bytes(path.read_bytes().replace(old, new, 1))
            with pytest.raises(varcomm.ArgumentError, match=rf"^read_mesh: .*{case.name}"):
                read_mesh(case)
    for form in ("ascii", "binary"):
        for name in NAMES[:4]:
            case = write_case(tmp_path / f"cut {form} {name}", (2, 1, 1), form)
            path = case / "constant" / "polyMesh" / name
            path.write_bytes(path.read_bytes()[:-12])
            with pytest.raises(varcomm.ArgumentError, match=f"^read_mesh: .*{name}: "):
                read_mesh(case)
    case = write_case(tmp_path / "without", (2, 1, 1))
    (case / "constant" / "polyMesh" / "owner").unlink()
    with pytest.raises(varcomm.ArgumentError, match=r"no file .*owner"):
        read_mesh(case)
    case = write_case(tmp_path / "field", (2, 1, 1), fields=[("p", "volScalarField", np.ones(3))])
    with pytest.raises(varcomm.ArgumentError, match="p: it has 3 values for 2 cells"):
        read_mesh(case / "0.5")
    (tmp_path / "parallel" / "processor0").mkdir(parents=True)
    with pytest.raises(varcomm.ArgumentError, match="reconstructParMesh"):
        read_mesh(tmp_path / "parallel")
    zipped = write_case(tmp_path / "zipped", (2, 1, 1), zipped=True)
    path = zipped / "constant" / "polyMesh" / "faces.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(varcomm.ArgumentError, match=r"faces.gz: it cannot be read"):
        read_mesh(zipped)


def by_one(rank, case):
    """One rank reads; all raise what it raises."""
    mesh = read_mesh(case if rank == 1 else "elsewhere", "cells", src=1)
    assert (mesh is None) == (rank != 1)
    graph = varcomm.graph.partition(mesh.data if mesh else None, src=1)
    assert len(graph.edge_area) == graph.edge_index.size(1)
    with pytest.raises(varcomm.ArgumentError, match=r"refused on rank 1 .*no file missing"):
        read_mesh("missing.vtu", src=1)
    return graph.num_owned


def test_one_rank_reads(worlds, tmp_path):
    case = write_case(tmp_path / "case", (3, 1, 1))
    assert sum(worlds.run(3, by_one, str(case))) == 3
