"""A partition that was saved, on as many ranks and on others."""

import json
import shutil

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from tests.graph.graphs import split_by, wild
from varcomm import ArgumentError
from varcomm.graph import PartitionedGraph, partition
from varcomm.graph.files import staging
from varcomm.graph.files.archive import MANIFEST, read_arrays, read_manifest


def graph_of(kind):
    """A graph with attributes of many dtypes."""
    if kind == "one type":
        data = wild()
        data.half, data.bits = data.x.bfloat16(), data.x.to(torch.float8_e4m3fn)
        data.phase, data.small = torch.complex(data.x, -data.x), data.x.to(torch.int8)
        data.level, data.title, data.depth = (
            torch.full((1, 3), 0.25),
            "a graph",
            {"m": [400, 0.5, None]},
        )
        data.mean_of_x, data.whole = data.x.mean(), torch.tensor([True])
        return data
    generator = torch.Generator().manual_seed(3)
    data = HeteroData()
    data["a"].x = torch.rand(9, 2, generator=generator)
    data["b"].num_nodes = 5
    data["c"].x = torch.empty(0, 3)
    for source, target, edges in (("a", "b", 30), ("b", "a", 7), ("b", "b", 9), ("a", "c", 0)):
        ends = [
            torch.randint(max(1, data[end].num_nodes), (edges,), generator=generator)
            for end in (source, target)
        ]
        data[source, "to", target].edge_index = torch.stack(ends)
        data[source, "to", target].weight = torch.rand(edges, generator=generator)
    data.year = 1998
    return data


def owners(data, ranks):
    """One rank owns nothing, where there are several."""
    if isinstance(data, HeteroData):
        return {key: split_by("a rank owns nothing", data[key].num_nodes, ranks) for key in "abc"}
    return split_by("a rank owns nothing", data.num_nodes, ranks)


def saved(rank, kind, folder, ranks, hops):
    data = graph_of(kind)
    graph = partition(data, method=owners(data, ranks), hops=hops)
    graph.save(folder)
    return contents(graph)


def loaded(rank, folder):
    return contents(PartitionedGraph.load(folder))


def contents(graph):
    """Everything that there is to a part, in plain values."""
    whole = {"method": graph.method, "hops": graph.hops, **graph.attributes}
    found = {("graph", None, name): value for name, value in whole.items()}
    for what, shards in (("nodes", graph.node_shards), ("edges", graph.edge_shards)):
        for key, shard in shards.items():
            found[what, key, "sizes"] = tuple(shard.sizes)
            found[what, key, "ids"] = shard.owned_ids
            found |= {(what, key, name): value for name, value in shard.attributes.items()}
    for key, edges in graph.edge_shards.items():
        sources = graph.node_shards[None if key is None else key[0]]
        found["local", key, "edge_index"] = edges.edge_index
        found["local", key, "halo"] = edges.halo_ids
        found["local", key, "plan"] = edges.plan(sources.owned_ids)
    return {key: plain(value) for key, value in found.items()}


def plain(value):
    """Bits of what cannot be pickled, or compared."""
    is_narrow = isinstance(value, torch.Tensor) and value.dtype == torch.float8_e4m3fn
    return value.view(torch.uint8) if is_narrow else value


