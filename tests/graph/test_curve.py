"""The Hilbert curve visits each cell once, from neighbour to neighbour."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from varcomm.graph.partitioners.curve import bits_of, hilbert_index, hilbert_keys


def all_cells(dims, bits):
    return torch.cartesian_prod(*[torch.arange(1 << bits)] * dims).view(-1, dims)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("dims", "bits"), [(1, 7), (2, 1), (2, 2), (2, 6), (3, 1), (3, 2), (3, 4), (4, 3), (5, 2)]
)
def test_the_curve_visits_each_cell_once_from_neighbour_to_neighbour(dims, bits, dtype):
    cells = all_cells(dims, bits)
    given = cells.to(dtype)
    numbers = hilbert_index(given, bits)
    assert torch.equal(given, cells.to(dtype)), "the cells have changed"
    assert numbers.dtype == torch.int64
    assert torch.equal(numbers.sort().values, torch.arange(len(cells)))
    steps = cells[numbers.argsort()].diff(dim=0).abs().sum(1)
    assert bool((steps == 1).all()), "a step that is no step to a neighbour"


@pytest.mark.parametrize(("dims", "bits"), [(2, 6), (3, 4), (4, 2)])
def test_a_finer_curve_stays_in_the_cell_of_the_coarser(dims, bits):
    cells = all_cells(dims, bits)
    fine = hilbert_index(cells, bits) >> dims
    # coarse numbers may be those of a turned curve: what counts is that they are whole cells
    coarse = hilbert_index(cells >> 1, bits - 1)
    together = torch.stack([fine, coarse], dim=1).unique(dim=0)
    assert len(together) == 1 << (dims * (bits - 1))


@settings(deadline=None, max_examples=60)
@given(dims=st.sampled_from([1, 2, 3, 4, 7, 21, 31, 63]), data=st.data())
def test_neighbours_of_the_finest_curve(dims, data):
    """Two cells that are next to each other on the curve share a face, at full depth too."""
    bits = bits_of(dims)
    assert bits * dims <= 63
    cell = st.lists(st.integers(0, (1 << bits) - 1), min_size=dims, max_size=dims)
    here = torch.tensor([data.draw(cell)])
    faces = torch.cat([torch.eye(dims, dtype=torch.int64), -torch.eye(dims, dtype=torch.int64)])
    around = here + faces
    around = around[((around >= 0) & (around < 1 << bits)).all(1)]
    number, numbers = hilbert_index(here, bits), hilbert_index(around, bits)
    assert 0 <= int(number) < 1 << (bits * dims)
    ends = int(number == 0) + int(number == (1 << (bits * dims)) - 1)
    assert int(((numbers - number).abs() == 1).sum()) == 2 - ends


@pytest.mark.parametrize("dims", [1, 2, 3, 6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int32])
def test_keys_of_the_corners_of_a_grid(dims, dtype):
    bits = 2 if dims < 6 else 1
    pos = all_cells(dims, bits).to(dtype)
    keys = hilbert_keys(pos, pos.amin(0).double(), pos.amax(0).double())
    steps = pos[keys.argsort()].double().diff(dim=0).abs().sum(1)
    assert bool((keys.diff() != 0).all())
    # the last cells of a side are as far from each other as the others
    assert bool((steps == 1).all())


def test_keys_do_not_depend_on_the_rows_beside_them():
    """Rows are numbered some thousands at a time, and ranks have other rows."""
    pos = torch.randn(70_001, 3, dtype=torch.float64)
    low, high = pos.amin(0), pos.amax(0)
    keys = hilbert_keys(pos, low, high)
    for rows in (slice(0, 1), slice(32_767, 32_770), slice(11, 50_000), slice(7, 7)):
        assert torch.equal(hilbert_keys(pos[rows], low, high), keys[rows])
    strided = torch.randn(70_001, 6, dtype=torch.float64)
    strided[:, ::2] = pos
    assert torch.equal(hilbert_keys(strided[:, ::2], low, high), keys)


@pytest.mark.parametrize("scale", [0.0, 5e-324, 1e-310, 1e-300, 1.0, 1e300, 1.7e308])
def test_extents_of_any_size(scale):
    unit = all_cells(2, 3).double() / 7 * 2 - 1
    pos = unit * scale
    keys = hilbert_keys(pos, pos.amin(0), pos.amax(0))
    assert bool(((keys >= 0) & (keys < 1 << 62)).all())
    if scale >= 1e-300:
        ends = torch.ones(2, dtype=torch.float64)
        assert torch.equal(keys.argsort(), hilbert_keys(unit, -ends, ends).argsort())
    if scale == 0:
        assert bool((keys == 0).all())


def test_an_extent_is_the_same_along_all_axes():
    """A long strip is cut across, as the curve fills a cube around it."""
    pos = torch.cartesian_prod(torch.arange(64.0), torch.arange(2.0)).double()
    keys = hilbert_keys(pos, pos.amin(0), pos.amax(0))
    first, second = pos[keys.argsort()].chunk(2)
    assert first[:, 0].max() < second[:, 0].min()
