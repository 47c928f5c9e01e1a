"""Whether tensors have bytes in common, against the numbers of all their bytes."""

import itertools

import torch

from varcomm.data_parallel.sharded.memory import overlapping


def test_views_of_one_tensor():
    x = torch.zeros(6, 8)
    views = {
        "rows": x[:3],
        "other rows": x[3:],
        "columns": x[:, :4],
        "other columns": x[:, 4:],
        "every other": x[:, ::2],
        "turned": x.t()[2:5],
        "one": x[5, 7],
        "none": x[:0],
        "wide": x.view(torch.float64)[:, 1],
        "elsewhere": torch.zeros(48),
    }
    numbers = torch.arange(48 * 4).view(6, 8, 4)
    found = {
        "rows": numbers[:3],
        "other rows": numbers[3:],
        "columns": numbers[:, :4],
        "other columns": numbers[:, 4:],
        "every other": numbers[:, ::2],
        "turned": numbers.transpose(0, 1)[2:5],
        "one": numbers[5, 7],
        "none": numbers[:0],
        "wide": numbers.view(6, 4, 8)[:, 1],
        "elsewhere": torch.arange(1000, 1048),
    }
    bytes_of = {name: set(number.flatten().tolist()) for name, number in found.items()}
    for a, b in itertools.permutations(views, 2):
        expected = (a, b) if bytes_of[a] & bytes_of[b] else None
        assert overlapping({a: views[a]}, {b: views[b]}) == expected, (a, b)


def test_what_stays_may_share_memory():
    x = torch.zeros(4)
    assert overlapping({"a": torch.zeros(2)}, {"b": x, "c": x[1:]}) is None
    assert overlapping({"a": x, "b": x[3:]}, {}) == ("a", "b")
