"""The command `doctor`: its checks pass where all is well, and it says so where it is not."""

import json
import socket
import time

import pytest
import torch

from varcomm.cli.doctor import checks, command, engines, facts
from varcomm.cli.doctor.engines import Engine
from varcomm.cli.main import main

GLOO = Engine("gloo", "cpu", 2)


def all_checks(rank, ranks):
    return [checks.check(rank, name, ranks, "cpu") for name in checks.CHECKS]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_checks_pass(worlds, ranks):
    for found in worlds.run(ranks, all_checks, ranks):
        assert found == [None] * len(checks.CHECKS)


def check_of_none(rank):
    """A sum whose backward is no sum is no adjoint pair."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return checks.vc.all_reduce(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    checks.CHECKS["wrong"] = checks._primitive(checks._all, lambda r, p, x: Wrong.apply(x))
    try:
        return checks.check(rank, "wrong", 2, "cpu")
    finally:
        del checks.CHECKS["wrong"]


def test_what_is_no_adjoint_fails(worlds):
    for found in worlds.run(2, check_of_none):
        assert found.startswith("not an adjoint pair: ")


@pytest.fixture
def gloo_alone(monkeypatch):
    absent = Engine("mpi", "cpu", 0, reasons={"absent": 'pip install "varcomm[mpi]"'})
    monkeypatch.setattr(command, "engines", lambda: [GLOO, absent])


@pytest.mark.usefixtures("gloo_alone")
def test_a_page_to_paste(capsys):
    assert main(["doctor"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    lines = told.out.splitlines()
    assert lines[0] == "### varcomm doctor"
    assert f"| torch | {torch.__version__} |" in lines
    assert f"| Gloo | 2 | works: {len(checks.CHECKS)} of {len(checks.CHECKS)} checks |" in lines
    assert '| MPI |  | not there: pip install "varcomm[mpi]" |' in lines
    for name in checks.CHECKS:
        assert f"| {name} | pass |" in lines


@pytest.mark.usefixtures("gloo_alone")
def test_an_engine_that_does_not_start(monkeypatch, capsys):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    assert main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert f"| Gloo | 2 | **fails**: 0 of {len(checks.CHECKS)} checks pass |" in told
    assert "\nGloo, start: LaunchError: rank " in told
    assert "| GLOO_SOCKET_IFNAME | nowhere0 |" in told


@pytest.mark.usefixtures("gloo_alone")
def test_a_check_that_fails(monkeypatch, capsys):
    monkeypatch.setattr(engines, "check", reduce_is_wrong)
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    gloo, absent = found["engines"]
    assert (gloo["state"], absent["state"]) == ("fails", "absent")
    assert [name for name, passed in gloo["passed"].items() if not passed] == ["reduce"]
    assert gloo["reasons"] == {"reduce": "not an adjoint pair"}


def reduce_is_wrong(rank, name, ranks, device):
    return "not an adjoint pair" if name == "reduce" else None


def test_a_check_that_hangs_ends(monkeypatch):
    monkeypatch.setattr(engines, "check", hangs_at_reduce)
    found = engines.tried(GLOO, 2.0, lambda words: None)
    assert found.state == "fails"
    assert found.passed["broadcast"]
    assert not found.passed["reduce"]
    assert "all_reduce" not in found.passed, "which comes after it"
    assert found.reasons == {"reduce": "rank 1 of 2 not finished within 2 s."}


def hangs_at_reduce(rank, name, ranks, device):
    if name == "reduce" and rank == 1:
        time.sleep(60)


def test_what_is_not_there_is_not_tried(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = {engine.backend: engine for engine in engines.engines()}
    assert found["gloo"].ranks == 2
    for name in ("mpi", "nccl"):
        assert engines.tried(found[name], 1.0, print) is found[name]
        assert found[name].state == "absent"


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 1), (2, 2), (8, 2)])
def test_engines_of_gpus(monkeypatch, gpus, ranks):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    found = {(engine.backend, engine.device): engine.ranks for engine in engines.engines()}
    assert found["nccl", "cuda"] == ranks
    assert found["gloo", "cuda"] == 2
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert {engine.backend: engine for engine in engines.engines()}["nccl"].state == "absent"


def test_facts(monkeypatch):
    assert facts.interfaces().keys() >= {name for _, name in socket.if_nameindex()}
    assert "127.0.0.1" in facts.interfaces()["lo"]
    assert facts.machine()["memory"]
    monkeypatch.setattr(facts, "_PACKAGES", {"none-of-this-name": "varcomm[none]"})
    missing = facts.versions()["none-of-this-name"]
    assert missing == 'not installed: pip install "varcomm[none]"'
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert facts.variables()["NCCL_DEBUG"] == "INFO"


@pytest.mark.parametrize("seconds", ["0", "-1", "long", "inf"])
def test_wrong_limits(seconds, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", f"--timeout={seconds}"])
    assert "is no positive number of seconds" in capsys.readouterr().err
