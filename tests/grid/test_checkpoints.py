"""Fields in checkpoints that 3, 2 and 2 x 2 ranks save and load."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import varcomm as vc
from tests.worlds import refused_alike
from varcomm.checkpoint import load, read, save

WHOLE = torch.arange(2 * 7 * 5, dtype=torch.float64).view(2, 7, 5)
# ranks, a mesh or None, and sizes
GRIDS = {
    "three": (3, None, [[4, 0, 3], None]),
    "two": (2, None, [[1, 6], None]),
    "columns": (2, None, [None, [5, 0]]),
    "mesh": (4, (2, 2), [[5, 2], [0, 5]]),
    "one": (1, None, [[7], None]),
}


class Positions(nn.Module):
    """Positions of all points are trained, and a mask of points is a buffer."""

    def __init__(self, x):
        super().__init__()
        self.positions, self.scale = nn.Parameter(x), nn.Parameter(torch.ones(()).double())
        self.register_buffer("mask", x > 9)

    def forward(self, x):
        return (x + self.positions) * self.scale * self.mask


def state_of(name, start, trained):
    """Return a state on a grid; with `trained` after a step of Adam."""
    _, mesh, sizes = GRIDS[name]
    grid = vc.grid.Grid((7, 5), mesh and init_device_mesh("cpu", mesh), sizes)
    x = grid.scatter(start)
    model = Positions(x.clone())
    optimizer = torch.optim.Adam(model.parameters())
    if trained:
        model(x).square().mean().backward()
        vc.data_parallel.sum_gradients([model.scale])
        optimizer.step()
    return {"x": x.clone(), "mean": x.mean(), "model": model, "optimizer": optimizer}


def values_of(state):
    """Return the full tensors of a state."""
    model, optimizer = state["model"], state["optimizer"]
    moments = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    tensors = [state["x"], state["mean"], *model.parameters(), model.mask, *moments]
    return [t.detach().gather() if isinstance(t, vc.grid.Field) else t.detach() for t in tensors]


def write(rank, name, folder):
    state = state_of(name, WHOLE, trained=True)
    save(state, folder)
    dcp.save({"x": state["x"].sharded()}, checkpoint_id=f"{folder}/torch")
    return values_of(state)


def read_back(rank, name, folder, expected):
    state = state_of(name, torch.zeros_like(WHOLE), trained=name != "two")
    load(state, folder)
    for found, wanted in zip(values_of(state), expected, strict=True):
        assert torch.equal(found, wanted)
    x = state["x"].new_zeros(state["x"].shape) + 0 * state["x"]
    dcp.load({"x": x.sharded()}, checkpoint_id=f"{folder}/torch")
    assert torch.equal(x.gather(), WHOLE)
    save(state, folder)
    dcp.save({"x": x.sharded()}, checkpoint_id=f"{folder}/torch")


MANY = pytest.param(("three", "two", "mesh", "columns", "three"), marks=pytest.mark.slow)


@pytest.mark.parametrize("names", [("three", "one"), MANY], ids=" to ".join)
def test_other_ranks(worlds, tmp_path, names):
    first, *others = names
    expected, *_ = run(worlds, first, write, first, tmp_path)
    for name in others:
        run(worlds, name, read_back, name, tmp_path, expected)
        assert torch.equal(read(tmp_path)["x"], WHOLE)


def run(worlds, name, function, *args):
    return worlds.run(GRIDS[name][0], function, *args)


def refused(rank, folder):
    x = vc.grid.Grid((7, 5), sizes=[[4, 0, 3], None]).scatter(WHOLE)
    joined = x.flatten(0, 1)
    refused_alike(vc.ArgumentError, lambda: save({"x": joined}, folder), "several images")
    save({"x": x}, folder)
    other = vc.grid.Grid((7, 4)).scatter(WHOLE[..., :4])
    refused_alike(vc.ArgumentError, lambda: load({"x": other}, folder), "'x' is saved as")
    refused_alike(vc.DisagreementError, lambda: save({"x": differs(rank, x)}, folder), "'x'")
    assert torch.equal(read(folder)["x"], WHOLE)


def differs(rank, x):
    return x.gather() + rank


def test_refusals(worlds, tmp_path):
    worlds.run(3, refused, tmp_path)
