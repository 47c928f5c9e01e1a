"""Saves that are killed, in processes forked from one that has everything imported.

Run as a script with the folder: prints for each save that was killed what the folder held then.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import varcomm
from varcomm.checkpoint import load, read, save, writer
from varcomm.sharding import Sharded, ShardSpec

ROWS = 20_000

# How a save that was killed too early, or too late, changes the time in which the next is killed:
# so that about as many are, however busy the machine is.
TOWARDS = (1.2, 0.8)


def state_of(number, rank=0, ranks=1):
    """A state of which every element says which it is, spread over ranks if there are several."""
    replicated = {f"layer {n}": torch.full((300,), float(number)) for n in range(6)}
    state = {"model": replicated, "step": number}
    if ranks > 1:
        spec = ShardSpec.of([ROWS // 4, ROWS - ROWS // 4])
        state["rows"] = Sharded.of(torch.full((spec.local,), float(number)), spec)
    else:
        state["rows"] = torch.full((ROWS,), float(number))
    return state


def held(folder):
    """Which of the states a folder holds, all of it; loaded in two ways."""
    whole = read(folder)
    step = whole["step"]
    own = state_of(-1)
    load(own, folder)
    for state in (whole, own):
        assert state["step"] == step
        assert all(bool((tensor == step).all()) for tensor in state["model"].values())
        assert len(state["rows"]) == ROWS
        assert bool((state["rows"] == step).all())
    return step


def forked(fn, *args):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            fn(*args)
            code = 0
        finally:
            os._exit(code)
    return pid


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def save_alone(folder, number, ready):
    state = state_of(number)
    os.write(ready, b".")
    save(state, folder)


def at_random(folder, times):
    """Kill a writer at random moments; print (before, new, found, files left)."""
    start = time.monotonic()
    save(state_of(0), folder)
    lasts = time.monotonic() - start
    chance, before = random.Random(7), 0
    for number in range(1, times + 1):
        heard, ready = os.pipe()
        pid = forked(save_alone, folder, number, ready)
        os.read(heard, 1)
        time.sleep(chance.uniform(0, lasts))
        os.kill(pid, signal.SIGKILL)
        ended(pid)
        os.close(heard)
        os.close(ready)
        found = held(folder)
        print(before, number, found)
        before, lasts = found, lasts * TOWARDS[found == number]


class Counting:
    """Calls of functions that change the disk; the process is killed in front of one of them."""

    def __init__(self, last):
        self.left = last

    def around(self, fn):
        def counted(*args, **kwargs):
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
            return fn(*args, **kwargs)

        return counted


def save_until(folder, number, last):
    counting = Counting(last)
    for name in ("fsync", "replace"):
        setattr(os, name, counting.around(getattr(os, name)))
    Path.unlink = counting.around(Path.unlink)
    Path.open = counting.around(Path.open)
    save(state_of(number), folder)


def at_each_step(folder):
    """Kill a writer in front of each change of the disk, until one gets through."""
    save(state_of(0), folder)
    before, number, code = 0, 0, -signal.SIGKILL
    while code:
        number += 1
        code = ended(forked(save_until, folder, number, number - 1))
        assert code in (0, -signal.SIGKILL), code
        found = held(folder)
        print(before, number, found)
        before = found
    print(len(list(folder.iterdir())))


def save_together(rank, store, folder, number, ready):
    options = {"init_method": f"file://{store}", "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", **options)
    state = state_of(number, rank, 2)
    dist.barrier()
    os.write(ready, b".")
    save(state, folder)
    os.write(ready, b"!")
    signal.pause()


def on_two_ranks(folder, times):
    """Kill one of two ranks, or both, at random moments."""
    chance, before = random.Random(11), -1
    for number in range(times + 1):
        heard, ready = os.pipe()
        store = folder.parent / f"store {number}"
        pids = [forked(save_together, rank, store, folder, number, ready) for rank in range(2)]
        os.read(heard, 1)
        if number == 0:
            start, done = time.monotonic(), b""
            while done.count(b"!") < 2:
                done += os.read(heard, 1)
            lasts = time.monotonic() - start
        else:
            time.sleep(chance.uniform(0, lasts))
            os.kill(chance.choice(pids), signal.SIGKILL)
            time.sleep(0.05)  # for the other one to see it, and to do what it does then
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            ended(pid)
        found = held(folder)
        if number:
            print(before, number, found)
            lasts *= TOWARDS[found == number]
        before = found


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert varcomm.checkpoint.writer is writer
    how, where, *more = sys.argv[1:]
    globals()[how](Path(where), *map(int, more))
