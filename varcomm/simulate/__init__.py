"""Simulation: bytes, memory and time of a run on many ranks, predicted by one process."""

from varcomm.simulate.grid import coarsened, ocean, read_sea
from varcomm.simulate.machine import MACHINES, Machine, Times
from varcomm.simulate.measure import measure
from varcomm.simulate.parts import Counts, Parts, partition
from varcomm.simulate.scaling import Sample, Scaling, sample, scaling
from varcomm.simulate.step import Step, step
from varcomm.simulate.work import Work, count, world

__all__ = [
    "MACHINES",
    "Counts",
    "Machine",
    "Parts",
    "Sample",
    "Scaling",
    "Step",
    "Times",
    "Work",
    "coarsened",
    "count",
    "measure",
    "ocean",
    "partition",
    "read_sea",
    "sample",
    "scaling",
    "step",
    "world",
]
