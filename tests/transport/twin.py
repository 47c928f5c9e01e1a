"""A collective against one process, in value and gradient."""

import torch
import torch.distributed as dist

from tests.ops.comparing import error_beyond_bound, twin_gradients
from tests.ops.primitives import random


def compare(failures, c, dtype, words, group=None, device="cpu"):
    rank, generator = dist.get_rank(group), torch.Generator().manual_seed(7)
    inputs = [x if x is None else x.requires_grad_() for x in c.draw(dtype)]
    weights = [random(y.shape, y.dtype, generator) for y in c.reference(inputs)]
    want = twin_gradients(c, inputs, weights)[rank]
    x = c.input(rank, dtype).to(device).requires_grad_()
    y = c.bind(group)(x)
    (got,) = torch.autograd.grad(y, x, weights[rank].to(device))
    with failures.named(*words, dtype):
        assert y.device == got.device == x.device
        with torch.no_grad():
            wrong = error_beyond_bound(c, inputs, rank, y.cpu())
        assert not wrong, wrong
        torch.testing.assert_close(got.cpu(), torch.zeros_like(x.cpu()) if want is None else want)
