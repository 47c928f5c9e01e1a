"""Simulation: bytes, memory and time of a run on many ranks, predicted by one process."""

from varcomm.simulate.grid import coarsened, ocean, read_sea
from varcomm.simulate.machine import MACHINES, Machine, Seconds, measure
from varcomm.simulate.parts import Counts, Parts, partition
from varcomm.simulate.scaling import Point, Sample, Scaling, sample, scaling
from varcomm.simulate.step import Step, Times, step
from varcomm.simulate.work import Work, count, world

__all__ = [
    "MACHINES",
    "Counts",
    "Machine",
    "Parts",
    "Point",
    "Sample",
    "Scaling",
    "Seconds",
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
