"""Groups: the ranks that take part in a call, and all state that belongs to them."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from typing import Any, ClassVar, Self, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from varcomm._torch_private import group_exists, group_named, timeout_of
from varcomm.errors import GroupError
from varcomm.transport.call_log import CallLog

# Ranks from which sums go by levels: as few as keep this many clusters from one merge, on average.
MANY = 16

GroupLike: TypeAlias = dist.ProcessGroup | DeviceMesh | None
Calls: TypeAlias = dict[Any, Any]  # by their arguments, with what they prepared


class OfGroup:
    """An object of the ranks of a group: copies of a model share it, and pickle refuses it."""

    _instead_of_pickle: ClassVar[str] = "Save its tensors, and make the object again."

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> str:
        raise GroupError(
            f"this {type(self).__name__} belongs to the ranks of its group and cannot be pickled, "
            f"as by torch.save. {self._instead_of_pickle}"
        )


class Group(OfGroup):
    """The ranks that take part in an operation, seen from one of them.

    There is one object per process group; :func:`resolve` returns it. `label` names this rank in
    messages; `name` is the group's name in torch.distributed, equal on all ranks.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group, self.name = process_group, process_group.group_name
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.label = f"rank {self.rank} of {self.size}"
        self.engines: dict[torch.device, Any] = {}  # as `engine_for` found them
        self.over_mpi = False  # of the world: whether MPI serves it and its subgroups
        self.node_size = 0  # of the world: ranks on each node, if consecutive and known
        self.log: CallLog | None = None  # of its calls, where sums over ranks compare them
        self.compared_calls = 0  # calls that this rank compared with the other ranks
        self.compares_exchanges = True  # until one was compiled
        self.compiles = False  # whether compiled code has run layers of it
        self.exchanges_to_compare = 0  # the next ones of graphs, before any row is sent
        self.given_up = ""  # message of the call in which this rank stopped to wait for others
        self.note: dict[str, Any] = {}  # of the world: note of this rank on its last call
        self.calls: Calls = {}  # that further calls with equal arguments use
        self.in_flight: list[Any] = []  # of the world: calls of Handles with further rounds
        self.captured: weakref.WeakSet[Any] = weakref.WeakSet()  # of the world: CUDA graphs
        self.unfinished: list[Any] = []  # buffers and requests of calls that no caller waits for
        self.auxiliary: dict[Any, Any] = {}  # state of other modules; for example further groups
        self._ranks: tuple[int, ...] = ()
        self._checked_mesh: DeviceMesh | None = None

    def __str__(self) -> str:
        return self.label

    def __repr__(self) -> str:
        return f"Group({self.name!r}, {self.label})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and self.process_group == other.process_group

    def __hash__(self) -> int:
        return hash(self.process_group)

    @property
    def ranks(self) -> tuple[int, ...]:
        """World ranks of the group, in its order."""
        if not self._ranks:
            self._ranks = tuple(dist.get_process_group_ranks(self.process_group))
        return self._ranks

    def exists(self) -> bool:
        """Return whether torch.distributed still has the group."""
        return group_exists(self.process_group)

    def backends(self) -> dict[str, str]:
        """Return the backend of torch.distributed for each kind of device."""
        try:
            config = dist.get_backend_config(self.process_group)
        except (TypeError, ValueError) as error:
            raise GroupError(f"the group of {self.label} was destroyed.") from error
        return dict(pair.split(":", 1) for pair in config.split(","))

    @cached_property
    def simulated(self) -> bool:
        """Whether its engine answers for the other ranks, which do not exist.

        Each of them repeats the metadata of this rank, and its data are zeros.
        """
        return self.backends().get(self.device().type) == "fake"

    def timeout(self) -> timedelta:
        """Return the timeout of calls; a simulated group has the default."""
        return timeout_of(self.process_group, self.device()) or default_pg_timeout

    def device(self) -> torch.device:
        """Return the device of tensors that this rank sends on its own account."""
        backends = self.backends()
        if "cpu" in backends:
            return torch.device("cpu")
        # the current GPU is of a thread, and in a new thread it is the first
        bound = self.process_group.bound_device_id
        return torch.device(next(iter(backends))) if bound is None else bound


# torch.distributed does not report the end of a group: `forget_destroyed` runs when a new group
# comes. A group that ends with the interpreter can abort the process, so none is left at exit.
_groups: dict[dist.ProcessGroup, Group] = {}


