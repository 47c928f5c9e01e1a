"""Pools of ranks that live as long as the session: each start costs seconds of imports."""

import gc
import itertools
import sys
import warnings
from collections import Counter
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import varcomm
from varcomm.errors import GroupError
from varcomm.testing import Ranks
from varcomm.transport import aside as aside_module
from varcomm.transport import lane as lane_module

WORLDS = (1, 2, 3, 5)

# Tests that are run with each pair of values of their parameters, not with each value alone.
PAIRED = ("tests/ops/test_adjoints", "tests/ops/test_derivatives", "tests/ops/test_values")

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
        choices=("gloo", "mpi"),
        default="gloo",
        help="what the ranks of the fixture `worlds` communicate by",
    )
    parser.addoption(
        "--all",
        action="store_true",
        help="run parametrized tests with all combinations of their parameters",
    )


@pytest.hookimpl(trylast=True)  # of what -k has left
def pytest_collection_modifyitems(config, items):
    """Choose combinations of parameters: each value once, of primitives each pair of values.

    On MPI, 3 ranks stand for all worlds but one: what is tested of worlds is no engine's.
    """
    if config.getoption("--all"):
        return
    on_gloo, runs = config.getoption("--engine") == "gloo", {}
    for item in items:
        if on_gloo or _params(item).get("ranks") not in (2, 5):
            runs.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = set()
    for test, several in runs.items():
        paired = on_gloo and test.startswith(PAIRED)
        chosen.update(_each_once(several, _pairs_of_values if paired else _values))
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def _params(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


def _values(item):
    """Return the values of its parameters; those that are given together are one."""
    found = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.replace(",", " ").split() if isinstance(names, str) else names
        found.append((*names, *(id(_params(item)[name]) for name in names)))
    return found


def _pairs_of_values(item):
    """Return each pair of the values of its parameters, also of those that are given together."""
    values = [(name, repr(value)) for name, value in sorted(_params(item).items())]
    return list(itertools.combinations(values, 2)) or values


def _each_once(items, what):
    """Choose among the runs of a test: what is seldom chosen first, until all is."""
    of = {item: set(what(item)) for item in items}
    left, times, chosen = set().union(*of.values()), Counter(), []
    if not left:
        return items
    while left:
        best = max(of, key=lambda item: (len(left & of[item]), -sum(times[v] for v in of[item])))
        chosen.append(best)
        left -= of[best]
        times.update(of.pop(best))
    return chosen


class Worlds:
    """Pools of 1, 2, 3 and 5 ranks, each started when it is first used."""

    def __init__(self, engine):
        self._engine = engine
        self._pools = {}

    def run(self, size, fn, *args, timeout=None):
        if size not in self._pools:
            self._pools[size] = Ranks(size, timeout=90, backend=self._engine)
        return self._pools[size].run(_on_one_thread, fn, *args, timeout=timeout)

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


def _end_groups():
    """End the groups that earlier tests made; now no rank is at work in them any more.

    Gloo has a thread for each, which wakes up 100 times a second. Those that varcomm makes and uses
    again stay.
    """
    lanes = [lane for made in lane_module._lanes.values() for of in made.values() for lane in of]
    kept = {dist.group.WORLD}
    for group in [lane.group for lane in lanes] + list(aside_module._made.values()):
        with suppress(GroupError):  # of a world that has been destroyed
            kept.add(group().process_group)
    made = set(distributed_c10d._world.pg_map) - kept
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
    pools = Worlds(request.config.getoption("--engine"))
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def mpi_worlds():
    """The same on MPI, whatever `--engine` says."""
    pools = Worlds("mpi")
    yield pools
    pools.close()


@pytest.fixture(autouse=True, scope="module")
def little_to_collect():
    """Spare the collector what modules and earlier tests keep: simulated ranks call it often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def ranks_for_examples(request, monkeypatch):
    """Examples in docstrings launch ranks: give them those that are there, without a start."""
    where = request.node.nodeid
    if "::" in where and where.startswith(("varcomm/", "models/")) and "launch.py" not in where:
        run = request.getfixturevalue("worlds").run
        monkeypatch.setattr(varcomm, "launch", lambda fn, size, *args: run(size, fn, *args))
