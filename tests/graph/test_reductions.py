"""Sums and means over all nodes: one number, with the derivatives of one process."""

import math

import pytest
import torch
from torch_geometric.data import Data

import varcomm
from tests.graph.graphs import split_by, wild
from tests.worlds import WORLDS
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import partition

MASKS = ("no mask", "a mask", "one node")


def mask_of(data, name):
    nodes = torch.arange(data.num_nodes)
    return {
        "no mask": None,
        "a mask": data.train_mask,
        "one node": nodes == 5,
    }[name]


def in_one_process(kind, values, mask):
    values = values if mask is None else values[mask]
    return values.sum() if kind == "sum" else values.mean()


def loss_of(reduce, x):
    """A loss in which what is reduced is used twice, and not linearly."""
    return reduce(x.sin() * x) ** 2 + reduce(x[:, 0].exp())


def derivatives(loss, x):
    """Of a loss by `x`; then of the gradient's squared length, given by `reduce`, once more."""
    value, length = loss(x)
    (first,) = torch.autograd.grad(value, x, create_graph=True)
    (second,) = torch.autograd.grad(length(first), x)
    return value.item(), first.detach(), second


def on_ranks(rank, data, method, cases):
    graph, found = partition(data, method=method), []
    for kind, mask_name in cases:
        mask = mask_of(data, mask_name)
        mask = mask if mask is None else mask[graph.owned_ids]

        def loss(x, kind=kind, mask=mask):
            value = loss_of(lambda values: getattr(graph, kind)(values, mask), x)
            return value, lambda gradient: graph.sum(gradient**2)

        found.append((graph.owned_ids, *derivatives(loss, graph.x.clone().requires_grad_())))
    return found


@pytest.mark.parametrize("ranks", WORLDS)
def test_values_and_derivatives_are_those_of_one_process(worlds, ranks):
    data = wild()
    cases = [(kind, mask) for kind in ("sum", "mean") for mask in MASKS]
    method = split_by("a rank owns nothing", data.num_nodes, ranks)
    on_all = worlds.run(ranks, on_ranks, data, method, cases)
    for number, (kind, mask_name) in enumerate(cases):
        mask = mask_of(data, mask_name)

        def loss(x, kind=kind, mask=mask):
            value = loss_of(lambda values: in_one_process(kind, values, mask), x)
            return value, lambda gradient: (gradient**2).sum()

        value, first, second = derivatives(loss, data.x.clone().requires_grad_())
        parts = [found[number] for found in on_all]
        assert len({part[1] for part in parts}) == 1, "ranks differ"
        for ids, got, *gradients in parts:
            assert got == pytest.approx(value, rel=1e-13)
            for mine, whole in zip(gradients, (first, second), strict=True):
                torch.testing.assert_close(mine, whole[ids], rtol=1e-12, atol=1e-13)


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


def of_a_graph_without_nodes(rank):
    data = Data(x=torch.zeros(0, 2), edge_index=torch.zeros(2, 0, dtype=torch.int64))
    graph = partition(data, method="block")
    return graph.sum(graph.x).item(), math.isnan(graph.mean(graph.x).item())


def test_a_graph_without_nodes(worlds):
    assert worlds.run(3, of_a_graph_without_nodes) == [(0.0, True)] * 3


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


def one_is_wrong(rank):
    graph = partition(three_nodes_each(3), method="block")
    values = torch.ones(3 if rank != 1 else 2)
    with varcomm.debug(), pytest.raises(DisagreementError) as caught:
        graph.mean(values)
    return str(caught.value), graph.sum(torch.ones(3)).item()


def test_in_debug_all_ranks_raise_where_one_has_to(worlds):
    for told, after in worlds.run(3, one_is_wrong):
        assert "not called, since on rank 1: graph.mean on rank 1 of 3: values must be" in told
        assert after == 9


def other_rows(rank):
    graph = partition(three_nodes_each(3), method="block")
    with varcomm.debug(), pytest.raises(DisagreementError) as caught:
        graph.mean(torch.ones(3, 1 + rank))
    return str(caught.value), graph.mean(torch.ones(3, 1 + rank)).item()


def test_in_debug_rows_are_of_one_shape(worlds):
    for told, after in worlds.run(3, other_rows):
        assert told.startswith("graph.mean: ranks disagree on shape of a row: rank 0 has [1]; ")
        assert after == 1


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
