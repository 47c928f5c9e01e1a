"""`broadcast_module`: values of one rank's model on all ranks, or one error on all."""

import pytest
import torch

import varcomm as vc
from tests.worlds import WORLDS, on_ranks, refused_alike
from varcomm import ArgumentError, DisagreementError


def model(rank, width=3):
    """Make a model with other values on each rank: tied, bf16, complex, ints, empty, strided."""
    torch.manual_seed(rank)
    net = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 3))
    net[1].weight = net[0].weight
    net.narrow = torch.nn.Parameter(torch.randn(5).bfloat16())
    net.frozen = torch.nn.Parameter(torch.randn(2, 3).t(), requires_grad=False)
    net.empty = torch.nn.Parameter(torch.randn(0, 4))
    net.single = torch.nn.Parameter(torch.randn(()))
    net.register_buffer("count", torch.tensor([rank, 7]))
    net.register_buffer("mask", torch.tensor([rank % 2 == 0]), persistent=False)
    net.register_buffer("phase", torch.randn(2, dtype=torch.complex64))
    return net


def values(net):
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


@on_ranks(*WORLDS)
def test_all_ranks_get_the_values_of_one(rank, ranks):
    src = ranks - 1
    net, expected = model(rank), values(model(src))
    vc.broadcast_module(net, src)
    assert net[1].weight is net[0].weight
    found = values(net)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
        assert value.dtype == expected[name].dtype
    assert net.frozen.stride() == (1, 3)


@on_ranks(3)
def test_another_structure_on_one_rank_is_the_same_error_on_all(rank):
    wider = model(rank, width=3 + (rank == 1))
    untied, deeper, lazy = model(rank), model(rank), model(rank)
    if rank == 1:
        untied[1].weight = torch.nn.Parameter(untied[0].weight.clone())
        deeper.append(torch.nn.ReLU())
        deeper.register_buffer("more", torch.zeros(1))
        lazy.append(torch.nn.LazyLinear(2))
    for net, src, kind, name in [
        (wider, 0, DisagreementError, "0.weight"),
        (untied, 0, DisagreementError, "1.weight"),
        (deeper, 0, DisagreementError, "more"),
        (lazy, 0, ArgumentError, "2.bias"),
        (model(0), rank, DisagreementError, "src"),
        ("net", 0, ArgumentError, "model"),
    ]:
        known = {} if net in ("net", lazy) else values(net)
        before = {name: value.clone() for name, value in known.items()}
        refused_alike(kind, lambda net=net, src=src: vc.broadcast_module(net, src), name)
        assert all(torch.equal(values(net)[name], value) for name, value in before.items())


@on_ranks(3)
def test_order_of_registration(rank):
    model = torch.nn.Module()
    for name in ("a", "b") if rank else ("b", "a"):
        value = torch.full((2,), float(ord(name) + rank))
        model.register_parameter(name, torch.nn.Parameter(value))
    vc.broadcast_module(model)
    assert (model.a.tolist(), model.b.tolist()) == ([97.0] * 2, [98.0] * 2)


@on_ranks(3)
def test_tensors_that_cannot_be_written(rank):
    meta = torch.nn.Linear(2, 2, device="meta" if rank == 1 else None)
    expanded = torch.nn.Module()
    expanded.register_buffer("x", torch.ones(1).expand(2) if rank == 1 else torch.ones(2))
    for model in (meta, expanded):
        with pytest.raises(ArgumentError, match="rank 1"):
            vc.broadcast_module(model)


@on_ranks(2)
def test_shards_would_become_those_of_one_rank(rank):
    layer = vc.tensor_parallel.ColumnParallelLinear(3, 4)
    refused_alike(ArgumentError, lambda: vc.broadcast_module(layer), "bias", "shard")
    alone = [torch.distributed.new_group([one]) for one in range(2)][rank]
    vc.broadcast_module(layer, group=alone)
