"""Saves that are killed, in processes forked from one that has everything imported.

Run as a script with a folder: prints the content of the folder after each killed save.
"""

import os
import random
import signal
import sys
import time
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from varcomm.checkpoint import load, read, save
from varcomm.sharding import Sharded, ShardSpec

ROWS = 20_000

# Changes of the time until the kill, after a save that was killed too early or too late.
TOWARDS = (1.2, 0.8)


def state_of(number, rank=0, ranks=1):
    """A state whose elements are all `number`; sharded if there are several ranks."""
    replicated = {f"layer {n}": torch.full((300,), float(number)) for n in range(6)}
    state = {"model": replicated, "step": number}
    if ranks > 1:
        spec = ShardSpec.of([ROWS // 4, ROWS - ROWS // 4])
        state["rows"] = Sharded.of(torch.full((spec.local,), float(number)), spec)
    else:
        state["rows"] = torch.full((ROWS,), float(number))
    return state


def held(folder):
    """The number of the state in a folder, after read() and load() of all of it."""
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


def save_until(folder, number, last):
    """Save, and be killed before the call of this number that changes the disk."""
    left = [last]

    def counted(fn):
        def call(*args, **kwargs):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return fn(*args, **kwargs)

        return call

    for name in ("fsync", "replace", "mkdir", "rmdir", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    save(state_of(number), folder)


def at_steps(folder, *steps):
    """Kill a writer before some changes of the disk; without steps, before each."""
    save(state_of(0), folder)
    before, code = 0, -signal.SIGKILL
    for number, step in enumerate(steps or count(), 1):
        code = ended(forked(save_until, folder, number, step))
        assert code in (0, -signal.SIGKILL), code
        found = held(folder)
        print(before, number, found)
        before = found
        if not code:
            break
    save(state_of(1), folder)
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
    how, where, *more = sys.argv[1:]
    globals()[how](Path(where), *map(int, more))
