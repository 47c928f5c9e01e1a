"""A second group of the same ranks, for calls whose order does not depend on any other's.

Ranks match the calls on a group by their order. What starts in the middle of a backward comes
before some exchange of the model on one rank and after it on another; on a group of its own it
meets nothing but its own kind.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from varcomm.errors import GroupError
from varcomm.transport.group import Group, resolve
from varcomm.transport.members import group_of_members, new_name

__all__ = ["Lane", "free_lanes", "take_lane", "weakly"]


@dataclass(eq=False)
class Lane:
    """A group that one user has to itself.

    Attributes
    ----------
    number : int
        The same on all its ranks.
    group : callable
        Returns the group.
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


# Of each world, which is gone when its process group is destroyed, and of each list of its ranks.
# torch.distributed keeps a group and its threads until then, so lanes are used again rather than
# made for each user.
_lanes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], list[Lane]]]
_lanes = weakref.WeakKeyDictionary()


def free_lanes(group: Group) -> dict[str, Any]:
    """Return what this rank tells of lanes that could serve in the place of `group`.

    Those that are free, by number; and a name for a new one: that of the first rank is taken.
    """
    free = [lane.number for lane in _made(group) if not lane.taken and lane.kind == _kind(group)]
    return {"free": free, "name": new_name()}


def take_lane(group: Group, told: Sequence[dict[str, Any]]) -> Lane | None:
    """Return a lane with the ranks of `group`, or None where there can be none; collective.

    There is none for one rank, which has nobody to get out of step with. Nor is there for a part of
    a world that torch.distributed has bound to GPUs from the start: it would split the world's
    communicator then, which only all ranks together can do.

    `told` is what :func:`free_lanes` gave on each rank. Users leave when the garbage collector
    finds them, at other times on other ranks; a lane is free when it is so everywhere.
    """
    world = resolve(None)
    part = group.size < world.size
    if group.size == 1 or (part and world.process_group.bound_device_id is not None):
        return None
    made = _made(group)
    common: set[int] = set.intersection(*(set(lanes["free"]) for lanes in told))
    if common:
        lane = made[min(common)]
        lane.taken = True
        return lane
    backends, timeout = kind = _kind(group)
    ranks = group.ranks
    process_group = (
        group_of_members(ranks, backends, timeout, told[0]["name"])
        if part
        else dist.new_group(list(ranks), timeout=timeout, backend=backends)
    )
    lane = Lane(len(made), weakly(resolve(process_group)), kind)
    made.append(lane)
    return lane


def _made(group: Group) -> list[Lane]:
    return _lanes.setdefault(resolve(None).process_group, {}).setdefault(group.ranks, [])


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
    return dist.get_backend_config(process_group), group.timeout()
