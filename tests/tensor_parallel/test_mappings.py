"""Every mapping, forward and backward, is what its convention says."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import varcomm
import varcomm.tensor_parallel as tp
from tests.ops.comparing import assert_none
from tests.tensor_parallel.twins import (
    REPLICATED,
    SPLITS,
    Sharded,
    compare,
    drawn,
    split,
)
from varcomm.transport.group import resolve


# A partial value is a shard of a stack along a new dimension, over which the twin sums.
def cases(ranks, pattern, group=None):
    sizes, others = split(pattern, ranks), split("uneven", ranks)
    ones = Sharded(0, (1,) * ranks)
    stack = drawn(2, ranks, sum(sizes), sum(others))
    first, last = Sharded(0, sizes), Sharded(1, others)
    whole = drawn(3, sum(sizes), sum(others))
    rank = resolve(group).rank
    scale = torch.arange(1.0, ranks + 1, dtype=torch.float64)
    return {
        "copy": (
            lambda x: scale[rank] * tp.copy_to_tensor_model_parallel_region(x, group=group)[None],
            lambda x: scale.view(-1, 1, 1) * x,
            [(whole, REPLICATED)],
            ones,
        ),
        "reduce": (
            lambda x: tp.reduce_from_tensor_model_parallel_region(x[0], group=group),
            lambda x: x.sum(0),
            [(stack, ones)],
            REPLICATED,
        ),
        "scatter": (
            lambda x: tp.scatter_to_tensor_model_parallel_region(x, others, group=group),
            lambda x: x * 1,
            [(whole, REPLICATED)],
            last,
        ),
        "gather": (
            lambda x: tp.gather_from_tensor_model_parallel_region(x, others, group=group),
            lambda x: x * 1,
            [(whole, last)],
            REPLICATED,
        ),
        "gather, asked": (
            lambda x: tp.gather_from_tensor_model_parallel_region(x, dim=0, group=group),
            lambda x: x * 1,
            [(whole, first)],
            REPLICATED,
        ),
        "scatter sequence": (
            lambda x: tp.scatter_to_sequence_parallel_region(x, sizes, group=group),
            lambda x: x * 1,
            [(whole, REPLICATED)],
            first,
        ),
        "gather sequence, alike": (
            lambda x: tp.gather_from_sequence_parallel_region(x, False, sizes, group=group),
            lambda x: x * 1,
            [(whole, first)],
            REPLICATED,
        ),
        "gather sequence": (
            lambda x: (
                scale[rank]
                * tp.gather_from_sequence_parallel_region(x, True, sizes, group=group)[None]
            ),
            lambda x: scale.view(-1, 1, 1) * x,
            [(whole, first)],
            ones,
        ),
        "reduce-scatter sequence": (
            lambda x: tp.reduce_scatter_to_sequence_parallel_region(x[0], sizes, group=group),
            lambda x: x.sum(0),
            [(stack, ones)],
            first,
        ),
        "gather last": (
            lambda x: (
                scale[rank]
                * tp.all_gather_last_dim_from_tensor_parallel_region(x, others, group=group)[None]
            ),
            lambda x: scale.view(-1, 1, 1) * x,
            [(whole, last)],
            ones,
        ),
        "reduce-scatter last": (
            lambda x: tp.reduce_scatter_last_dim_to_tensor_parallel_region(
                x[0], others, group=group
            ),
            lambda x: x.sum(0),
            [(stack, ones)],
            last,
        ),
        "sequence to hidden": (
            lambda x: tp.all_to_all_sp2hp(x, sizes, others, group),
            lambda x: x * 1,
            [(whole, first)],
            last,
        ),
        "hidden to sequence": (
            lambda x: tp.all_to_all_hp2sp(x, sizes, others, group),
            lambda x: x * 1,
            [(whole, last)],
            first,
        ),
    }


def run(rank, pattern):
    ranks = torch.distributed.get_world_size()
    failures = []
    for name, case in cases(ranks, pattern).items():
        failures += [f"{name}: {text}" for text in compare(*case)]
    return failures


@pytest.mark.parametrize(("ranks", "pattern"), SPLITS)
def test_values_and_derivatives(worlds, pattern, ranks):
    assert_none(worlds.run(ranks, run, pattern))


def in_mesh(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    failures = []
    for name, case in cases(2, "uneven", mesh["tensor"]).items():
        failures += [f"{name}: {text}" for text in compare(*case, group=mesh["tensor"])]
    return failures


@pytest.mark.slow
def test_one_dimension_of_a_mesh(worlds):
    assert_none(worlds.run(4, in_mesh))


def communicated(rank):
    """Which bytes each mapping sends forward and backward, on 2 ranks, fp32, 3 + 1 rows."""
    sizes, told = [3, 1], {}
    x = torch.ones(4, requires_grad=True)
    shard = torch.ones(sizes[rank], requires_grad=True)
    calls = {
        "copy": lambda: tp.copy_to_tensor_model_parallel_region(x),
        "reduce": lambda: tp.reduce_from_tensor_model_parallel_region(x),
        "scatter": lambda: tp.scatter_to_tensor_model_parallel_region(x, sizes),
        "gather": lambda: tp.gather_from_tensor_model_parallel_region(shard, sizes),
        "gather sequence": lambda: tp.gather_from_sequence_parallel_region(shard, sizes=sizes),
    }
    for name, call in calls.items():
        with varcomm.trace() as forward:
            y = call()
        with varcomm.trace() as backward:
            y.sum().backward()
        told[name] = [sum(c.sent for c in forward), sum(c.sent for c in backward)]
    return told


def test_bytes(worlds):
    first, second = worlds.run(2, communicated)
    assert first == {
        "copy": [0, 16],
        "reduce": [16, 0],
        "scatter": [0, 12],
        "gather": [12, 0],
        "gather sequence": [12, 4],
    }
    assert second == first | {
        "scatter": [0, 4],
        "gather": [4, 0],
        "gather sequence": [4, 12],
    }


def in_place_around(rank):
    """An incoming gradient and a saved activation stay as they are."""
    a = torch.tensor([1.0], requires_grad=True)
    b = torch.tensor([2.0], requires_grad=True)
    copy = tp.copy_to_tensor_model_parallel_region
    (copy(a) + copy(b)).backward()
    x = torch.tensor([0.5], requires_grad=True)
    tp.reduce_from_tensor_model_parallel_region(x.exp()).backward()
    # the gradient of a sum is one number seen from many places: what is summed must be returned
    y = torch.ones(3, 2, requires_grad=True)
    copy(y.T).sum().backward()
    return a.grad.item(), b.grad.item(), x.grad.item(), y.grad.tolist()


def test_nothing_is_written_into_nor_lost(worlds):
    two = torch.tensor(0.5).exp().item()
    for a, b, x, y in worlds.run(2, in_place_around):
        assert (a, b) == (2.0, 2.0)
        assert x == pytest.approx(two)
        assert y == [[2.0, 2.0]] * 3
