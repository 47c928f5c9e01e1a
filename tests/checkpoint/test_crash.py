"""A killed save leaves the earlier checkpoint, or the new one, whole."""

import pytest

from tests.transport.processes import finished


def run(how, folder, *more):
    """The content of the folder after each killed save: (before, the killed one, found)."""
    done = finished("-m", "tests.checkpoint.killed", how, folder, *map(str, more))
    assert done.returncode == 0, done.stderr
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    killed = [one for one in found if len(one) == 3]
    assert all(after in (before, new) for before, new, after in killed)
    return killed, found[-1]


def test_killed_before_and_after_the_rename(tmp_path):
    killed, (files,) = run("at_steps", tmp_path, 3, 9)
    assert [after == new for _, new, after in killed] == [False, True]
    assert files == 2  # the leftovers are gone


@pytest.mark.slow
def test_killed_before_each_change_of_the_disk(tmp_path):
    killed, (files,) = run("at_steps", tmp_path)
    assert len(killed) > 8
    assert [after == new for _, new, after in killed][-1]
    assert sum(after == new for _, new, after in killed) > 1  # also killed after the rename
    assert files == 2
