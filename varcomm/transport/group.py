"""What a user gives as ``group``, made into who the ranks are and which engine serves them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from varcomm.errors import GroupError

__all__ = ["Group", "GroupLike", "resolve"]

GroupLike: TypeAlias = dist.ProcessGroup | DeviceMesh | None


@dataclass(frozen=True)
class Group:
    """The ranks that take part in an operation, seen from one of them.

    Attributes
    ----------
    process_group : torch.distributed.ProcessGroup
    rank, size : int
        This rank *within the group*, and how many there are.
    """

    process_group: dist.ProcessGroup
    rank: int
    size: int

    def __str__(self) -> str:
        """Return how messages name this rank."""
        return f"rank {self.rank} of {self.size}"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the world that are in the group, in its order."""
        return tuple(dist.get_process_group_ranks(self.process_group))

    def backends(self) -> dict[str, str]:
        """Return which of torch.distributed's backends serves which kind of device."""
        config = dist.get_backend_config(self.process_group)
        return dict(pair.split(":", 1) for pair in config.split(","))

    def timeout(self) -> timedelta:
        """Return how long calls may take."""
        options = self.process_group._get_backend(self.device()).options
        # a group that is only planned has none
        return default_pg_timeout if options is None else options._timeout

    def device(self) -> torch.device:
        """Return where this rank keeps what it has to send without a tensor of the user's."""
        backends = self.backends()
        return torch.device("cpu" if "cpu" in backends else next(iter(backends)))


def resolve(group: GroupLike) -> Group:
    """Return the ranks behind a ProcessGroup, a one-dimensional DeviceMesh, or None for all.

    Raises
    ------
    GroupError
        If ``torch.distributed`` is not initialised, if this rank is not in the group, if a mesh
        has several dimensions, or if `group` is something else.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise GroupError(
            "torch.distributed is not initialised. Call varcomm.init() first, under torchrun, srun "
            "or mpirun, or inside varcomm.launch."
        )
    if group is None:
        process_group = dist.group.WORLD
    elif isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or tuple(map(str, range(group.ndim)))
            raise GroupError(
                f"group must be one dimension of a DeviceMesh; got a mesh of {group.ndim} "
                f"dimensions {names}. Pick one: mesh[{names[0]!r}]."
            )
        if group.get_coordinate() is None:
            raise GroupError(f"rank {dist.get_rank()} of the world is not in the mesh {group}.")
        process_group = group.get_group()
    else:
        process_group = group
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
        raise GroupError(
            f"rank {dist.get_rank()} of the world is not in this group. Only its members may call."
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise GroupError(
            "group must be None, a ProcessGroup or a one-dimensional DeviceMesh; "
            f"got {group!r} of type {type(group).__name__}."
        )
    try:
        rank = dist.get_rank(process_group)
    except ValueError as error:
        raise GroupError(
            f"this group exists no longer, or is none of this job: {error}."
        ) from error
    if rank < 0:
        raise GroupError(f"rank {dist.get_rank()} of the world is not in this group.")
    return Group(process_group, rank, dist.get_world_size(process_group))
