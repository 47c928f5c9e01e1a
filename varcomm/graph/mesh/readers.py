"""Readers of mesh files, and of the meshes of other libraries."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element

import numpy as np

from varcomm.errors import ArgumentError, MissingPackageError
from varcomm.graph.libraries import package
from varcomm.graph.mesh.gmsh import completed
from varcomm.graph.mesh.openfoam import is_case, read_case
from varcomm.graph.mesh.polyhedra import PolyMesh, polyhedral
from varcomm.graph.mesh.vtk_xml import read_vtu, step_of
from varcomm.graph.ragged import Ragged

logger = logging.getLogger("varcomm")

# files of VTK that PyVista reads, beside those of meshio
_OF_VTK = {".vtk", ".vtp", ".vts", ".vtr", ".vti", ".vtm", ".vtkhdf", ".pvts", ".pvtr", ".pvti"}
_XML = {".vtu", ".pvtu", ".pvd"}
SUFFIXES = _OF_VTK | _XML


class Reader(NamedTuple):
    """A reader of files that it accepts: of a path, and of a step of a series."""

    accepts: Callable[[Path], bool]
    read: Callable[[Path, int], Any]


def read_source(path: Path, step: int) -> Any:
    """Return the contents of a file, by the first reader that accepts it."""
    reader = next(reader for reader in READERS if reader.accepts(path))
    return _with_polyhedra(_checked(path, lambda: reader.read(path, step)))


def source_of(mesh: Any) -> Any:
    """Return the contents of a mesh of meshio or PyVista."""
    if isinstance(mesh, PolyMesh):
        return mesh
    if hasattr(mesh, "IsA"):  # an object of VTK
        return _from_vtk(mesh)
    if all(hasattr(mesh, name) for name in ("points", "cells", "point_data", "cell_data")):
        return _with_polyhedra(mesh)
    raise ArgumentError(
        f"expected a path or a mesh of meshio or PyVista; got {type(mesh).__name__}. Pass one of "
        "them."
    )


def _case(path: Path, step: int) -> Any:
    if step:
        raise ArgumentError("step is of no use for a case. Pass the folder of a time.")
    return read_case(path)


def _meshio(path: Path, step: int) -> Any:
    step_of(1, step)
    with _quiet(path) as meshio:
        return meshio.read(path)


def _gmsh(path: Path, step: int) -> Any:
    try:
        return _meshio(path, step)
    except ValueError:  # cells with and without a physical group
        content = completed(path.read_bytes())
        if content is None:
            raise
        with TemporaryDirectory() as folder:
            file = Path(folder, path.name)
            file.write_bytes(content)
            return _meshio(file, step)


def _xdmf(path: Path, step: int) -> Any:
    if b"Temporal" not in path.read_bytes():
        return _meshio(path, step)
    with _quiet(path) as meshio, meshio.xdmf.TimeSeriesReader(path) as series:
        at = step_of(series.num_steps, step)
        steps, mesh = (series.collection[at], series.mesh_grid), Element("Grid")
        for part in ("Topology", "Geometry"):  # each may change in time
            found = [grid.find(part) for grid in steps if grid.find(part) is not None]
            if not found or len(found[0]) != 1:
                raise ArgumentError(f"a step has no {part} of its own. Write one file per step.")
            mesh.append(found[0])
        series.mesh_grid = mesh
        points, cells = series.read_points_cells()
        _, point_data, cell_data = series.read_data(at)
        return meshio.Mesh(points, cells, point_data, cell_data)


# Places of Exodus' points in cells of VTK: Exodus has upright edges before those at the top.
_EXODUS = [*range(12), *range(16, 20), *range(12, 16), 23, 24, 25, 26, 21, 22, 20]


def _exodus(path: Path, step: int) -> Any:
    mesh = _meshio(path, step)
    for block in mesh.cells:
        if block.type in ("hexahedron20", "hexahedron27"):
            block.data = block.data[:, _EXODUS[: block.data.shape[1]]]
    return mesh


def _pyvista(path: Path, step: int) -> Any:
    pyvista = package("pyvista", "read_mesh")
    with pyvista.VtkErrorCatcher(send_to_logging=False) as seen:
        reader = pyvista.get_reader(path)
        steps = getattr(reader, "number_time_points", 1)
        at = step_of(steps, step)
        if steps > 1:
            reader.set_active_time_point(at)
        mesh = reader.read()
    if seen.events:  # VTK returns what it has read of a file that is cut off
        raise ArgumentError("VTK reports a fault in this file. Write it again.")
    return _from_vtk(mesh)


def _legacy(path: Path, step: int) -> Any:
    try:  # first, because VTK lacks dtypes that meshio writes
        return _meshio(path, step)
    except (Exception, SystemExit):
        if not _is_of_vtk(path):
            raise
    return _pyvista(path, step)


def _suffix(*suffixes: str) -> Callable[[Path], bool]:
    return lambda path: path.suffix.lower() in suffixes


def _is_of_vtk(path: Path) -> bool:
    return path.suffix.lower() in _OF_VTK and find_spec("pyvista") is not None


# The first that accepts a file reads it.
READERS = (
    Reader(is_case, _case),
    Reader(_suffix(*_XML), read_vtu),
    Reader(_suffix(".vtk"), _legacy),
    Reader(_is_of_vtk, _pyvista),
    Reader(_suffix(".msh"), _gmsh),
    Reader(_suffix(".xdmf", ".xmf"), _xdmf),
    Reader(_suffix(".e", ".ex2", ".exo"), _exodus),
    Reader(lambda path: True, _meshio),
)


def _from_vtk(mesh: Any) -> Any:
    """Return a mesh of PyVista or VTK, as the VTU file that it writes."""
    pyvista = package("pyvista", "read_mesh")
    mesh = pyvista.wrap(mesh)
    if isinstance(mesh, pyvista.MultiBlock):
        blocks = [block for block in mesh.recursive_iterator(skip_none=True) if block.n_cells]
        if len(blocks) != 1:
            raise ArgumentError(
                f"it holds {len(blocks)} meshes. Pass one of them, mesh[i], or all as one, "
                "mesh.combine(merge_points=True), of mesh = pyvista.read(path)."
            )
        mesh = blocks[0]
    with TemporaryDirectory() as folder:
        file = Path(folder, "mesh.vtu")
        mesh.cast_to_unstructured_grid().save(file)
        return read_vtu(file, 0)


def _with_polyhedra(source: Any) -> Any:
    """Return meshio's mesh as a PolyMesh if some cells are polyhedra."""
    if isinstance(source, PolyMesh) or not any(_is_polyhedra(each) for each in source.cells):
        return source
    blocks, faces, cell, first = [], [], [], 0
    for block in source.cells:
        ids = np.arange(first, first + len(block.data))
        first += len(ids)
        if not _is_polyhedra(block):
            blocks.append((block.type, block.data, ids))
            continue
        for row, faces_of_cell in zip(ids, block.data, strict=True):
            faces += [*faces_of_cell]
            cell += [row] * len(faces_of_cell)
    lists = Ragged(np.cumsum([len(face) for face in faces]), np.concatenate(faces))
    fields = {name: np.concatenate(parts) for name, parts in source.cell_data.items()}
    points = np.asarray(source.points)
    return polyhedral(points, blocks, lists, np.array(cell), source.point_data, fields)


