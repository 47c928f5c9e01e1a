"""Over which groups the gradient of each parameter is summed, and in which order."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from varcomm.data_parallel.buckets import Bucket, cut
from varcomm.errors import ArgumentError

if TYPE_CHECKING:
    from varcomm.data_parallel.replica import Replica

__all__ = ["Route", "alive", "deleted", "routes"]


@dataclass(frozen=True)
class Route:
    """A bucket, and those who sum it after the first has, over other groups, one after the other.

    The first has a copy of the list, and must not keep itself by it.
    """

    bucket: Bucket
    others: tuple[weakref.ref[Replica], ...]

    def after(self) -> list[Replica]:
        """Return those who sum it further."""
        return alive(self.others)


def alive(references: Sequence[weakref.ref[Replica]]) -> list[Replica]:
    """Return whom they refer to, or raise if one is gone."""
    replicas = [replica for reference in references if (replica := reference()) is not None]
    if len(replicas) < len(references):
        raise deleted()
    return replicas


def deleted() -> ArgumentError:
    """Return the error of a module that is gone."""
    return ArgumentError(
        "replicate: the module that was replicated has been deleted before backward, and its "
        "gradients are not summed. Keep it, or replicate the module that you call."
    )


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
