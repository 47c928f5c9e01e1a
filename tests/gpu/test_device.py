"""Tests with ``--device``: their tensors are on the device, and what varcomm makes is not."""

import torch

from tests.gpu.device import on_cpu, on_device
from varcomm.cli.workload import Case, workload


def test_tensors_of_tests_are_on_the_device():
    with on_device("pretended", strict=True):
        drawn = torch.randn(3, generator=torch.Generator().manual_seed(0), requires_grad=True)
        made = [drawn, torch.ones(2), torch.tensor([1.0], device=None)]
        assert all(x.is_cuda for x in (*made, *torch.nn.Linear(2, 2).parameters()))
        assert drawn.is_leaf
        assert drawn.requires_grad
        assert torch.zeros(1, device="cpu").device.type == "cpu"
        layout = workload(
            Case("halo", False, 2, "gloo", "float32", 96, "even"), 0, torch.device("cpu")
        )
        assert {x.device.type for x in layout.indices(0)} == {"cpu"}
        assert [x.device.type for x in on_cpu(made)] == ["cpu"] * 3
    assert torch.ones(1).device.type == "cpu"
