"""The command `doctor`: its checks pass on each engine, and failures show."""

import json
import time

import pytest
import torch

from tests.worlds import WORLDS
from varcomm import all_reduce
from varcomm.cli import doctor
from varcomm.cli.doctor import CHECKS, Engine
from varcomm.cli.main import main

GLOO = Engine("gloo", "cpu", 2)
ABSENT = Engine("mpi", "cpu", 0, reasons={"absent": 'pip install "varcomm[mpi]"'})


class Wrong(torch.autograd.Function):
    """A sum over ranks whose backward is not its adjoint."""

    @staticmethod
    def forward(ctx, x):
        return all_reduce(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def all_checks(rank, ranks):
    if ranks > 1:
        with pytest.raises(AssertionError, match=r"^not an adjoint pair: "):
            doctor.dot_test(Wrong.apply, torch.ones(7, 4, dtype=torch.float64))
    return [doctor.check(rank, name, ranks, "cpu") for name in CHECKS]


@pytest.mark.parametrize("ranks", WORLDS)
def test_checks_pass(worlds, ranks):
    for found in worlds.run(ranks, all_checks, ranks):
        assert found == [None] * len(CHECKS)


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
    assert any(line.startswith("| interface lo | 127.0.0.1") for line in lines)
    assert {
        f"| torch | {torch.__version__} |",
        f"| Gloo | 2 | works: {len(CHECKS)} of {len(CHECKS)} checks |",
        '| MPI |  | not installed: pip install "varcomm[mpi]" |',
        *(f"| {name} | pass |" for name in CHECKS),
    } <= set(lines)


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
    found = doctor.tried(GLOO, 6.0)
    assert found.state == "fails"
    wrong = [name for name, passed in found.passed.items() if not passed]
    assert wrong == ["broadcast", "reduce"]
    assert "all_reduce" not in found.passed  # checked after reduce
    assert found.reasons["broadcast"] == "not an adjoint pair"
    assert "rank 1 of 2" in found.reasons["reduce"]


@pytest.mark.parametrize(("gpus", "nccl", "gloo"), [(0, 0, None), (1, 1, 2), (8, 2, 2)])
def test_engines(monkeypatch, gpus, nccl, gloo):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    found = {(engine.backend, engine.device): engine for engine in doctor.engines()}
    ranks = {key: engine.ranks for key, engine in found.items()}
    assert (ranks["gloo", "cpu"], ranks["nccl", "cuda"], ranks["mpi", "cpu"]) == (2, nccl, 0)
    assert ranks.get(("gloo", "cuda")) == gloo
    assert doctor.tried(found["mpi", "cpu"], 1.0).state == "absent"
