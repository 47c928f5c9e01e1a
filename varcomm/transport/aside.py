"""A group with the same ranks, for a thread that agrees with its like while others compute.

Calls of two threads on one group would be matched in whatever order they come, which is another one
on each rank. This group is on Gloo, whatever the ranks compute on: what threads say is short, and
must not get between the kernels of a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch.distributed as dist

from varcomm.transport.agreement import share
from varcomm.transport.engines import peers_answer
from varcomm.transport.group import Group, resolve
from varcomm.transport.lane import weakly
from varcomm.transport.members import group_of_members, new_name

__all__ = ["aside"]

# By the group whose ranks it has. torch.distributed keeps groups until the world is destroyed.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Callable[[], Group]] = (
    weakref.WeakKeyDictionary()
)


def aside(group: Group) -> Group:
    """Return the second group of the ranks of `group`, made when it is first asked for; collective.

    One thread at a time may use it.
    """
    if group.process_group not in _made:
        name = share("a second group", new_name, group)[0]
        backends = "gloo" if peers_answer(group) else dist.get_backend_config(group.process_group)
        made = group_of_members(group.ranks, backends, group.timeout(), name)
        _made[group.process_group] = weakly(resolve(made))
    return _made[group.process_group]()
