"""Ranks as real processes: their calls, their failures and their ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

import varcomm
from tests.transport.processes import all_end, is_running, pids_of, script
from varcomm import Ranks, World, init, launch
from varcomm.errors import ArgumentError, LaunchError


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2, timeout=60) as pool:
        yield pool


def rank_and_argument(rank, argument):
    return rank, argument


@pytest.mark.usefixtures("new_interpreters")
def test_results(ranks):
    offset = 10

    class Local:
        def __init__(self, rank):
            self.value = rank + offset

    def make(rank):
        value = torch.tensor(10 + rank)
        dist.all_reduce(value)
        world = init(), init().size, torch.get_num_threads()
        return value.item(), world, torch.ones(3, requires_grad=True) * rank

    assert ranks.run(rank_and_argument, "x") == [(0, "x"), (1, "x")]
    assert ranks.run(lambda rank: time.sleep(0.1 * (1 - rank)) or rank) == [0, 1]
    first, second = ranks.run(lambda rank: Local(rank))
    assert (first.value, second.value, isinstance(first, Local)) == (10, 11, True)
    threads = max(1, os.cpu_count() // 2)
    for rank, (total, world, product) in enumerate(ranks.run(make)):
        assert total == 21
        assert world == (World(rank, 2, rank, torch.device("cpu")), 2, threads)
        assert product.requires_grad
        assert product.tolist() == [rank] * 3
    for timeout in (60, np.float32(60), timedelta(minutes=1), float("inf"), timedelta.max):
        assert ranks.run(rank_and_argument, 0, timeout=timeout) == [(0, 0), (1, 0)]
        assert 60 <= Ranks(np.int64(2), timeout).timeout <= 24 * 86_400


def test_ranks_are_kept_and_serve_threads_in_turn(ranks):
    def slow(rank, name):
        time.sleep(0.1)
        return name, rank

    pids, results = pids_of(ranks), {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: ranks.run(slow, n)}))
        for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [(n, 0), (n, 1)] for n in range(3)}
    start = time.perf_counter()
    for _ in range(20):
        ranks.run(rank_and_argument, None)
    assert time.perf_counter() - start < 20 * 0.1
    assert pids_of(ranks) == pids


class Unreadable:
    def __reduce__(self):
        return exec, ("raise RuntimeError('not here')",)


REFUSALS = [
    (lambda: launch(rank_and_argument, 0), "world_size"),
    (lambda: launch(rank_and_argument, 2.0), "world_size"),
    (lambda: launch(rank_and_argument, True), "world_size"),
    (lambda: launch(rank_and_argument, 2, timeout=0), "timeout"),
    (lambda: launch(rank_and_argument, 2, timeout=float("nan")), "timeout"),
    (lambda: launch(rank_and_argument, 2, timeout="60"), "timeout"),
    (lambda: launch(rank_and_argument, 2, timeout=timedelta(0)), "timeout"),
    (lambda: launch(rank_and_argument, 2, backend="cpu:mpi"), "backend"),
    (lambda: launch(3, 2), "fn must be callable"),
    (lambda: launch(rank_and_argument, 2, (i for i in ())), "cannot be pickled"),
]


def test_refusals(ranks):
    for call, word in REFUSALS:
        with pytest.raises(ArgumentError, match=word):
            call()
    with pytest.raises(LaunchError, match="its result, of type generator, cannot be pickled"):
        ranks.run(lambda rank: (i for i in range(rank)))
    with pytest.raises(LaunchError, match=r"a result cannot be unpickled here: .*not here"):
        ranks.run(lambda rank: Unreadable())


class Callable:
    def __call__(self, rank, *args):
        return rank


def test_without_cloudpickle_functions_go_by_name(ranks, monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert ranks.run(rank_and_argument, 1) == [(0, 1), (1, 1)]
    assert ranks.run(Callable(), Callable) == [0, 1]
    monkeypatch.setattr(Callable, "__module__", "__main__")
    monkeypatch.setattr("__main__.Callable", Callable, raising=False)
    for fn in (lambda rank: rank, Callable()):
        with pytest.raises(ArgumentError, match="pip install cloudpickle"):
            ranks.run(fn)


def test_what_cannot_be_pickled_is_named(ranks):
    lock = threading.Lock()
    with pytest.raises(ArgumentError, match=r"cannot pickle '_thread.lock'.*inside fn"):
        ranks.run(lambda rank: lock)


class Odd(Exception):
    """Cannot be pickled."""

    def __init__(self, one, two):
        super().__init__("odd")


def raises(rank):
    if rank == 1:
        raise KeyError("boom")
    dist.barrier()


def raises_on_both(rank):
    time.sleep(0.1 * (1 - rank))
    raise Odd(1, 2)


def dies(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def exits(rank):
    if rank == 1:
        os._exit(3)
    dist.barrier()


def starts_and_fails(rank):
    child = subprocess.Popen(["sleep", "60"])
    raise ValueError(f"<{child.pid}>")


def waits_for_no_rank(rank):
    subprocess.Popen(["sleep", "60"])
    if rank == 0:
        dist.barrier()


FAILURES = {
    raises: ("rank 1 of 2 failed.*in raises.*'boom'", KeyError),
    raises_on_both: (r"rank 1 of 2 failed \(then rank 0 failed\).*odd", type(None)),
    dies: ("rank 1 of 2 failed.*signal SIGKILL ended it before it gave a result", type(None)),
    exits: ("rank 1 of 2 failed.*exited with code 3 before it gave a result", type(None)),
    starts_and_fails: ("<", ValueError),
    waits_for_no_rank: (r"rank 0 of 2 not finished within 0\.5 s.*rank 0: .*in wa", type(None)),
}


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(fn, marks=pytest.mark.slow) if fn in (exits, raises_on_both) else fn
        for fn in FAILURES
    ],
)
def test_a_failed_rank_is_named_and_all_end(ranks, fn, request):
    message, cause = FAILURES[fn]
    if fn is dies:
        ranks.close()
        request.getfixturevalue("new_interpreters")
    ranks.run(rank_and_argument, 0)  # imports this module
    pids = pids_of(ranks)
    with pytest.raises(LaunchError, match=f"(?s){message}") as info:
        ranks.run(fn, timeout=0.5 if fn is waits_for_no_rank else None)
    assert isinstance(info.value.__cause__, cause)
    assert fn is not waits_for_no_rank or "rank 1:" not in str(info.value)
    if cause is ValueError:
        pids.append(int(str(info.value.__cause__).strip("<>")))
    assert all_end(pids)


@pytest.mark.slow
def test_rank_that_dies_while_idle_is_replaced(ranks):
    pids = pids_of(ranks)
    os.kill(pids[0], signal.SIGKILL)
    assert all_end(pids[:1])
    assert not set(pids_of(ranks)) & set(pids)


@pytest.mark.usefixtures("new_interpreters")
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
    pool = Ranks(1)
    pids = pids_of(pool)
    del pool
    assert all_end(pids), "a forgotten pool ends"


@pytest.mark.parametrize(
    "death", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_script_needs_no_guard_and_no_rank_outlives_it(tmp_path, death):
    code = """
