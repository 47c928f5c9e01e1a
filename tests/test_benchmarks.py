"""Benchmarks run, at sizes that show nothing about speed, and print their tables."""

import json
import lzma
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import netcdf_file

import varcomm as vc
from varcomm.graph.graph_file import globe

FOLDER = Path(__file__).parents[1] / "benchmarks"
SLOW = pytest.mark.slow

# Arguments of each, and a text that only a complete run prints.
RUNS = [
    (
        "cross_entropy.py --tokens 20 --vocabulary 103 --hidden 8 --repeats 2 --ranks 3",
        "losses differ by",
    ),
    ("python_time.py --samples 2", "us for each"),
]
SLOW_RUNS = [
    ("goals.py --engines gloo --quick --repeat 1 --markdown", "| one rank: plan |"),
    ("checkpoints.py --ranks 2 --megabytes 4 --tensors 2 --repeats 2", "of dcp (quartiles)"),
    (
        "embedding.py --ranks 2 --tokens 64 --vocabulary 53 --width 8 --repeats 1",
        "sums / this, turn by turn",
    ),
    ("graph_build.py --side 30 --ranks 2 --nodes 400 --weak 3 --repeats 1", "bytes per exchange"),
    ("migration.py --side 30 --ranks 2 --rounds 1", "migrate / METIS"),
    (
        "sharded_gradients.py --ranks 2 --columns 300 --layers 2 --steps 1 --repeats 1",
        "varcomm ShardedGradients",
    ),
    (
        "simulate.py --ranks 2 --sides 6 --width 4 --blocks 1 --steps 2",
        "bytes and messages are those that vc.trace counted",
    ),
    (
        "neighbours.py --atoms 400 --neighbours 8 --ranks 1 3 --rounds 1 --repeats 1",
        "times as fast",
    ),
    ("agreement.py --ranks 3 --turns 2 --count 2", "a call in the log"),
    (
        "halo_peers.py --columns 9 --height 4 --width 4 --blocks 1 --turns 2 --count 1",
        "the same, interior edges first",
    ),
    ("linears.py --rows 21 --inputs 8 --outputs 6 --repeats 2", "ratio, all ranks"),
    (
        "scaling.py --rows 20 --ranks 1 2 4 16 --width 8 --blocks 1 --plot {folder}/a.png",
        "weak: 200 nodes per rank; finer grids, this one on 4 ranks",
    ),
]


def run(monkeypatch, command):
    script, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.syspath_prepend(FOLDER)  # ranks look for modules where this process does
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    runpy.run_path(str(FOLDER / script), run_name="__main__")


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.torch.jit.interface. is deprecated")  # torch's own, of a peer
@pytest.mark.parametrize(
    ("command", "expected"),
    [*RUNS, *(pytest.param(*each, marks=SLOW) for each in SLOW_RUNS)],
    ids=lambda text: text.split()[0],
)
def test_script(worlds, monkeypatch, capsys, command, expected, tmp_path):
    """On ranks that exist: the scripts start new ranks for each way, to measure memory."""

    def launch(fn, size, *args, timeout=None, backend="gloo"):
        return worlds.run(size, fn, *args, timeout=timeout)

    monkeypatch.setattr(vc, "launch", launch)
    run(monkeypatch, command.format(folder=tmp_path))
    assert expected in capsys.readouterr().out


def test_relief_of_the_earth(monkeypatch, tmp_path):
    """A file like NOAA's: an island, and a last column that repeats the first."""
    monkeypatch.syspath_prepend(FOLDER)
    import sea

    heights = np.full((20, 37), -1000.0, dtype=np.float32)
    heights[5:9, 10:20] = 200
    path, packed = tmp_path / "etopo.cdf", tmp_path / "etopo.cdf.xz"
    with netcdf_file(path, "w") as file:
        file.createDimension("lat", 20)
        file.createDimension("lon", 37)
        file.createVariable("ROSE", "f4", ("lat", "lon"))[:] = heights
    packed.write_bytes(lzma.compress(path.read_bytes()))
    for each in (path, packed):
        is_sea = sea.read_sea(each)
        assert is_sea.shape == (20, 36)
        ocean = sea.ocean(is_sea)
        assert ocean.num_nodes == 720 - 40
        expected = globe(20, 36).subgraph(torch.from_numpy(is_sea).view(-1))
        assert torch.equal(ocean.edge_index, expected.edge_index)
        torch.testing.assert_close(ocean.pos, expected.pos)


