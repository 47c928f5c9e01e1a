"""Training continues from a checkpoint on other ranks, also if one of them has been killed."""

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
def test_training_learns(worlds, tmp_path):
    ((code, printed),) = worlds.run(1, run_main, tmp_path / "one", "--steps", "100")
    assert code == 0
    assert "from step 0 on 1 ranks, of [144] nodes" in printed
    (run,) = runs(tmp_path / "one")
    assert run.saves == list(range(10, 101, 10))
    assert run.losses[99] < 0.2 * run.losses[0]
    assert printed.endswith(f"{run.cost}\n")


@pytest.mark.parametrize("more", [[], pytest.param(["--async"], marks=pytest.mark.slow)])
def test_other_ranks_continue_as_one_process_would(worlds, tmp_path, more):
    folder, alone = tmp_path / "several", tmp_path / "one"
    for ranks, steps in ((3, "15"), (2, "30"), (5, "45"), (1, "50")):
        found = worlds.run(ranks, run_main, folder, "--steps", steps, *more)
        assert [code for code, _ in found] == [0] * ranks
        assert [bool(printed) for _, printed in found] == [True] + [False] * (ranks - 1)
    worlds.run(1, run_main, alone, "--steps", "50")
    found, (uninterrupted,) = runs(folder), runs(alone)
    assert [(run.ranks, run.start) for run in found] == [(3, 0), (2, 15), (5, 30), (1, 45)]
    assert [step for run in found for step in run.losses] == list(range(50))
    assert [run.cost.count(" and ") for run in found] == [2, 1, 4, 0], "memory of each rank"
    assert max(example("history").differences(uninterrupted, found)) <= 1e-9


def processes_naming(text):
    """Return the ids of the processes whose command contains a text."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text in (process / "cmdline").read_text():
                found.append(process.name)
    return found


@contextlib.contextmanager
def demonstration(folder, *arguments):
    """Run the command of the README in a folder, and check that it leaves nothing."""
    script = EXAMPLES / "resume" / "kill_and_resume.py"
    picture = ["--picture", str(folder.parent / f"picture of {folder.name}.png")]
    with subprocess.Popen(
        [sys.executable, "-u", str(script), *arguments, *picture],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()  # which ends all processes that it has started
    assert processes_naming(str(folder)) == []
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_rank_is_killed_while_it_saves_and_two_continue(tmp_path):
    in_readme = test_every_example.command("resume")
    assert in_readme[1:] == ["examples/resume/kill_and_resume.py"]
    with demonstration(tmp_path, "--smoke", "--moment", "save") as process:
        printed, errors = process.communicate()
    assert (process.returncode, errors) == (0, ""), printed
    assert "killed agent 2 and its rank in the middle of a save\n" in printed
    assert re.search(r"two ranks go on from step (\d+)", printed)[1] in ("20", "30")
    assert float(re.search(r"greatest relative difference: (\S+)", printed)[1]) <= 1e-9
    for line in (
        r"  step +one process +3 ranks +2 ranks",
        r"on 1 ranks: .* s a step, the median of 60;.*",
        r"on 2 ranks: .* s a step, .* and \d+ MiB a rank",
    ):
        assert re.search(f"^{line}$", printed, re.MULTILINE)
    assert printed.endswith("\none answer\n")
    picture = (tmp_path.parent / f"picture of {tmp_path.name}.png").read_bytes()
    assert picture[:4] == b"\x89PNG"
    assert len(picture) > 10_000


@pytest.mark.slow
def test_nothing_is_left_running_if_it_is_interrupted(tmp_path):
    with demonstration(tmp_path, "--smoke", "--steps", "100000") as process:
        deadline = time.monotonic() + 60
        while not any(tmp_path.glob("*/three.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(processes_naming(str(tmp_path))) == 6, "three agents and their ranks"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=40)
    assert process.returncode == 1
    assert errors == "ended by SIGTERM\n"


@pytest.mark.parametrize(
    "line", ["--steps 60", "--smoke --steps 30", "--every 0", f"--picture {__file__}/a.png"]
)
def test_wrong_options(capsys, line):
    with pytest.raises(SystemExit, match=r"^2$"):
        example("kill_and_resume").main(line.split())
    assert f"{re.findall('--[a-z]+', line)[-1]}: " in capsys.readouterr().err
