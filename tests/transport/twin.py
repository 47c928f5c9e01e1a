"""A collective against one process, in value and gradient."""

import torch
import torch.distributed as dist

from tests.ops.comparing import error_beyond_bound, gradient_beyond_bound
from tests.ops.primitives import random


def compare(failures, c, dtype, words, group=None, device="cpu"):
    rank, generator = dist.get_rank(group), torch.Generator().manual_seed(7)
    inputs = c.draw(dtype)
    weights = [random(y.shape, y.dtype, generator) for y in c.reference(inputs)]
    x = c.input(rank, dtype).to(device).requires_grad_()
    y = c.bind(group)(x)
    (got,) = torch.autograd.grad(y, x, weights[rank].to(device))
    with failures.named(*words, dtype):
        assert y.device == got.device == x.device
        assert got.dtype == dtype
        wrong = error_beyond_bound(c, inputs, rank, y.detach().cpu())
        assert not wrong, wrong
        wrong = gradient_beyond_bound(c, inputs, weights, rank, got.cpu())
        assert not wrong, f"gradient: {wrong}"
