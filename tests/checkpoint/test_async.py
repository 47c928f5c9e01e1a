"""Saves that go on while training does: what was there when they began, complete or not at all."""

import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import varcomm
from tests.checkpoint.test_crash import ROOT
from varcomm import ArgumentError, CommunicationError, DisagreementError, GroupError
from varcomm.checkpoint import PerRank, Rows, load, read, save, writer
from varcomm.data_parallel import sum_gradients
from varcomm.sharding import Sharded, ShardSpec


class Held:
    """Holds up what a thread writes, until it is told to go on."""

    def __init__(self):
        self.go, self.begun, self.threads = threading.Event(), threading.Event(), []
        self._sync = writer._sync
        self._write = writer.FileSystemWriter.write_data

    def __enter__(self):
        def held(*args):
            self.threads.append(threading.current_thread().name)
            self.begun.set()
            assert self.go.wait(30)
            return self._write(*args)

        writer.FileSystemWriter.write_data = held
        return self

    def __exit__(self, *_):
        self.go.set()
        writer.FileSystemWriter.write_data = self._write


def during(rank, folder):
    """Tensors are changed, and collectives are run, before anything is written."""
    spec = ShardSpec.of([1, 0, 4])
    own = torch.full((spec.local, 2), float(rank))
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    ids = torch.arange(rank, 7, 3)
    state = {"w": Sharded.of(own, spec), "model": model, "u": Rows(ids * 1.0, ids, 7), "log": [1]}
    weight = model.weight.detach().clone()
    with Held() as held:
        pending = save(state, folder, async_=True)
        assert not pending.done()
        own.fill_(9)
        state["log"].append(2)
        for _ in range(20):  # while the thread waits to agree with the others
            model(torch.ones(1, 2)).sum().backward()
            sum_gradients(model)
            total = varcomm.all_reduce(torch.ones(3))
        with torch.no_grad():
            model.weight.zero_()
        there = (folder / ".metadata").exists()
        held.go.set()
    pending.wait()
    assert pending.done()
    pending.wait()  # again, and it says the same
    found = read(folder)
    return (
        not there
        and set(held.threads) <= {"varcomm.checkpoint"}
        and total.tolist() == [3, 3, 3]
        and torch.equal(found["model"]["weight"], weight)
        and found["w"][:, 0].tolist() == [0, 2, 2, 2, 2]
        and found["u"].tolist() == list(range(7))
        and found["log"] == [1]
    )


def test_what_was_there_when_it_began(worlds, tmp_path):
    assert worlds.run(3, during, tmp_path) == [True] * 3


def several(rank, folder):
    """Each save waits for the one before, and so does a load."""
    x = torch.zeros(2)
    for number in range(4):
        x.fill_(number)
        save({"x": x}, folder, async_=True)
    load({"x": x.zero_()}, folder)
    assert x.tolist() == [3, 3]
    save({"x": x + 1}, folder, async_=True)
    save({"x": x + 2}, folder)
    return read(folder)["x"].tolist(), len(list(folder.iterdir()))


def test_one_after_the_other(worlds, tmp_path):
    assert worlds.run(2, several, tmp_path) == [([5, 5], 3), ([5, 5], 3)]


def fails(rank, folder):
    """What goes wrong on one rank, all are told; in wait(), or else by the next save."""
    save({"x": 1}, folder)
    for seen in (True, False):
        if rank == 1:
            write = writer.FileSystemWriter.write_data

            def refuse(*_):
                raise OSError(28, "No space left on device")

            writer.FileSystemWriter.write_data = refuse
        pending = save({f"x{n}": torch.ones(4) for n in range(3)}, folder, async_=True)
        while not pending.done():
            time.sleep(0.001)
        if rank == 1:
            writer.FileSystemWriter.write_data = write
        message = (
            rf"checkpoint.save to {folder} with async_=True: refused on rank 1 of 2: "
            r"\[Errno 28\] No space left on device"
        )
        if seen:
            with pytest.raises(ArgumentError, match=message):
                pending.wait()
        else:
            with pytest.raises(ArgumentError, match=message):
                save({"x": 2}, folder)
    found = read(folder)
    save({"x": 3}, folder)
    return found, read(folder)


def test_an_error_in_the_thread(worlds, tmp_path):
    assert worlds.run(2, fails, tmp_path) == [({"x": 1}, {"x": 3})] * 2


def on_one(rank, folder):
    with pytest.raises(DisagreementError, match=r"on async_: rank 0 has False, rank 1 has True"):
        save({"x": 1}, folder, async_=rank == 1)
    return not folder.exists()


