"""Ranks as real processes: what they return, how they fail, and that none is left behind."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from varcomm.errors import ArgumentError, LaunchError, MissingPackageError
from varcomm.transport.environment import Place
from varcomm.transport.launch import Ranks, World, init, launch
from varcomm.transport.world import _gpu, join


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2, timeout=60) as pool:
        yield pool


def is_running(pid):
    """Tell it of a process that need not be our child: a zombie with no other threads has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_end(pids, within=10.0):
    deadline = time.monotonic() + within
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_running, pids))


def pids_of(ranks):
    return ranks.run(lambda rank: os.getpid())


def script(tmp_path, code, **options):
    """Start `code` as a script of its own that finds varcomm."""
    path = tmp_path / "script.py"
    path.write_text(code)
    return subprocess.Popen(
        [sys.executable, path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def rank_and_argument(rank, argument):
    return rank, argument


def test_results_come_in_rank_order(ranks):
    assert ranks.run(rank_and_argument, "x") == [(0, "x"), (1, "x")]
    assert ranks.run(lambda rank: time.sleep(0.1 * (1 - rank)) or rank) == [0, 1]


def test_closures_are_sent_by_value(ranks):
    offset = 10

    class Local:
        def __init__(self, rank):
            self.value = rank + offset

    first, second = ranks.run(lambda rank: Local(rank))
    assert (first.value, second.value) == (10, 11)
    assert isinstance(first, Local)


def test_process_group_is_ready_and_init_describes_it(ranks):
    def add(rank):
        value = torch.tensor(10 + rank)
        dist.all_reduce(value)
        return value, init(), init().world_size, torch.get_num_threads()

    threads = max(1, os.cpu_count() // 2)
    for rank, result in enumerate(ranks.run(add)):
        assert result == (21, World(rank, 2, rank, torch.device("cpu")), 2, threads)


def test_tensors_come_back_whole_and_writable(ranks):
    def make(rank):
        return torch.ones(3, requires_grad=True) * rank, torch.arange(6).reshape(2, 3).T

    product, strided = ranks.run(make)[1]
    assert product.requires_grad
    assert product.tolist() == [1, 1, 1]
    assert strided.add_(1).tolist() == [[1, 4], [2, 5], [3, 6]]


def test_ranks_are_kept_and_a_run_costs_little(ranks):
    pids = pids_of(ranks)
    start = time.perf_counter()
    for _ in range(20):
        ranks.run(rank_and_argument, None)
    assert time.perf_counter() - start < 20 * 0.02
    assert pids_of(ranks) == pids


def test_failing_rank_has_its_traceback_shown_and_all_end(ranks):
    pids = pids_of(ranks)

    def fail_on_one(rank):
        if rank == 1:
            raise KeyError("boom")
        dist.barrier()

    start = time.perf_counter()
    with pytest.raises(
        LaunchError, match=r"(?s)rank 1 of 2 failed.*in fail_on_one.*'boom'"
    ) as info:
        ranks.run(fail_on_one)
    assert time.perf_counter() - start < 5
    assert isinstance(info.value.__cause__, KeyError)
    assert all_end(pids)
    assert not set(pids_of(ranks)) & set(pids)  # and the pool is as good as new


def test_rank_that_failed_first_is_the_one_that_is_shown(ranks):
    def fail(rank):
        time.sleep(0.1 * (1 - rank))
        raise ValueError(f"on {rank}")

    with pytest.raises(LaunchError, match=r"(?s)rank 1 of 2 failed \(then rank 0 failed\).*: on 1"):
        ranks.run(fail)


def test_exception_that_cannot_be_pickled_is_still_told(ranks):
    class Odd(Exception):
        def __init__(self, one, two):
            super().__init__("odd")

    def fail(rank):
        raise Odd(1, 2)

    with pytest.raises(LaunchError, match=r"Odd: odd") as info:
        ranks.run(fail)
    assert info.value.__cause__ is None


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 of 2 failed.*signal SIGKILL ended"),
        (lambda: os._exit(3), "rank 1 of 2 failed.*it exited with code 3 before it gave a result"),
    ],
)
def test_dead_rank_is_named_and_all_end(ranks, end, message):
    pids = pids_of(ranks)

    def die(rank):
        if rank == 1:
            end()
        dist.barrier()

    with pytest.raises(LaunchError, match=message):
        ranks.run(die)
    assert all_end(pids)


def test_rank_that_dies_while_idle_is_replaced(ranks):
    pids = pids_of(ranks)
    os.kill(pids[0], signal.SIGKILL)
    assert all_end(pids[:1])
    assert not set(pids_of(ranks)) & set(pids)


def test_timeout_names_the_late_ranks_and_where_they_stand(ranks):
    pids = pids_of(ranks)

    def wait_for_nobody(rank):
        if rank == 0:
            dist.barrier()

    message = r"(?s)rank 0 of 2 not finished within 0\.5 s.*rank 0: .*barrier.*in wait_for_nobody"
    with pytest.raises(LaunchError, match=message) as info:
        ranks.run(wait_for_nobody, timeout=0.5)
    assert "rank 1:" not in str(info.value)
    assert all_end(pids)


def test_start_that_takes_too_long_is_told(monkeypatch):
    monkeypatch.setattr("varcomm.transport.launch._START_LIMIT", 0.01)
    with pytest.raises(LaunchError, match=r"ranks 0, 1 of 2 not started within 0.01 s"):
        launch(rank_and_argument, 2, None)


def test_what_a_rank_started_ends_with_it(ranks):
    def start_and_fail(rank):
        child = subprocess.Popen(["sleep", "60"])
        raise ValueError(f"<{child.pid}>")

    with pytest.raises(LaunchError) as info:
        ranks.run(start_and_fail)
    assert all_end([int(str(info.value.__cause__).strip("<>"))])


def test_close_lets_exit_handlers_run_and_removes_everything(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mark = tmp_path / "mark"

    def at_exit(rank):
        import atexit

        atexit.register(mark.write_text, "left")
        return os.getpid()

    [pid] = launch(at_exit, 1)
    assert mark.read_text() == "left"
    assert not is_running(pid)
    assert list(tmp_path.iterdir()) == [mark]


def test_forgotten_pool_ends():
    pool = Ranks(1)
    pids = pids_of(pool)
    del pool
    assert all_end(pids)


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGINT])
def test_no_rank_outlives_its_parent(tmp_path, death):
    code = """
import os, time
from varcomm.transport.launch import launch
def stay(rank, parent):
    print(f'{os.getpid()}\\n', end='', flush=True)  # in one write
    time.sleep(60)
launch(stay, 2, os.getpid())
"""
    parent = script(tmp_path, code, start_new_session=True)
    with parent:
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        parent.send_signal(death)
        assert all_end(pids)
    assert parent.returncode == -death


