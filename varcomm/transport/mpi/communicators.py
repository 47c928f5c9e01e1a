"""Communicators of mpi4py for groups of torch.distributed, made within their time limits."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from mpi4py import MPI

from varcomm.errors import LaunchError
from varcomm.transport.mpi.progress import poll, too_late

__all__ = ["of_members", "of_world"]


def of_world(rank: int, size: int, seconds: float) -> MPI.Intracomm:
    """Return a communicator of its own for all ranks; collective.

    Raises
    ------
    LaunchError
        If MPI numbers the ranks otherwise than torch.distributed, or they do not all come.
    """
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (rank, size):
        raise LaunchError(
            f"rank {rank} of {size} of torch.distributed is rank {world.rank} of {world.size} of "
            "MPI. Start all ranks with one mpirun or srun, or let varcomm.init(backend='mpi') "
            "give them their places."
        )
    made, request = world.Idup()
    if not poll(request.Test, seconds):
        raise LaunchError(str(too_late("making the communicator", f"rank {rank}", seconds)))
    made.Set_errhandler(MPI.ERRORS_RETURN)
    return made


def of_members(ranks: Sequence[int], name: str, seconds: float) -> MPI.Intracomm:
    """Return a communicator for some ranks of the world, in their order; these alone call it.

    MPI's own call would wait for them for ever, so they meet first.

    Raises
    ------
    LaunchError
        If they do not all come within the time limit.
    """
    world = MPI.COMM_WORLD
    # in the upper half, which few use; a hash, as ranks may make two groups in another order
    half = (world.Get_attr(MPI.TAG_UB) or 32767) // 2
    tag = half + zlib.crc32(name.encode()) % half
    place, size, step = ranks.index(world.rank), len(ranks), 1
    while step < size:  # after each round, a rank has heard of twice as many
        requests = [
            world.Irecv([None, 0, MPI.BYTE], ranks[(place - step) % size], tag),
            world.Isend([None, 0, MPI.BYTE], ranks[(place + step) % size], tag),
        ]
        if not poll(lambda: MPI.Request.Testall(requests), seconds):  # noqa: B023
            where = f"rank {world.rank} with the ranks {list(ranks)}"
            raise LaunchError(str(too_late("making a group", where, seconds)))
        step *= 2
    group = world.group.Incl(list(ranks))
    made = world.Create_group(group, tag)
    group.Free()
    made.Set_errhandler(MPI.ERRORS_RETURN)
    return made
