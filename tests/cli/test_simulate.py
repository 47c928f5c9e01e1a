"""The command `simulate`, at sizes that take seconds."""

import pytest
import torch

import varcomm as vc
from tests.cli.test_partition import channel
from varcomm.cli.main import main
from varcomm.graph.graph_file import globe

SMALL = ["simulate", "--width", "8", "--blocks", "1"]


@pytest.mark.slow
def test_graphs(tmp_path, capsys):
    path = channel(tmp_path / "square.vtu", 9, 9)
    for graph, ranks, shown in (
        (["--mesh", str(path)], "2,3", "81 nodes, 288 edges"),
        (["--grid", "20x36"], "1,4,16", "720 nodes, "),
    ):
        assert main([*SMALL, *graph, "--ranks", ranks]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(shown)
        rows = [line.split() for line in printed.splitlines()]
        assert [row[0] for row in rows if len(row) == 13 and row[0].isdecimal()] == ranks.split(",")


def test_verdict_and_machines(capsys):
    assert main([*SMALL, "--grid", "20x36", "--ranks", "1,16"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        "verdict, relative to 1 rank: efficient up to 1 rank; on 16 ranks, starting"
    )
    assert main(["simulate", "--machines"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [*vc.simulate.MACHINES]


@pytest.mark.parametrize("line", ["--grid 7", "--grid 7x2", "--mesh none.vtu"])
def test_an_impossible_graph(line, capsys):
    assert main(["simulate", *line.split()]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_grid_goes_around_the_earth():
    data = globe(3, 5)
    cells = [divmod(cell, 5) for cell in range(15)]
    expected = {
        (i, j)
        for i, (row, column) in enumerate(cells)
        for j, (other, there) in enumerate(cells)
        if i != j and abs(row - other) <= 1 and (column - there) % 5 in (0, 1, 4)
    }
    assert set(map(tuple, data.edge_index.T.tolist())) == expected
    assert data.num_edges == len(expected)
    torch.testing.assert_close(data.pos.norm(dim=1), torch.ones(15))
