"""Ranks that torchrun starts again meet among what the first ones have left in its store."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from varcomm.errors import LaunchError
from varcomm.transport.environment import Place
from varcomm.transport.world import join, meeting_store


@pytest.fixture
def agents_store(monkeypatch):
    """As the agent of torchrun serves it, and tells its ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return store


def place(rank, size):
    return Place(rank, size, 0, "env://", "torchrun", lasting_store=True)


def meet(size, limit=20.0):
    """All ranks of one start, each a thread; a rank's store on a connection of its own."""
    with ThreadPoolExecutor(size) as threads:
        meeting = [
            threads.submit(meeting_store, place(rank, size), timedelta(seconds=limit))
            for rank in range(size)
        ]
        return [one.result() for one in meeting]


def test_what_earlier_ranks_have_left_is_not_found(agents_store):
    for start, size in enumerate([3, 2, 3, 1, 5]):
        stores = meet(size)
        assert not any(store.check(["address"]) for store in stores), "left by an earlier start"
        stores[-1].set("address", str(start))
        assert [store.get("address") for store in stores] == [str(start).encode()] * size


def test_ranks_that_left_before_all_had_come_are_not_counted(agents_store):
    with pytest.raises(RuntimeError):  # of ranks 1 and 2, which nobody answers
        meeting_store(place(1, 3), timedelta(seconds=0.2))
    with pytest.raises(RuntimeError, match=r"after 0\.2 s, 1 of 3 ranks have come"):
        meeting_store(place(0, 3), timedelta(seconds=0.2))
    first, *others = meet(3)
    first.set("here", "yes")
    assert [store.get("here") for store in others] == [b"yes", b"yes"]


def test_who_waits_in_vain_says_for_how_many(agents_store):
    message = r"rank 0 of 2 .* could not join .* after 0\.3 s, 1 of 2 ranks have come\."
    with pytest.raises(LaunchError, match=message):
        join(place(0, 2), "gloo", 0.3)


@pytest.mark.slow
def test_ranks_that_torchrun_starts_again_join(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import os, signal, torch, torch.distributed as dist, varcomm\n"
        "world = varcomm.init(timeout=40); total = torch.tensor(world.rank + 1)\n"
        "dist.all_reduce(total); start = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print(f'start {start}, {world.rank}/{world.size}: {total}\\n', end='', flush=True)\n"
        "dist.barrier()\n"
        "if start == '0' and world.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.barrier()\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "--max-restarts", "1", path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=80,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == [
        "",
        "start 0, 0/2: 3",
        "start 0, 1/2: 3",
        "start 1, 0/2: 3",
        "start 1, 1/2: 3",
    ], done.stderr
