"""The code in the README runs and says what it says there."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv

import varcomm

ROOT = Path(__file__).parent.parent
FOUR_LINES, SCRIPT, TRAINING, GCN, PARALLEL = re.findall(
    r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
)


def output_of(script):
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_collectives_as_a_script():
    assert output_of(SCRIPT) == "[True, True, True]\n"


def test_parallel_layers_as_a_script():
    printed = output_of(PARALLEL).strip()
    assert f"# {printed}" in PARALLEL
    assert printed.count("True") == 3


def test_training_as_a_script():
    first, *report = output_of(TRAINING).splitlines()
    assert f"# {first}" in TRAINING
    assert report[0].startswith("100 nodes and 600 edges on 2 ranks by ")


def four_lines(rank):
    """Run the four lines as they stand; give the loss, and that of one process."""
    nodes = torch.arange(20)
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    data = Data(x=x, edge_index=torch.stack([nodes, (nodes + 1) % 20]), y=x[:, :1])
    torch.manual_seed(0)
    model = SAGEConv(3, 1)
    alone = functional.mse_loss(model(x, data.edge_index), data.y)
    names = {"vc": varcomm, "F": functional, "data": data, "model": model}
    exec(FOUR_LINES, names)
    return names["loss"].item(), alone.item()


def test_the_four_lines(worlds):
    for loss, alone in worlds.run(2, four_lines):
        assert loss == pytest.approx(alone, rel=1e-6)


def tutorial(rank, folder):
    """The layer gives on ranks what it gives alone, which is what PyG's GCNConv gives."""
    sys.path.insert(0, folder)
    try:
        gcn = importlib.import_module("gcn_of_the_readme").GCN
    finally:
        sys.path.remove(folder)
    torch.manual_seed(0)
    layer, known = gcn(4, 3), GCNConv(4, 3, bias=False)
    torch.nn.init.zeros_(layer.lin.bias)
    known.lin.weight.data.copy_(layer.lin.weight.data)
    data = Data(x=torch.randn(20, 4), edge_index=torch.randint(20, (2, 60)))
    data.edge_index = data.edge_index[:, data.edge_index[0] != data.edge_index[1]]
    expected = known(data.x, data.edge_index)
    torch.testing.assert_close(layer(data.x, data.edge_index), expected)
    graph = varcomm.graph.partition(data, method="random")
    part = varcomm.graph.distribute(layer, graph)(graph.x, graph.edge_index)
    torch.testing.assert_close(part, expected[graph.owned_ids])


def test_the_gcn_of_the_tutorial(worlds, tmp_path):
    # a file, since PyG reads the module that a layer is of
    (tmp_path / "gcn_of_the_readme.py").write_text(GCN)
    assert worlds.run(2, tutorial, str(tmp_path)) == [None] * 2
