"""Programs and faulty calls, drawn at random: `make fuzz` draws them for half an hour."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz import faults, programs

QUICK = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=list(HealthCheck),
    database=None,
)


@QUICK
@given(program=programs.programs())
def test_programs_are_as_in_one_process(worlds, program):
    answers = worlds.run(programs.POOL, programs.on_ranks, program, timeout=60)
    wrong = [text for text in answers if text]
    assert not wrong, wrong


@QUICK
@given(fault=faults.faults())
def test_faulty_calls_are_one_error_on_all_ranks(worlds, fault):
    answers = worlds.run(programs.POOL, faults.on_ranks, fault, timeout=60)
    problem = faults.verdict(fault, answers)
    if problem:
        pytest.fail(problem)
