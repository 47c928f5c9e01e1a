"""What a run on many ranks would send, keep and take, from one process and without them."""

from varcomm.simulate.counts import Counts
from varcomm.simulate.grid import coarsened, ocean, read_sea
from varcomm.simulate.machine import Machine, Seconds
from varcomm.simulate.machines import MACHINES
from varcomm.simulate.measure import measure
from varcomm.simulate.parts import Parts, partition
from varcomm.simulate.scaling import Point, Sample, Scaling, sample, scaling
from varcomm.simulate.step import Step, Times, step
from varcomm.simulate.work import Work, count
from varcomm.simulate.world import world

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
