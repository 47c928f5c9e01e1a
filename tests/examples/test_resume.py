"""Training goes on from a checkpoint on other ranks, also where one of them has been killed."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.examples import test_every_example
from tests.examples.loading import EXAMPLES
from tests.examples.loading import example as module

SMALL = ["--side", "12", "--hidden", "4", "--blocks", "1"]


def example(name):
    return module("resume", name)


def run_main(rank, folder, *arguments):
    history = folder.with_suffix(".jsonl")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = example("train").main(
            [str(folder), "--history", str(history), "--every", "10", *SMALL, *arguments]
        )
    return code, printed.getvalue()


def runs(folder):
    return example("history").History(folder.with_suffix(".jsonl")).runs()


@pytest.mark.slow
def test_training_learns(worlds, tmp_path):
    ((code, printed),) = worlds.run(1, run_main, tmp_path / "one", "--steps", "100")
    assert code == 0
    assert "from step 0 on 1 ranks, of [144] nodes" in printed
    (run,) = runs(tmp_path / "one")
    assert run.saves == list(range(10, 101, 10))
    assert run.losses[99] < 0.2 * run.losses[0]
    assert re.fullmatch(r"0\.\d{3} s a step, the median of 100; at most \d+ MiB a rank", run.cost)
    assert printed.endswith(f"{run.cost}\n")


@pytest.mark.parametrize("more", [[], pytest.param(["--async"], marks=pytest.mark.slow)])
def test_other_ranks_go_on_as_one_process_would(worlds, tmp_path, more):
    folder, alone = tmp_path / "several", tmp_path / "one"
    for ranks, steps in ((3, "15"), (2, "30"), (5, "45"), (1, "50")):
        told = worlds.run(ranks, run_main, folder, "--steps", steps, *more)
        assert [code for code, _ in told] == [0] * ranks
        assert [bool(printed) for _, printed in told] == [True] + [False] * (ranks - 1)
    worlds.run(1, run_main, alone, "--steps", "50")
    found, (uninterrupted,) = runs(folder), runs(alone)
    assert [(run.ranks, run.start) for run in found] == [(3, 0), (2, 15), (5, 30), (1, 45)]
    assert [step for run in found for step in run.losses] == list(range(50))
    assert [run.cost.count(" and ") for run in found] == [2, 1, 4, 0], "memory of each rank"
    assert max(example("history").differences(uninterrupted, found)) <= 1e-9


def naming(text):
    """Processes whose command has a text in it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text in (process / "cmdline").read_text():
                found.append(process.name)
    return found


def picture_of(folder):
    """Beside the folder, which shall be empty in the end."""
    return folder.parent / f"picture of {folder.name}.png"


@contextlib.contextmanager
def demonstration(folder, *arguments):
    """Of what the README says, where it leaves its files."""
    command = [
        sys.executable,
        "-u",
        str(EXAMPLES / "resume" / "kill_and_resume.py"),
        *arguments,
        "--picture",
        str(picture_of(folder)),
    ]
    with subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()  # of which it ends, and all that it has started


@pytest.mark.slow
def test_a_rank_is_killed_while_it_saves_and_two_go_on(tmp_path):
    in_readme = test_every_example.command("resume")
    assert in_readme[1:] == ["examples/resume/kill_and_resume.py"]
    with demonstration(tmp_path, "--smoke", "--moment", "save") as process:
        printed, told = process.communicate()
    assert (process.returncode, told) == (0, ""), printed
    assert "killed agent 2 and its rank in the middle of a save\n" in printed
    assert re.search(r"two ranks go on from step (\d+)", printed)[1] in ("20", "30")
    assert re.search(r"^  step +one process +3 ranks +2 ranks$", printed, re.MULTILINE)
    assert float(re.search(r"greatest relative difference: (\S+)", printed)[1]) <= 1e-9
    assert re.search(r"^on 1 ranks: .* s a step, the median of 60;", printed, re.MULTILINE)
    assert re.search(r"^on 2 ranks: .* s a step, .* and \d+ MiB a rank$", printed, re.MULTILINE)
    assert printed.endswith("\none answer\n")
    assert picture_of(tmp_path).read_bytes()[:4] == b"\x89PNG"
    assert picture_of(tmp_path).stat().st_size > 10_000
    assert naming(str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_nothing_is_left_running_where_it_is_interrupted(tmp_path):
    with demonstration(tmp_path, "--smoke", "--steps", "100000") as process:
        deadline = time.monotonic() + 60
        while not any(tmp_path.glob("*/three.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(naming(str(tmp_path))) == 6, "three agents and their ranks"
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=40)
    assert process.returncode == 1
    assert told == "ended by SIGTERM\n"
    assert naming(str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "60"], "--steps: need more than three times --every, got 60"),
        (["--smoke", "--steps", "30"], "--steps: need more than three times --every, got 30"),
        (["--every", "0"], "--every: need a whole number from 1 on, got '0'"),
        (["--picture", f"{__file__}/a.png"], "--picture: cannot write"),
    ],
)
def test_wrong_options(capsys, arguments, message):
    with pytest.raises(SystemExit, match=r"^2$"):
        example("kill_and_resume").main(arguments)
    assert message in capsys.readouterr().err
