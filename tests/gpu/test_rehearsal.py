"""The command for GPUs runs its cases on a CPU; a case that fails or crashes leaves the others."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.gpu.report import Case, Page, Skip, run_cases

ROOT = Path(__file__).parents[2]


def rehearse(part, folder, *options):
    command = [sys.executable, "-m", "tests.gpu", part, "--device", "cpu", "--page", str(folder)]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *options], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return (folder / f"{part}.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", ["right", "fast", "several"])
def test_every_case_runs_on_a_cpu(tmp_path, part):
    page = rehearse(part, tmp_path, "--seconds", "800")
    assert "| failed |" not in page
    assert "out of time" not in page
    assert "Rehearsal on a CPU" in page


def passes():
    return "3 checks"


def makes_a_table():
    return "| a |\n| --- |\n| 1 |"


def fails():
    raise ValueError("wrong | values")


def is_skipped():
    raise Skip("needs 2 GPUs")


def crashes():
    os.kill(os.getpid(), signal.SIGKILL)


def hangs():
    signal.pause()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_results_of_cases(tmp_path):
    cases = [
        *(Case("good", passes), Case("measured", makes_a_table), Case("bad", fails)),
        *(Case("left out", is_skipped), Case("gone", crashes), Case("stuck", hangs, 3)),
    ]
    page = Page(tmp_path / "pages" / "page.md", "# Head\n", "cpu")
    assert run_cases(cases, page, 1000) == 3
    assert run_cases([Case("late", partial(fails))], page, 1) == 3
    text = page.path.read_text()
    results = [(r[0], r[1]) for r in page.rows]
    assert results == [
        *(("good", "passed"), ("measured", "passed"), ("bad", "failed"), ("left out", "skipped")),
        *(("gone", "failed"), ("stuck", "failed"), ("late", "skipped")),
    ]
    assert "2 passed, 3 failed, 2 skipped." in text
    assert "ValueError: wrong / values" in text
    assert "exit code -9" in text
    assert "not finished within 3 s" in text
    assert "## Measured\n\n| a |" in text
    assert "needs 2 GPUs" in text
    assert "out of time" in text


@pytest.mark.slow
def test_usage_errors(tmp_path):
    command = [sys.executable, "-m", "tests.gpu", "right"]
    refused = {"pass --page": ["--device", "cpu"]}
    if not torch.cuda.is_available():
        refused["a GPU that torch can use"] = ["--page", str(tmp_path)]
    for message, options in refused.items():
        done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2
        assert message in done.stderr
