"""How ranks fail and how they end: the one to blame is named, and none is left behind."""

import os
import signal
import subprocess
import time

import pytest
import torch.distributed as dist

from tests.transport.processes import all_end, is_running, pids_of, script
from varcomm.errors import LaunchError
from varcomm.transport.launch import Ranks, launch


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2, timeout=60) as pool:
        yield pool


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
        launch(pids_of, 2)


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
import os, signal, time
from varcomm.transport.launch import launch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job would ignore it
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


def test_no_rank_outlives_its_parent_whose_forked_child_lives(tmp_path):
    """The child has the parent's ends of the sockets too, and keeps them open."""
    code = """
import os, time
from varcomm.transport.launch import Ranks
pool = Ranks(2)
print(*pool.run(lambda rank: os.getpid()), flush=True)
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""
    with script(tmp_path, code) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        child = int(parent.stdout.readline())
        try:
            parent.kill()
            assert all_end(pids)
            assert is_running(child)
        finally:
            os.kill(child, signal.SIGKILL)
