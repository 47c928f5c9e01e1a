"""Wrong options: exit status 2, the option in the message, and nothing printed before."""

import numpy as np
import pytest
import torch

from varcomm.cli.main import main

CASES = [
    ([], "COMMAND"),
    (["cure"], "'cure'"),
    (["doctor", "--timeout=0"], "--timeout"),
    (["doctor", "--timeout=long"], "--timeout"),
    (["doctor", "--timeout=inf"], "--timeout"),
    (["partition", "ring.npz"], "--parts"),
    (["partition", "ring.npz", "--parts", "0"], "--parts"),
    (["partition", "ring.npz", "--parts", "few"], "--parts"),
    (["partition", "ring.npz", "--parts", "99999999999"], "--parts"),
    (["partition", "ring.npz", "--parts", "2", "--method", "scissors"], "--method"),
    (["simulate", "--machine", "abacus"], "--machine"),
    (["simulate", "--ranks", "4,2"], "--ranks"),
    (["simulate", "--ranks", "few"], "--ranks"),
    (["simulate", "--width", "0"], "--width"),
    (["simulate", "--method", "scissors"], "--method"),
    (["simulate", "--grid", "3"], "--grid"),
    (["simulate", "--grid", "\u00b2x5"], "--grid"),
    (["simulate", "--mesh", "a.vtu", "--weak"], "--weak"),
    (["simulate", "--grid", "4x8", "--ranks", "1,2", "--weak"], "--weak"),
    (["simulate", "--plot", "none/a.png"], "--plot"),
    (["bench", "--engine", "ucx"], "--engine"),
    (["bench", "--world", "2,0"], "--world"),
    (["bench", "--sizes", "1T"], "--sizes"),
    (["bench", "--sizes", "0"], "--sizes"),
    (["bench", "--sizes", "99999999999G"], "--sizes"),
    (["bench", "--sizes", "9" * 5000], "--sizes"),
    (["bench", "--skews", "8"], "--skews"),
    (["bench", "--skews", "0:0"], "--skews"),
    (["bench", "--dtypes", "int64"], "--dtypes"),
    (["bench", "--operations", "gather"], "--operations"),
    (["bench", "--seconds", "-1"], "--seconds"),
    (["bench", "--seconds", "long"], "--seconds"),
    (["bench", "--repeat", "none"], "--repeat"),
    (["bench", "--json", "/"], "/ cannot be written"),
    (["bench", "--json", "/nowhere/at/all/run.json"], "/nowhere/at/all/run.json"),
]
if not torch.cuda.is_available():
    CASES.append((["bench", "--engine", "nccl"], "--engine"))


@pytest.mark.parametrize(("arguments", "named"), CASES, ids=lambda each: str(each)[:60])
def test_usage_error(arguments, named, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert named in shown.err.split("error:")[1]
    assert shown.out == ""


NO_TARGET = [
    (["--plot", "parts.txt"], "parts.txt"),
    (["--plot", "none/parts.png"], "none"),
    (["--plot", "parts.png"], "positions"),
    (["--plot", "parts.png", "--out", "parts"], "positions"),
    (["--out", "."], "saved partition"),
    (["--method", "rcb"], "ring.npz"),
    (["--out", "ring.npz/parts"], "ring.npz"),
]


@pytest.mark.parametrize(("arguments", "named"), NO_TARGET)
def test_a_target_is_refused_before_the_work(arguments, named, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    np.savez("ring.npz", edge_index=[[0, 1, 2, 3], [1, 2, 3, 0]])
    assert main(["partition", "ring.npz", "--parts", "2", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line
    assert [path.name for path in tmp_path.iterdir()] == ["ring.npz"]


def test_a_picture_of_an_unknown_kind(capsys):
    assert main(["simulate", "--plot", "scaling.txt"]) == 1
    assert "scaling.txt" in capsys.readouterr().err
