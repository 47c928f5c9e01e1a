"""What a user gives as ``group``, made into who the ranks are and which engine serves them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from varcomm.errors import GroupError

__all__ = ["Group", "GroupLike", "named", "resolve"]

# The mesh that a group was last given as: telling its ranks takes 20 us. A mesh keeps its group.
_checked: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[DeviceMesh]]
_checked = weakref.WeakKeyDictionary()

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
    label: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # made here, where torch.compile, which writes no ints that it found into a text, sees it
        object.__setattr__(self, "label", f"rank {self.rank} of {self.size}")

    def __str__(self) -> str:
        """Return how messages name this rank."""
        return self.label

    @property
    def name(self) -> str:
        """What torch.distributed calls the group, on every rank alike."""
        return self.process_group.group_name

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the world that are in the group, in its order."""
        return tuple(dist.get_process_group_ranks(self.process_group))

    def backends(self) -> dict[str, str]:
        """Return which of torch.distributed's backends serves which kind of device."""
        try:
            config = dist.get_backend_config(self.process_group)
        except (TypeError, ValueError) as error:  # torch.distributed does not know it any more
            raise GroupError(
                f"the group of {self.label} was destroyed. Make another one, or call before."
            ) from error
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
        has several dimensions or its ranks in another order than its group has them, or if `group`
        is something else.
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
            names = group.mesh_dim_names
            named = "without names" if names is None else names
            pick = "mesh.get_group(0)" if names is None else f"mesh[{names[0]!r}]"
            raise GroupError(
                f"group must be one dimension of a DeviceMesh; got a mesh of {group.ndim} "
                f"dimensions {named}. Pick one: {pick}."
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
    # the compiler cannot look at the ranks of a mesh
    if isinstance(group, DeviceMesh) and not torch.compiler.is_compiling():
        _check_order(group, process_group)
    return Group(process_group, rank, dist.get_world_size(process_group))


def named(name: str, rank: int) -> Group:
    """Return the group of this name, of which a graph says that this process is `rank`.

    Raises
    ------
    GroupError
        If there is none, or this process is another rank of it.
    """
    try:
        process_group = torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise GroupError(
            f"the group {name!r} of a traced or compiled graph does not exist in this process. "
            "Trace again, after the group has been made."
        ) from error
    group = Group(process_group, process_group.rank(), process_group.size())
    if group.rank != rank:
        raise GroupError(f"a graph traced on rank {rank} runs on {group}. Trace on each rank.")
    return group


def _check_order(mesh: DeviceMesh, process_group: dist.ProcessGroup) -> None:
    """Raise GroupError, on all ranks alike, where a mesh and its group do not count alike."""
    last = _checked.get(process_group)
    if last is not None and last() is mesh:
        return
    ranks, own = mesh.mesh.tolist(), dist.get_process_group_ranks(process_group)
    if ranks != own:
        raise GroupError(
            f"the mesh has ranks {ranks} of the world, in this order, of which torch has made a "
            f"group in the order {own}: the first in the one is not the first in the other. "
            "Name ranks of a mesh in ascending order, or pass a group that keeps yours: "
            f"torch.distributed.new_group({ranks}, sort_ranks=False)."
        )
    _checked[process_group] = weakref.ref(mesh)
