"""Comparison of a replicated module with the same in one process."""

import copy

import torch

from varcomm.data_parallel import replicate


def seeded(make, seed=11):
    torch.manual_seed(seed)
    return make()


def replicated(make, group=None, **options):
    """Return a replicated module and its twin for one process."""
    twin = seeded(make)
    return replicate(copy.deepcopy(twin), group, **options), twin


def assert_same_gradients(model, twin, tolerance=1e-12):
    """Compare also which parameters have a gradient; in memory it lies as the parameter does."""
    for (name, own), one in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (own.grad is None) == (one.grad is None), name
        if own.grad is not None:
            torch.testing.assert_close(own.grad, one.grad, rtol=tolerance, atol=tolerance)
            assert strides(own.grad) == strides(own), name


def strides(x):
    """Return those that matter."""
    return [stride for stride, n in zip(x.stride(), x.shape, strict=True) if n > 1]
