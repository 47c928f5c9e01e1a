"""``Rows`` of grids in files: NetCDF 3, HDF5, zarr and npy, packed values, names of axes."""

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from tests.worlds import on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import Rows, partition

xarray, h5py = pytest.importorskip("xarray"), pytest.importorskip("h5py")
pytest.importorskip("scipy")
pytest.importorskip("zarr")

TIME, LEVEL, LAT, LON = 4, 2, 5, 6
SIZES = {"time": TIME, "level": LEVEL, "lat": LAT, "lon": LON}


def field(*dims):
    """Return values that int16 packs with a scale of 0.25 and an offset of 200; one is missing."""
    drawn = np.random.default_rng(0).integers(-99, 99, [SIZES[dim] for dim in dims])
    values = drawn.astype("f4") / 4 + 200
    values[(-1,) * values.ndim] = np.nan
    return xarray.DataArray(values, dims=dims)


FIELDS = {
    "air": field("time", "lat", "lon"),
    "wind": field("time", "level", "lat", "lon"),
    "land": field("lat", "lon"),
    "last": field("lat", "lon", "time"),
}
PACKED = {"dtype": "i2", "scale_factor": 0.25, "add_offset": 200.0, "_FillValue": -999}
FILLED = {"_FillValue": np.float32(1e20)}
FILES = (
    "classic.nc",
    "packed3.nc",
    "chunked.nc",
    "packed4.nc",
    "v2.zarr",
    "v3.zarr",
    "packed2.zarr",
    "packed3.zarr",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write the fields with xarray in every format, plain and packed."""
    path, data = tmp_path_factory.mktemp("grids"), xarray.Dataset(FIELDS)
    data = data.assign_coords(lat=np.arange(LAT) * 1.0, lon=np.arange(LON) * 1.0)
    filled, packed = dict.fromkeys(FIELDS, FILLED), dict.fromkeys(FIELDS, PACKED)
    data.to_netcdf(path / "classic.nc", engine="scipy", encoding=filled)
    record = {"engine": "scipy", "encoding": {"air": FILLED}, "unlimited_dims": ["time"]}
    data[["air"]].to_netcdf(path / "record.nc", **record)
    data.to_netcdf(path / "packed3.nc", engine="scipy", encoding=packed)
    sizes = {"time": 2, "level": 1, "lat": 3, "lon": 4}
    chunks = {k: {"chunksizes": tuple(sizes[d] for d in v.dims)} for k, v in FIELDS.items()}
    every = {key: FILLED | chunks[key] for key in FIELDS}
    data.to_netcdf(path / "chunked.nc", engine="h5netcdf", encoding=every)
    data.to_netcdf(path / "packed4.nc", engine="h5netcdf", encoding=packed)
    one = {k: {"chunks": [1, *v.shape[1:]]} for k, v in FIELDS.items()}
    every = {key: FILLED | one[key] for key in FIELDS}
    data.to_zarr(path / "v2.zarr", encoding=every, zarr_format=2, consolidated=False)
    data.to_zarr(path / "v3.zarr", encoding=every, zarr_format=3, consolidated=False)
    data.to_zarr(path / "packed2.zarr", encoding=packed, zarr_format=2, consolidated=False)
    data.to_zarr(path / "packed3.zarr", encoding=packed, zarr_format=3, consolidated=False)
    for name, values in FIELDS.items():
        np.save(path / f"{name}.npy", values)
    (path / "notes.nc").write_text("no field")
    return path


def graph_of_grid(nodes=LAT * LON):
    ids = torch.arange(nodes)
    return partition(
        Data(edge_index=torch.stack([ids, ids.roll(7)]), num_nodes=nodes), None, "random"
    )


def compare(rows, graph, values):
    """Compare with values of dimensions (time, lat, lon, ...), some of which are missing."""
    expected = torch.from_numpy(np.ascontiguousarray(values)).flatten(1, 2)[:, graph.owned_ids]
    found = torch.stack([*rows])
    torch.testing.assert_close(found, expected, equal_nan=True, check_dtype=False)
    assert found.is_floating_point()


@on_ranks(3)
def test_fields_of_every_format(rank, folder):
    """A grid is flattened in the order of its axes; the rest are features, or samples."""
    graph = graph_of_grid()
    names = {name: values.values for name, values in FIELDS.items()}
    for file in FILES:
        path, axis = str(folder / file), ("lat", "lon")
        compare(Rows(path, graph, variable="air", axis=axis), graph, names["air"])
        wind = Rows(path, graph, variable="wind", axis=axis)
        assert wind.shape == (TIME, LAT * LON, LEVEL)
        compare(wind, graph, np.moveaxis(names["wind"], 1, -1))
        land = Rows(path, graph, variable="land", axis=axis)
        assert land.shape == (1, LAT * LON)
        compare(land, graph, names["land"][None])
        last = Rows(path, graph, variable="last", axis=axis, sample_axis="time")
        compare(last, graph, np.moveaxis(names["last"], -1, 0))
        turned = Rows(path, graph, variable="air", axis=("lon", "lat"))
        compare(turned, graph, names["air"].swapaxes(1, 2))
    for axis in ((1, 2), (-2, -1), [1, 2]):
        compare(Rows(folder / "air.npy", graph, axis=axis), graph, names["air"])
    compare(Rows(folder / "land.npy", graph, axis=(0, 1)), graph, names["land"][None])
    rows = Rows(
        str(folder / "air.npy"), graph, axis=(0, 1), sample_axis=None, rows=graph.owned_ids % 20
    )
    assert rows.shape == (1, LAT * LON, LON)


@on_ranks(3)
def test_open_arrays(rank, folder):
    """Arrays and groups that the program has opened are read like their files."""
    graph, air = graph_of_grid(), FIELDS["air"].values
    axis = ("lat", "lon")
    raw = xarray.open_dataset(folder / "packed4.nc", engine="h5netcdf", mask_and_scale=False)
    decoded = xarray.open_dataset(folder / "packed4.nc", engine="h5netcdf")
    file = h5py.File(folder / "packed4.nc")
    for source in (raw["air"], decoded["air"], file["air"], FIELDS["air"]):
        compare(Rows(source, graph, axis=axis), graph, air)
    for source in (raw, file, lambda: h5py.File(folder / "chunked.nc"), FIELDS):
        compare(Rows(source, graph, variable="air", axis=axis), graph, air)
    compare(Rows(folder / "record.nc", graph, axis=axis), graph, air)  # has one field
    masked = np.ma.masked_invalid(air)
    compare(Rows(masked, graph, axis=(1, 2)), graph, air)
    small = np.array([[[-1, 1], [2, 3]]], np.int8)
    with h5py.File(folder / f"unsigned{rank}.h5", "w") as made:
        made["x"] = small
        made["x"].attrs.update({"_Unsigned": b"true", "scale_factor": np.float32(2)})
    four = graph_of_grid(4)
    rows = Rows(str(folder / f"unsigned{rank}.h5"), four, axis=(1, 2))
    assert rows[0].tolist() == [[510.0, 2.0, 4.0, 6.0][i] for i in four.owned_ids]
    (batch,) = Rows(
        str(folder / "classic.nc"), graph, variable="air", axis=axis, halo="read"
    ).loader(TIME, num_workers=1)
    known = torch.cat([graph.owned_ids, graph.halo_ids])
    expected = torch.from_numpy(air).flatten(1)[:, known]
    torch.testing.assert_close(batch, expected, equal_nan=True, check_dtype=False)


@on_ranks(3)
def test_refused_grids(rank, folder):
    graph, last = graph_of_grid(), rank == 2
    right = {"variable": "air", "axis": ("lat", "lon")}
    for path, options, message in [
        ("classic.nc", {"axis": 1}, r"5 rows along axis=1.*30 nodes. Pass axis=\('lat', 'lon'\)"),
        ("classic.nc", {"axis": ("y", "x")}, r"no axis 'y', but shape.*\(time, lat, lon\)"),
        ("classic.nc", {"axis": ("lat", "lat")}, "different axes"),
        ("classic.nc", {"axis": ()}, "at least one"),
        ("classic.nc", {"axis": 1.5}, "no axis 1.5"),
        ("classic.nc", {"sample_axis": "when"}, "no axis 'when'"),
        ("classic.nc", {"variable": "wet"}, "no array 'wet'.*air, land, last, lat, lon, wind"),
        ("classic.nc", {"variable": None}, "several arrays"),
        ("v3.zarr", {"variable": "wet"}, "no array 'wet'"),
        ("land.npy", {"axis": 1}, r"Pass axis=\(0, 1\)"),
        ("land.npy", {}, "names are unknown"),
        ("none.nc", {}, "No such file"),
        ("notes.nc", {}, "not a .npy, zarr, HDF5 or NetCDF file"),
    ]:
        given = (path, right | options) if last else ("classic.nc", right)
        with pytest.raises(ArgumentError, match=message) as raised:
            Rows(str(folder / given[0]), graph, **given[1])
        assert "rank 2 of 3" in str(raised.value)
    square = np.zeros((2, 3, 3), "f4")
    for one, other in [
        ({"source": square, "axis": (1, 2)}, {"source": square, "axis": (2, 1)}),
        (
            {"source": {"a": square, "b": square}, "variable": "a", "axis": (1, 2)},
            {"variable": "b"},
        ),
    ]:
        with pytest.raises(DisagreementError):
            Rows(graph=graph_of_grid(9), **(one | other if last else one))


def test_a_rectangle_is_one_request_and_chunks_are_read_once():
    from varcomm.graph.samples.stored_array import StoredArray

    class Counted:
        def __init__(self, array, chunks):
            self.array, self.shape, self.chunks, self.calls = array, array.shape, chunks, []

        def __getitem__(self, index):
            self.calls.append(index)
            return self.array[index]

    values = np.arange(2.0 * 40 * 60).reshape(2, 40, 60)
    ids = np.arange(2400).reshape(40, 60)[10:30, 20:50].ravel()
    for chunks, requests, numbers in ((None, 1, 600), ((1, 10, 60), 1, 1200), ((1, 8, 8), 3, 960)):
        stored = StoredArray(Counted(values, chunks), None, (1, 2), 0)
        found = stored.requests(ids)
        rows, touched = stored.read(1, found)
        assert np.array_equal(rows, values[1].ravel()[ids])
        assert (len(found), touched) == (requests, 8 * numbers), chunks
