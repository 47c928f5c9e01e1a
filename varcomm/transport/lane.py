"""A second group of all ranks, for calls whose order does not depend on any other's.

Ranks match the calls on a group by their order. What starts in the middle of a backward comes
before some exchange of the model on one rank and after it on another; on a group of its own it
meets nothing but its own kind.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from varcomm.errors import GroupError
from varcomm.transport.group import Group, resolve

__all__ = ["Lane", "free_lanes", "take_lane", "weakly"]


@dataclass(eq=False)
class Lane:
    """A group that one user has to itself.

    Attributes
    ----------
    number : int
        The same on all ranks.
    group : callable
        Returns the group, of all ranks of the world.
    kind : tuple
        Backends and time limit, which are those of the group that it was made for.
    under_way : bool
        Whether calls have been started and not been waited for. A lane that is left so is not used
        again: nobody knows which of them the peers have made.
    taken : bool
        Whether it has a user on this rank.
    """

    number: int
    group: Callable[[], Group]
    kind: tuple[str, timedelta]
    under_way: bool = False
    taken: bool = True

    def give_back(self) -> None:
        """Leave it to whoever comes next."""
        self.taken = self.under_way


# Of each world, which is gone when its process group is destroyed. torch.distributed keeps a group
# and its threads until then, so lanes are used again rather than made for each user.
_lanes: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Lane]] = weakref.WeakKeyDictionary()


def free_lanes(group: Group) -> list[int]:
    """Return the numbers of the lanes of this rank that could serve in the place of `group`."""
    made = _lanes.get(resolve(None).process_group, [])
    return [lane.number for lane in made if not lane.taken and lane.kind == _kind(group)]


def take_lane(group: Group, free: list[list[int]]) -> Lane | None:
    """Return a lane with the ranks of `group`, or None where there can be none; collective.

    There is none for one rank, which has nobody to get out of step with, nor for a part of the
    world: torch.distributed makes a group only if all ranks of the world take part.

    `free` is what :func:`free_lanes` gave on each rank. Users leave when the garbage collector
    finds them, at other times on other ranks; a lane is free when it is so everywhere.
    """
    world = resolve(None)
    if not 1 < group.size == world.size:
        return None
    made = _lanes.setdefault(world.process_group, [])
    common = set.intersection(*map(set, free))
    if common:
        lane = made[min(common)]
        lane.taken = True
        return lane
    backends, timeout = kind = _kind(group)
    ranks = dist.get_process_group_ranks(group.process_group)
    process_group = dist.new_group(ranks, timeout=timeout, backend=backends)
    lane = Lane(len(made), weakly(resolve(process_group)), kind)
    made.append(lane)
    return lane


def weakly(group: Group) -> Callable[[], Group]:
    """Return what gives the group as long as it exists, and does not keep it.

    What lives until the interpreter ends, as a model may, must not keep the threads of a group:
    they would abort the process.

    Raises
    ------
    GroupError
        When called after the group has been destroyed.
    """
    reference, place = weakref.ref(group.process_group), str(group)

    def found() -> Group:
        process_group = reference()
        if process_group is None:
            raise GroupError(f"the group in which this was {place} has been destroyed.")
        return resolve(process_group)

    return found


def _kind(group: Group) -> tuple[str, timedelta]:
    process_group = group.process_group
    backend = process_group._get_backend(group.device())
    return dist.get_backend_config(process_group), backend.options._timeout
