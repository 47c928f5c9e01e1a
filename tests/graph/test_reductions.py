"""Sums and means over all nodes: one number, with the derivatives of one process."""

import math

import pytest
import torch
from torch_geometric.data import Data

import varcomm
from tests.graph.graphs import split_by, wild
from tests.worlds import WORLDS
from varcomm import ArgumentError
from varcomm.graph import partition


def check_gradient_as_operator(rank, data, method):
    """The gradient of a loss is a function from shards to shards, to be proved like any other."""
    graph = partition(data, method=method)

    def gradient(x):
        x = x if x.requires_grad else x.requires_grad_()
        loss = graph.mean(x**3) * graph.sum(x.sin(), graph.train_mask)
        return torch.autograd.grad(loss, x, create_graph=True)[0]

    x = graph.x[:, :2]
    varcomm.testing.gradcheck(gradient, x, fast_mode=True)
    varcomm.testing.gradgradcheck(gradient, x, fast_mode=True)


@pytest.mark.parametrize("ranks", WORLDS)
def test_second_and_third_derivatives_against_finite_differences(worlds, ranks):
    method = split_by("a rank owns nothing", 8, ranks)
    results = worlds.run(ranks, check_gradient_as_operator, wild(8), method)
    assert results == [None] * ranks


def slope(rank, data, method):
    """Forward mode gives what backward gives."""
    graph = partition(data, method=method)
    direction = graph.y[:, :1].expand_as(graph.x).contiguous()
    _, forward = torch.func.jvp(lambda x: graph.mean(x**2), (graph.x,), (direction,))
    return forward.item()


def test_forward_mode(worlds):
    data = wild()
    expected = (2 * data.x * data.y[:, :1]).mean().item()
    for got in worlds.run(3, slope, data, "block"):
        assert got == pytest.approx(expected, rel=1e-13)


def nothing_counts(rank, data, method):
    graph = partition(data, method=method)
    nobody = torch.zeros(graph.num_owned, dtype=torch.bool)
    x = graph.x.requires_grad_()
    total = graph.sum(x, nobody)
    (gradient,) = torch.autograd.grad(total, x)
    return total.item(), graph.mean(x, nobody).item(), gradient.abs().sum().item()


def test_the_mean_of_nothing_is_nan_and_its_sum_zero(worlds):
    for total, mean, gradient in worlds.run(3, nothing_counts, wild(), "block"):
        assert total == gradient == 0
        assert math.isnan(mean)


def in_dtype(rank, dtype, values):
    nodes = len(values)
    data = Data(x=values.to(dtype), edge_index=torch.zeros(2, 0, dtype=torch.int64))
    graph = partition(data, method=torch.arange(nodes) % torch.distributed.get_world_size())
    with varcomm.trace() as calls:
        total = graph.sum(graph.x)
    assert sum(call.sent for call in calls) <= 16 * (torch.distributed.get_world_size() - 1)
    return total.dtype, total.item(), graph.mean(graph.x).item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_summed_in_fp64_and_rounded_once(worlds, dtype):
    """A large value and its negative leave the small ones whole, on one rank and over ranks."""
    large = 2.0**15
    values = torch.tensor([large, 0.125, 0.25, 0.5, 0.25, -large, 0.375, 0.5])
    for got, total, mean in worlds.run(3, in_dtype, dtype, values):
        assert (got, total, mean) == (dtype, 2.0, 0.25)


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


def three_nodes_each(ranks):
    return Data(edge_index=torch.zeros(2, 0, dtype=torch.int64), num_nodes=3 * ranks)


def refused(rank):
    graph = partition(three_nodes_each(3), method="block")
    for values, mask, message in REFUSED:
        for kind in ("sum", "mean", "max"):
            with pytest.raises(
                ArgumentError, match=f"graph.{kind} on rank {rank} of 3: .*{message}"
            ):
                getattr(graph, kind)(values, mask)


def test_refusals(worlds):
    assert worlds.run(3, refused) == [None] * 3


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
