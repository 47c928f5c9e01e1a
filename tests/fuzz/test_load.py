"""Nothing is held that is no longer needed; `make fuzz` does the same ten times as often."""

import pytest

from tests.fuzz import load

MEGABYTE = 1 << 20


@pytest.mark.parametrize(
    ("job", "count", "room"),
    [
        (load.collectives, 1000, 2 * MEGABYTE),
        (load.plans, 50, MEGABYTE),
        (load.groups, 20, 2 * MEGABYTE),
        (load.refusals, 100, MEGABYTE),
    ],
    ids=["collectives", "plans", "groups", "refusals"],
)
def test_what_is_held(worlds, job, count, room):
    for (memory, files, threads), right in worlds.run(3, job, count):
        assert right
        assert memory < room
        assert (files, threads) == (0, 0)