def forget_destroyed(also_living: bool = False) -> None:
    """Drop the groups that torch.distributed has destroyed, so that their threads end."""
    for group in [*_groups.values()]:
        if also_living or not group.exists():
            # calls, plans of grids among the auxiliary values, and messages hold it in a cycle
            group.calls.clear()
            group.auxiliary.clear()
            group.in_flight = []
            del _groups[group.process_group]


def living() -> list[Group]:
    """Return the groups that torch.distributed has, by name, which is an order of all ranks."""
    return sorted((g for g in _groups.values() if g.exists()), key=lambda group: group.name)


def compare_calls(agreement: bool) -> None:
    """Let sums over ranks compare calls from now on, or no longer, in all groups."""
    for group in _groups.values():
        if group.log is not None and group.log.active != agreement:
            group.calls.clear()  # which are prepared for it
            group.log.active = agreement
            group.log.clear()


@atexit.register
def _forget_all(owner: int = os.getpid()) -> None:
    if os.getpid() == owner:  # a forked child has no threads to end
        forget_destroyed(also_living=True)


def resolve(group: GroupLike) -> Group:
    """Return the Group of a ProcessGroup, a one-dimensional DeviceMesh, or all ranks (None)."""
    if torch.compiler.is_dynamo_compiling():  # it follows no dict of groups
        return Group(_process_group(group))
    given = dist.group.WORLD if group is None else group
    if isinstance(given, dist.ProcessGroup):
        known = _groups.get(given)
        if known is not None and (group is None or known.exists()):
            return known
    found = _of(_process_group(group))
    if isinstance(group, DeviceMesh) and found._checked_mesh is not group:
        ranks, own = group.mesh.tolist(), list(found.ranks)
        if ranks != own:
            raise GroupError(
                f"the mesh has ranks {ranks} of the world, of which torch has made a group in the "
                f"order {own}. Name ranks of a mesh in ascending order, or, with torch 2.12 or "
                "newer, pass a group that keeps yours: "
                f"torch.distributed.new_group({ranks}, sort_ranks=False)."
            )
        found._checked_mesh = group
    return found


def _process_group(group: GroupLike) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise GroupError(
            "torch.distributed is not initialised. Call varcomm.init() first, under torchrun, srun "
            "or mpirun, or inside varcomm.launch."
        )
    process_group = dist.group.WORLD if group is None else group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names
            pick = "mesh.get_group(0)" if names is None else f"mesh[{names[0]!r}]"
            raise GroupError(
                f"group must be one dimension of a DeviceMesh; got a mesh of {group.ndim} "
                f"dimensions. Pick one: {pick}."
            )
        if group.get_coordinate() is None:
            raise GroupError(f"rank {dist.get_rank()} of the world is not in the mesh {group}.")
        process_group = group.get_group()
    if process_group is cast(object, dist.GroupMember.NON_GROUP_MEMBER):
        raise GroupError(f"rank {dist.get_rank()} of the world is not in this group.")
    if not isinstance(process_group, dist.ProcessGroup):
        raise GroupError(
            "group must be None, a ProcessGroup or a one-dimensional DeviceMesh; "
            f"got {group!r} of type {type(group).__name__}."
        )
    return process_group


def _of(process_group: dist.ProcessGroup) -> Group:
    """Return the one Group of a process group."""
    found = _groups.get(process_group)
    if found is None or not found.exists():
        try:
            found = Group(process_group)
        except ValueError as error:
            _groups.pop(process_group, None)
            raise GroupError(
                f"this group exists no longer, or is none of this job: {error}."
            ) from error
        forget_destroyed()
        _groups[process_group] = found
        if found.size > 1:
            found.log = CallLog()
        if process_group is not dist.group.WORLD:
            world = resolve(None)
            found.in_flight = world.in_flight
            if found.log is not None and world.log is not None:
                found.log.active = world.log.active
    return found


def named(name: str, rank: int) -> Group:
    """Return the group of a graph that was traced on `rank`."""
    process_group = group_named(name)
    if process_group is None:
        raise GroupError(
            f"the group {name!r} of a traced or compiled graph does not exist. Trace again."
        )
    group = _of(process_group)
    if group.rank != rank:
        raise GroupError(f"a graph traced on rank {rank} runs on {group}. Trace on each rank.")
    return group


def weakly(group: Group) -> Callable[[], Group]:
    """Return a function that returns the group, or raises GroupError after its end.

    A model may live until the interpreter ends; the threads of a group must end before.
    """
    process_group, label = weakref.ref(group.process_group), group.label

    def found() -> Group:
        alive = process_group()
        if alive is None:
            raise GroupError(f"the group in which this was {label} has been destroyed.")
        return resolve(alive)

    return found
