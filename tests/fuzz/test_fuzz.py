"""Samples of random programs and faulty calls, and of long runs; `make fuzz` runs many more."""

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz import faults, load, programs

MEGABYTE = 1 << 20


def run(worlds, pool, examples, strategy, on_ranks, problem):
    @seed(0)
    @settings(
        max_examples=examples,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(drawn=strategy(pool))
    def draw(drawn):
        answers = worlds.run(pool, on_ranks, drawn, timeout=60)
        if found := problem(drawn, answers):
            pytest.fail(f"{drawn}: {found}")

    draw()


SAMPLES = [(3, 6), pytest.param(4, 30, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("pool", "examples"), SAMPLES)
def test_programs_are_as_in_one_process(worlds, pool, examples):
    def wrong(_, answers):
        return "; ".join(text for text in answers if text)

    run(worlds, pool, examples, programs.programs, programs.on_ranks, wrong)


@pytest.mark.parametrize(("pool", "examples"), SAMPLES)
def test_faulty_calls_are_one_error_on_all_ranks(worlds, pool, examples):
    run(worlds, pool, examples, faults.faults, faults.on_ranks, faults.verdict)


@pytest.mark.slow
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
def test_nothing_is_leaked(worlds, job, count, room):
    for (memory, files, threads), right in worlds.run(3, job, count):
        assert right
        assert memory < room
        assert (files, threads) == (0, 0)