def assert_same(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == other[key].dtype
            assert torch.equal(value, other[key]), key
        else:
            assert value == other[key], key


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("ranks", [1, 3])
def test_on_as_many_ranks_every_part_is_the_same(worlds, ranks, hops, tmp_path):
    before = worlds.run(ranks, saved, "one type", tmp_path / "g", ranks, hops)
    after = worlds.run(ranks, loaded, tmp_path / "g")
    for one, other in zip(before, after, strict=True):
        assert_same(one, other)


def test_types_on_as_many_ranks(worlds, tmp_path):
    before = worlds.run(3, saved, "types", tmp_path / "g", 3, 1)
    for one, other in zip(before, worlds.run(3, loaded, tmp_path / "g"), strict=True):
        assert_same(one, other)


def whole_of(parts, *key):
    """Rows of all parts, in the order of the whole graph."""
    ids = torch.cat([part[*key, "ids"] for part in parts])
    assert torch.equal(ids.sort().values, torch.arange(len(ids)))
    names = [k[-1] for k in parts[0] if k[:-1] == key and k[-1] not in ("sizes", "ids")]
    return {name: torch.cat([p[*key, name] for p in parts])[ids.argsort()] for name in names}


@pytest.mark.parametrize("kind", ["one type", "types"])
@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3), (3, 5), (5, 2), (2, 3)])
def test_on_other_ranks_the_parts_make_up_the_same_graph(worlds, kind, before, after, tmp_path):
    worlds.run(before, saved, kind, tmp_path / "g", before, 1)
    parts = worlds.run(after, loaded, tmp_path / "g")
    data = graph_of(kind)
    for key in [None] if kind == "one type" else ["a", "b", "c"]:
        store = data if key is None else data[key]
        for name, value in whole_of(parts, "nodes", key).items():
            assert torch.equal(value, plain(store[name])), name
        sizes = parts[0]["nodes", key, "sizes"]
        assert max(sizes) - min(sizes) <= 1
    for key in [None] if kind == "one type" else data.edge_types:
        store = data if key is None else data[key]
        for name, value in whole_of(parts, "edges", key).items():
            assert torch.equal(value, store[name]), name
        source, target = (None, None) if key is None else (key[0], key[2])
        for part in parts:
            known = torch.cat([part["nodes", source, "ids"], part["local", key, "halo"]])
            rows, columns = part["local", key, "edge_index"]
            ends = torch.stack([known[rows], part["nodes", target, "ids"][columns]])
            assert torch.equal(ends, store.edge_index[:, part["edges", key, "ids"]])
            assert torch.equal(part["local", key, "plan"], part["local", key, "halo"])


def saved_twice(rank, folder):
    data = wild()
    partition(data, method="block").save(folder)
    data.x = data.x + 1
    partition(data, method="block").save(folder)
    graph = PartitionedGraph.load(folder)
    return torch.equal(graph.gather(graph.x), data.x)


def test_a_later_save_takes_the_place_of_an_earlier_one(worlds, tmp_path):
    assert worlds.run(2, saved_twice, tmp_path / "g") == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == ["g"]


def refused(rank, folder):
    with pytest.raises(ArgumentError) as caught:
        PartitionedGraph.load(folder)
    return str(caught.value)


def cut_short(folder):
    path = folder / "part-00001.npz"
    path.write_bytes(path.read_bytes()[:-40])


def one_bit_changed(folder):
    path = folder / "part-00001.npz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


def of_another_graph(folder):
    shutil.copy(folder.parent / "other" / "part-00001.npz", folder / "part-00001.npz")


def without_a_part(folder):
    (folder / "part-00001.npz").unlink()


def without_manifest(folder):
    (folder / MANIFEST).unlink()


def manifest(folder, text):
    (folder / MANIFEST).write_text(text)


def altered(folder):
    text = (folder / MANIFEST).read_text()
    assert text.count('"hops": 1') == 1
    manifest(folder, text.replace('"hops": 1', '"hops": 3'))


def of_version_2(folder):
    content = json.loads((folder / MANIFEST).read_text())
    manifest(folder, json.dumps(content | {"version": 2}))


def with_objects(folder):
    path = folder / "part-00001.npz"
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **(arrays | {"nodes 0.x": np.array([{}, []], dtype=object)}))


