"""A save that is killed leaves the checkpoint that was there, or the new one, whole."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(how, folder, *more):
    """What the folder held after each save that was killed: (before, the killed one, found)."""
    command = [sys.executable, "-m", "tests.checkpoint.killed", how, folder, *map(str, more)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]


def test_killed_at_random_moments(tmp_path):
    found = run("at_random", tmp_path, 50)
    assert len(found) == 50
    assert all(after in (before, new) for before, new, after in found)
    assert {after == new for _, new, after in found} == {True, False}  # of both, some


def test_killed_in_front_of_each_change_of_the_disk(tmp_path):
    *found, (files,) = run("at_each_step", tmp_path)
    assert len(found) > 10
    assert all(after in (before, new) for before, new, after in found)
    assert [after == new for _, new, after in found][-1]
    assert sum(after == new for _, new, after in found) > 1  # also killed after it was complete
    assert files == 3  # what others had left is gone


def test_killed_on_one_of_two_ranks(tmp_path):
    found = run("on_two_ranks", tmp_path / "here", 10)
    assert len(found) == 10
    assert all(after in (before, new) for before, new, after in found)
