"""Run a scenario on tensors that pretend to be on a GPU, beside the same on the CPU."""

import torch

from tests.gpu.pretended import looks, plain, pretended
from tests.gpu.scenarios import SCENARIOS
from tests.transport.strict_nccl import strict_nccl


def second_step(rank, ranks, name):
    """Return the looks of this rank in the second step; its results must be those of the CPU."""
    make = SCENARIOS[name].make
    on_cpu = make(torch.device("cpu"), rank, ranks)
    on_cpu()
    want = on_cpu()
    with strict_nccl(["cuda"]), pretended() as device:
        step = make(device, rank, ranks)
        step()
        with looks() as found:
            got = step()
    for value, expected in zip(got, want, strict=True):
        if expected is None:
            assert value is None
        else:
            assert isinstance(value, type(expected)) or value.device == device
            torch.testing.assert_close(plain(value), expected.detach())
    return found
