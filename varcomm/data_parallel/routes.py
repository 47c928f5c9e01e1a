"""Over which groups the gradient of each parameter is summed, and in which order."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from varcomm.data_parallel.buckets import Bucket, cut

if TYPE_CHECKING:
    from varcomm.data_parallel.replica import Replica

__all__ = ["Route", "routes"]


@dataclass(frozen=True)
class Route:
    """A bucket, and those who sum it after the first has, over other groups, one after the other.

    The first has a copy of the list, and must not keep itself by it.
    """

    bucket: Bucket
    others: tuple[weakref.ref[Replica], ...]

    def after(self) -> list[Replica]:
        """Return those who sum it further."""
        return [replica for other in self.others if (replica := other()) is not None]


def routes(first: Replica) -> list[Route]:
    """Return the buckets that a replica is the first to sum, the last parameters first.

    Who came first sums first, while backward goes on; the others sum what it has summed. So each
    bucket is of parameters that take the same way. That order is the same on all ranks.
    """
    ways: dict[tuple[int, ...], tuple[list[int], list[Replica]]] = {}
    places: dict[int, int] = {}
    for index in reversed(range(len(first.parameters))):
        summing = first.summing(index)
        if summing and summing[0] is first and first.parameters[index].requires_grad:
            way = ways.setdefault(tuple(r.number for r in summing), ([], summing[1:]))
            places[index] = len(places)
            way[0].append(index)
    cuts = [
        (members, tuple(weakref.ref(replica) for replica in others))
        for indices, others in ways.values()
        for members in cut(first.parameters, indices, first.options.bucket_bytes)
    ]
    cuts.sort(key=lambda of: places[of[0][-1]])
    return [
        Route(Bucket({index: first.parameters[index] for index in members}), others)
        for members, others in cuts
    ]
