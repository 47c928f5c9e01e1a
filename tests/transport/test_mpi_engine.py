"""The engine on MPI: the bytes it moves, and what it does on a GPU, as far as a CPU can tell."""

from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from conftest import WORLDS
from varcomm.transport.engines import engine_for
from varcomm.transport.group import resolve
from varcomm.transport.staged import Staged

LARGE = 300_000  # bytes, which torch copies where a rank keeps them
LIMIT = timedelta(seconds=60)


def stamp(sender, receiver, n):
    return torch.full((n,), 16 * sender + receiver, dtype=torch.uint8)


def moved(rank, unit, staged):
    group = resolve(None)
    size, right = group.size, []
    engine = engine_for(group, torch.device("cpu"))
    if staged:
        engine = Staged(engine)

    def wait(works):
        for work in works:
            work.wait()
            work.wait()  # which changes nothing

    for counts in ([unit * r for r in range(size)], [unit] * size, [0] * size, [1] + [0] * size):
        counts = counts[:size]
        want = torch.cat([stamp(r, 0, n) for r, n in enumerate(counts)])
        out = torch.zeros(sum(counts), dtype=torch.uint8)
        wait(engine.all_gather(group, out, stamp(rank, 0, counts[rank]), counts))
        right.append(torch.equal(out, want))
        if not staged:
            out.zero_()
            place = out.split(counts)[rank]
            place.copy_(stamp(rank, 0, counts[rank]))
            wait(engine.all_gather(group, out, place, counts))
            right.append(torch.equal(out, want))

    table = [[unit * ((r + 2 * s) % 3) for s in range(size)] for r in range(size)]
    send, recv = table[rank], [row[rank] for row in table]
    data = torch.cat([stamp(rank, s, n) for s, n in enumerate(send)])
    want = torch.cat([stamp(r, rank, n) for r, n in enumerate(recv)])
    for peers in ("all", "neighbours", "one"):
        out = torch.zeros_like(want)
        works = engine.exchange(group, out, data, recv, send, peers)
        wait(works)
        right.append(torch.equal(out, want))
    out.zero_()
    works = engine.exchange(group, out, data, recv, send, "all")
    while not all(work.is_completed() for work in works):
        pass
    wait(works)  # which copies what was staged
    right.append(torch.equal(out, want))

    x = stamp(rank, 3, unit)
    wait(engine.broadcast(group, x, size - 1))
    right.append(torch.equal(x, stamp(size - 1, 3, unit)))
    small = torch.zeros(3 * size, dtype=torch.uint8)
    engine.all_gather_small(group, small, stamp(rank, 1, 3), LIMIT)
    right.append(torch.equal(small, torch.cat([stamp(r, 1, 3) for r in range(size)])))
    dist.barrier()
    return right


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("unit", [0, 1, 1000, LARGE])
@pytest.mark.parametrize("world", WORLDS)
def test_bytes_arrive(mpi_worlds, world, unit, staged):
    assert all(all(right) for right in mpi_worlds.run(world, moved, unit, staged))


def by_tree(rank, unit):
    from varcomm.transport.mpi import engine

    with patch.object(engine, "_MANY_RANKS", 2):
        return moved(rank, unit, False)


@pytest.mark.parametrize("unit", [0, 1, 1000])
def test_few_bytes_among_many_ranks(mpi_worlds, unit):
    assert all(all(right) for right in mpi_worlds.run(3, by_tree, unit))


def beside_a_second_round(rank):
    """The engine's wait finishes what another rank needs of this one."""
    group = resolve(None)
    engine = engine_for(group, torch.device("cpu"))
    x = torch.full((50_001,), float(rank))
    work = dist.all_reduce(x, async_op=True)
    if rank == 0:
        work.wait()
    out = torch.zeros(group.size, dtype=torch.uint8)
    engine.all_gather_small(group, out, stamp(rank, 0, 1), LIMIT)
    work.wait()
    return x.unique().tolist(), out.tolist()


def test_the_wait_keeps_others_going(mpi_worlds):
    assert mpi_worlds.run(3, beside_a_second_round) == [([3.0], [0, 16, 32])] * 3


def served(rank):
    from varcomm.transport.mpi import buffers
    from varcomm.transport.mpi.engine import MPIEngine

    group = resolve(None)
    on_gpu = engine_for(group, torch.device("cuda"))
    aware = buffers.gpu_aware()
    return isinstance(on_gpu, MPIEngine if aware else Staged)


def test_engine_for_gpus(mpi_worlds):
    assert mpi_worlds.run(2, served) == [True, True]
