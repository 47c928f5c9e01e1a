"""Ranks as real processes: what may be sent to them, and what they return."""

import os
import sys
import time
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.transport.processes import pids_of, script
from varcomm.errors import ArgumentError, LaunchError, MissingPackageError
from varcomm.transport.environment import Place
from varcomm.transport.launch import Ranks, World, init, launch
from varcomm.transport.world import join


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2, timeout=60) as pool:
        yield pool


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


class Callable:
    def __call__(self, rank, *args):
        return rank

    def method(self, rank):
        return rank


@pytest.fixture
def without_cloudpickle(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


@pytest.mark.usefixtures("without_cloudpickle")
def test_without_cloudpickle_functions_go_by_name(ranks):
    assert ranks.run(rank_and_argument, 1) == [(0, 1), (1, 1)]
    assert ranks.run(Callable(), Callable) == [0, 1]
    with pytest.raises(MissingPackageError, match=r'pip install "varcomm\[launch\]"'):
        ranks.run(lambda rank: rank)


@pytest.mark.usefixtures("without_cloudpickle")
@pytest.mark.parametrize(
    ("fn", "args", "culprit"),
    [
        (Callable(), (), "Callable"),
        (Callable().method, (), "Callable"),
        (partial(Callable()), (), "Callable"),
        (partial(rank_and_argument, argument=1), (), "rank_and_argument"),
        (os.path.join, ([{"deep": Callable()}],), "Callable"),
        (os.path.join, (rank_and_argument,), "rank_and_argument"),
    ],
)
def test_without_cloudpickle_what_a_script_defines_is_refused(
    ranks, monkeypatch, fn, args, culprit
):
    """In the ranks `__main__` is another module, where its name means nothing."""
    monkeypatch.setattr(Callable, "__module__", "__main__")
    monkeypatch.setattr(rank_and_argument, "__module__", "__main__")
    with pytest.raises(
        MissingPackageError, match=rf"\({culprit} is defined in __main__\).*pip ins"
    ):
        ranks.run(fn, *args)


@pytest.mark.parametrize("world_size", [0, -1, 2.0, True])
def test_world_size_must_be_a_positive_integer(world_size):
    with pytest.raises(ArgumentError, match=f"world_size must be a positive.*got {world_size}"):
        launch(rank_and_argument, world_size)


def test_world_size_of_any_integer_type():
    pool = Ranks(np.int64(2))
    assert type(pool.world_size) is int
    assert pool.world_size == 2


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), None, "60", True, timedelta(0)])
def test_timeout_must_be_positive(timeout):
    message = r"timeout must be a positive number of seconds or a timedelta; got "
    with pytest.raises(ArgumentError, match=message):
        launch(rank_and_argument, 2, timeout=timeout)
    with pytest.raises(ArgumentError, match=message):
        join(Place(), None, timeout)


def test_timeout_of_a_run_must_be_positive(ranks):
    with pytest.raises(ArgumentError, match=r"timeout must be a positive number .* got -1"):
        ranks.run(rank_and_argument, timeout=-1)


@pytest.mark.parametrize(
    "timeout", [60, np.float32(60), timedelta(minutes=1), 1e10, float("inf"), timedelta.max]
)
def test_timeout_is_a_number_or_a_timedelta(ranks, timeout):
    assert ranks.run(rank_and_argument, 0, timeout=timeout) == [(0, 0), (1, 0)]
    assert 60 <= Ranks(2, timeout).timeout <= 24 * 86_400


def test_collectives_have_at_least_the_time_of_a_run(ranks):
    def limit(rank):
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        dist.barrier()
        return backend.options._timeout

    # torch 2.15 rounds seconds to float32
    assert min(ranks.run(limit, timeout=1e10)) > timedelta(days=24) - timedelta(seconds=1)


def test_fn_must_be_callable(ranks):
    with pytest.raises(ArgumentError, match=r"fn must be callable as fn\(rank, \*args\); got 3"):
        ranks.run(3)
