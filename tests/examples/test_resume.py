"""Training continues from a checkpoint on other ranks, also if one of them has been killed."""

import contextlib
import io
import os
import re
import subprocess
import sys

import pytest

from tests.examples import test_every_example
from tests.examples.loading import EXAMPLES
from tests.examples.loading import example as module

SMALL = ["--side", "12", "--hidden", "4", "--blocks", "1", "--every", "10"]


def example(name):
    return module("resume", name)


def run_main(rank, folder, *arguments):
    history = ["--history", str(folder.with_suffix(".jsonl"))]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = example("train").main([str(folder), *history, *SMALL, *arguments])
    return code, printed.getvalue()


def runs(folder):
    return example("history").History(folder.with_suffix(".jsonl")).runs()


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--async"]])
def test_other_ranks_continue_as_one_process_would(worlds, tmp_path, more):
    folder, alone = tmp_path / "several", tmp_path / "one"
    for ranks, steps in ((3, "15"), (2, "30"), (1, "45")):
        found = worlds.run(ranks, run_main, folder, "--steps", steps, *more)
        assert [code for code, _ in found] == [0] * ranks
        assert [bool(printed) for _, printed in found] == [True] + [False] * (ranks - 1)
    worlds.run(1, run_main, alone, "--steps", "45")
    found, (uninterrupted,) = runs(folder), runs(alone)
    assert [(run.ranks, run.start) for run in found] == [(3, 0), (2, 15), (1, 30)]
    assert [step for run in found for step in run.losses] == list(range(45))
    assert [run.cost.count(" and ") for run in found] == [2, 1, 0], "memory of each rank"
    assert max(example("history").differences(uninterrupted, found)) <= 1e-9


@pytest.mark.slow
def test_a_rank_is_killed_while_it_saves_and_two_continue(tmp_path):
    words = test_every_example.command("resume")
    assert words[1:] == ["examples/resume/kill_and_resume.py"]
    picture, scratch = tmp_path / "a.png", tmp_path / "scratch"
    scratch.mkdir()
    done = subprocess.run(
        [*words, "--smoke", "--moment", "save", "--picture", str(picture)],
        cwd=EXAMPLES.parent,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    printed = done.stdout
    assert (done.returncode, done.stderr) == (0, ""), printed
    assert list(scratch.iterdir()) == []
    assert "killed agent 2 and its rank in the middle of a save\n" in printed
    assert re.search(r"two ranks go on from step (\d+)", printed)[1] in ("20", "30")
    assert float(re.search(r"greatest relative difference: (\S+)", printed)[1]) <= 1e-9
    assert re.search(r"^on 2 ranks: .* s per step, .* and \d+ MiB per rank$", printed, re.MULTILINE)
    assert printed.endswith("\none answer\n")
    assert picture.stat().st_size > 10_000
