"""What the columns of the benchmark mean: bandwidths, ratios, goals; and who is not believed."""

from dataclasses import replace

import pytest
import torch

from varcomm.cli.bench.case import COPY, FLOOR, OURS, PEER, Answer, Case, Contender, Result, Task
from varcomm.cli.bench.goals import verdicts
from varcomm.cli.bench.layout import Layout, transposed
from varcomm.cli.bench.suites.ops import OPERATIONS
from varcomm.cli.bench.table import head, reasons, row
from varcomm.cli.bench.timing import Effort, measure
from varcomm.errors import LaunchError

CPU = torch.device("cpu")
CASE = Case("ops", "all_gather_v", False, 2, "gloo", "float32", 2**20, "1:2")


def answers(seconds, **more):
    """Of one rank: seconds by contender, each of the kind that its name is."""
    fields = {"nbytes": 1000, "skew": 1.0, "sent": 400, "received": 600, "traced": 400, "calls": 1}
    return [Answer(seconds, {name: name for name in seconds}, {}, **(fields | more))]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("world", [2, 3, 5])
def test_bus_bandwidth_of_even_shards_is_that_of_nccl_tests(operation, world):
    """Its factors: (n - 1) / n for all of these; an exchange keeps nothing, and has 1."""
    case = replace(CASE, operation=operation, world=world, skew="even", nbytes=64 * 4 * 60)
    for backward in (False, True):
        layouts = [Layout.of(case, rank, CPU) for rank in range(world)]
        if backward:
            layouts = [transposed(layout) for layout in layouts]
        busiest = max(max(layout.sent, layout.received) for layout in layouts)
        factor = 1 if operation == "indexed_all_to_all_v" else (world - 1) / world
        assert busiest == factor * case.nbytes


def test_busiest_rank_counts_where_shards_differ():
    result = Result.of(
        CASE,
        answers({OURS: [2e-6]}) + answers({OURS: [1e-6]}, sent=900, received=100, traced=900),
    )
    assert result.bus_bytes == 900
    assert result.busbw == pytest.approx(900 / 2e-6 / 1e9)
    assert result.algbw == pytest.approx(1000 / 2e-6 / 1e9)
    assert result.wire == 1.0


def test_the_slowest_rank_of_a_repetition_counts_and_ratios_are_of_pairs():
    first = answers({OURS: [1.0, 9.0, 3.0], FLOOR: [1.0, None, 2.0], COPY: [0.1, 0.1, 0.1]})
    second = answers({OURS: [2.0, 1.0, 3.0], FLOOR: [2.0, None, 1.0], COPY: [0.1, 0.1, 0.1]})
    result = Result.of(CASE, first + second)
    assert (result.ours.seconds, result.ours.repetitions) == (3.0, 3)
    assert (result.floor.seconds, result.floor.repetitions) == (2.0, 2)
    assert result.floor.ratio == pytest.approx((2 / 2 + 3 / 2) / 2)


def test_bytes_beyond_the_fewest_show():
    assert Result.of(CASE, answers({OURS: [1.0]}, traced=500)).wire == 1.25
    assert Result.of(CASE, answers({OURS: [1.0]}, sent=0, traced=7)).wire == 8.0


def test_goals_name_the_case_that_is_furthest_off():
    good = Result.of(CASE, answers({OURS: [1.0], FLOOR: [1.0]}))
    bad = Result.of(replace(CASE, skew="1:8"), answers({OURS: [3.0], FLOOR: [2.0]}, traced=800))
    small = Result.of(replace(CASE, nbytes=768), answers({OURS: [1.2], FLOOR: [1.0]}))
    between = Result.of(replace(CASE, nbytes=2**16), answers({OURS: [9.0], FLOOR: [1.0]}))
    found = {v.goal.text: v for v in verdicts([good, bad, small, between])}
    large = found["1 MB and more, of the floor"]
    assert (large.cases, large.held, large.worst) == (2, 1, 1.5)
    assert "all_gather_v forward, 2 ranks, float32, 1M 1:8" in large.where
    assert (found["under 64 KB, of the floor"].held, len(found)) == (1, 3)
    assert found["bytes on the wire, of the fewest possible"].worst == 2.0


