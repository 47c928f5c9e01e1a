"""A training that goes on from its last checkpoint, whoever ended it; losses go into a file.

torchrun ... -m tests.faults.training FOLDER STEPS LIMIT PAUSE
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch_geometric.nn as pyg
from torch_geometric.data import Data

import varcomm
from varcomm.checkpoint import load, save
from varcomm.data_parallel import sum_gradients
from varcomm.graph import distribute, partition

EVERY = 5  # steps, between two checkpoints


def data():
    draws = torch.Generator().manual_seed(0)
    edge_index = torch.randint(40, (2, 200), generator=draws)
    x = torch.rand(40, 3, generator=draws, dtype=torch.float64)
    return Data(edge_index=edge_index, x=x, y=x.sum(1, keepdim=True).sin())


def train(folder, steps, pause, told):
    """Train up to so many steps, and call `told` with each step and its loss."""
    torch.manual_seed(0)
    graph = partition(data(), method="block")
    model = distribute(pyg.GraphConv(3, 1).double(), graph)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if (folder / "checkpoint").exists():
        load(state, folder / "checkpoint")
    for step in range(state["step"], steps):
        optimizer.zero_grad()
        loss = graph.mean((model(graph.x, graph.edge_index) - graph.y).square())
        loss.backward()
        sum_gradients(model)
        optimizer.step()
        told(step, loss.item())
        time.sleep(pause)
        if (step + 1) % EVERY == 0:
            state["step"] = step + 1
            save(state, folder / "checkpoint")


def main():
    folder, steps, limit, pause = sys.argv[1:]
    torch.set_num_threads(1)
    world = varcomm.init("gloo", timeout=float(limit))

    def told(step, loss):
        if world.rank == 0:
            with open(f"{folder}/losses", "a") as file:
                file.write(json.dumps([step, loss]) + "\n")

    train(Path(folder), int(steps), float(pause), told)


if __name__ == "__main__":
    main()