import os, signal, time
from varcomm import Ranks
class Point:
    def __init__(self, rank): self.rank = rank
def make(rank): return Point(rank)
def stay(rank):
    print(f'{os.getpid()}\\n', end='', flush=True)  # in one write
    time.sleep(60)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job would ignore it
with Ranks(2) as ranks:
    print([type(point) is Point for point in ranks.run(make)], __name__, flush=True)
    ranks.run(stay)
"""
    with script(tmp_path, code, start_new_session=True) as parent:
        assert parent.stdout.readline() == "[True, True] __main__\n"
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        parent.send_signal(death)
        assert all_end(pids)
    assert parent.returncode == -death


FORK = """
import os, sys
from varcomm import Ranks
def pid(rank): return os.getpid()
with Ranks(2) as pool:
    pids = pool.run(pid)
    child = os.fork()
    if child == 0:
        {act}
        sys.exit()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, pool.run(pid) == pids)
"""
FORKED = [
    "pass",  # leaves the block, which closes the pool
    "assert not set(pool.run(pid)) & set(pids)",  # has ranks of its own
]


@pytest.mark.slow
@pytest.mark.parametrize("act", FORKED)
def test_a_forked_child_leaves_the_ranks_alone(tmp_path, act):
    with script(tmp_path, FORK.format(act=act)) as parent:
        assert parent.communicate(timeout=60) == ("0 True\n", "")


@pytest.mark.slow
def test_ranks_of_ranks(worlds, tmp_path):
    """A script that its ranks import does not launch without end; their functions may launch."""
    code = """
import varcomm
def import_script(rank):
    import script
varcomm.launch(import_script, 2, timeout=60)
"""
    with script(tmp_path, code) as parent:
        assert parent.wait(60) == 1
        assert "imports module 'script', which launches ranks" in parent.stderr.read()

    def nested(rank):
        # run as an example of a docstring is: in a module that no rank imports
        exec("import varcomm; answer = varcomm.launch(lambda rank: rank, 2)", scope := {})
        return rank, scope["answer"]

    assert worlds.run(2, nested) == [(0, [0, 1]), (1, [0, 1])]
    assert varcomm.launch(nested, 1) == [(0, [0, 1])]
