"""Pools of ranks that live as long as the session, forked because imports cost seconds."""

import gc
import subprocess
import sys
import warnings
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import varcomm
from tests.forks import Forks
from varcomm.testing import Ranks
from varcomm.transport import launch

# if OpenMP has started threads here, a fork waits for them without end
torch.set_num_threads(1)

# It imports mpi4py without starting MPI; ASE calls MPI where mpi4py is imported, and would abort.
collect_ignore = ["varcomm/transport/engines/mpi.py"]

ALLOWED = (
    # of torch_geometric and Inductor, of torch; of torch_geometric, of Python 3.13
    ".torch.jit.script(_method)?. is deprecated",
    "Failing to pass a value to the .type_params. parameter of .typing._eval_type.",
    # torch.compile's own, where it follows an autograd.Function
    "<class 'torch.autograd.function.Function'> should not be instantiated",
    # torch's own, where its module of distributed optimizers is imported
    ".torch.jit.interface. is deprecated",
    # the backend serves them as long as torch has them
    "`torch.distributed.all_(gather|reduce)_coalesced` will be deprecated",
)


def pytest_addoption(parser):
    parser.addoption(
        "--engine",
        choices=("gloo", "mpi", "strict-nccl"),
        default="gloo",
        help="what the ranks of the fixture `worlds` communicate by",
    )
    parser.addoption(
        "--device",
        default="cpu",
        help='where the ranks of `worlds` make tensors: cuda:0, or "pretended" with strict-nccl',
    )
    parser.addoption("--all", action="store_true", help="run the tests marked `slow` as well")
    parser.addoption(
        "--sample",
        metavar="SEED",
        help="run one in 20 of the tests marked `slow`, drawn by SEED, and no other test",
    )


def pytest_collection_modifyitems(config, items):
    """Select a tier: the tests without the mark `slow`, all tests, or a sample of the slow ones."""
    if config.getoption("--all"):
        return
    seed = config.getoption("--sample")

    def selected(item):
        if item.get_closest_marker("slow") is None:
            return seed is None
        return seed is not None and crc32(f"{seed} {item.nodeid}".encode()) % 20 == 0

    config.hook.pytest_deselected(items=[item for item in items if not selected(item)])
    items[:] = [item for item in items if selected(item)]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Let ranks be forks of this process as it is now: tests are imported, and none has run."""
    if session.items and not torch.cuda.is_available():  # a fork cannot use CUDA after its parent
        Forks().serve_ranks()


@pytest.fixture
def new_interpreters(monkeypatch):
    """Start ranks as users' ranks start, each with a new interpreter."""
    monkeypatch.setattr(launch, "subprocess", subprocess)


class Worlds:
    """Pools of 1, 2, 3 and 5 ranks, each started when it is first used."""

    def __init__(self, engine, device="cpu"):
        self._strict, self._device = engine == "strict-nccl", device
        self._backend = "gloo" if self._strict else engine
        self._pools = {}

    def run(self, size, fn, *args, timeout=None):
        if size not in self._pools:
            self._pools[size] = Ranks(size, timeout=90, backend=self._backend)
        how = self._strict, self._device
        return self._pools[size].run(_on_device, *how, fn, *args, timeout=timeout)

    def close(self):
        """Forget the pools, which ends their ranks at once; a farewell takes each rank seconds."""
        self._pools.clear()


def _on_one_thread(rank, fn, *args):
    _end_groups()
    gc.collect()  # cycles, as of a model and its hooks, keep groups
    gc.freeze()  # what is left is of modules, most of it, and need not be gone through again
    for kind in (DeprecationWarning, FutureWarning):  # as pyproject.toml says of this process
        warnings.simplefilter("error", kind)
    for message in ALLOWED:
        warnings.filterwarnings("ignore", message)
    torch.set_num_threads(1)
    torch.manual_seed(100 + rank)
    return fn(rank, *args)


def _on_device(rank, strict, device, fn, *args):
    if not strict and device == "cpu":
        return _on_one_thread(rank, fn, *args)
    from tests.gpu.device import on_cpu, on_device

    with on_device(device, strict):
        return on_cpu(_on_one_thread(rank, fn, *args))


def _end_groups():
    """End the groups of earlier tests, in which no rank is at work any more.

    Gloo has a thread per group, which wakes up 100 times a second. Auxiliary groups of varcomm,
    which it uses again, have names that begin with its own.
    """
    made = [
        group
        for group in distributed_c10d._world.pg_map
        if group != dist.group.WORLD and not group.group_name.startswith("varcomm.")
    ]
    for group in sorted(made, key=lambda group: group.group_name):  # in one order on all ranks
        dist.destroy_process_group(group)
    if made and "torch.distributed.tensor" in sys.modules:
        _forget_meshes()


def _forget_meshes():
    """Clear what DTensor remembers by meshes: later ones are equal, but have other groups."""
    from torch.distributed.tensor._redistribute import (
        _gen_transform_infos,
        clear_redistribute_planner_cache,
    )
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()


@pytest.fixture(scope="session")
def worlds(request):
    pools = Worlds(*map(request.config.getoption, ("--engine", "--device")))
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def mpi_worlds():
    """The same on MPI, whatever `--engine` says."""
    pools = Worlds("mpi")
    yield pools
    pools.close()


@pytest.fixture
def launch_on_worlds(worlds, monkeypatch):
    """Let ``vc.launch`` run on the ranks of the pool."""
    monkeypatch.setattr(varcomm, "launch", lambda fn, size, *args: worlds.run(size, fn, *args))


@pytest.fixture(autouse=True, scope="module")
def little_to_collect():
    """Spare the collector what modules and earlier tests keep: simulated ranks call it often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def ranks_for_examples(request):
    """Examples in docstrings launch ranks: give them those that are there, without a start."""
    where = request.node.nodeid
    if "::" in where and where.startswith(("varcomm/", "models/")) and "launch.py" not in where:
        request.getfixturevalue("launch_on_worlds")
