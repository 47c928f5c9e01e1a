"""Refused calls of simulate: the kind of error and the name of the argument."""

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import varcomm as vc
from tests.graph.graphs import grid, wild
from tests.simulate.test_step import both_types, prepare_layer, prepare_types
from varcomm import ArgumentError, DisagreementError, GroupError

simulate = vc.simulate


def parts(size=2):
    return simulate.partition(wild(), size, "block")


def inside(size, fn):
    with simulate.world(size):
        return fn()


def uneven(graph):
    return lambda: [vc.all_reduce(torch.ones(1)) for _ in range(graph.group.rank)]


def swapping_pairs():
    edge_index = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 0, 4, 5, 2, 3]])
    return simulate.partition(Data(x=torch.ones(6, 4), edge_index=edge_index), 3, "block")


def sample(data, sizes):
    return simulate.sample(prepare_layer, data, sizes, "block")


APART = Data(x=torch.ones(4, 4), edge_index=torch.tensor([[0, 1], [1, 0]]))
SMALL = Data(x=torch.ones(90, 4), edge_index=grid(9, 10).edge_index)
CASES = {
    "partition size": (lambda: parts(0), ArgumentError, "size"),
    "partition method": (
        lambda: simulate.partition(wild(), 2, torch.arange(24) % 4),
        *(ArgumentError, "ranks 0...3"),
    ),
    "world size": (lambda: inside(0, list), ArgumentError, "size"),
    "world within a world": (lambda: inside(2, lambda: inside(2, list)), GroupError, "initialised"),
    "part of another size": (lambda: inside(3, parts().part), ArgumentError, "2 ranks"),
    "partition of peers": (
        lambda: inside(2, lambda: vc.graph.partition(wild(), method="block")),
        *(GroupError, "partition"),
    ),
    "measure ranks": (lambda: simulate.measure(1), ArgumentError, "ranks"),
    "no ranks": (lambda: simulate.step(prepare_layer, parts(), []), ArgumentError, "ranks"),
    "rank out of range": (lambda: simulate.step(prepare_layer, parts(), [2]), ArgumentError, "2"),
    "different calls": (
        lambda: simulate.step(uneven, parts(3)),
        *(DisagreementError, "same calls"),
    ),
    "a rank without a halo": (
        lambda: simulate.step(prepare_layer, swapping_pairs(), [0]),
        *(ArgumentError, "halo: 1."),
    ),
    "two types with the same halo": (
        lambda: simulate.step(prepare_types, both_types(), [0]),
        *(ArgumentError, "[1, 2]"),
    ),
    "no sizes": (lambda: sample(SMALL, []), ArgumentError, "sizes"),
    "a sample without halos": (lambda: sample(APART, [2]), ArgumentError, "halos"),
    "a sample of other sizes": (
        lambda: sample(SMALL, [2]).step(parts(3)),
        *(ArgumentError, "3"),
    ),
    "plot folder": (lambda: parts().plot("none/a.png"), ArgumentError, "folder"),
    "plot node_type": (
        lambda: parts().plot("a.png", node_type="sea"),
        *(ArgumentError, "node_type"),
    ),
    "ocean dtype": (lambda: simulate.ocean(np.ones((2, 4))), ArgumentError, "is_sea"),
    "ocean columns": (
        lambda: simulate.ocean(np.ones((2, 2), dtype=bool)),
        *(ArgumentError, "columns"),
    ),
    "read_sea format": (lambda: simulate.read_sea(__file__), ArgumentError, "netCDF"),
    "read_sea file": (lambda: simulate.read_sea("none.cdf"), ArgumentError, "none.cdf"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name):
    call, kind, named = CASES[name]
    with pytest.raises(kind) as raised:
        call()
    assert named in str(raised.value)


def test_another_rank_determines_the_halo():
    for prepare, cut in ((prepare_layer, swapping_pairs()), (prepare_types, both_types())):
        found, right = (simulate.step(prepare, cut, ranks) for ranks in ([1], range(3)))
        assert found.sent.tolist() == right.sent.tolist()


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ArgumentError):
        parts().save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
