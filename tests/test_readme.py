"""The code in the README runs and says what it says there."""

import re
import subprocess
import sys
from pathlib import Path

import torch
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

import varcomm

ROOT = Path(__file__).parent.parent
FOUR_LINES, SCRIPT, LOOP = re.findall(
    r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
)


def test_collectives_as_a_script():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[True, True, True]\n"


def train(rank):
    """Run the four lines and the loop as they stand, on a ring of nodes that each know their x."""
    generator = torch.Generator().manual_seed(0)
    nodes = torch.arange(20)
    x = torch.randn(20, 3, generator=generator)
    data = Data(
        x=x,
        edge_index=torch.stack([nodes, (nodes + 1) % 20]),
        y=x[:, :1],
        train_mask=nodes % 5 > 0,
    )
    torch.manual_seed(0)
    model = SAGEConv(3, 1)
    names = {"vc": varcomm, "F": functional, "data": data, "model": model, "print": lambda _: None}
    exec(FOUR_LINES, names)
    before = names["loss"].item()
    exec(LOOP, names | {"steps": 50, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1)})
    after = names["graph"].mean(
        (model(names["graph"].x, names["graph"].edge_index) - names["graph"].y) ** 2
    )
    return before, after.item()


def test_training_on_a_partitioned_graph(worlds):
    (before, after), other = worlds.run(2, train)
    assert (before, after) == other
    assert after < 0.1 * before
