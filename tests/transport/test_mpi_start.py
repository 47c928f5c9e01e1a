"""Ranks of MPI, started by each launcher: they find each other, and end."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import varcomm
import varcomm.transport.mpi  # before any test hides mpi4py
from tests.transport.processes import all_end, script
from varcomm.errors import LaunchError, MissingPackageError
from varcomm.transport.environment import Place
from varcomm.transport.world import join

MPIEXEC = [Path(sys.executable).parent / "mpiexec", "-n"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]

# As one write each: the lines of ranks would mix.
TOTAL = """
import os, sys, torch, torch.distributed as dist, varcomm
def tell(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
world = varcomm.init("mpi", timeout=40)
total = torch.tensor(world.rank + 1)
dist.all_reduce(total)
"""
TELL = "tell(world.rank, world.size, world.local_rank, world.device, total.item())\n"


@pytest.fixture
def start(tmp_path):
    """Run code on ranks by a launcher, in one environment for all."""
    number = itertools.count()

    def run(launcher, size, code, **options):
        path = tmp_path / f"script{next(number)}.py"  # two threads may start at once
        path.write_text(code)
        launched = [] if launcher is None else [*launcher, str(size), *options.pop("flags", [])]
        if launcher is not TORCHRUN:
            launched.append(sys.executable)
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [*launched, path],
            env=environ | options.pop("environ", {}),
            capture_output=True,
            text=True,
            timeout=80,
        )

    return run


def lines(done):
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def left_in_shared_memory():
    return set(Path("/dev/shm").glob("mpich_shm_*"))


def test_two_jobs_of_mpiexec_at_once_do_not_meet(start):
    """In the second MPI is the caller's own, who ends it too."""
    own = """
from mpi4py import MPI
import atexit
atexit.register(lambda: tell(MPI.Is_finalized()))
"""
    with ThreadPoolExecutor() as threads:
        first = threads.submit(start, MPIEXEC, 3, TOTAL + TELL)
        second = threads.submit(start, MPIEXEC, 2, own + TOTAL + TELL)
    assert lines(first.result()) == ["0 3 0 cpu 6", "1 3 1 cpu 6", "2 3 2 cpu 6"]
    assert lines(second.result()) == ["0 2 0 cpu 3", "1 2 1 cpu 3", "False", "False"]


def test_torchrun_starts_ranks_of_mpi_again(start):
    code = f"""{TOTAL}
import signal
from mpi4py import MPI
tell(os.environ["TORCHELASTIC_RESTART_COUNT"], MPI.COMM_WORLD.rank, world.size, total.item())
dist.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""
    done = start(TORCHRUN, 2, code, flags=["--max-restarts", "1"])
    assert lines(done) == ["0 0 2 3", "0 1 2 3", "1 0 2 3", "1 1 2 3"]


def test_alone_and_what_is_refused_before(start):
    code = """
import atexit, os
from datetime import timedelta
import torch.distributed as dist, varcomm
def refused(**variables):
    os.environ.update(variables)
    try:
        varcomm.init("mpi", timeout=1)
    except varcomm.VarcommError as error:
        print(type(error).__name__, str(error).replace("\\n", " "))
    for name in variables:
        del os.environ[name]
refused(MPI4PY_LIBMPI="/nowhere/libmpi.so")
refused(OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_LOCAL_RANK="1")
refused(PMI_RANK="1", PMI_SIZE="4", MPI_LOCALRANKID="1")  # and no PMI_FD
from varcomm.transport.mpi.start import MPI, _store
atexit.register(lambda: print(MPI.Is_finalized()))
print(varcomm.init("mpi"), dist.get_backend())
os.environ["MASTER_ADDR"] = "host.invalid"
try:
    _store(timedelta(seconds=0.1))
except varcomm.LaunchError as error:
    print(error)
"""
    done = start(None, 1, code)
    assert done.returncode == 0, done.stderr
    missing, foreign, other, world, store, ended = done.stdout.splitlines()
    assert re.match(r'MissingModuleError .*pip install "varcomm\[mpi\]".*/nowhere/lib', missing)
    assert re.match(
        r"LaunchError this is rank 1 of 4, started by Open MPI, but mpi4py has loaded MPICH\.",
        foreign,
    )
    assert re.match(
        r"LaunchError this is rank 1 of 4 to MPICH, but rank 0 of 1 to MPI \(MPICH.*\)\. "
        r"Start it by the mpiexec of that library",
        other,
    )
    assert world == "World(rank=0, size=1, local_rank=0, device=device(type='cpu')) mpi4py"
    assert re.match(r"rank 0 cannot open a store for the others at 'host\.invalid': ", store)
    assert ended == "False", "who asked for it first was refused, but MPI had begun"


def test_threads_must_be_allowed(start):
    code = """
import mpi4py
mpi4py.rc.thread_level = "funneled"
from mpi4py import MPI
import varcomm
varcomm.init("mpi")
"""
    done = start(None, 1, code)
    assert done.returncode == 1
    assert "LaunchError: rank 0: MPI was started without support for threads" in done.stderr


def test_rank_that_fails_ends_the_others(start):
    code = TOTAL + "if world.rank == 1: raise ValueError('boom')\ndist.barrier()"
    before, begin = left_in_shared_memory(), time.perf_counter()
    done = start(MPIEXEC, 2, code)
    assert done.returncode != 0
    assert "ValueError: boom" in done.stderr
    assert time.perf_counter() - begin < 30, "less than the limit of the barrier"
    assert left_in_shared_memory() <= before


def test_rank_that_never_starts_mpi_is_not_waited_for_without_end(start):
    code = """
import os, sys
if os.environ["PMI_RANK"] == "1":
    sys.exit()
import varcomm
varcomm.init("mpi", timeout=0.5)
"""
    done = start(MPIEXEC, 2, code)
    assert done.returncode == 1
    assert re.search(r"Timeout .*\n(.*\n)*.*start\.py.* in _initialize", done.stderr)


def test_launch_on_mpi():
    def total(rank):
        value = torch.tensor(rank + 1)
        dist.all_reduce(value)
        managers = [name for name in os.environ if name.startswith("PMI")]
        return value.item(), dist.get_backend(), varcomm.init().rank, os.getpid(), managers

    def die(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    before = left_in_shared_memory()
    with varcomm.Ranks(2, timeout=60, backend="mpi") as ranks:
        first = ranks.run(total)
        with pytest.raises(LaunchError, match=r"rank 1 of 2 failed.*signal SIGKILL ended it"):
            ranks.run(die)
        second = ranks.run(total)
    for results in first, second:
        assert [result[:3] for result in results] == [(3, "mpi4py", 0), (3, "mpi4py", 1)]
        assert [result[4] for result in results] == [[], []]
    assert all_end([result[3] for result in first + second])
    assert left_in_shared_memory() <= before


def test_gloo_does_without_mpi4py(tmp_path):
    code = """
import sys
import varcomm
varcomm.init("gloo")
print([name for name in sys.modules if "mpi" in name.split(".")[0]])
print([name for name in sys.modules if name.startswith("varcomm.transport.mpi")])
"""
    with script(tmp_path, code) as parent:
        assert parent.communicate(timeout=60) == ("[]\n[]\n", "")


def test_missing_mpi4py_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "varcomm.transport.mpi.start", raising=False)
    with pytest.raises(MissingPackageError, match=r'mpi4py.*pip install "varcomm\[mpi\]"'):
        join(Place(), "mpi", 5)


def test_open_mpi_needs_its_own_launcher(monkeypatch):
    monkeypatch.setattr("varcomm.transport.mpi.start.MPI.get_vendor", lambda: ("Open MPI", (5, 0)))
    message = r"Open MPI can only be started by its mpirun.*rank 1 of 2, started by torchrun"
    with pytest.raises(LaunchError, match=message):
        join(Place(1, 2, 1, "env://", "torchrun"), "mpi", 5)


@pytest.mark.parametrize("backend", ["cpu:mpi,cuda:nccl", "cpu:gloo,cuda:mpi"])
def test_mpi_is_not_combined(backend):
    with pytest.raises(
        varcomm.ArgumentError, match=f"cannot be combined with others; got '{backend}'"
    ):
        varcomm.init(backend)


def test_child_that_is_forked_leaves_its_parent_alone(start):
    code = TOTAL + (
        "pid = os.fork()\n"
        "if not pid: sys.exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "dist.all_reduce(total)\n" + TELL
    )
    done = start(MPIEXEC, 2, code)
    assert lines(done) == ["0 2 0 cpu 6", "1 2 1 cpu 6"]


def test_rank_that_is_gone_is_not_waited_for_at_the_end_for_ever(start):
    code = TOTAL.replace("timeout=40", "timeout=8") + "if world.rank == 1: os._exit(0)\n"
    done = start(TORCHRUN, 2, code)
    assert done.returncode != 0
    assert "after 8 s not all ranks have come to their end" in done.stderr