def test_goals_of_the_padded_gather_and_of_mpi():
    seconds = {OURS: [1e-3], FLOOR: [0.95e-3], "padded": [3e-3]}
    kinds = {OURS: OURS, FLOOR: FLOOR, "padded": PEER}
    gloo = Result.of(CASE, [replace(answers(seconds)[0], kinds=kinds)])
    on_mpi = replace(CASE, engine="mpi")
    large = Result.of(on_mpi, answers({OURS: [1.1], FLOOR: [1.0]}))
    small = Result.of(replace(on_mpi, nbytes=768), answers({OURS: [90e-6], FLOOR: [60e-6]}))
    plan = Result.of(replace(CASE, suite="plan"), answers({OURS: [1.2], FLOOR: [1.0]}))
    found = {
        v.goal.text: (v.held, pytest.approx(v.worst)) for v in verdicts([gloo, large, small, plan])
    }
    assert found["Gloo, 1:2, 1 MB and more: times as fast as the padded gather"] == (0, 3.0)
    assert found["MPI, 1 MB and more, of mpi4py's bare call"] == (1, 1.1)
    assert found["MPI, under 64 KB, more than mpi4py's bare call"] == (1, 30.0)
    assert found["plans, of the bare schedule"] == (0, 1.2)


def test_a_row_has_as_many_columns_as_the_head():
    result = Result.of(CASE, answers({OURS: [1e-3], FLOOR: [5e-4]}))
    titles = head().replace("floor us", "floor_us").split()
    assert len(row(result).split()) == len(titles)
    assert row(result).split()[-len(titles) :][titles.index("/floor")] == "2.00"


def with_liars(case, effort, device):
    """A task among whose contenders are some that are wrong, on one rank at least."""
    rank = torch.distributed.get_rank()
    value = torch.arange(3.0)

    def fails():
        raise ValueError("no such thing\nas this")

    return Task(
        [
            Contender(OURS, OURS, lambda: value),
            Contender("true", FLOOR, lambda: value.clone()),
            Contender("off", PEER, lambda: value + rank),
            Contender("short", PEER, lambda: value[: 3 - rank]),
            Contender("narrow", PEER, lambda: value.bfloat16()),
            Contender("nan", PEER, lambda: value * torch.nan),
            Contender("failing", PEER, fails),
        ],
        value,
        0.0,
        *(12, 1.0, 4, 4),
        {"absent": "is not there"},
    )


def test_wrong_results_are_told_and_not_timed(worlds):
    first, second = worlds.run(2, measure, CASE, Effort(repetitions=3), with_liars)
    assert set(first.seconds) == {OURS, "true", "copy"}
    assert {name: len(seconds) for name, seconds in first.seconds.items()} == {
        OURS: 3,
        "true": 3,
        "copy": 3,
    }
    assert first.cannot == second.cannot
    assert first.cannot == {
        "absent": "is not there",
        "off": "wrong result: off by 1",
        "short": "wrong result: shape (2,) of torch.float32 in place of (3,) of torch.float32",
        "narrow": "wrong result: shape (3,) of torch.bfloat16 in place of (3,) of torch.float32",
        "nan": "wrong result: off by nan",
        "failing": "ValueError: no such thing",
    }


def test_reasons_are_told_once(worlds):
    answers = worlds.run(2, measure, CASE, Effort(repetitions=1), with_liars)
    result = Result.of(CASE, answers)
    told = list(reasons([result, result]))
    assert told[0] == "absent: is not there (all_gather_v forward)"
    assert len(told) == len(result.cannot)
    told = list(reasons([result, replace(result, case=replace(CASE, backward=True))]))
    assert told[0] == "absent: is not there (all_gather_v)"


def with_wrong_varcomm(case, effort, device):
    task = with_liars(case, effort, device)
    return replace(task, expected=task.expected + 1)


def test_wrong_varcomm_ends_the_run(worlds):
    with pytest.raises(LaunchError, match="varcomm is wrong, which is a bug: wrong result: off by"):
        worlds.run(2, measure, CASE, Effort(repetitions=1), with_wrong_varcomm)
