"""Sums and means over all nodes: one number, with the derivatives of one process."""

import math

import pytest
import torch

import varcomm
from tests.graph.batches import no_edges
from tests.graph.graphs import split_by, wild
from tests.worlds import WORLDS
from varcomm import ArgumentError
from varcomm.graph import partition

# values, a mask, and the name of the wrong one
REFUSED = [
    (torch.ones(4), None, "values must be floats"),
    (torch.tensor(1.0), None, "values must be floats"),
    (torch.ones(3, dtype=torch.int64), None, "values must be floats"),
    (torch.ones(3, dtype=torch.complex64), None, "values must be floats"),
    (1.0, None, "values must be floats"),
    (torch.ones(3), [True] * 3, "mask must be"),
    (torch.ones(1), torch.arange(3) < 2, "values must be floats"),
    (torch.ones(3), torch.ones(3), "mask must be"),
    (torch.ones(3), torch.ones(2) > 0, "mask must be"),
    (torch.ones(3, 1), torch.ones(3, 1) > 0, "mask must be"),
]


def check_on_three(rank):
    data = wild()
    graph = partition(data, method="block")
    # forward mode gives what backward gives
    direction = graph.y[:, :1].expand_as(graph.x).contiguous()
    _, forward = torch.func.jvp(lambda x: graph.mean(x**2), (graph.x,), (direction,))
    assert forward.item() == pytest.approx((2 * data.x * data.y[:, :1]).mean().item(), rel=1e-13)
    # the mean of nothing is NaN, and its sum zero
    nobody, x = torch.zeros(graph.num_owned, dtype=torch.bool), graph.x.requires_grad_()
    total = graph.sum(x, nobody)
    (gradient,) = torch.autograd.grad(total, x)
    assert total.item() == gradient.abs().sum().item() == 0
    assert graph.mean(x, nobody).isnan()
    # summed in fp64 and rounded once: a large value and its negative leave the small ones whole
    large = 2.0**15
    values = torch.tensor([large, 0.125, 0.25, 0.5, 0.25, -large, 0.375, 0.5])
    for dtype in (torch.float64, torch.bfloat16):
        eight = partition(no_edges(8, x=values.to(dtype)), method=torch.arange(8) % 3)
        with varcomm.trace() as calls:
            total = eight.sum(eight.x)
        assert sum(call.sent for call in calls) <= 16 * 2
        assert (total.dtype, total.item(), eight.mean(eight.x).item()) == (dtype, 2.0, 0.25)
    three = partition(no_edges(9), method="block")
    for values, mask, message in REFUSED:
        for kind in ("sum", "mean", "max"):
            where = f"graph.{kind} on rank {rank} of 3: "
            with pytest.raises(ArgumentError, match=f"{where}.*{message}"):
                getattr(three, kind)(values, mask)


def test_forward_mode_sums_of_nothing_dtypes_and_refusals(worlds):
    assert worlds.run(3, check_on_three) == [None] * 3


def masked_before(rank, data, method):
    """Targets outside the mask are NaN: rows that count are picked before the loss is taken."""
    graph = partition(data, method=method)
    mask, x = graph.train_mask, graph.x.requires_grad_()
    loss = graph.mean(
        torch.nn.functional.mse_loss(x[mask][:, :2], graph.y[mask], reduction="none"), mask
    )
    loss.backward()
    return loss.item(), graph.sum(x[mask].detach(), mask).item(), graph.owned_ids, x.grad


@pytest.mark.parametrize("ranks", WORLDS)
def test_rows_that_count_alone(worlds, ranks):
    data = wild()
    mask, x = data.train_mask, data.x.clone().requires_grad_()
    data.y[~mask] = math.nan
    loss = torch.nn.functional.mse_loss(x[mask][:, :2], data.y[mask])
    loss.backward()
    method = split_by("a rank owns nothing", data.num_nodes, ranks)
    for got, total, ids, gradient in worlds.run(ranks, masked_before, data, method):
        assert got == pytest.approx(loss.item(), rel=1e-13)
        assert total == pytest.approx(x[mask].sum().item(), rel=1e-13)
        torch.testing.assert_close(gradient, x.grad[ids], rtol=1e-12, atol=1e-13)
