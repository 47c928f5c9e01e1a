"""Joining the ranks that a launcher started, or none."""

import os
import subprocess
import sys

import pytest
import torch.distributed as dist

from tests.transport.processes import script
from varcomm.errors import LaunchError
from varcomm.transport.environment import Place
from varcomm.transport.world import join


def test_init_without_launcher_is_one_rank(tmp_path):
    code = """
import torch.distributed as dist
from varcomm import init
world = init(timeout=5)
dist.barrier()
print(world.rank, world.size, world.local_rank, world.device, world == init())
"""
    with script(tmp_path, code) as parent:
        out, err = parent.communicate(timeout=60)
    assert (out, err) == ("0 1 0 cpu True\n", "")


def test_init_joins_what_torchrun_started(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import torch, torch.distributed as dist; from varcomm import init\n"
        "world = init(); total = torch.tensor(world.rank + 1); dist.all_reduce(total)\n"
        "print(f'{world.rank}/{world.size} on {world.local_rank}: {total}\\n', end='', flush=True)"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--standalone", path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert sorted(done.stdout.split("\n")) == ["", "0/2 on 0: 3", "1/2 on 1: 3"], done.stderr


@pytest.mark.slow
def test_init_leaves_the_callers_own_group_alone(tmp_path):
    code = """
import torch.distributed as dist
from varcomm import init
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
print(init().size, dist.group.WORLD is group)
"""
    with script(tmp_path, code) as parent:
        assert parent.communicate(timeout=60)[0] == "1 True\n"


def test_threads_of_the_group_end_before_the_interpreter_does(tmp_path):
    """Else one that still owns a tensor may abort the process: terminate without an exception."""
    code = """
import atexit, os
import torch, torch.distributed as dist
from varcomm import init
def threads(): return len(os.listdir("/proc/self/task"))
before = threads()
atexit.register(lambda: print(threads() - before))  # after what init registers
init()
import torch.distributed.nn  # as PyG does; has the world as a default argument if it can
cycle = [dist.group.WORLD]
cycle.append(cycle)
del cycle
for _ in range(50):
    dist.all_reduce(torch.ones(3), async_op=True)
print(threads() > before)
"""
    with script(tmp_path, code) as parent:
        assert parent.communicate(timeout=60) == ("True\n0\n", "")


def test_ranks_that_do_not_meet_are_told():
    with pytest.raises(
        LaunchError, match=r"rank 0 of 2 \(started by SLURM\) could not join .*tcp:"
    ):
        join(Place(0, 2, 0, "tcp://127.0.0.1:0", "SLURM"), "gloo", timeout=0.2)
    assert not dist.is_initialized()