COMPARE = "compare.py --sizes 2K --skews 1:2 --dtypes bfloat16 --repeat 2"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("chosen", "cases"),
    [
        pytest.param(
            "--world 3 --suite ops,plan --operations all_gather_v,halo_with_own", 4, marks=SLOW
        ),
        pytest.param("--world 2 --suite ops,plan", 18, marks=SLOW),
        pytest.param("--world 3 --suite graph,tensor-parallel --no-peers", 12, marks=SLOW),
        pytest.param("--world 2 --suite debug --no-peers", 12, marks=SLOW),
        pytest.param("--world 2 --suite ops --engine mpi --no-peers", 12, marks=SLOW),
    ],
)
def test_compare(monkeypatch, tmp_path, capsys, chosen, cases):
    file, picture = tmp_path / "run.json", tmp_path / "run.png"
    run(monkeypatch, f"{COMPARE} {chosen} --json {file} --plot {picture}")
    shown = capsys.readouterr().out
    found = json.loads(file.read_text())["results"]
    assert len(found) == cases
    for result in found:
        kinds = [timing["kind"] for timing in result["timings"].values()]
        assert kinds[0] == "varcomm"
        assert "floor" in kinds
        # its statistics, 3 numbers of each of 11 tokens, carry the 8 bytes that compare calls
        agreed = 8 if (result["operation"], result["backward"]) == ("cross_entropy", False) else 0
        assert result["wire"] == 1.0 + agreed / (3 * 11 * 4)
        assert not [why for why in result["cannot"].values() if "wrong result" in why]
    assert picture.read_bytes().startswith(b"\x89PNG")
    run(monkeypatch, f"compare.py --from {file} --markdown")
    again = capsys.readouterr().out
    assert again.startswith(shown.rstrip())
    assert "| operation | pass |" in again


def with_wrong_contenders(case, peers, device):
    from suite.task import FLOOR, OURS, PEER, Contender, Task

    rank, value = torch.distributed.get_rank(), torch.arange(3.0)

    def fails():
        raise ValueError("no such thing\nat all")

    contenders = [
        Contender(OURS, OURS, lambda: value),
        Contender("true", FLOOR, value.clone),
        Contender("off", PEER, lambda: value + rank),
        Contender("nan", PEER, lambda: value * torch.nan),
        Contender("failing", PEER, fails),
    ]
    expected = value + 1 if case.operation == "wrong" else value
    return Task(contenders, expected, 0.0, 12, 1.0, (4, 4), {"absent": "is not installed"})


def measured(rank, operation):
    sys.path.insert(0, str(FOLDER))
    try:
        from suite.task import measure

        from varcomm.cli.workload import Case

        case = Case(operation, False, 3, "gloo", "float32", 12, "even")
        return measure(rank, case, 0.5, 3, True, with_wrong_contenders)
    finally:
        sys.path.remove(str(FOLDER))


def test_wrong_results_are_listed_and_not_timed(worlds):
    for found in worlds.run(3, measured, "right"):
        assert set(found["timings"]) == {"varcomm", "true", "copy"}
        assert set(found["cannot"]) == {"absent", "off", "nan", "failing"}
        assert found["cannot"]["failing"] == "ValueError: no such thing"
    with pytest.raises(vc.LaunchError, match="varcomm is wrong"):
        worlds.run(3, measured, "wrong")
