"""Auxiliary groups: further groups with the ranks of a group, made by these ranks alone.

A call whose order depends on no other call, such as one in a second thread, needs its own group.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from varcomm._torch_private import make_group
from varcomm.transport.agreement import on_all_ranks, share
from varcomm.transport.failure import leave
from varcomm.transport.group import Group, resolve, weakly
from varcomm.transport.notes import brief, leave_note


def aside(group: Group) -> Group:
    """Return a second group of the ranks of `group` for one thread; collective at first."""
    if "aside" not in group.auxiliary:
        name = share("a second group", _new_name, group)[0]
        backends = _kind(group)[0] if group.simulated else "gloo"
        group.auxiliary["aside"] = _made(group, backends, name)
    found: Group = group.auxiliary["aside"]()
    return found


@dataclass(eq=False)
class Lane:
    """An auxiliary group that one user has to itself, until it leaves without calls in flight."""

    number: int  # equal on all its ranks
    group: Callable[[], Group]
    kind: tuple[str, timedelta]  # backends and timeout of the group that it was made for
    under_way: bool = False  # calls are in flight
    taken: bool = True  # it has a user on this rank

    def give_back(self) -> None:
        """Free the lane for the next user."""
        self.taken = self.under_way

    def leave(self, error: BaseException, where: str) -> None:
        """Close the lane on this rank, so that no rank waits, unless all ranks raise the error."""
        if not on_all_ranks(error):
            self.under_way = True
            leave_note({"left with": f"{type(error).__name__}: {brief(error)}, in {where}"})
            leave(self.group())


def free_lanes(group: Group, backends: str = "") -> dict[str, Any]:
    """Return the numbers of the lanes that could replace `group` on this rank, and a new name.

    The name that the first rank returns is used if a lane must be made. `backends` are those of
    the group by default.
    """
    kind = _kind(group, backends)
    free = [lane.number for lane in _lanes(group) if not lane.taken and lane.kind == kind]
    return {"free": free, "name": _new_name()}


def take_lane(group: Group, offers: Sequence[dict[str, Any]], backends: str = "") -> Lane | None:
    """Return a lane with the ranks of `group`, or None for a single rank; collective.

    `offers` holds the result of :func:`free_lanes` on each rank: a lane is free if it is so on all.
    """
    if group.size == 1:
        return None
    lanes = _lanes(group)
    free: set[int] = set.intersection(*(set(offer["free"]) for offer in offers))
    if free:
        lanes[min(free)].taken = True
        return lanes[min(free)]
    kind = _kind(group, backends)
    lanes.append(Lane(len(lanes), _made(group, kind[0], offers[0]["name"]), kind))
    return lanes[-1]


def _lanes(group: Group) -> list[Lane]:
    """Return the lanes of these ranks; the world keeps them, as torch keeps a group's threads."""
    lanes: list[Lane] = resolve(None).auxiliary.setdefault(group.ranks, [])
    return lanes


def _kind(group: Group, backends: str = "") -> tuple[str, timedelta]:
    return backends or dist.get_backend_config(group.process_group), group.timeout()


def _new_name() -> str:
    return f"varcomm.{uuid.uuid4().hex}"


def _made(group: Group, backends: str, name: str) -> Callable[[], Group]:
    made = make_group(group.ranks, group.rank, backends, name, group.timeout())
    return weakly(resolve(made))
