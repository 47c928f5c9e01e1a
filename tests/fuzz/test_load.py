"""Nothing is held that is no longer needed; `make fuzz` does the same ten times as often."""

from tests.fuzz import load

MEGABYTE = 1 << 20


def test_collectives(worlds):
    for (memory, files, threads), drifted in worlds.run(3, load.collectives, 1000):
        assert drifted == 0
        assert memory < 2 * MEGABYTE
        assert (files, threads) == (0, 0)


def test_plans(worlds):
    for memory, files, threads in worlds.run(3, load.plans, 50):
        assert memory < MEGABYTE
        assert (files, threads) == (0, 0)


def test_groups(worlds):
    for memory, files, threads in worlds.run(3, load.groups, 20):
        assert memory < 2 * MEGABYTE
        assert (files, threads) == (0, 0)
