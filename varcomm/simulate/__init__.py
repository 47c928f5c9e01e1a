"""Simulation: bytes, memory and time of a run on many ranks, predicted by one process."""

from varcomm.simulate.machine import MACHINES, Machine, Times
from varcomm.simulate.parts import Counts, Parts, partition
from varcomm.simulate.step import Sample, Step, sample, step
from varcomm.simulate.work import Work, count, world

__all__ = [
    "MACHINES",
    "Counts",
    "Machine",
    "Parts",
    "Sample",
    "Step",
    "Times",
    "Work",
    "count",
    "partition",
    "sample",
    "step",
    "world",
]
