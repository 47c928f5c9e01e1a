"""Joining the ranks that a launcher started, or starts again, or none."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.transport.processes import script, torchrun
from varcomm.errors import LaunchError
from varcomm.transport.environment import Place
from varcomm.transport.world import join, meeting_store

# The last line counts threads after what init registers: a thread that still owns a tensor when the
# interpreter ends may abort the process.
ALONE = """
import atexit, os, torch, torch.distributed as dist
from varcomm import init
def threads(): return len(os.listdir("/proc/self/task"))
before = threads()
atexit.register(lambda: print(threads() - before))
world = init(timeout=5)
dist.barrier()
print(world.rank, world.size, world.local_rank, world.device, world == init())
import torch.distributed.nn  # as PyG does; has the world as a default argument if it can
cycle = [dist.group.WORLD]
cycle.append(cycle)
del cycle
for _ in range(50):
    dist.all_reduce(torch.ones(3), async_op=True)
print(threads() > before)
"""
CALLERS = """
import torch.distributed as dist
from varcomm import init
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
print(init().size, dist.group.WORLD is group)
"""


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        (ALONE, "0 1 0 cpu True\nTrue\n0\n"),
        pytest.param(CALLERS, "1 True\n", marks=pytest.mark.slow),
    ],
)
def test_one_rank_without_a_launcher(tmp_path, code, printed):
    with script(tmp_path, code) as parent:
        assert parent.communicate(timeout=60) == (printed, "")


def printed_by_ranks(tmp_path, code, *options):
    path = tmp_path / "script.py"
    path.write_text(code)
    done = torchrun(*options, path)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.split())


TOTAL = """
import os, signal, torch, torch.distributed as dist, varcomm
world = varcomm.init(timeout=40)
total = torch.tensor(world.rank + 1)
dist.all_reduce(total)
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"{start}:{world.rank}/{world.size}/{world.local_rank}:{total}\\n", end="", flush=True)
dist.barrier()
"""
DIES = """
if start == "0" and world.rank == 1: os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""


def test_ranks_of_torchrun(tmp_path):
    assert printed_by_ranks(tmp_path, TOTAL) == ["0:0/2/0:3", "0:1/2/1:3"]


@pytest.mark.slow
def test_ranks_that_torchrun_starts_again(tmp_path):
    found = printed_by_ranks(tmp_path, TOTAL + DIES, "--max-restarts=1")
    assert found == [f"{start}:{rank}/2/{rank}:3" for start in (0, 1) for rank in (0, 1)]


@pytest.fixture
def agents_store(monkeypatch):
    """The store of torchrun's agent, as it describes it to its ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return store


def place(rank, size):
    return Place(rank, size, 0, "env://", "torchrun", lasting_store=True)


def meet(size):
    """Return the stores of all ranks of one start; each rank is a thread."""
    with ThreadPoolExecutor(size) as threads:
        limit = timedelta(seconds=20)
        meeting = [threads.submit(meeting_store, place(r, size), limit) for r in range(size)]
        return [one.result() for one in meeting]


def test_ranks_meet_among_remains_of_earlier_starts(agents_store):
    for rank, message in ((1, "timeout"), (0, r"after 0\.2 s, 1 of 3 ranks have come")):
        with pytest.raises(RuntimeError, match=message):  # ranks that leave before all have come
            meeting_store(place(rank, 3), timedelta(seconds=0.2))
    for start, size in enumerate([3, 2, 3, 1, 5]):
        stores = meet(size)
        assert not any(store.check(["address"]) for store in stores), "left by an earlier start"
        stores[-1].set("address", str(start))
        assert [store.get("address") for store in stores] == [str(start).encode()] * size


def test_refusals(agents_store):
    alone = Place(0, 2, 0, "tcp://127.0.0.1:0", "SLURM")
    for where, message in (
        (alone, r"rank 0 of 2 \(started by SLURM\) could not join .*tcp:"),
        (place(0, 2), r"rank 0 of 2 .* could not join .* after 0\.2 s, 1 of 2 ranks have come"),
    ):
        with pytest.raises(LaunchError, match=message):
            join(where, "gloo", timeout=0.2)
    assert not dist.is_initialized()


def test_ranks_on_fewer_gpus(monkeypatch, tmp_path):
    """Ranks choose GPUs, or refuse to; they do not come as far as to meet."""
    chosen = []

    def init_process_group(*_, **__):
        raise RuntimeError("no further")

    def gpu_of(local_rank, launcher, gpus):
        """Return the GPU of a rank, or "refused"; and the host that NCCL is told."""
        monkeypatch.setenv("NCCL_HOSTID", "")
        monkeypatch.delenv("NCCL_HOSTID")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        where = Place(local_rank, 4, local_rank, f"file://{tmp_path}/store", launcher)
        with pytest.raises(LaunchError) as caught:
            join(where, "nccl", timeout=1)
        if "could not join" not in str(caught.value):
            seen = f"local rank {local_rank} on a host where it sees {gpus} GPUs"
            assert seen in str(caught.value)
            return "refused"
        return chosen[-1].index, os.environ.get("NCCL_HOSTID")

    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.delenv("VARCOMM_SHARE_GPU", raising=False)
    for launcher in ("torchrun", "varcomm.launch", "no launcher"):
        assert gpu_of(1, launcher, 2) == (1, None)
        assert gpu_of(1, launcher, 1) == "refused"
    assert gpu_of(1, "SLURM", 1) == (0, None)  # it has bound another GPU to each rank
    assert gpu_of(2, "SLURM", 2) == "refused"
    monkeypatch.setenv("VARCOMM_SHARE_GPU", "1")
    host = socket.gethostname()
    for launcher in ("torchrun", "varcomm.launch"):
        assert [gpu_of(rank, launcher, 2) for rank in range(4)] == [
            (0, f"{host}.0"),
            (1, f"{host}.0"),
            (0, f"{host}.1"),
            (1, f"{host}.1"),
        ]
        assert gpu_of(1, launcher, 0) == "refused"
    monkeypatch.setenv("VARCOMM_SHARE_GPU", "0")
    assert gpu_of(1, "varcomm.launch", 1) == "refused"