def test_script_without_guard(tmp_path):
    code = """
from varcomm.transport.launch import launch
class Point:
    def __init__(self, rank): self.rank = rank
def make(rank): return Point(rank)
print([type(point) is Point for point in launch(make, 2)], __name__)
"""
    with script(tmp_path, code) as parent:
        out, err = parent.communicate(timeout=60)
    assert (out, err) == ("[True, True] __main__\n", "")


def test_result_that_cannot_be_pickled(ranks):
    with pytest.raises(LaunchError, match=r"its result, of type generator, cannot be pickled"):
        ranks.run(lambda rank: (i for i in range(rank)))


class Unreadable:
    def __reduce__(self):
        return Unreadable._read, (os.getpid(),)

    @staticmethod
    def _read(pid):
        if pid != os.getpid():
            raise RuntimeError("not here")


def test_result_that_cannot_be_unpickled(ranks):
    with pytest.raises(LaunchError, match=r"what rank 0 returned cannot be unpickled.*not here"):
        ranks.run(lambda rank: Unreadable())


def test_argument_that_cannot_be_pickled(ranks):
    with pytest.raises(ArgumentError, match=r"or its arguments cannot be pickled"):
        ranks.run(rank_and_argument, (i for i in ()))


def test_without_cloudpickle_functions_go_by_name(ranks, monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert ranks.run(rank_and_argument, 1) == [(0, 1), (1, 1)]
    with pytest.raises(MissingPackageError, match=r'pip install "varcomm\[launch\]"'):
        ranks.run(lambda rank: rank)
    monkeypatch.setattr(rank_and_argument, "__module__", "__main__")
    with pytest.raises(MissingPackageError, match=r"it is defined in __main__"):
        ranks.run(rank_and_argument, 1)


@pytest.mark.parametrize("world_size", [0, -1, 2.0, True])
def test_world_size_must_be_a_positive_integer(world_size):
    with pytest.raises(ArgumentError, match=f"world_size must be a positive.*got {world_size}"):
        launch(rank_and_argument, world_size)


def test_timeout_must_be_positive(ranks):
    with pytest.raises(ArgumentError, match=r"timeout must be a positive number .* got 0"):
        Ranks(2, timeout=0)
    with pytest.raises(ArgumentError, match=r"timeout must be a positive number .* got -1"):
        ranks.run(rank_and_argument, timeout=-1)
    with pytest.raises(ArgumentError, match=r"timeout must be positive; got datetime"):
        join(Place(), None, timedelta(0))


def test_fn_must_be_callable(ranks):
    with pytest.raises(ArgumentError, match=r"fn must be callable as fn\(rank, \*args\); got 3"):
        ranks.run(3)


def test_init_without_launcher_is_one_rank(tmp_path):
    code = """
import torch.distributed as dist
from varcomm.transport.launch import init
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
        "import torch, torch.distributed as dist; from varcomm.transport.launch import init\n"
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


def test_init_leaves_the_callers_own_group_alone(tmp_path):
    code = """
import torch.distributed as dist
from varcomm.transport.launch import init
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
print(init().size, dist.group.WORLD is group)
"""
    with script(tmp_path, code) as parent:
        assert parent.communicate(timeout=60)[0] == "1 True\n"


def test_ranks_that_do_not_meet_are_told():
    with pytest.raises(
        LaunchError, match=r"rank 0 of 2 \(started by SLURM\) could not join .*tcp:"
    ):
        join(Place(0, 2, 0, "tcp://127.0.0.1:0", "SLURM"), "gloo", timeout=0.2)
    assert not dist.is_initialized()


def test_each_rank_gets_its_own_gpu():
    assert _gpu(Place(5, 8, 1, launcher="torchrun"), 4) == 1
    assert _gpu(Place(5, 8, 1, launcher="SLURM"), 1) == 0  # bound by srun, sees no other
    with pytest.raises(LaunchError, match=r'local rank 1 .* sees 1 GPUs.*init\(backend="gloo"\)'):
        _gpu(Place(1, 2, 1, launcher="torchrun"), 1)
