"""A saved partition, loaded on as many ranks and on others."""

import os
import shutil

import pytest
import torch
from torch_geometric.data import Data

from tests.checkpoint.test_files import flipped, resigned
from tests.graph.graphs import split_by, wild
from tests.graph.parts import by_hand, contents, different
from tests.graph.typed import owners, typed
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import PartitionedGraph, partition


def graph_of(kind):
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


def saved(rank, kind, folder, ranks, hops):
    data = graph_of(kind)
    if kind == "types":
        method = owners(data, "a rank owns nothing", ranks)
    else:
        method = split_by("a rank owns nothing", data.num_nodes, ranks)
    graph = partition(data, method=method, hops=hops)
    graph.save(folder)
    return plain(graph)


def loaded(rank, folder):
    return plain(PartitionedGraph.load(folder))


def plain(graph):
    """The content, and bits of values that cannot be pickled or compared."""
    found = contents(graph) | {("graph", None, "method"): graph.method}
    narrow = torch.float8_e4m3fn
    return {k: v.view(torch.uint8) if is_of(v, narrow) else v for k, v in found.items()}


def is_of(value, dtype):
    return isinstance(value, torch.Tensor) and value.dtype == dtype


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("kind", "hops"), [("one type", 2), ("types", 1)])
def test_on_as_many_ranks_every_part_is_the_same(worlds, kind, hops, tmp_path):
    before = worlds.run(3, saved, kind, tmp_path / "g", 3, hops)
    after = worlds.run(3, loaded, tmp_path / "g")
    for one, other in zip(before, after, strict=True):
        assert one.keys() == other.keys()
        assert different(one, other) == []


@pytest.mark.parametrize("kind", ["one type", "types"])
@pytest.mark.parametrize(
    ("before", "after"),
    [(3, 1), (1, 3), pytest.param(3, 5, marks=SLOW), pytest.param(5, 2, marks=SLOW)],
)
def test_on_other_ranks_the_parts_make_up_the_same_graph(worlds, kind, before, after, tmp_path):
    worlds.run(before, saved, kind, tmp_path / "g", before, 1)
    parts = worlds.run(after, loaded, tmp_path / "g")
    data, owner = graph_of(kind), {}
    for key in [None] if kind == "one type" else data.node_types:
        ids = [part["nodes", key, "ids"] for part in parts]
        sizes = [len(one) for one in ids]
        assert max(sizes) - min(sizes) <= 1
        owner[key] = torch.arange(after).repeat_interleave(torch.tensor(sizes))
        owner[key] = owner[key][torch.cat(ids).argsort()]
    if kind == "one type":
        data.bits, owner = data.bits.view(torch.uint8), owner[None]
    for rank, part in enumerate(parts):
        expected = by_hand(data, owner, rank, after)
        assert expected.keys() <= part.keys()
        assert different(expected, part) == []


def saved_twice(rank, folder):
    data = wild()
    partition(data, method="block").save(folder)
    data.x = data.x + 1
    partition(data, method="block").save(folder)
    graph = PartitionedGraph.load(folder)
    return torch.equal(graph.gather(graph.x), data.x)


def test_a_later_save_replaces_an_earlier_one(worlds, tmp_path):
    assert worlds.run(3, saved_twice, tmp_path / "g") == [True] * 3
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
    worlds.run(3, saved, "one type", tmp_path / "whole" / "g", 3, 1)
    worlds.run(3, saved, "types", tmp_path / "whole" / "other", 3, 1)
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
