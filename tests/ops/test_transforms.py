"""Transforms of torch around collectives; most are in tests/transforms."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import varcomm
from tests.ops.primitives import case


def refused(rank):
    x = torch.ones(3, 2)

    def batched(async_op):
        def call(x):
            y = varcomm.all_gather_v(x, [2, 2], async_op=async_op)
            return y.wait() if async_op else y

        return call

    plan = varcomm.ExchangePlan.from_indices([torch.tensor([0])] * 2, 2)
    calls = (
        lambda: torch.func.vmap(batched(False))(x),
        lambda: torch.func.vmap(batched(True))(x),
        lambda: torch.func.jacrev(batched(False))(x[0]),
        lambda: torch.func.hessian(lambda x: varcomm.all_reduce(x**3).sum())(x[0]),
        lambda: torch.func.vmap(plan)(x),
        lambda: torch.func.vmap(lambda x: varcomm.broadcast(x))(x),
    )
    told = []
    for call in calls:
        with pytest.raises(varcomm.ArgumentError, match="vmap") as caught:
            call()
        told.append(f"on rank {rank} of 2" in str(caught.value))
    return told, varcomm.all_reduce(torch.tensor(1)).item()


def test_vmap_is_refused(worlds):
    assert worlds.run(2, refused) == [([True] * 6, 2)] * 2


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
