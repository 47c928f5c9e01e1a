"""Saves that are killed, in processes forked from one that has everything imported.

Run as a script with a folder: prints the content of the folder after each killed save.
"""

import os
import signal
import sys
from itertools import count
from pathlib import Path

import torch

from varcomm.checkpoint import load, read, save

ROWS = 20_000


def state_of(number):
    """A state whose elements are all `number`."""
    replicated = {f"layer {n}": torch.full((300,), float(number)) for n in range(6)}
    return {"model": replicated, "step": number, "rows": torch.full((ROWS,), float(number))}


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


if __name__ == "__main__":
    torch.set_num_threads(1)
    how, where, *more = sys.argv[1:]
    globals()[how](Path(where), *map(int, more))
