"""MPI as the engine of a Gloo group: bytes, groups, timeouts, starts and ends."""

import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import varcomm
from tests.transport.groups import ordered_group
from tests.transport.processes import all_end, finished, script
from varcomm.errors import CommunicationError, LaunchError
from varcomm.transport.engine import Route, broadcast_route
from varcomm.transport.engines.choose import engine_for, prepared
from varcomm.transport.group import resolve

MPIEXEC = [str(Path(sys.executable).parent / "mpiexec"), "-n"]
CPU = torch.device("cpu")
LARGE = 300_000  # bytes: more than Python copies


def stamp(sender, receiver, n):
    return torch.full((n,), 16 * sender + receiver, dtype=torch.uint8)


def moved(rank, unit):
    """Check the bytes of each call of the engine; waiting twice changes nothing."""
    group = resolve(None)
    size = group.size
    assert type(engine_for(group, CPU)).__name__ == "MPIEngine"

    def wait(works):
        for work in [*works, *works]:
            work.wait()

    for counts in ([unit * r for r in range(size)], [unit] * size, [0] * size, [1] + [0] * size):
        counts = counts[:size]
        want = torch.cat([stamp(r, 0, n) for r, n in enumerate(counts)])
        for in_place in (False, True):
            out = torch.zeros(sum(counts), dtype=torch.uint8)
            own = stamp(rank, 0, counts[rank])
            own = out.split(counts)[rank].copy_(own) if in_place else own
            to_each = [counts[rank]] * size
            wait(prepared(Route("all_gather", group, counts, to_each), CPU)(out, own))
            assert torch.equal(out, want)
    table = [[unit * ((r + 2 * s) % 3) for s in range(size)] for r in range(size)]
    send, recv = table[rank], [row[rank] for row in table]
    data = torch.cat([stamp(rank, s, n) for s, n in enumerate(send)])
    want = torch.cat([stamp(r, rank, n) for r, n in enumerate(recv)])
    for schedule in ("all", "neighbours", "one"):
        out = torch.zeros_like(want)
        works = prepared(Route(schedule, group, recv, send), CPU)(out, data)
        while schedule == "one" and not all(work.is_completed() for work in works):
            pass
        wait(works)
        assert torch.equal(out, want)
    x = stamp(rank, 3, unit)
    wait(prepared(broadcast_route(group, len(x), size - 1), CPU)(x, x))
    assert torch.equal(x, stamp(size - 1, 3, unit))


def many(rank):
    """A group of some ranks; sums and objects on Gloo beside sums on MPI."""
    part = ordered_group([2, 0])
    total = varcomm.all_reduce(torch.tensor(rank), group=part).item() if rank != 1 else None
    dist.barrier()
    value = torch.tensor(rank)
    work = dist.all_reduce(value, async_op=True)
    ours = varcomm.all_reduce(torch.tensor(rank)).item()
    work.wait()
    objects = [None] * 3
    dist.all_gather_object(objects, rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2) * rank).sum().backward()
    with pytest.raises(varcomm.DisagreementError), varcomm.debug():
        varcomm.all_reduce(torch.ones(1 + rank))
    return total, value.item(), ours, objects, model.module.weight.grad.tolist()


def dropped(rank):
    """No rank waits for these; the next calls arrive all the same."""
    whole = []
    for elements in (10, 3_000_000):
        for _ in range(3):
            varcomm.all_gather_v(torch.full((elements,), rank), [elements] * 3, async_op=True)
        whole.append(varcomm.all_reduce(torch.tensor(rank)).item())
    return whole


@pytest.mark.slow
def test_groups_and_dropped_calls(mpi_worlds):
    """The sample of the first tier."""
    first, second, third = mpi_worlds.run(3, many)
    same = (3, 3, [0, 1, 2], [[1.0, 1.0]])
    assert (first, second, third) == ((2, *same), (None, *same), (2, *same))
    assert mpi_worlds.run(3, dropped) == [[3, 3]] * 3
    mpi_worlds.run(3, moved, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 9])
def test_bytes_arrive(mpi_worlds, world):
    for unit in (0, 1, 1000, LARGE):
        mpi_worlds.run(world, moved, unit)


