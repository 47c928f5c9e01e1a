"""``Rows`` and ``RowWriter``: each rank reads and writes its own rows, in every format."""

import pickle
import threading

import numpy as np
import pytest
import torch
from scipy.io import netcdf_file
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torch_geometric.data import HeteroData

import varcomm as vc
from tests.graph.graphs import grid, split_by, wild
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import Rows, RowWriter, assign, partition

zarr, h5py = pytest.importorskip("zarr"), pytest.importorskip("h5py")

SAMPLES, NODES, WIDTH = 3, 24, 2
WORLDS = (3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 2, 5)))
METHODS = ("block", "random", "a rank owns nothing")


def values(samples=SAMPLES, nodes=NODES, dtype=np.float32):
    found = np.random.default_rng(0).normal(size=(samples, nodes, WIDTH)).astype(dtype)
    found[1, nodes // 3 :: 5] = np.nan
    return found


def write_zarr(path, array, chunks=(1, 5, 2), shards=None, **attributes):
    group = zarr.open_group(path, mode="w")
    kwargs = {"chunks": chunks, "shards": shards, "attributes": attributes}
    made = group.create_array("x", shape=array.shape, dtype=array.dtype, **kwargs)
    made[:] = array
    group.create_array("time", shape=(3,), dtype="i4")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return paths of the same values in every format."""
    folder, array = tmp_path_factory.mktemp("rows"), values()
    write_zarr(folder / "plain.zarr", array)
    write_zarr(folder / "sharded.zarr", array, (1, 5, 2), (1, 10, 2))
    write_zarr(folder / "several_samples.zarr", array, (2, 7, 1))
    with h5py.File(folder / "chunked.h5", "w") as file:
        file.create_dataset("x", data=array, chunks=(1, 5, 2), compression="gzip")
    with h5py.File(folder / "contiguous.nc", "w") as file:
        file.create_dataset("x", data=array.astype(">f4"))
        file.create_dataset("time", data=np.arange(3))
    with netcdf_file(folder / "classic.nc", "w") as file:
        for name, size in zip(("t", "n", "c"), array.shape, strict=True):
            file.createDimension(name, None if name == "t" else size)
        file.createVariable("y", "i2", ("t", "n"))[:] = np.arange(SAMPLES * NODES).reshape(3, -1)
        file.createVariable("x", "f4", ("t", "n", "c"))[:] = array
    np.save(folder / "array.npy", array)
    return folder


FORMATS = {
    "plain.zarr": None,
    "sharded.zarr": None,
    "several_samples.zarr": "x",
    "chunked.h5": None,
    "contiguous.nc": "x",
    "classic.nc": "x",
    "array.npy": None,
}


def read_all(rank, ranks, folder):
    """Compare all samples of each format with rows of the array."""
    array, data = torch.from_numpy(values()), wild(NODES)
    for method in METHODS:
        graph = partition(data, method=split_by(method, NODES, ranks))
        own = array[:, graph.owned_ids]
        known = array[:, torch.cat([graph.owned_ids, graph.halo_ids])]
        sources = {name: (f"{folder}/{name}", variable) for name, variable in FORMATS.items()}
        sources["tensor"], sources["array"] = (array, None), (array.numpy()[::-1][::-1], None)
        sources["zarr array"] = zarr.open(f"{folder}/plain.zarr", mode="r")["x"], None
        for name, (source, variable) in sources.items():
            if method != "random" and name not in ("sharded.zarr", "classic.nc"):
                continue
            rows = Rows(source, graph, variable=variable)
            assert rows.shape == tuple(array.shape), name
            assert len(rows) == SAMPLES
            for t in (2, 0, -2):
                torch.testing.assert_close(rows[t], own[t], rtol=0, atol=0, equal_nan=True)
            found = torch.stack([*rows.samples([1, 1, 0])])
            torch.testing.assert_close(found, own[[1, 1, 0]], rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(rows[1:], own[1:], rtol=0, atol=0, equal_nan=True)
            assert rows[3:].shape == (0, *own.shape[1:])
            rows.close()
            assert len([*rows]) == SAMPLES
        for halo in ("exchange", "read"):
            with vc.debug():
                rows = Rows(f"{folder}/sharded.zarr", graph, halo=halo)
                found = torch.stack([*rows])
            torch.testing.assert_close(found, known, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("ranks", WORLDS)
def test_every_format_and_partition(worlds, ranks, files):
    worlds.run(ranks, read_all, ranks, str(files))


# arrays of zarr v2: xarray stores the value of missing data as the fill value
V2 = {"bare": {}, "scaled": {"scale_factor": 0.5}, "xarray": {"_ARRAY_DIMENSIONS": ["t", "n", "c"]}}


def columns_of(rank, folder):
    graph = partition(wild(NODES), method="random")
    ids, array = graph.owned_ids, values()
    both = Rows(f"{folder}/classic.nc", graph, variable=["x", "y"], dtype=torch.float64)
    assert both.shape == (SAMPLES, NODES, WIDTH + 1)
    expected = np.concatenate([array, np.arange(72.0).reshape(3, -1, 1)], axis=2)
    torch.testing.assert_close(both[2], torch.from_numpy(expected)[2, ids], rtol=0, atol=0)
    turned = Rows(np.moveaxis(array, 1, 2), graph, axis=-1)
    torch.testing.assert_close(turned[0], torch.from_numpy(array)[0, ids], rtol=0, atol=0)
    with pytest.raises(ArgumentError, match="dtypes"):
        Rows(f"{folder}/classic.nc", graph, variable=["x", "y"])
    expected = torch.where(ids == 7, torch.nan, ids * 0.5 + 3)
    for name in ("packed.zarr", "second.zarr"):
        packed = Rows(f"{folder}/{name}", graph)
        assert packed[0].dtype == torch.float32
        torch.testing.assert_close(packed[0][:, 0], expected, equal_nan=True, check_dtype=False)
    for name, attributes in V2.items():
        found = Rows(f"{folder}/{name}.zarr", graph)[0][:, 0]
        scale, is_missing = attributes.get("scale_factor", 1), "_ARRAY_DIMENSIONS" in attributes
        assert found.is_floating_point() == bool(attributes)
        expected = torch.where((ids == 0) & is_missing, torch.nan, ids * scale)
        torch.testing.assert_close(found, expected, equal_nan=True, check_dtype=False)
    assert packed.chunk == 1  # one chunk has all rows


def test_variables_axes_and_packed_values(worlds, files):
    packed = np.arange(NODES, dtype=np.int16).reshape(1, -1, 1)
    more = {"scale_factor": 0.5, "add_offset": 3, "_FillValue": 7}
    write_zarr(files / "packed.zarr", packed, (1, 5, 1), **more)
    second = zarr.open_group(files / "second.zarr", mode="w", zarr_format=2)
    fill = more.pop("_FillValue")
    made = second.create_array("x", shape=packed.shape, dtype=packed.dtype, fill_value=fill)
    made[:] = packed
    made.attrs.update(more)
    zeros = np.arange(NODES, dtype=np.int16).reshape(1, -1, 1)
    for name, attributes in V2.items():  # with the fill value that zarr writes by default
        second = zarr.open_group(files / f"{name}.zarr", mode="w", zarr_format=2)
        made = second.create_array("x", shape=zeros.shape, dtype=zeros.dtype, fill_value=0)
        made[:] = zeros
        made.attrs.update(attributes)
    worlds.run(3, columns_of, str(files))


def chosen_rows(rank, folder):
    """Rows of a larger source, in another order than the nodes, some twice."""
    graph, array = partition(wild(12), method="random"), torch.from_numpy(values())
    of_nodes = torch.tensor([23, 5, 5, 0, 22, 7, 8, 9, 3, 1, 2, 17])
    own = of_nodes[graph.owned_ids]
    known = of_nodes[torch.cat([graph.owned_ids, graph.halo_ids])]
    for name in ("plain.zarr", "chunked.h5", "array.npy"):
        for halo in (None, "read", "exchange"):
            rows = Rows(f"{folder}/{name}", graph, rows=own, halo=halo)
            assert (rows.shape, rows.chunk) == ((SAMPLES, 12, WIDTH), 1)
            expected = array[2, known if halo else own]
            torch.testing.assert_close(rows[2], expected, rtol=0, atol=0, equal_nan=True)
    assert rows.bytes_read == len(own.unique()) * WIDTH * 4
    last = rank == 2
    for wrong, message in [
        (own[:-1], "11|row of each of the"),
        (own + 1, "out of range for 24 rows"),
        (own.float(), "torch.int64"),
        (own.tolist(), "must be a torch.Tensor"),
    ]:
        with pytest.raises(ArgumentError, match=f"rank 2 of 3.*({message})"):
            Rows(array, graph, rows=wrong if last else own)
    with pytest.raises(DisagreementError, match="rows="):
        Rows(array[:, :12], graph, rows=None if last else own % 12)


def test_rows_of_a_larger_source(worlds, files):
    worlds.run(3, chosen_rows, str(files))


def bytes_of(rank, folder):
    data = grid(40, 30)
    nodes, found = data.num_nodes, {}
    for name in ("wide.zarr", "wide.h5", "wide.npy"):
        graph = partition(data, method="block")
        rows = Rows(f"{folder}/{name}", graph)
        for _ in rows.samples():
            pass
        owned = len(rows) * graph.num_owned * WIDTH * 4
        found[name] = rows.bytes_read / owned
        kept = partition(data, method="metis", chunk=max(1, rows.chunk))
        again = Rows(f"{folder}/{name}", kept)
        again[0]
        assert again.bytes_read == kept.num_owned * WIDTH * 4, "no chunk is on two ranks"
    ids = torch.arange(nodes)
    owner = assign(data, 3, "metis", chunk=16)
    assert torch.equal(owner, owner[ids // 16 * 16])
    return found


def test_bytes_are_those_of_the_owned_rows(worlds, tmp_path):
    array = values(2, 1200)
    write_zarr(tmp_path / "wide.zarr", array, (1, 16, 2), (1, 64, 2))
    with h5py.File(tmp_path / "wide.h5", "w") as file:
        file.create_dataset("x", data=array, chunks=(1, 16, 2), compression="gzip")
    np.save(tmp_path / "wide.npy", array)
    for found in worlds.run(3, bytes_of, str(tmp_path)):
        assert all(1 <= ratio <= 1.2 for ratio in found.values()), found
        assert found["wide.npy"] == 1


def fails_in_the_thread(rank, path):
    graph = partition(wild(NODES), method="block")
    rows = Rows(path, graph)
    found, before = rows.samples(ahead=2), threading.active_count()
    next(found)
    assert threading.active_count() <= before + 1
    with pytest.raises(ArgumentError, match="sample 2, cannot be read"):
        list(found)
    unused = rows.samples([0, 0, 0, 0, 0], ahead=1)
    next(unused)
    unused.close()
    del unused
    names = [thread.name for thread in threading.enumerate()]
    assert not any("varcomm.graph.Rows" in name for name in names), names
    with pytest.raises(IndexError, match="out of range"):
        [*rows.samples([0, SAMPLES])]
    with pytest.raises(ArgumentError, match="ahead"):
        rows.samples(ahead=0)


def test_an_error_of_the_thread_is_raised_at_the_caller(worlds, tmp_path):
    path = tmp_path / "damaged.zarr"
    write_zarr(path, values())
    for file in (path / "x" / "c" / "2").rglob("*"):
        if file.is_file():
            file.write_bytes(b"damaged")
    worlds.run(3, fails_in_the_thread, str(path))


def fails_before_the_exchange(rank, folder):
    graph = partition(wild(NODES), method="block")
    name = "damaged" if rank else "whole"
    rows = Rows(f"{folder}/{name}.zarr", graph, halo="exchange")
    found = rows.samples(ahead=1)
    next(found)
    with pytest.raises(ArgumentError, match=r"rank 1 of 2.*sample 1, cannot be read"):
        next(found)
    with pytest.raises(ArgumentError, match=r"rank 1 of 2.*sample 1, cannot be read"):
        rows[1]
    for bad in (99, "a"):
        with pytest.raises((ArgumentError, IndexError), match=r"out of range|an integer"):
            rows[bad if rank else 0]
    assert len(rows[2]) == graph.num_owned + graph.num_halo


def test_all_ranks_raise_a_read_error_before_the_exchange(worlds, tmp_path):
    for name in ("whole", "damaged"):
        write_zarr(tmp_path / f"{name}.zarr", values())
    for file in (tmp_path / "damaged.zarr" / "x" / "c" / "1").rglob("*"):
        if file.is_file():
            file.write_bytes(b"damaged")
    worlds.run(2, fails_before_the_exchange, str(tmp_path))


def loaded(rank, folder):
    graph = partition(wild(NODES), method="random")
    array = torch.from_numpy(values())
    rows = Rows(f"{folder}/sharded.zarr", graph)
    rows[0]  # open here before workers fork
    orders = []
    for workers in (0, 2):
        batches = rows.loader(2, [0, 2, 1, 2], shuffle=True, seed=3, num_workers=workers)
        drawn = []
        for batch in batches:
            assert batch.shape == (2, graph.num_owned, WIDTH)
            whole = graph.nodes.gather(batch.transpose(0, 1)).transpose(0, 1)
            for sample in whole:
                same = [torch.equal(sample.nan_to_num(9), x.nan_to_num(9)) for x in array]
                drawn.append(same.index(True))
        orders.append(drawn)
        assert sorted(drawn) == [0, 1, 2, 2]
    plain = [*DataLoader(rows, batch_size=3)]
    expected = array[:, graph.owned_ids]
    torch.testing.assert_close(plain[0], expected, rtol=0, atol=0, equal_nan=True)
    known = graph.edges.with_halo(plain[0], dim=1)
    read = Rows(f"{folder}/chunked.h5", graph, halo="read")
    read[0]
    (batch,) = read.loader(3, num_workers=1)
    torch.testing.assert_close(batch, known.as_subclass(torch.Tensor), equal_nan=True)
    with pytest.raises(ArgumentError, match="sampler"):
        rows.loader(sampler=DistributedSampler(rows, 3, rank))
    with pytest.raises(ArgumentError, match="exchange"):
        Rows(array, graph, halo="exchange").loader(num_workers=1)
    last = rank == 2
    with pytest.raises(ArgumentError, match="rank 2 of 3: batch_size"):
        rows.loader(0 if last else 1)
    with pytest.raises(ArgumentError, match="rank 2 of 3: seed"):
        rows.loader(seed="a" if last else 0)
    with pytest.raises(DisagreementError, match="seed"):
        rows.loader(seed=rank)
    with pytest.raises(DisagreementError, match="samples"):
        rows.loader(samples=[rank % 2])
    sent = pickle.loads(pickle.dumps(rows))
    torch.testing.assert_close(sent[1], expected[1], rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ArgumentError, match="process"):
        sent.loader()
    return orders


@pytest.mark.timeout(200)
def test_loaders_draw_the_same_samples_on_every_rank(worlds, files):
    first, *others = worlds.run(3, loaded, str(files), timeout=150)
    assert others == [first] * 2
    assert first[0] == first[1], "the order does not depend on workers"


def reading_refused(rank, ranks, folder):
    graph = partition(wild(NODES), method="block")
    array = values()
    last = rank == ranks - 1
    for source, options, message in [
        (f"{folder}/none.zarr", {}, "cannot be read"),
        (f"{folder}/none.h5", {}, "cannot be read"),
        (array[:, :-1], {}, "23 rows"),
        (array, {"axis": 2}, "2 rows"),
        (array, {"axis": 0}, "axis=0"),
        (array[0, 0], {}, "axis=1"),
        (np.full((3, NODES), "a"), {}, "not numbers"),
        (f"{folder}/plain.zarr", {"variable": "z"}, "no variable 'z', but"),
        (f"{folder}/classic.nc", {}, "('y', 'x'|'x', 'y').*Pass variable="),
        (f"{folder}/unsigned.zarr", {}, "_Unsigned"),
        (f"{folder}/array.npy", {"variable": "x"}, "without variables"),
        (f"{folder}/text.txt", {}, "not a zarr folder"),
        (f"{folder}/broken.h5", {}, "cannot be read"),
        ([1, 2], {}, "source must be"),
        (array, {"halo": True}, "halo must be"),
        (array, {"node_type": "grid"}, "node_type"),
        (array, {"dtype": np.float32}, "torch.dtype"),
    ]:
        # on one rank, and the error is on all
        given, more = (source, options) if last else (array, {})
        with pytest.raises(ArgumentError, match=message):
            Rows(given, graph, **more)
    for other in (array[:-1], array.astype(np.float64)):
        if ranks > 1:
            with pytest.raises(DisagreementError):
                Rows(other if last else array, graph)
    with pytest.raises(ArgumentError, match="PartitionedGraph"):
        Rows(array, None)


def test_refused_files(worlds, files):
    write_zarr(files / "unsigned.zarr", values(), _Unsigned="true")
    (files / "text.txt").write_text("text")
    (files / "broken.h5").write_bytes(b"\x89HDF\r\n\x1a\n broken")
    worlds.run(3, reading_refused, 3, str(files))


def written(rank, ranks, folder):
    data, array = wild(NODES), torch.from_numpy(values())
    for i, method in enumerate(METHODS):
        graph = partition(data, method=split_by(method, NODES, ranks))
        for name in ("a.zarr", "b.zarr", "c.h5", "d.nc", "e.npy"):
            chunks = {"a.zarr": {"chunk": 5}, "b.zarr": {"chunk": 2, "shard": 6}}.get(name, {})
            path = f"{folder}/{i}{name}"
            out = RowWriter(path, graph, SAMPLES, (WIDTH,), **chunks)
            for t in (1, 0, 2, 1):
                out.write(t, array[t, graph.owned_ids])
            out.close()
            out.close()
            assert not (out.path.with_name(f"{out.path.name}.part")).exists()
            rows = Rows(path, graph)
            for t in range(SAMPLES):
                expected = array[t, graph.owned_ids]
                torch.testing.assert_close(rows[t], expected, rtol=0, atol=0, equal_nan=True)
            if rank == 0:
                assert torch.equal(whole(path).nan_to_num(9), array.nan_to_num(9))
        assert out.bytes_written <= 4 * WIDTH * 4 * max(graph.num_owned, -(-NODES // ranks))
    return out.bytes_written


def whole(path):
    if path.endswith("zarr"):
        found = zarr.open(path, mode="r")["values"][:]
    elif path.endswith("npy"):
        found = np.load(path)
    else:
        with h5py.File(path) as file:
            found = file["values"][:]
    return torch.from_numpy(found)


@pytest.mark.parametrize("ranks", WORLDS)
def test_results_come_back_exactly(worlds, ranks, tmp_path):
    found = worlds.run(ranks, written, ranks, str(tmp_path))
    assert sum(found) == 4 * NODES * WIDTH * 4, "each row once"


def writing_refused(rank, folder):
    graph = partition(wild(NODES), method="random")
    own, last = graph.owned_ids.float(), rank == 2
    for path, more, message in [
        ("x.tif", {}, "must end in"),
        ("x.h5", {"chunk": 4}, "are for zarr"),
        ("x.zarr", {"chunk": 4, "shard": 6}, "not a multiple"),
        ("x.npy", {"dtype": torch.bfloat16}, "no counterpart"),
        ("x.nc", {"dtype": torch.complex64}, "NetCDF"),
        ("missing/x.npy", {}, "cannot be written"),
        ("missing/x.h5", {}, "cannot be written"),
        ("exists.npy", {}, "exists"),
        ("x.npy", {"samples": -1}, "samples"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            RowWriter(f"{folder}/{path}", graph, **{"samples": 1, **more})
    with pytest.raises(DisagreementError, match="shape"):
        RowWriter(f"{folder}/x.npy", graph, 1 + rank)
    out = RowWriter(f"{folder}/y.npy", graph, 2)
    for sample, x in [
        (2, own),
        (True, own),
        (0, own.double()),
        (0, own[:, None]),
        (0, own.to("meta")),
        (0, None),
    ]:
        with pytest.raises(ArgumentError):
            out.write(*((sample, x) if last else (0, own)))
    with pytest.raises(DisagreementError, match="sample"):
        out.write(rank % 2, own)
    out.write(0, own)
    with pytest.raises(ArgumentError, match="1 of 2 samples were not written"):
        out.close()
    assert not out.path.exists()
    out.write(1, own)
    out.close()
    with pytest.raises(ArgumentError, match="closed"):
        out.write(0, own)
    with pytest.raises(ZeroDivisionError), RowWriter(f"{folder}/z.zarr", graph, 2) as out:
        raise ZeroDivisionError
    assert not out.path.exists()
    with RowWriter(f"{folder}/z.zarr", graph, 2, (0,)) as out:  # over what was left
        for t in range(2):
            out.write(t, own[:, None][:, :0])
    assert Rows(f"{folder}/z.zarr", graph)[0].shape == (len(own), 0)


def test_refused_results(worlds, tmp_path):
    np.save(tmp_path / "exists.npy", np.zeros(3))
    worlds.run(3, writing_refused, str(tmp_path))


def of_types(rank, folder):
    data = HeteroData()
    data["grid"].num_nodes, data["mesh"].num_nodes = NODES, 6
    data["grid"].pos, data["mesh"].pos = torch.rand(NODES, 2), torch.rand(6, 2)
    torch.manual_seed(0)
    up = torch.stack([torch.arange(NODES), torch.arange(NODES) % 6])
    kinds = ("grid", "to", "mesh"), ("mesh", "to", "grid")
    data[kinds[0]].edge_index, data[kinds[1]].edge_index = up, up.flip(0)
    data["grid"].pos = torch.linspace(0, 1, 2 * NODES).view(-1, 2)
    data["mesh"].pos = torch.linspace(0, 1, 12).view(-1, 2)
    for method in ("metis", "rcb", "hilbert", "block", "random"):
        graph = partition(data, method=method, chunk={"grid": 5})
        chunks = graph["grid"].owned_ids // 5
        every = graph["grid"].gather(torch.full_like(chunks, rank))
        assert all((every[i : i + 5] == every[i]).all() for i in range(0, NODES, 5)), method
    array = torch.from_numpy(values())
    rows = Rows(array, graph, halo="read", edge_type=kinds[0])
    known = torch.cat([graph["grid"].owned_ids, graph[kinds[0]].halo_ids])
    torch.testing.assert_close(rows[0], array[0, known], rtol=0, atol=0)
    with pytest.raises(ArgumentError, match="node_type"):
        Rows(array, graph)
    with pytest.raises(ArgumentError, match="a dict"):
        partition(data, method="block", chunk=5)
    with pytest.raises(ArgumentError, match="ranks of nodes"):
        partition(data, method=assign(data, 3, "block"), chunk={"grid": 5})
    with RowWriter(f"{folder}/grid.npy", graph, 1, (WIDTH,), node_type="grid") as out:
        out.write(0, array[0, graph["grid"].owned_ids])


def test_types_of_nodes(worlds, tmp_path):
    worlds.run(3, of_types, str(tmp_path))
    np.testing.assert_array_equal(np.load(tmp_path / "grid.npy")[0], values()[0])


@pytest.mark.parametrize("method", ["metis", "rcb", "hilbert", "block", "random"])
def test_chunks_stay_together(method):
    data = grid(40, 30)
    owner = assign(data, 5, method, chunk=16)
    ids = torch.arange(1200)
    assert torch.equal(owner, owner[ids // 16 * 16])
    counts = torch.bincount(owner, minlength=5)
    if method != "random":
        assert counts.max() <= 240 * 1.15 + 16
    assert len(assign(data, 5, method, chunk=1200).unique()) == 1
    weight = ids % 7
    if method != "random":
        weighted = assign(data, 5, method, node_weight=weight, chunk=16)
        sums = torch.zeros(5, dtype=torch.int64).index_add_(0, weighted, weight)
        assert sums.max() <= weight.sum() / 5 * 1.15 + 16 * 6
    if method == "metis":
        cost = torch.ones(data.num_edges, dtype=torch.int64)
        assert torch.equal(assign(data, 5, method, edge_weight=cost, chunk=16), owner)
    for wrong in (0, 2.5, {"grid": 4}):
        with pytest.raises(ArgumentError, match="chunk"):
            assign(data, 5, method, chunk=wrong)
