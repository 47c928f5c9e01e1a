"""Asynchronous saves: the state when they began, complete or not at all."""

import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import varcomm
from tests.transport.processes import finished
from varcomm import ArgumentError, CommunicationError, DisagreementError, GroupError
from varcomm.checkpoint import PerRank, RowsById, load, read, save
from varcomm.sharding import Sharded, ShardSpec


class Held:
    """Stops a save at its first sync to the disk until `go` is set."""

    def __init__(self, error=None):
        self.go, self.threads, self.error = threading.Event(), set(), error
        self._sync = os.fsync

    def __enter__(self):
        def held(descriptor):
            self.threads.add(threading.current_thread().name)
            assert self.go.wait(30)
            if self.error is not None:
                raise self.error
            self._sync(descriptor)

        os.fsync = held
        return self

    def __exit__(self, *_):
        self.go.set()
        os.fsync = self._sync


def during(rank, folder):
    """Tensors are changed, and collectives are run, before anything is written."""
    spec = ShardSpec.of([1, 0, 4])
    own = torch.full((spec.local, 2), float(rank))
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    ids = torch.arange(rank, 7, 3)
    rows = RowsById(ids * 1.0, ids, 7)
    state = {"w": Sharded.of(own, spec), "model": model, "u": rows, "log": [1]}
    weight = model.weight.detach().clone()
    with Held() as held:
        pending = save(state, folder, async_=True)
        assert not pending.done()
        own.fill_(9)
        state["log"].append(2)
        for _ in range(20):  # while the thread waits to agree with the others
            assert varcomm.all_reduce(torch.ones(3)).tolist() == [3, 3, 3]
        with torch.no_grad():
            model.weight.zero_()
        assert not (folder / "checkpoint.json").exists()
        held.go.set()
        pending.wait()
    assert pending.done()
    pending.wait()  # again, with the same result
    assert all(name.startswith("varcomm.checkpoint") for name in held.threads)
    found = read(folder)
    assert torch.equal(found["model"]["weight"], weight)
    assert found["w"][:, 0].tolist() == [0, 2, 2, 2, 2]
    assert found["u"].tolist() == list(range(7))
    assert found["log"] == [1]


def several(rank, folder):
    """Each save waits for the one before, and so does a load."""
    x = torch.zeros(2)
    for number in range(4):
        save({"x": x.fill_(number)}, folder, async_=True)
    load({"x": x.zero_()}, folder)
    assert x.tolist() == [3, 3]
    save({"x": x + 1}, folder, async_=True)
    save({"x": x + 2}, folder)
    assert read(folder)["x"].tolist() == [5, 5]
    assert len(list(folder.iterdir())) == 2


def fails(rank, folder):
    """An error on one rank is raised on all: by wait(), or else by the next call."""
    save({"x": 1}, folder)
    message = rf"save to {folder} with async_=True: refused on rank 1 of 3: .*No space left"
    state = {f"x{n}": torch.ones(4) for n in range(3)}
    for next_call in (None, lambda: save({"x": 2}, folder), lambda: read(folder)):
        with Held(OSError(28, "No space left on device") if rank == 1 else None) as held:
            held.go.set()
            pending = save(state, folder, async_=True)
            while not pending.done():
                time.sleep(0.001)
        with pytest.raises(ArgumentError, match=message):
            (next_call or pending.wait)()
    assert read(folder) == {"x": 1}
    dist.barrier()
    save({"x": 3}, folder)
    assert read(folder) == {"x": 3}


def on_some(rank, folder):
    with pytest.raises(DisagreementError, match="on async_: rank 0 has False; rank 1 has True"):
        save({"x": 1}, folder, async_=rank == 1)
    group = dist.new_group([0, 2])
    if rank != 1:
        save({"x": torch.ones(2)}, folder, async_=True, group=group).wait()
        save({"x": torch.ones(3)}, folder, async_=True, group=group).wait()
        assert read(folder)["x"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("check", [during, several, fails, on_some])
def test_on_ranks(worlds, tmp_path, check):
    worlds.run(3, check, tmp_path / "new")


UNSEEN = """
import resource, signal, sys, torch
from varcomm.checkpoint import save
save({"x": torch.ones(3)}, sys.argv[1], async_=True)
if "fail" in sys.argv:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    save({}, sys.argv[1] + "/other")
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    save({"x": torch.ones(100_000)}, sys.argv[1], async_=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", [["fail"], []])
def test_the_interpreter_waits_and_an_error_is_logged(tmp_path, more):
    done = finished("-c", UNSEEN, tmp_path, *more)
    said = f"checkpoint.save to {tmp_path} with async_=True: rank-00000.safetensors cannot be"
    assert done.returncode == 0
    assert done.stderr.startswith(said) if more else not done.stderr
    assert read(tmp_path)["x"].tolist() == [1, 1, 1]


def test_alone(tmp_path, monkeypatch):
    """In one process; a relative folder is that of the call."""
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    x = torch.ones(1000)
    with Held() as held:
        pending = save({"x": x, "y": x[::2]}, "here", async_=True)
        monkeypatch.chdir(tmp_path / "other")
        x.zero_()
        held.go.set()
        pending.wait()
    assert all(value.eq(1).all() for value in read(tmp_path / "here").values())
    assert not list((tmp_path / "other").iterdir())


def slow(rank, folder):
    """One rank writes for longer than the group's timeout."""
    dist.barrier()  # the timeout is for the ranks to meet again
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / "store"), 2)
    options = {"rank": rank, "world_size": 2, "timeout": timedelta(seconds=5)}
    dist.init_process_group("gloo", store=store, **options)
    save({"x": 1}, folder / "c")
    with Held() as held:
        if rank:
            held.go.set()
        pending = save({f"x{n}": torch.ones(4) for n in range(3)}, folder / "c", async_=True)
        time.sleep(10)
        held.go.set()
        with pytest.raises(CommunicationError, match=r"save to .* with async_=True on rank \d of"):
            pending.wait()
    assert read(folder / "c") == {"x": 1}


def destroyed(rank, folder):
    """The group is destroyed meanwhile."""
    save({"x": 1}, folder)
    with Held() as held:
        pending = save({"x": 2, "y": PerRank(torch.ones(2))}, folder, async_=True)
        dist.destroy_process_group()
        held.go.set()
        with pytest.raises(GroupError, match=r"the group of rank \d of 2 was destroyed"):
            pending.wait()
    assert read(folder) == {"x": 1}


@pytest.mark.slow
@pytest.mark.parametrize("check", [slow, destroyed])
def test_ranks_that_cannot_agree(tmp_path, check):
    varcomm.launch(check, 2, tmp_path)
