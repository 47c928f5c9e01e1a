"""The code on the pages of the docs runs, on every rank from top to bottom."""

import re
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

import varcomm

PAGES = Path(__file__).parent.parent / "docs"


def run_page(rank, page, folder):
    """Return the tensors that the blocks of a page make."""
    names = {"rank": rank, "folder": folder}
    for block in re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL):
        # as a module does, so that classes defined there have a module
        exec(compile(block, page, "exec"), names)
    tensors = {key: value for key, value in names.items() if isinstance(value, torch.Tensor)}
    return {key: value for key, value in tensors.items() if not isinstance(value, DTensor)}


def check_equal(one, other, *names):
    for name in names:
        assert torch.equal(one[name], other[name]), name


def test_code_on_graphs(worlds, tmp_path):
    one, other = worlds.run(2, run_page, "graphs.md", tmp_path / "saved")
    check_equal(one, other, "mean", "logits")
    assert torch.isfinite(one["loss"])
    assert one["out"].shape[1] == 1
    assert len(one["out"]) + len(other["out"]) == 60


def test_code_on_tensor_parallelism(worlds, tmp_path):
    one, other = worlds.run(2, run_page, "tensor_parallel.md", tmp_path)
    check_equal(one, other, "norm", "kept")
    assert (one["part"].shape, other["part"].shape) == ((4, 2, 8), (2, 2, 8))
    assert one["logits"].shape[-1] + other["logits"].shape[-1] == 131
    for found in (one, other):
        torch.testing.assert_close(found["loss"], found["expected"])
    for expected in (other["answer"], one["unfused"]):
        torch.testing.assert_close(one["answer"], expected)


def test_code_on_checkpoints(worlds, tmp_path):
    one, other = worlds.run(2, run_page, "checkpoints.md", tmp_path / "saved")
    check_equal(one, other, "whole", "weight")
    assert one["weight"].any(dim=1).all()
    assert torch.equal(torch.cat([other["again"], one["again"]]), one["whole"])


def test_code_on_gradients(worlds, tmp_path):
    one, other = worlds.run(2, run_page, "gradients.md", tmp_path)
    check_equal(one, other, "mean", "weight", "up")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    model(torch.arange(12.0).view(4, 3)).square().sum().div(4).backward()
    torch.testing.assert_close(one["mean"], model[0].weight.grad)


def test_code_on_compilation(tmp_path):
    """In ranks of its own: the compiler stays in a process."""
    one, other = varcomm.launch(run_page, 2, "compile.md", tmp_path)
    check_equal(one, other, "loss", "bias")
    assert one["shard"].shape[0] + other["shard"].shape[0] == 7
    assert one["bias"].tolist() == [0.0] * 3


def test_code_on_dtensors(worlds, tmp_path):
    one, other = worlds.run(2, run_page, "dtensor.md", tmp_path)
    check_equal(one, other, "of_weight", "summed")
    for found in (one, other):
        assert torch.equal(found["everything"], found["rows"])
        torch.testing.assert_close(found["output"], found["expected"])
    assert (len(one["own"]), len(other["own"])) == (1, 4)
    assert (len(one["back"]), len(other["back"])) == (3, 2)
    x = one["rows"].clone().requires_grad_()
    torch.manual_seed(0)
    weight = torch.randn(2, 3, requires_grad=True)
    energy = torch.tanh(x @ weight).square().sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    (energy + force.square().sum()).backward()
    torch.testing.assert_close(one["of_weight"], weight.grad)
    torch.testing.assert_close(torch.cat([one["of_rows"], other["of_rows"]]), x.grad)


def test_code_on_simulation(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = run_page(0, "simulate.md", tmp_path)  # in this process
    assert found["rows"].shape == (512, 512)
    assert len(found["sent"]) == len(found["memory"]) == 512
    assert found["memory"].min() > 0
