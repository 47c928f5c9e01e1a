"""Checks of a graph on a GPU: the host reads the first one, and the GPU itself later ones."""

import pytest
import torch
import torch.nn as nn
import torch_geometric.nn as pyg
from torch_geometric.data import Data

import varcomm as vc
from tests.gpu.pretended import looks, plain, pretended
from tests.graph.graphs import wild
from tests.transport.strict_nccl import strict_nccl
from varcomm import graph


def wrong_uses(device, rank):
    """Return uses of a graph by name: a right one, a wrong one of the same kind, and its error."""
    data = wild()
    data.batch = torch.arange(24) // 9
    g = graph.partition(data, method="block").to(device)
    norm = nn.Sequential(pyg.GraphNorm(4)).double().to(device)
    norm[0].forward = graph.global_norm(norm[0], g.nodes)
    line = Data(edge_index=torch.tensor([[0], [1]]), x=torch.ones(2, 1))
    one_edge = graph.partition(line, method="block").to(device)
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    conv = graph.distribute(pyg.EdgeConv(inner).to(device), one_edge)
    own = torch.arange(g.num_owned, device=device)
    values = torch.ones(len(own), 2, device=device, dtype=torch.float64)
    mask = own < 3
    size = g.num_owned

    def with_edges(source, target):
        return torch.cat([g.edge_index, torch.stack([source, target])], dim=1)

    def largest(start):
        start = torch.full((3, 2), start, device=device, dtype=torch.float64)
        index = g.batch.view(-1, 1).expand(-1, 2)
        return start.scatter_reduce(0, index, values, "amax", include_self=False)

    def from_sources(value):
        index = g.edge_index[0]
        messages = torch.full((len(g.edge_attr),), value, device=device, dtype=torch.float64)
        start = messages.new_zeros(size)
        return start.scatter_reduce(0, index, messages, "amax", include_self=False)

    return {
        "self loops": (lambda: with_edges(own, own), lambda: with_edges(own, own.flip(0))),
        "of owned nodes": (lambda: with_edges(own, own), lambda: with_edges(own + 1, own + 1)),
        "tensor of 0s": (lambda: largest(0.0), lambda: largest(1.0)),
        "infinite values": (lambda: from_sources(1.0), lambda: from_sources(float("inf"))),
        "values must be": (lambda: g.sum(values[:3], mask), lambda: g.sum(values[:3], own < 2)),
        "numbers in batch": (
            lambda: norm[0](g.x, g.batch.plain, 3),
            lambda: norm[0](g.x, g.batch.plain + 2, 3),
        ),
        "more than 1 value": (
            lambda: conv(one_edge.x, torch.cat([one_edge.edge_index] * 2, 1)),
            lambda: conv(one_edge.x, one_edge.edge_index),
        ),
    }


def refused(rank):
    with strict_nccl(["cuda"]), pretended() as device:
        for name, (_, wrong) in wrong_uses(device, rank).items():
            with pytest.raises(vc.ArgumentError, match=name):  # the host reads the first one
                wrong()
        for name, (right, wrong) in wrong_uses(device, rank).items():
            right()
            with looks() as found:
                right()
            assert not found, (name, found)
            with pytest.raises(RuntimeError, match=name), looks() as found:
                wrong()  # on a GPU, its next use of the device raises
            assert not found, (name, found)
        uses = wrong_uses(device, rank)
        for name, (right, wrong) in uses.items():
            right()
            with pytest.raises((vc.ArgumentError, vc.DisagreementError), match=name), vc.debug():
                wrong()


def test_wrong_use_is_an_error_though_no_host_looks(worlds):
    worlds.run(2, refused)


def reduced(device, rank, values, mask):
    """Return sum, mean and largest of values on `device`, and their gradients."""
    g = graph.partition(wild(), method="block").to(device)
    x = values[g.owned_ids.cpu()].to(device).requires_grad_()
    mask = mask[g.owned_ids.cpu()].to(device)
    outs = [getattr(g, name)(x, mask) for name in ("sum", "mean", "max")]
    return [*outs, *(torch.autograd.grad(out, x)[0] for out in outs)]


def with_masks(rank):
    generator = torch.Generator().manual_seed(0)
    finite = torch.randint(4, (24, 2), generator=generator).double()  # of which several are equal
    some = torch.arange(24) % 3 == 1
    wild_values = finite.clone()
    wild_values[0], wild_values[2] = float("nan"), -float("inf")  # not selected
    low = torch.full_like(finite, -float("inf"))
    cases = [(finite, some), (finite, ~some & some), (wild_values, some), (low, some)]
    cases += [(wild_values, ~some), (finite.float().sqrt(), some)]
    for values, mask in cases:
        want = reduced(torch.device("cpu"), rank, values, mask)
        with strict_nccl(["cuda"]), pretended() as device:
            got = reduced(device, rank, values, mask)
        for value, expected in zip(got, want, strict=True):
            torch.testing.assert_close(plain(value), expected.detach(), equal_nan=True)


def test_a_mask_selects_the_same_values(worlds):
    worlds.run(2, with_masks)
