"""Internals of torch.distributed that no public function offers; the only ones used in varcomm.

``tests/transport/test_c10d.py`` pins them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import Store, distributed_c10d  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout

__all__ = ["default_store", "group_by_name", "group_of_members", "is_registered", "timeout_of"]


def default_store() -> Store:
    """Return the store in which the ranks of the world met."""
    return distributed_c10d._get_default_store()


def group_by_name(name: str) -> dist.ProcessGroup:
    """Return the process group that torch.distributed calls `name`; RuntimeError if none does."""
    found: dist.ProcessGroup = cast(Any, distributed_c10d)._resolve_process_group(name)
    return found


def is_registered(process_group: dist.ProcessGroup) -> bool:
    """Return whether a process group has not been destroyed."""
    return process_group in distributed_c10d._world.pg_group_ranks


def timeout_of(process_group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout of a group's calls; a simulated group has the default."""
    options = process_group._get_backend(device).options
    return default_pg_timeout if options is None else options._timeout


def group_of_members(
    ranks: Sequence[int], backends: str, timeout: timedelta, name: str
) -> dist.ProcessGroup:
    """Make a process group by a call of its members alone.

    ``new_group(use_local_synchronization=True)`` derives the name under which ranks meet from the
    groups that a rank is in. Ranks in different numbers of groups never meet, and a new group can
    read the addresses that a destroyed one left in the store. Here the caller passes `name`: equal
    on all members, and used for no other group.
    """
    _, store = distributed_c10d._world.pg_map[cast(dist.ProcessGroup, dist.group.WORLD)]
    process_group: dist.ProcessGroup
    process_group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(dist.get_rank()),
        list(ranks),
        distributed_c10d.Backend(backends),
        store,
        cast(Any, name),
        timeout=timeout,
    )
    group_ranks = {rank: place for place, rank in enumerate(ranks)}
    distributed_c10d._world.pg_group_ranks[process_group] = group_ranks
    return process_group
