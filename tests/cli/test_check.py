"""The command `check`: right and wrong models, and errors of the user."""

import sys

import pytest
import torch
from torch_geometric.data import Data

from varcomm.cli.main import main

SOURCE = """
import torch
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

class Centred(torch.nn.Module):
    def forward(self, x, edge_index):
        return x - x.mean(0)

def right():
    return SAGEConv(2, 1)

def wrong():
    return Centred()

def refused():
    return torch.nn.Sequential(torch.nn.MultiheadAttention(2, 1))

def first(model, data):
    return model[0](data.x, data.x, data.x)[0]

def fails():
    return torch.nn.Linear(3, 3)

def a_graph():
    return Data(x=torch.rand(9, 2), edge_index=torch.randint(9, (2, 30)))

def step_of_plain_sum(model, data):
    loss = (model(data.x, data.edge_index) ** 2).sum()
    loss.backward()
    return loss

def squares(out, data):
    return data.mean(out ** 2)
"""


@pytest.fixture
def folder(launch_on_worlds, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "net_of_check.py").write_text(SOURCE)
    (tmp_path / "colorsys.py").write_text(SOURCE)
    (tmp_path / "broken_net.py").write_text("import nothing_of_this_name")
    data = Data(x=torch.rand(9, 2), edge_index=torch.randint(9, (2, 30)))
    torch.save(data, "graph.pt")
    yield tmp_path
    sys.modules.pop("net_of_check", None)


def test_results(folder, capsys):
    model = "net_of_check.py"
    assert main(["check", f"{model}:right", "--data", "graph.pt", "--loss", "squares"]) == 0
    assert capsys.readouterr().out.startswith("the same as one process")
    made = ["--data", f"{model}:a_graph", "--parts", "2"]
    assert main(["check", f"{model}:wrong", *made]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("not the same as one process")
    assert f"{folder / model}:8\n    return x - x.mean(0)\n" in shown
    assert main(["check", f"{model}:right", *made, "--step", "step_of_plain_sum"]) == 1
    assert "loss" in capsys.readouterr().out
    assert main(["check", f"{model}:refused", *made, "--call", "first"]) == 1
    assert "cannot distribute" in capsys.readouterr().err


# arguments, and words of the last line
WRONG = [
    ("model.py:right --data graph.pt", "No module named 'model'"),
    ("net_of_check.py --data graph.pt", "FILE.py:NAME"),
    ("net_of_check.py:left --data graph.pt", "no attribute 'left'"),
    ("broken_net.py:right --data graph.pt", "nothing_of_this_name"),
    ("colorsys.py:right --data graph.pt", "Rename"),
    ("net_of_check.py:right --data none.pt", "none.pt does not exist"),
    ("net_of_check.py:a_graph --data graph.pt", "returned a Data"),
    ("net_of_check.py:right --data net_of_check.py:right", "edge_index"),
    ("net_of_check.py:right --data graph.pt --parts 0", "--parts"),
    ("net_of_check.py:fails --data graph.pt", "call="),
    ("net_of_check.py:right --data graph.pt --step squares --loss squares", "step"),
]


@pytest.mark.slow
def test_errors_of_the_user(folder, capsys):
    for line, named in WRONG:
        with pytest.raises(SystemExit, match="2"):
            main(["check", *line.split()])
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("usage: ")
        assert named in shown.err, line
