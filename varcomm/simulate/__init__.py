"""What a run on many ranks would send, keep and take, from one process and without them."""

from varcomm.simulate.machine import Machine, Seconds
from varcomm.simulate.machines import MACHINES
from varcomm.simulate.parts import Parts, partition
from varcomm.simulate.step import Step, Times, step
from varcomm.simulate.work import Work, count
from varcomm.simulate.world import world

__all__ = [
    "MACHINES",
    "Machine",
    "Parts",
    "Seconds",
    "Step",
    "Times",
    "Work",
    "count",
    "partition",
    "step",
    "world",
]