def _is_polyhedra(block: Any) -> bool:
    return bool(block.type.startswith("polyhedron"))


@contextmanager
def _quiet(path: Path) -> Iterator[Any]:
    """Yield meshio; what it prints goes to the log, and cells that it leaves out are an error."""
    meshio, said = package("meshio", "read_mesh"), io.StringIO()
    with redirect_stdout(said), redirect_stderr(said), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy, while meshio tries formats
        yield meshio
    printed = " ".join(said.getvalue().split())
    if "cannot handle" in printed:
        raise ArgumentError("meshio leaves out some of its cells. Split them, or convert to VTU.")
    if printed:
        logger.warning("read_mesh: %s: %s", path, printed)


def _checked(path: Path, read: Callable[[], Any]) -> Any:
    """Return the contents of a file, or raise ArgumentError with the next step."""
    if not path.exists():
        raise ArgumentError(f"read_mesh: there is no file {path}. Pass an existing file or case.")
    try:
        return read()
    except ArgumentError as error:
        has_path = str(error).startswith("read_mesh: ")
        raise error if has_path else ArgumentError(f"read_mesh: {path}: {error}") from error
    except MissingPackageError:
        raise
    except ImportError as error:
        raise MissingPackageError(
            f"{path} needs {error.name}: pip install {error.name}."
        ) from error
    except (PermissionError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        fault = "it is empty, cut off, damaged, or not in the format of its suffix"
        cure = "Write the file again, or convert it to VTU, as with ParaView."
        if path.is_dir() or path.suffix == ".foam":
            fault = "it is no OpenFOAM case"
            cure = "Pass a file, or the folder of a case, in which constant/polyMesh exists."
        elif path.suffix.lower() == ".msh":
            cure = (
                f"Convert it: gmsh {path.name} -save -format vtk -o out.vtk; pip install pyvista."
            )
        elif path.suffix.lower() in _OF_VTK and not _is_of_vtk(path):
            cure = "Install PyVista, which reads all files of VTK: pip install pyvista."
        raise ArgumentError(f"read_mesh: {path} cannot be read: {fault}. {cure}") from error
