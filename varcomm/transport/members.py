"""Groups of some ranks of the world, made by a call that only these make."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from varcomm.transport.group import resolve

__all__ = ["group_of_members", "new_name"]


def new_name() -> str:
    """Return a name for a group that no other has; one rank draws it, and tells the others."""
    return f"varcomm.{uuid.uuid4().hex}"


def group_of_members(
    ranks: Sequence[int], backends: str, timeout: timedelta, name: str
) -> dist.ProcessGroup:
    """Make a group; all of its members call it, and nobody else need.

    With ``use_local_synchronization``, ``new_group`` would do so too, but it derives the name, by
    which ranks find each other, from how many groups a rank is in. Ranks that are in more groups
    than others would never meet, and a group made after another has been destroyed could meet what
    that one has left behind.

    Parameters
    ----------
    ranks : sequence of int
        Of the world.
    backends : str
        As torch.distributed's ``new_group`` takes them.
    timeout : timedelta
    name : str
        The same on all of them, and of no other group: as :func:`new_name` gives it.
    """
    _, store = c10d._world.pg_map[resolve(None).process_group]
    process_group: dist.ProcessGroup
    process_group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        c10d.Backend(backends),
        store,
        cast(Any, name),  # of a type that only some versions of torch have
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[process_group] = {rank: i for i, rank in enumerate(ranks)}
    return process_group
