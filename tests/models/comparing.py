"""Comparison of a model on ranks with its twin in one process."""

import torch

import varcomm


def compare(failures, label, pairs, together, alone, tolerance):
    """Compare tensors ``{name: (got, wanted)}``, and all gradients, which are summed before."""
    varcomm.data_parallel.sum_gradients(together)
    expected = dict(alone.named_parameters())
    gradients = {n: (p.grad, expected[n].grad) for n, p in together.named_parameters()}
    for name, (got, wanted) in (pairs | gradients).items():
        with failures.named(label, name):
            torch.testing.assert_close(got, wanted, **tolerance)
