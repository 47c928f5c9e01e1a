"""The command end to end, at sizes that say nothing of speed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from varcomm.cli.bench.peers.offer import PEERS
from varcomm.cli.bench.report import Report
from varcomm.cli.bench.suites.all import SUITES
from varcomm.cli.main import main

ROOT = Path(__file__).parents[2]
TINY = ["--sizes", "768,2K", "--skews", "1:2", "--repeat", "2", "--dtypes", "bfloat16"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A run of all operations: its files, and what it has printed."""
    folder = tmp_path_factory.mktemp("bench")
    command = [sys.executable, "-m", "varcomm", "bench", "--world", "2"]
    files = ["--json", str(folder / "run.json"), "--plot", str(folder / "run.png")]
    done = subprocess.run(
        [*command, *TINY, *files], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout, done.stderr


def test_all_operations_are_in_the_table(measured):
    _, printed, errors = measured
    lines = printed.splitlines()
    head = next(line for line in lines if line.startswith("operation"))
    for column in ("bytes", "skew", "us", "algbw", "busbw", "wire", "schedule", "/floor", *PEERS):
        assert column in head.split(), head
    rows = [line.split()[:3] for line in lines if line.split()[1:2] in (["forward"], ["backward"])]
    expected = [
        [name, direction, "2"]
        for name in SUITES["ops"].OPERATIONS
        for direction in ("forward", "backward")
        for _ in range(2)
    ]
    assert rows == expected
    assert errors == ""


def test_header_says_where_and_how(measured):
    _, printed, _ = measured
    assert "cores of " in printed
    assert f"torch {torch.__version__}" in printed
    assert "command: python -m varcomm bench --world 2" in printed


def test_json_keeps_everything(measured):
    folder, _, _ = measured
    record = json.loads((folder / "run.json").read_text())
    assert set(record["about"]) == {"machine", "versions", "command", "date"}
    for result in record["results"]:
        kinds = [timing["kind"] for timing in result["timings"]]
        assert kinds[0] == "varcomm"
        assert "floor" in kinds
        assert kinds[-1] == "copy"
        assert result["wire"] == 1.0
        for timing in result["timings"]:
            assert 0 < timing["low"] <= timing["seconds"] <= timing["high"]
            assert 1 <= timing["repetitions"] <= 2


def test_a_report_is_read_as_it_was_written(measured, tmp_path):
    folder, _, _ = measured
    report = Report.load(folder / "run.json")
    report.save(tmp_path / "again.json")
    assert Report.load(tmp_path / "again.json") == report


def test_results_are_shown_again_without_measuring(measured, capsys):
    folder, printed, _ = measured
    assert main(["bench", "--from", str(folder / "run.json"), "--markdown"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(printed.rstrip())
    assert "Suite `ops` on gloo, 2 ranks:" in shown
    assert "| operation | pass | 768 | 2K |" in shown
    assert "| bytes on the wire, of the fewest possible | 1 | 24 | 24 | 1.00 | 1.00 |" in shown


def test_picture_is_drawn(measured):
    folder, _, _ = measured
    picture = (folder / "run.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 50_000


def test_who_cannot_run_is_listed(measured):
    _, printed, _ = measured
    said = [line for line in printed.splitlines() if line.startswith("could not run: ")]
    assert any("padded: gathers, forward (" in line for line in said)
    reason = "torch.nn: the backward of its reduce_scatter gathers even shards only"
    assert f"could not run: {reason} (reduce_scatter_v backward)" in said


@pytest.mark.parametrize("engine", ["gloo", "mpi"])
def test_one_rank_has_nothing_to_send(engine, tmp_path):
    file = tmp_path / "run.json"
    chosen = ["--world", "1", "--engine", engine, "--operations", "all_gather_v", *TINY]
    assert main(["bench", *chosen, "--json", str(file), "--plot", str(tmp_path / "run.svg")]) == 0
    results = Report.load(file).results
    assert [(result.bus_bytes, result.busbw, result.wire) for result in results] == [(0, 0, 1)] * 4
    assert "</svg>" in (tmp_path / "run.svg").read_text()


@pytest.mark.parametrize("suite", ["plan", "graph", "tensor-parallel", "debug"])
def test_other_suites_run(suite, tmp_path, capsys):
    file = tmp_path / "run.json"
    chosen = ["--suite", suite, "--world", "2", "--json", str(file), "--no-peers"]
    tiny = ["--sizes", "2K", "--skews", "empty", "--dtypes", "float32", "--repeat", "1"]
    assert main(["bench", *chosen, *tiny]) == 0
    results = Report.load(file).results
    names = {result.case.operation for result in results}
    assert names == set(SUITES[suite].OPERATIONS)
    assert len(results) == 2 * len(names)
    assert all(result.wire == 1.0 and result.floor for result in results)
    assert all(not result.cannot for result in results)
    assert "could not run" not in capsys.readouterr().out


def test_ranks_may_be_those_of_a_job(tmp_path):
    file = tmp_path / "run.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    arguments = ["--operations", "gather_v", *TINY]
    done = subprocess.run(
        [*launcher, "-m", "varcomm", "bench", *arguments, "--json", str(file)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("machine:") == 1
    assert {result.case.world for result in Report.load(file).results} == {2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "operations"], "'operations' is no suite: write ops, plan, graph, tensor-"),
        (["--engine", "ucx"], "invalid choice: 'ucx'"),
        (["--world", "2,0"], "'0' is no positive whole number"),
        (["--sizes", "1T"], "'1T' is no number of bytes: write 768, 16K, 1M or 1G"),
        (["--sizes", "0"], "'0' is no number of bytes"),
        (["--skews", "8"], "'8' is no skew: write even, empty"),
        (["--skews", "0:0"], "'0:0' is no skew: write even, empty"),
        (["--dtypes", "int64"], "'int64' is no dtype to measure: write float32"),
        (["--operations", "gather"], "'gather' is no operation of ops: write all_gather_v, "),
        (["--seconds", "-1"], "'-1' is no positive number of seconds"),
        (["--seconds", "long"], "'long' is no positive number of seconds"),
        (["--repeat", "none"], "'none' is no positive whole number"),
        (["--sizes", "99999999999G"], "'99999999999G' is more than the "),
        (["--sizes", "9" * 5000], "9' is no number of bytes"),
        (["--json", "/"], "/ cannot be written: Is a directory"),
        (["--json", "/nowhere/at/all/run.json"], "there is no folder /nowhere/at/all for run.json"),
    ],
)
def test_wrong_arguments_are_told_before_anything_runs(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_world_of_a_job_is_not_chosen(monkeypatch, capsys):
    def here(engine):
        return type("Here", (), {"rank": 0, "size": 1})()

    monkeypatch.setattr("varcomm.cli.bench.command.is_launched", lambda: True)
    monkeypatch.setattr("varcomm.cli.bench.command.Here", here)
    with pytest.raises(SystemExit):
        main(["bench", "--world", "2"])
    assert "this job has 1 ranks: leave --world out" in capsys.readouterr().err


def test_a_file_that_is_no_report_is_refused(tmp_path, capsys):
    (tmp_path / "other.json").write_text("{}")
    for name, message in (
        ("other.json", "other.json is no report of this command's --json"),
        ("none.json", f"there is no file {tmp_path / 'none.json'}."),
    ):
        assert main(["bench", "--from", str(tmp_path / name)]) == 1
        assert message in capsys.readouterr().err


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    assert "python -m varcomm bench --world 2 --sizes 1M,16M" in capsys.readouterr().out


def test_without_a_command_there_is_a_list(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "the following arguments are required: COMMAND" in capsys.readouterr().err


def test_a_suite_says_what_to_install(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("varcomm.graph")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch_geometric", None)
    assert main(["bench", "--suite", "graph"]) == 1
    assert 'pip install "varcomm[graph]"' in capsys.readouterr().err