DAMAGE = {
    "cut short": (cut_short, "part-00001.npz is damaged: "),
    "altered": (one_bit_changed, "part-00001.npz is "),
    "of another graph": (of_another_graph, "is of another graph, or damaged."),
    "a part is missing": (without_a_part, "lacks part-00001.npz. Copy it there"),
    "with pickled objects": (
        with_objects,
        "part-00001.npz is damaged: nodes 0.x.npy has not [2] of object",
    ),
    "no manifest": (
        without_manifest,
        "is no saved partition: graph.json cannot be read (No such file or directory).",
    ),
    "a manifest cut short": (lambda f: manifest(f, '{"format": '), "graph.json is damaged: "),
    "another file": (lambda f: manifest(f, "[]"), "does not belong to a saved partition."),
    "an altered manifest": (altered, "graph.json is damaged or has been altered."),
    "no version": (
        lambda f: manifest(f, '{"format": "varcomm partitioned graph"}'),
        "is of version None; this varcomm reads",
    ),
    "a later version": (of_version_2, "is of version 2; this varcomm reads version 1."),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_told_on_every_rank(worlds, damage, ranks, tmp_path):
    spoil, message = DAMAGE[damage]
    worlds.run(2, saved, "one type", tmp_path / "g", 2, 1)
    worlds.run(2, saved, "types", tmp_path / "other", 2, 1)
    spoil(tmp_path / "g")
    told = worlds.run(ranks, refused, tmp_path / "g")
    assert message in told[0]
    assert told == [told[0]] * ranks


def test_what_is_no_file_is_not_read(tmp_path):
    """Of a device there may be no end."""
    path = tmp_path / MANIFEST
    path.symlink_to("/dev/null")
    with pytest.raises(ArgumentError, match=r"graph\.json cannot be read"):
        read_manifest(tmp_path)
    with pytest.raises(ArgumentError, match=r"is damaged: graph\.json is no file"):
        read_arrays(path, {}, "")


def test_no_folder(worlds, tmp_path):
    told = worlds.run(2, refused, tmp_path / "nothing")
    assert "nothing is no saved partition: graph.json cannot be read (No such file" in told[0]


def save_refused(rank, folder, name, value):
    data = Data(x=torch.ones(3, 1), edge_index=torch.tensor([[0, 1], [1, 2]]))
    data[name] = value
    with pytest.raises(ArgumentError) as caught:
        partition(data, method="block").save(folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("names", ["a", "b", "c"], "names cannot be saved: it is of list. Make it a tensor."),
        ("shape", (1, 2, 3, 4), "shape cannot be saved: it is of tuple."),
        ("model", {"f": torch.nn.ReLU}, "model cannot be saved: it is of dict."),
    ],
)
def test_what_cannot_be_saved(worlds, name, value, message, tmp_path):
    told = worlds.run(2, save_refused, tmp_path / "g", name, value)
    assert message in told[0]
    assert told[0] == told[1]
    assert not any(tmp_path.iterdir())


def save_into_a_file(rank, folder):
    graph = partition(Data(x=torch.ones(3, 1), edge_index=torch.tensor([[0], [1]])), method="block")
    finish = staging.write_manifest
    staging.write_manifest = full  # the last that is written
    try:
        with pytest.raises(ArgumentError, match="no space left"):
            graph.save(folder)
    finally:
        staging.write_manifest = finish
    return True


def full(*arguments):
    raise OSError("no space left")


def test_nothing_is_left_of_what_could_not_be_saved(worlds, tmp_path):
    assert worlds.run(2, save_into_a_file, tmp_path / "g") == [True, True]
    assert not any(tmp_path.iterdir())


def test_a_folder_with_something_else_in_it_is_left_alone(worlds, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    told = worlds.run(2, save_refused, tmp_path, "title", "a graph")
    assert "exists and is no saved partition; choose another." in told[0]
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def different_folders(rank, folders):
    with pytest.raises(Exception, match="ranks find different graphs") as caught:
        PartitionedGraph.load(folders[rank])
    return type(caught.value).__name__


def test_ranks_with_different_folders(worlds, tmp_path):
    folders = [tmp_path / "one", tmp_path / "other"]
    worlds.run(2, saved, "one type", folders[0], 2, 1)
    worlds.run(2, saved, "types", folders[1], 2, 1)
    assert worlds.run(2, different_folders, folders) == ["DisagreementError"] * 2
