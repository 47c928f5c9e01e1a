"""What is taken for an integer, a list of sizes, a dimension and a rank, and what is refused."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varcomm import ArgumentError, ShardSizes
from varcomm.sizes import checked_dim, checked_rank, checked_sizes, exact_int


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (3, 3),
        (-(2**70), -(2**70)),
        (np.int8(-3), -3),
        (np.uint64(3), 3),
        (torch.tensor(3), 3),
        (torch.tensor(3, dtype=torch.int32), 3),
        (True, None),
        (np.bool_(True), None),
        (torch.tensor(True), None),
        (3.0, None),
        (np.float64(3), None),
        (torch.tensor(3.0), None),
        ("3", None),
        (None, None),
        ([3], None),
        (np.array([3, 4]), None),
        (torch.tensor([3, 4]), None),
    ],
)
def test_exact_int(value, want):
    got = exact_int(value)
    assert got == want
    assert got is None or type(got) is int


def test_checked_sizes_names_what_and_where():
    assert checked_sizes([1, 2], "counts", 2) == (1, 2)
    for sizes in ([1, 2], ShardSizes([1, 2])):
        message = "here: counts must have one entry a rank, 3; got 2: "
        with pytest.raises(ArgumentError, match=f"^{re.escape(message)}"):
            checked_sizes(sizes, "counts", 3, "here: ")
    with pytest.raises(ArgumentError, match=r"^here: counts must not be negative"):
        checked_sizes([1, -2], "counts", 2, "here: ")


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.data())
def test_checked_dim_counts_from_the_front(shape, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    assert checked_dim(dim, shape) == range(len(shape))[dim]
    assert checked_dim(np.int32(dim), shape) == range(len(shape))[dim]


@pytest.mark.parametrize(
    ("dim", "shape", "message"),
    [
        (2, (4, 5), "here: axis=2 is out of range for a tensor of shape (4, 5)."),
        (-3, (4, 5), "here: axis=-3 is out of range for a tensor of shape (4, 5)."),
        (
            0,
            (),
            "here: axis=0 is out of range for a tensor of shape (). "
            "A scalar has no rows: unsqueeze(0) it.",
        ),
        (1.0, (4, 5), "here: axis must be an int; got 1.0."),
        (True, (4, 5), "here: axis must be an int; got True."),
    ],
)
def test_checked_dim_refuses(dim, shape, message):
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        checked_dim(dim, shape, "here: ", "axis")


def test_checked_rank():
    assert checked_rank(np.int64(1), 2, "src") == 1
    message = re.escape("here: src must be a rank of the group, 0...2; got 3.")
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        checked_rank(3, 3, "src", "here: ")
