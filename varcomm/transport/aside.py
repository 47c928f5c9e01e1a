"""A group with the same ranks, for a thread that agrees with its like while others compute.

Calls of two threads on one group would be matched in whatever order they come, which is another one
on each rank. This group is on Gloo, whatever the ranks compute on: what threads say is short, and
must not get between the kernels of a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch.distributed as dist

from varcomm.transport.group import Group, resolve
from varcomm.transport.lane import weakly

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
        ranks = dist.get_process_group_ranks(group.process_group)
        backend = group.process_group._get_backend(group.device())
        made = dist.new_group(
            ranks,
            timeout=backend.options._timeout,
            backend="gloo",
            use_local_synchronization=True,  # others of the world need not take part
        )
        _made[group.process_group] = weakly(resolve(made))
    return _made[group.process_group]()
