"""Transforms of torch around collectives; most are in tests/transforms."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

from tests.ops.primitives import case


def reverse_over_forward(rank, name):
    """The tangent on rank 1 depends on nothing, and yet rank 1 takes part in its derivative."""
    c = case(name, "even", 2)  # the root is rank 1
    op = c.bind()
    x = c.input(rank, torch.float64).requires_grad_()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        y = op(dual**3 if rank == 0 else dual.clone())
        tangent = forward_ad.unpack_dual(y).tangent
        (gradient,) = torch.autograd.grad(tangent.sum(), x)
    return float((gradient - 6 * x).abs().max()), float(gradient.abs().max())


SUMMED_ONCE = ("all_to_all_v", "transpose_v", "gather_v")


@pytest.mark.parametrize("name", [*SUMMED_ONCE, "all_reduce", "plan_from_needed", "broadcast"])
def test_reverse_over_forward_mode_where_one_rank_is_linear(worlds, name):
    (cubed, _), (_, linear) = worlds.run(2, reverse_over_forward, name)
    assert cubed < 1e-12 or name not in SUMMED_ONCE
    assert linear == 0
