"""The command `doctor`: its checks pass on each engine, and failures show."""

import json
import time

import pytest
import torch

from tests.worlds import WORLDS
from varcomm import ShardSizes, all_reduce
from varcomm.cli import doctor
from varcomm.cli.doctor import CHECKS, Engine
from varcomm.cli.main import main

GLOO = Engine("gloo", "cpu", 2)
ABSENT = Engine("mpi", "cpu", 0, reasons={"absent": 'pip install "varcomm[mpi]"'})


def all_checks(rank, ranks):
    return [doctor.check(rank, name, ranks, "cpu") for name in CHECKS]


@pytest.mark.parametrize("ranks", WORLDS)
def test_checks_pass(worlds, ranks):
    for found in worlds.run(ranks, all_checks, ranks):
        assert found == [None] * len(CHECKS)


class Wrong(torch.autograd.Function):
    """A sum over ranks whose backward is not its adjoint."""

    @staticmethod
    def forward(ctx, x):
        return all_reduce(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def wrong_adjoint(rank):
    x = torch.ones(ShardSizes([3, 1, 3]).total, 4, dtype=torch.float64)
    try:
        doctor.dot_test(Wrong.apply, x)
    except AssertionError as error:
        return str(error)


def test_a_wrong_adjoint_fails(worlds):
    for found in worlds.run(3, wrong_adjoint):
        assert found.startswith("not an adjoint pair: ")


@pytest.fixture
def gloo_alone(monkeypatch):
    monkeypatch.setattr(doctor, "engines", lambda: [GLOO, ABSENT])


@pytest.mark.usefixtures("gloo_alone")
def test_a_page_to_paste(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = shown.out.splitlines()
    assert lines[0] == "### varcomm doctor"
    assert f"| torch | {torch.__version__} |" in lines
    assert f"| Gloo | 2 | works: {len(CHECKS)} of {len(CHECKS)} checks |" in lines
    assert '| MPI |  | not installed: pip install "varcomm[mpi]" |' in lines
    assert any(line.startswith("| interface lo | 127.0.0.1") for line in lines)
    for name in CHECKS:
        assert f"| {name} | pass |" in lines


@pytest.mark.usefixtures("gloo_alone")
def test_an_engine_that_does_not_start(monkeypatch, capsys):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert found["environment"]["GLOO_SOCKET_IFNAME"] == "nowhere0"
    gloo, mpi = found["engines"]
    assert (gloo["state"], mpi["state"]) == ("fails", "absent")
    assert gloo["passed"] == {}
    assert "nowhere0" in gloo["reasons"]["start"]


def hangs_at_reduce(rank, name, ranks, device):
    if name == "broadcast":
        return "not an adjoint pair"
    if name == "reduce" and rank == 1:
        time.sleep(60)


def test_checks_that_fail_and_hang(monkeypatch):
    monkeypatch.setattr(doctor, "check", hangs_at_reduce)
    found = doctor.tried(GLOO, 6.0, lambda words: None)
    assert found.state == "fails"
    wrong = [name for name, passed in found.passed.items() if not passed]
    assert wrong == ["broadcast", "reduce"]
    assert "all_reduce" not in found.passed  # checked after reduce
    assert found.reasons["broadcast"] == "not an adjoint pair"
    assert "rank 1 of 2" in found.reasons["reduce"]


def test_absent_engines(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = {engine.backend: engine for engine in doctor.engines()}
    assert found["gloo"].ranks == 2
    for name in ("mpi", "nccl"):
        assert doctor.tried(found[name], 1.0, print) is found[name]
        assert found[name].state == "absent"


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 1), (8, 2)])
def test_engines_of_gpus(monkeypatch, gpus, ranks):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    found = {(engine.backend, engine.device): engine.ranks for engine in doctor.engines()}
    assert (found["nccl", "cuda"], found["gloo", "cuda"]) == (ranks, 2)
