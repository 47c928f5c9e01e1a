"""What a run leaves behind when something ends it, and reports that are none."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from varcomm.cli.bench import command
from varcomm.cli.bench.case import FLOOR, OURS, Case, Result, Timing
from varcomm.cli.bench.files import write_whole
from varcomm.cli.bench.floors import primitives
from varcomm.cli.bench.report import Report
from varcomm.cli.bench.suites.ops import tolerance
from varcomm.cli.main import main
from varcomm.errors import LaunchError
from varcomm.ops.reduction import sum_in_rank_order

CASE = Case("ops", "all_gather_v", False, 2, "gloo", "float32", 2**20, "1:2")
TIMINGS = tuple(Timing(kind, kind, 1.0, 1.0, 1.0, 1, 1.0) for kind in (OURS, FLOOR))
RESULT = Result(CASE, 1000, 1.0, 600, 1.0, 1, TIMINGS, {})


def ended_by(error):
    def measured(options, operations, here):
        yield RESULT
        raise error

    return measured


def test_an_interrupted_run_keeps_and_shows_its_results(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "_measured", ended_by(KeyboardInterrupt()))
    file = tmp_path / "run.json"
    assert main(["bench", "--json", str(file)]) == 130
    shown = capsys.readouterr()
    assert shown.err == "python -m varcomm bench: interrupted\n"
    assert "bytes on the wire" in shown.out
    assert Report.load(file).results == [RESULT]


def test_a_failed_run_keeps_its_results(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "_measured", ended_by(LaunchError("a rank is gone")))
    file = tmp_path / "run.json"
    assert main(["bench", "--json", str(file)]) == 1
    assert "a rank is gone" in capsys.readouterr().err
    assert Report.load(file).results == [RESULT]
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"


def test_a_picture_is_not_drawn_over_a_folder(tmp_path, capsys):
    (tmp_path / "run.png").mkdir()
    with pytest.raises(SystemExit):
        main(["bench", "--plot", str(tmp_path / "run.png")])
    assert "run.png cannot be written: Is a directory" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_needs_a_gpu(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--engine", "nccl"])
    assert "--engine nccl: this machine has no GPU" in capsys.readouterr().err


def changed(**more):
    return {"format": "varcomm bench 1", "about": {}, "results": [asdict(RESULT) | more]}


@pytest.mark.parametrize(
    "record",
    [
        [],
        changed() | {"about": []},
        changed() | {"results": [[1]]},
        changed() | {"results": 1},
        changed(timings=[]),
        changed(timings=[asdict(TIMINGS[1])]),
        changed(timings=[asdict(TIMINGS[0]) | {"seconds": 0}]),
        changed(timings=[asdict(TIMINGS[0]) | {"ratio": "1"}]),
        changed(timings=[asdict(TIMINGS[0]) | {"ratio": float("nan")}]),
        changed(case=asdict(CASE) | {"nbytes": None}),
        changed(cannot=[]),
    ],
)
def test_malformed_reports_are_refused(record, tmp_path, capsys):
    file = tmp_path / "other.json"
    file.write_text(json.dumps(record))
    assert main(["bench", "--from", str(file)]) == 1
    shown = capsys.readouterr()
    assert "other.json is no report of this command's --json" in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_no_results_make_no_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "run.json"
    Report({}, []).save(file)
    assert main(["bench", "--from", str(file)]) == 0
    assert main(["bench", "--from", str(file), "--plot", str(tmp_path / "run.png")]) == 1
    assert "there are no results to draw" in capsys.readouterr().err


def test_only_the_first_rank_shows_a_report(monkeypatch, tmp_path, capsys):
    file = tmp_path / "run.json"
    Report({}, [RESULT]).save(file)
    for rank in (0, 1):
        monkeypatch.setattr(command, "is_first", lambda rank=rank: rank == 0)
        assert main(["bench", "--from", str(file)]) == 0
        assert bool(capsys.readouterr().out) == (rank == 0)


def test_each_dtype_has_its_tolerance():
    dtypes = ("bfloat16", "float16", "float32", "float64")
    found = [tolerance(replace(CASE, dtype=dtype)) for dtype in dtypes]
    assert found == pytest.approx([0.02, 4e-3, 1e-5, 2e-14], rel=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [0, 3, 300_001])
def test_bare_sums_are_those_of_varcomm(dtype, rows):
    parts = [torch.randn(rows, 2).to(dtype) for _ in range(3)]
    assert torch.equal(primitives._sum(parts), sum_in_rank_order(parts, True))
