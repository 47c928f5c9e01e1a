"""The command `bench`, at sizes that show nothing about speed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from varcomm.cli.main import main
from varcomm.cli.workload import OPERATIONS

ROOT = Path(__file__).parents[2]
TINY = ["--sizes", "768", "--skews", "1:2", "--repeat", "1", "--dtypes", "bfloat16"]


def results(path):
    return json.loads(path.read_text())["results"]


def test_table_and_file(tmp_path, capsys):
    file = tmp_path / "run.json"
    assert main(["bench", "--world", "3", *TINY, "--json", str(file)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    columns = ["operation", "pass", "ranks", "dtype", "bytes", "count", "shards", "us", "algbw"]
    assert head.split() == [*columns, "busbw", "wire"]
    assert [line.split()[:3] for line in lines] == [
        [name, direction, "3"] for name in OPERATIONS for direction in ("forward", "backward")
    ]
    found = results(file)
    assert len(found) == len(lines)
    for result in found:
        assert result["wire"] == 1.0
        assert result["count"] * 2 == result["nbytes"]
        assert result["algbw"] == pytest.approx(result["nbytes"] / result["seconds"] / 1e9)
        assert result["busbw"] == pytest.approx(result["busiest"] / result["seconds"] / 1e9)


def test_bus_bandwidth_of_even_shards_is_that_of_nccl_tests(tmp_path):
    """The factor is (P - 1) / P; an exchange keeps no rows, so its factor is 1."""
    file, chosen = tmp_path / "run.json", ",".join(OPERATIONS[:-1])
    arguments = ["--sizes", "15360", "--skews", "even", "--repeat", "1", "--dtypes", "float32"]
    assert main(
        ["bench", "--world", "3", "--operations", chosen, "--json", str(file), *arguments]
    ) == 0  # fmt: skip
    for result in results(file):
        factor = 1 if result["operation"] == "indexed_all_to_all_v" else 2 / 3
        assert result["busiest"] == pytest.approx(factor * result["nbytes"])


@pytest.mark.parametrize("engine", ["gloo", pytest.param("mpi", marks=pytest.mark.slow)])
def test_one_rank_sends_nothing(engine, tmp_path):
    file = tmp_path / "run.json"
    chosen = ["--world", "1", "--engine", engine, "--operations", "all_gather_v,halo"]
    assert main(["bench", *chosen, *TINY, "--json", str(file)]) == 0
    assert {(r["busiest"], r["busbw"], r["wire"]) for r in results(file)} == {(0, 0, 1)}


@pytest.mark.slow
def test_ranks_of_a_job(tmp_path):
    file = tmp_path / "run.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [
            *(*launcher, "-m", "varcomm", "bench", "--operations", "gather_v"),
            *(*TINY, "--json", str(file)),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("operation") == 1
    assert {result["world"] for result in results(file)} == {2}