def late(rank, made):
    """Rank 1 does not come to a call: to the first of a group, or to a later one."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    if made:
        varcomm.all_reduce(torch.ones(1), group=group)
    if rank == 1:
        time.sleep(4)
        return None
    with pytest.raises(CommunicationError, match=r"failed after \d") as caught:
        varcomm.all_reduce(torch.ones(1), group=group)
    with pytest.raises(CommunicationError, match="has left the group"):
        varcomm.all_gather_v(torch.ones(1), [1] * 3, group=group)
    return str(caught.value)


def absent(rank):
    if rank == 1:
        return None
    with pytest.raises(CommunicationError) as caught, varcomm.debug(1):
        varcomm.all_reduce(torch.ones(1))
    return str(caught.value)


@pytest.mark.slow
def test_ranks_that_do_not_come():
    with varcomm.Ranks(3, backend="mpi") as ranks:
        for made in (False, True):
            for message in ranks.run(late, made)[::2]:
                assert "It has failed on 2 of 3: 0, 2; rank 1 not come to it" in message
    with varcomm.Ranks(3, backend="mpi") as ranks:
        assert "rank 1 has not come" in ranks.run(absent)[0]


@pytest.mark.slow
def test_ranks_on_mpi():
    def total(rank):
        ours = varcomm.all_reduce(torch.tensor(rank + 1)).item()
        return ours, dist.get_backend(), varcomm.init().rank, os.getpid(), os.environ["RANK"]

    def die(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        varcomm.all_reduce(torch.ones(1))

    def fail(rank):
        return 1 / rank

    with varcomm.Ranks(2, timeout=60, backend="mpi") as ranks:
        first = ranks.run(total)
        with pytest.raises(LaunchError, match="failed"):
            ranks.run(die)
        second = ranks.run(total)
        with pytest.raises(LaunchError, match="rank 0 of 2 failed") as caught:
            ranks.run(fail)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(LaunchError, match="rank 1 of 2 not finished within 1 s"):
            ranks.run(lambda rank: rank and time.sleep(60), timeout=1)
    for results in first, second:
        assert [result[:3] for result in results] == [(3, "gloo", 0), (3, "gloo", 1)]
        assert [result[4] for result in results] == ["0", "1"]
    assert all_end([result[3] for result in first + second])


# Each rank prints in one write: their lines would mix.
TOTAL = """
import os, sys, torch, torch.distributed as dist, varcomm
def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
world = varcomm.init("mpi", timeout=40)
total = varcomm.all_reduce(torch.tensor(world.rank + 1))
"""
SAY = "say(world.rank, world.size, world.local_rank, world.device, total.item())\n"


@pytest.fixture
def start(tmp_path):
    def run(launcher, code, **environ):
        path = tmp_path / f"script{len(list(tmp_path.iterdir()))}.py"
        path.write_text(code)
        return finished(path, launcher=launcher, **environ)

    return run


def left_in_shared_memory():
    return set(Path("/dev/shm").glob("mpich_shm_*"))


@pytest.mark.slow
def test_ends_of_mpiexec(start):
    before = left_in_shared_memory()
    fails = "if world.rank == 1: raise ValueError('boom')\ndist.barrier()"
    failed = start([*MPIEXEC, "2"], TOTAL + fails)
    assert failed.returncode != 0
    assert "ValueError: boom" in failed.stderr
    assert left_in_shared_memory() <= before
    fork = "pid = os.fork()\nif not pid: sys.exit(0)\nassert os.waitpid(pid, 0)[1] == 0\n"
    forked = start([*MPIEXEC, "2"], TOTAL + fork + "total = varcomm.all_reduce(total)\n" + SAY)
    assert sorted(forked.stdout.splitlines()) == ["0 2 0 cpu 6", "1 2 1 cpu 6"]
    never = "import os, sys\nif os.environ['PMI_RANK'] == '1': sys.exit()\n"
    missing = start([*MPIEXEC, "2"], never + "import varcomm\nvarcomm.init('mpi', timeout=0.5)")
    assert missing.returncode != 0


DEFAULT = """
import os, torch, varcomm
from varcomm.transport.engines.choose import engine_for
from varcomm.transport.group import resolve
world = varcomm.init(timeout=40)
total = varcomm.all_reduce(torch.tensor(world.rank + 1)).item()
name = type(engine_for(resolve(None), torch.device("cpu"))).__name__
os.write(1, f"{world.rank} {world.size} {total} {name}\\n".encode())
"""


def test_the_default_under_mpiexec(start):
    done = start([*MPIEXEC, "2"], DEFAULT)
    assert sorted(done.stdout.splitlines()) == ["0 2 3 MPIEngine", "1 2 3 MPIEngine"]
    assert "Gloo" not in done.stderr


@pytest.mark.slow
def test_other_defaults(start):
    """Where MPI's library cannot be loaded, and where torchrun started the ranks."""
    done = start([*MPIEXEC, "2"], DEFAULT, MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert sorted(done.stdout.splitlines()) == ["0 2 3 Gloo", "1 2 3 Gloo"]
    assert done.stderr.count("varcomm runs over Gloo under MPICH: ") == 1
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert start([*MPIEXEC, "1"], DEFAULT, **one).stdout == "0 1 1 Gloo\n"


REFUSED = """
import os, varcomm
def refused(backend, **variables):
    os.environ.update(variables)
    try:
        varcomm.init(backend, timeout=1)
    except varcomm.VarcommError as error:
        print(type(error).__name__, str(error).replace("\\n", " "))
    for name in variables:
        del os.environ[name]
refused("mpi", MPI4PY_LIBMPI="/nowhere/libmpi.so")
refused("cpu:mpi,cuda:nccl")
refused("mpi", RANK="1", WORLD_SIZE="4", MASTER_ADDR="localhost", MASTER_PORT="1")
print(varcomm.init("mpi"))
"""


@pytest.mark.slow
def test_refusals(start):
    done = start([], REFUSED)
    missing, combined, torchrun, world = done.stdout.splitlines()
    assert re.match(r"MissingModuleError .*pip install mpi4py mpich.*/nowhere/lib", missing)
    assert combined.startswith("ArgumentError")
    assert "cpu:mpi,cuda:nccl" in combined
    assert torchrun.startswith("LaunchError this is rank 1 of 4 to torchrun, but rank 0 of 1 to ")
    assert world.startswith("World(rank=0, size=1")
    threads = "import mpi4py\nmpi4py.rc.thread_level = 'funneled'\nfrom mpi4py import MPI\n"
    done = start([], threads + "import varcomm; varcomm.init('mpi')")
    assert "LaunchError: rank 0: MPI was started without support for threads" in done.stderr


@pytest.mark.slow
def test_gloo_does_without_mpi4py(tmp_path):
    code = """
import sys
import varcomm
varcomm.init("gloo")
print([name for name in sys.modules if "mpi" in name.split(".")[0]])
print([name for name in sys.modules if name.startswith("varcomm.transport.engines.mpi")])
"""
    with script(tmp_path, code) as parent:
        assert parent.communicate(timeout=60) == ("[]\n[]\n", "")
