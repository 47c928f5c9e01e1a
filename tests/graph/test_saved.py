"""A saved partition, loaded on as many ranks and on others."""

import copy
import io
import os
import pickle
import shutil
from multiprocessing.reduction import ForkingPickler

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch_geometric.data import Data

from tests.checkpoint.test_files import flipped, resigned
from tests.graph.against_one import graph_of
from tests.graph.graphs import wild
from tests.graph.parts import by_hand, contents, differences, different
from tests.graph.typed import typed
from tests.worlds import on_ranks
from varcomm import ArgumentError, DisagreementError, GroupError
from varcomm.graph import PartitionedGraph, partition
from varcomm.grid import Grid


def data_of(kind):
    """A graph with attributes of many dtypes, or with types."""
    if kind == "types":
        data = typed()
        del data["paper"].mask
        return data
    data = wild()
    data.half, data.bits = data.x.bfloat16(), data.x.to(torch.float8_e4m3fn)
    data.phase, data.small = torch.complex(data.x, -data.x), data.x.to(torch.int8)
    data.level, data.title = torch.full((1, 3), 0.25), "a graph"
    data.depth = {"m": [400, 0.5, None], "box": (1, "z"), "at": torch.ones(2).half()}
    data.mean_of_x, data.whole = data.x.mean(), torch.tensor([True])
    return data


def made(kind, hops=1):
    return graph_of(data_of(kind), hops=hops)


@on_ranks(1, 3)
def test_pickle_names_what_saves(rank):
    writers = [
        pickle.dumps,
        cloudpickle.dumps,
        ForkingPickler.dumps,  # of multiprocessing, and of workers of a DataLoader
        lambda value: torch.save({"value": value}, io.BytesIO()),
    ]
    for kind in ("one type", "types"):
        graph = made(kind)
        of_group = [*graph.node_shards.values(), *graph.edge_shards.values(), Grid((7, 5))]
        for write in writers:
            with pytest.raises(GroupError, match=r"graph\.save\(folder\)"):
                write([graph])
            for value in of_group:
                with pytest.raises(GroupError, match="make the object again"):
                    write(value)
        assert copy.copy(graph) is copy.deepcopy({"a": graph})["a"] is graph
        copy.deepcopy(of_group), [copy.copy(value) for value in of_group]


@pytest.mark.parametrize(("kind", "hops"), [("one type", 2), ("types", 1)])
@on_ranks(3)
def test_on_as_many_ranks_every_part_is_the_same(rank, kind, hops, tmp_path):
    before = made(kind, hops)
    before.save(tmp_path / "g")
    after = PartitionedGraph.load(tmp_path / "g")
    assert after.method == before.method
    assert differences(after, before) == []


def save(rank, kind, folder):
    made(kind).save(folder)


def part_found_by_hand(rank, kind, folder):
    """Return what differs between a loaded part and that of the full graph."""
    graph, data = PartitionedGraph.load(folder), data_of(kind)
    owner = {}
    for key, nodes in graph.node_shards.items():
        assert max(nodes.sizes) - min(nodes.sizes) <= 1
        owner[key] = nodes.owner(torch.arange(nodes.sizes.total))
    owner = owner if kind == "types" else owner[None]
    expected, found = by_hand(data, owner, rank, dist.get_world_size()), contents(graph)
    assert expected.keys() <= found.keys()
    return different(expected, found)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("kind", ["one type", "types"])
@pytest.mark.parametrize(
    ("before", "after"),
    [(3, 1), (1, 3), pytest.param(3, 5, marks=SLOW), pytest.param(5, 2, marks=SLOW)],
)
def test_on_other_ranks_the_parts_make_up_the_same_graph(worlds, kind, before, after, tmp_path):
    worlds.run(before, save, kind, tmp_path / "g")
    assert worlds.run(after, part_found_by_hand, kind, tmp_path / "g") == [[]] * after


@on_ranks(3)
def test_a_later_save_replaces_an_earlier_one(rank, tmp_path):
    data, folder = wild(), tmp_path / "g"
    partition(data, method="block").save(folder)
    data.x = data.x + 1
    partition(data, method="block").save(folder)
    graph = PartitionedGraph.load(folder)
    assert torch.equal(graph.gather(graph.x), data.x)
    assert len([*tmp_path.iterdir()]) == 1


def part_of(folder):
    (path,) = folder.rglob("rank-00001.safetensors")
    return path


def signed(change):
    """Change the index, and sign it."""
    return lambda folder: resigned(folder, change, "graph.json")


HOSTILE = [{"hops": 0}, {"node types": []}, {"edge types": [[None, [1, 2]]]}, {"arrays": {}}]
HOSTILE += [{"files": {}}]
DAMAGE = {  # with the name of a file in the message
    "altered": (lambda folder: flipped(part_of(folder)), "rank-00001"),
    "of another graph": (
        lambda folder: shutil.copy(part_of(folder.parent / "other"), part_of(folder)),
        "rank-00001",
    ),
    "a part is missing": (lambda folder: os.remove(part_of(folder)), "rank-00001"),
    "no index": (lambda folder: (folder / "graph.json").unlink(), "graph.json"),
    "an altered index": (lambda folder: flipped(folder / "graph.json"), "graph.json"),
    "a wide row": (signed(lambda i: i["arrays"].update({"nodes 0.x": ["float64", [7]]})), "x'"),
    **{str(one): (signed(lambda i, one=one: i.update(one)), "") for one in HOSTILE},
    "no folder": (shutil.rmtree, "there is no"),
    "another graph on each rank": (lambda folder: None, "different graphs"),
}


def refused(rank, folder):
    found = []
    for name in DAMAGE:
        differs = name == "another graph on each rank" and rank > 0
        with pytest.raises((ArgumentError, DisagreementError)) as caught:
            PartitionedGraph.load(folder / name / ("other" if differs else "g"))
        found.append(str(caught.value).replace("/other", "/g"))
    return found


def test_damage_is_told_on_every_rank(worlds, tmp_path):
    worlds.run(3, save, "one type", tmp_path / "whole" / "g")
    worlds.run(3, save, "types", tmp_path / "whole" / "other")
    for name, (spoil, _) in DAMAGE.items():
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        spoil(tmp_path / name / "g")
    found = worlds.run(3, refused, tmp_path)
    assert found == [found[0]] * 3
    for said, (_, word) in zip(found[0], DAMAGE.values(), strict=True):
        assert word in said


def save_refused(rank, folder):
    """Attributes that cannot be saved, and folders that hold something else."""
    ring = {"x": torch.ones(3, 1), "edge_index": torch.tensor([[0, 1], [1, 2]])}
    for name, value in {"rule": print, "model": torch.nn.ReLU}.items():
        with pytest.raises(ArgumentError, match=f"{name} cannot be saved"):
            partition(Data(**ring, **{name: value}), method="block").save(folder / "new")
    graph = partition(Data(**ring), method="block")
    with pytest.raises(ArgumentError, match="exists and is not a saved partition; choose another"):
        graph.save(folder)

    def full(*arguments):
        raise OSError("no space left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", full)  # the last step
        with pytest.raises(ArgumentError, match="no space"):
            graph.save(folder / "new")


def test_a_refused_save_leaves_nothing(worlds, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    worlds.run(3, save_refused, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
