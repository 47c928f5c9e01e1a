"""Benchmarks run, at sizes that say nothing of speed, and print their tables."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import varcomm as vc

FOLDER = Path(__file__).parents[1] / "benchmarks"

# what each prints that only a run to its end has
RUNS = {
    "embedding.py": (
        ["--ranks", "2", "--tokens", "64", "--vocabulary", "53", "--width", "8", "--repeats", "1"],
        "masked / this, turn by turn",
    ),
    "cross_entropy.py": (
        ["--tokens", "20", "--vocabulary", "103", "--hidden", "8", "--repeats", "2"],
        "losses differ by",
    ),
    "graph_build.py": (
        ["--side", "30", "--ranks", "2", "--nodes", "400", "--weak", "3", "--repeats", "1"],
        "bytes an exchange",
    ),
    "overlap.py": (
        ["--side", "20", "--width", "4", "--layers", "2", "--repeats", "2"],
        "without / with, turn by turn",
    ),
    "plan.py": (
        ["--rows", "300", "--widths", "2", "16", "--kinds", "20%", "dense", "--seconds", "0.01"],
        "first backward",
    ),
    "sharded_gradients.py": (
        ["--ranks", "2", "--columns", "300", "--layers", "2", "--steps", "1", "--repeats", "1"],
        "varcomm ShardedGradients",
    ),
    "python_time.py": (["--samples", "2"], "us for each"),
    "mpi_schedules.py": (["--bytes", "768", "--repeats", "5"], "broadcast, 2 ranks, us"),
    "simulate.py": (
        ["--ranks", "2", "--sides", "6", "--width", "4", "--blocks", "1", "--steps", "2"],
        "bytes and messages are those that vc.trace counted",
    ),
    "linears.py": (
        ["--rows", "21", "--inputs", "8", "--outputs", "6", "--repeats", "2"],
        "MB of the largest",
    ),
}


def test_benchmark_runs_as_a_script():
    arguments, expected = RUNS["python_time.py"]
    done = subprocess.run(
        [sys.executable, "python_time.py", *arguments],
        cwd=FOLDER,
        env=os.environ | {"PYTHONPATH": str(FOLDER.parent)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.torch.jit.interface. is deprecated")  # torch's own, of a peer
@pytest.mark.parametrize("name", [name for name in RUNS if name != "python_time.py"])
def test_benchmark_runs(worlds, mpi_worlds, monkeypatch, capsys, name):
    """On ranks that are there: the scripts start ranks anew for each way, to measure memory."""

    def launch(fn, size, *args, timeout=None, backend="gloo"):
        return {"gloo": worlds, "mpi": mpi_worlds}[backend].run(size, fn, *args, timeout=timeout)

    arguments, expected = RUNS[name]
    monkeypatch.setattr(vc, "launch", launch)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.syspath_prepend(FOLDER)  # ranks look for modules where this process does
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    assert expected in capsys.readouterr().out
