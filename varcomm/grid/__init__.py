"""Grids: fields that are split over ranks, on which unmodified networks of torch run."""

from varcomm.grid import contractions, elementwise, fourier, norms, reductions, resample, shapes
from varcomm.grid import windows as windows
from varcomm.grid.field import Field
from varcomm.grid.grid import Grid, functions

__all__ = ["Field", "Grid", "functions"]

del contractions, elementwise, fourier, norms, reductions, resample, shapes, windows
