"""Samples of random programs, faulty calls, altered files and long runs; `make fuzz` runs more."""

import pytest

from tests.fuzz import faults, files, load, programs, swaps
from tests.fuzz.run import draw
from tests.grid import programs as grids

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(programs, id="programs"),
        pytest.param(grids, id="programs of grids", marks=SLOW),  # first tier: tests/grid
        pytest.param(faults, id="faulty calls"),
    ],
)
@pytest.mark.parametrize(("pool", "examples"), [(3, 6), pytest.param(4, 30, marks=SLOW)])
def test_samples(worlds, job, pool, examples):
    """Programs are as in one process; faulty calls are one error on all ranks."""
    drawn = draw(worlds.run, job, pool, examples, 0)
    problems = {str(example): job.verdict(example, answers) for example, answers in drawn}
    assert problems == dict.fromkeys(problems, "")


@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_swaps_are_found_at_a_sum(worlds, count):
    """Nearly all at the first sum; the others at the next ones, by other bits."""
    answers = worlds.run(swaps.RANKS, swaps.on_ranks, range(count), timeout=100)
    assert swaps.verdict(answers) == []
    expected = [where for name, where in answers[0] if name not in swaps.NOT_FOUND]
    later = [where for where in expected if where not in ("inside", "sum 1")]
    assert len(later) <= 4 + len(expected) / 100


@pytest.mark.parametrize("kind", files.SAVED)
def test_altered_files_are_refused(worlds, kind, tmp_path):
    refused, wrong = worlds.run(1, files.attempts, tmp_path, kind, 300, 0)[0]
    assert wrong == []
    assert refused > 150


@pytest.mark.slow
@pytest.mark.parametrize("name", load.JOBS)
def test_nothing_is_leaked(worlds, name):
    job, count, room = load.JOBS[name]
    for (memory, opened, threads), right in worlds.run(3, job, count // 10):
        assert right
        assert memory < room / 2
        assert (opened, threads) == (0, 0)
