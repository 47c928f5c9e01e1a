"""What a run on many ranks would send, keep and take, from one process and without them."""

from varcomm.simulate.parts import Parts, partition
from varcomm.simulate.world import world

__all__ = ["Parts", "partition", "world"]