def test_ranks_that_disagree(worlds, tmp_path):
    assert worlds.run(2, on_one, tmp_path / "new") == [True, True]


def aside_of_part(rank, folder):
    group = dist.new_group([0, 2])
    if rank == 1:
        return True
    save({"x": torch.ones(2)}, folder, async_=True, group=group).wait()
    save({"x": torch.ones(3)}, folder, async_=True, group=group).wait()
    return read(folder)["x"].tolist() == [1, 1, 1]


def test_a_part_of_the_world(worlds, tmp_path):
    assert worlds.run(3, aside_of_part, tmp_path) == [True] * 3


AT_EXIT = """
import sys, torch
from varcomm.checkpoint import save, writer
write = writer.write
def slow(*args):
    import time
    time.sleep(0.3)
    return write(*args)
import varcomm.checkpoint.saving as saving
saving.write = slow
save({"x": torch.ones(3)}, sys.argv[1], async_=True)
"""


def test_the_interpreter_waits(tmp_path):
    command = [sys.executable, "-c", AT_EXIT, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert read(tmp_path)["x"].tolist() == [1, 1, 1]


def test_alone(tmp_path):
    x = torch.ones(1000)
    pending = save({"x": x, "y": x[::2]}, tmp_path, async_=True)
    x.zero_()
    pending.wait()
    assert read(tmp_path)["x"].eq(1).all()
    assert read(tmp_path)["y"].eq(1).all()


UNSEEN = """
import resource, signal, sys, torch
from varcomm.checkpoint import save
save({"x": torch.ones(3)}, sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
save({"x": torch.ones(100_000)}, sys.argv[1], async_=True)
"""


def test_an_error_that_nobody_waits_for_is_told(tmp_path):
    command = [sys.executable, "-c", UNSEEN, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    said = f"checkpoint.save to {tmp_path} with async_=True: [Errno 27] File too large: '__0_"
    assert done.stderr.startswith(said)
    assert done.returncode == 0
    assert read(tmp_path)["x"].tolist() == [1, 1, 1]


def test_a_read_tells_of_it_as_well(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writer.FileSystemWriter, "write_data", refuse)
        pending = save({"x": 1}, tmp_path / "new", async_=True)
        while not pending.done():
            time.sleep(0.001)
    save_that_failed = rf"checkpoint.save to {tmp_path / 'new'} with async_=True: \[Errno 28\]"
    with pytest.raises(ArgumentError, match=f"^checkpoint.read: {save_that_failed}"):
        read(tmp_path)


def test_a_relative_folder_is_that_of_the_call(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with Held() as held:
        pending = save({"x": 1}, "here", async_=True)
        monkeypatch.chdir(tmp_path / "other")
        held.go.set()
        pending.wait()
    assert read(tmp_path / "here") == {"x": 1}
    assert not list((tmp_path / "other").iterdir())


COULD_NOT = r"save to .* with async_=True on rank \d of 2: failed after \d+\.\d s: "


def slow(rank, folder, timeout):
    """One rank writes for longer than the group's limit."""
    dist.barrier()  # from here on both are there: the limit is for them to meet again
    dist.destroy_process_group()
    limit = timedelta(seconds=timeout)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    save({"x": 1}, folder / "c")
    write = writer.FileSystemWriter.write_data

    def late(*args):
        time.sleep(2 * timeout if rank == 0 else 0)
        return write(*args)

    writer.FileSystemWriter.write_data = late
    pending = save({f"x{n}": torch.ones(4) for n in range(3)}, folder / "c", async_=True)
    with pytest.raises(CommunicationError, match=COULD_NOT):
        pending.wait()
    return read(folder / "c")


def test_a_rank_that_writes_for_longer_than_the_limit(tmp_path):
    assert varcomm.launch(slow, 2, tmp_path, 5) == [{"x": 1}, {"x": 1}]


def destroyed(rank, folder):
    save({"x": 1}, folder)
    with Held() as held:
        pending = save({"x": 2, "y": PerRank(2)}, folder, async_=True)
        dist.destroy_process_group()
        held.go.set()
    with pytest.raises(GroupError, match=r"the group of rank \d of 2 was destroyed\. Make another"):
        pending.wait()
    return read(folder)


def test_a_group_that_is_destroyed_meanwhile(tmp_path):
    assert varcomm.launch(destroyed, 2, tmp_path) == [{"x": 1}, {"x": 1}]
