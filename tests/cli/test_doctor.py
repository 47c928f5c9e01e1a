"""The command `doctor`: its checks pass on each engine, and failures show."""

import re
import time

import pytest
import torch

from tests.worlds import WORLDS
from varcomm.cli import doctor
from varcomm.cli.doctor import CHECKS, Engine
from varcomm.cli.main import main

GLOO = Engine("Gloo", "gloo")
ABSENT = Engine("MPI", "mpi", absent="pip install mpi4py mpich")


def all_checks(rank):
    return [doctor.check(rank, name, "cpu") for name in CHECKS]


@pytest.mark.parametrize("ranks", WORLDS)
def test_checks_pass(worlds, ranks):
    for found in worlds.run(ranks, all_checks):
        assert found == [""] * len(CHECKS)


@pytest.mark.slow
def test_a_page_to_paste(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "engines", lambda: [GLOO, ABSENT])
    assert main(["doctor", "--markdown"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = shown.out.splitlines()
    assert lines[0] == "### varcomm doctor"
    assert any(line.startswith("| network interfaces | ") and "lo" in line for line in lines)
    assert {
        f"| torch | {torch.__version__} |",
        f"| Gloo | 2 | works: {len(CHECKS)} of {len(CHECKS)} checks |",
        "| MPI |  | not installed: pip install mpi4py mpich |",
    } <= set(lines)
    assert lines[-1] == "OK: Gloo works; MPI: pip install mpi4py mpich"


@pytest.mark.slow
def test_an_engine_that_does_not_start(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "engines", lambda: [GLOO])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    assert main(["doctor", "--markdown"]) == 1
    *lines, _, last, _, verdict = capsys.readouterr().out.splitlines()
    assert "| GLOO_SOCKET_IFNAME | nowhere0 |" in lines
    assert lines[-1] == f"| Gloo | 2 | FAILS: 0 of {len(CHECKS)} checks pass |"
    assert last.startswith("Gloo, all_gather_v: ")
    assert "nowhere0" in last
    assert verdict == "FAILED: Gloo fails"


def hangs_at_reduce(rank, name, device):
    if name == "reduce" and rank == 1:
        time.sleep(60)
    return "not an adjoint pair" if name == "broadcast" else ""


@pytest.mark.slow
def test_checks_that_fail_and_hang(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "LIMIT", 6.0)
    monkeypatch.setattr(doctor, "check", hangs_at_reduce)
    monkeypatch.setattr(doctor, "engines", lambda: [GLOO])
    assert main(["doctor", "--markdown"]) == 1
    shown = capsys.readouterr().out
    assert "| Gloo | 2 | FAILS: 5 of 10 checks pass |\n" in shown
    assert "\nGloo, broadcast: not an adjoint pair\n" in shown
    assert re.fullmatch("Gloo, reduce: .*rank 1 of 2.*", shown.splitlines()[-3])


@pytest.mark.parametrize(("gpus", "nccl", "gloo"), [(0, 0, None), (1, 1, 2), (8, 2, 2)])
def test_engines(monkeypatch, gpus, nccl, gloo):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    found = {(e.backend, e.device): 0 if e.absent else e.ranks for e in doctor.engines()}
    expected = {("gloo", "cpu"): 2, ("nccl", "cuda"): nccl, ("mpi", "cpu"): 0}
    assert found == expected | ({("gloo", "cuda"): gloo} if gloo else {})


def test_engines_that_are_timed(worlds, capsys, monkeypatch):
    for of_ranks in worlds.run(3, doctor.times):
        assert len(of_ranks) == len(doctor.SIZES)
        assert 0 < of_ranks[0] < 1
    both = {GLOO: {}, Engine("MPI", "mpi"): {}}
    seconds = {"Gloo": [2e-4, 2e-3], "MPI": [1e-5, 1e-3]}
    monkeypatch.setattr(doctor, "engines", lambda: both)
    monkeypatch.setattr(doctor, "tried", lambda engine, found: found.update(seconds) or {})
    assert main(["doctor", "--markdown"]) == 0
    shown = capsys.readouterr().out
    assert "`varcomm.init()` here: MPI under mpiexec and mpirun, Gloo under torchrun" in shown
    assert "| 1 KiB | 200 us | 10 us | 20.0 |\n| 1024 KiB | 2000 us | 1000 us | 2.0" in shown
    assert main(["doctor"]) == 0  # aligned columns, for a terminal
    lines = capsys.readouterr().out.splitlines()
    assert {"bytes     Gloo     MPI      Gloo / MPI"} <= set(lines)
    assert {"1 KiB     200 us   10 us    20.0"} <= set(lines)
    assert lines[0] == "varcomm doctor"
    assert lines[-1] == "OK: Gloo, MPI work"
