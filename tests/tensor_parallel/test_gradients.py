"""The norm of gradients, and clipping by it: as torch does for the unsharded model."""

import contextlib
import math

import pytest
import torch
from torch import nn

import varcomm
from tests.worlds import on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.sharding import ShardSpec, mark
from varcomm.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    parallelize,
)
from varcomm.tensor_parallel.gradients import clip_grad_norm_, grad_norm

DOUBLE = torch.float64


def whole_gradients(dtype):
    """Of a weight that is sharded by rows, one by columns, a bias; and one without a gradient."""
    generator = torch.Generator().manual_seed(6)
    shapes = [(7, 3), (2, 7), (4,)]
    return [torch.randn(s, dtype=DOUBLE, generator=generator).to(dtype) for s in shapes]


def parameter(gradient):
    made = nn.Parameter(torch.zeros_like(gradient))
    made.grad = gradient.clone()
    return made


def sharded(dtype, sizes):
    rows, columns, bias = whole_gradients(dtype)
    by_row, by_column = ShardSpec.of(sizes, 0), ShardSpec.of(sizes, 1)
    return [
        mark(parameter(by_row.shard(rows)), by_row),
        mark(parameter(by_column.shard(columns)), by_column),
        parameter(bias),
        nn.Parameter(torch.zeros(2, dtype=dtype)),
    ]


@pytest.mark.parametrize(
    ("ranks", "sizes", "norm_type"),
    [
        (1, [7], 2.0),
        (3, [0, 4, 3], 1.0),
        (3, [0, 0, 7], math.inf),
        (3, [3, 2, 2], 0.5),
        pytest.param(2, [0, 7], 3, marks=pytest.mark.slow),
        pytest.param(5, [2, 2, 1, 1, 1], 2.0, marks=pytest.mark.slow),
    ],
)
@on_ranks()
def test_as_in_one_process(rank, ranks, sizes, norm_type):
    """Clip the shards and the whole; the norm is the one before, and the same on all ranks."""
    own, by_column = sharded(DOUBLE, sizes), ShardSpec.of(sizes, 1)
    twin = [parameter(gradient) for gradient in whole_gradients(DOUBLE)]
    before = grad_norm(own, norm_type)
    norm = clip_grad_norm_(own, 0.5, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(twin, 0.5, norm_type)
    torch.testing.assert_close(before, expected.double(), rtol=1e-12, atol=0)
    gathered = [ShardSpec.of(sizes).gather(own[0].grad), by_column.gather(own[1].grad), own[2].grad]
    for mine, one in zip(gathered, twin, strict=True):
        torch.testing.assert_close(mine, one.grad, rtol=1e-12, atol=0)
    assert torch.equal(before, norm)
    assert varcomm.all_gather_v(norm[None], [1] * ranks).unique().numel() == 1
    assert own[3].grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_ranks(2)
def test_narrow_gradients_are_summed_in_fp32(rank, dtype):
    own = sharded(dtype, [4, 3])
    exact = torch.cat([g.double().reshape(-1) for g in whole_gradients(dtype)]).norm()
    norm = grad_norm(own)
    assert norm.dtype == DOUBLE
    assert abs(norm.item() / exact.item() - 1) < 1e-6
    clipped = clip_grad_norm_(own, 0.1)
    assert varcomm.all_gather_v(clipped[None], [1, 1]).unique().numel() == 1


@on_ranks(3)
def test_four_numbers_of_each_rank_travel(rank):
    """Norms of sharded and of other gradients, and two for the comparison of calls."""
    own = sharded(DOUBLE, [4, 3, 0])
    with varcomm.trace() as calls:
        clip_grad_norm_(own, 1.0)
    assert [(call.name, call.sent, call.received) for call in calls] == [
        ("compared_gather", 64, 64)
    ]


@pytest.mark.parametrize(("value", "norm_type"), [(math.nan, 2.0), (math.inf, math.inf)])
@on_ranks(2)
def test_what_is_not_finite(rank, value, norm_type):
    """One element, on rank 1, is not finite; the other rank has torch's error as well."""
    weight = mark(nn.Parameter(torch.zeros(2)), ShardSpec.of([2, 2]))
    weight.grad = torch.tensor([1.0, value if rank == 1 else 1.0])
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        clip_grad_norm_([weight], 1.0, norm_type, error_if_nonfinite=True)
    untouched = weight.grad[0].item()
    norm = clip_grad_norm_([weight], 1.0, norm_type)
    twin = nn.Parameter(torch.zeros(4))
    twin.grad = torch.tensor([1.0, 1.0, 1.0, value])
    expected = torch.nn.utils.clip_grad_norm_([twin], 1.0, norm_type)
    torch.testing.assert_close(norm.float(), expected, equal_nan=True)
    torch.testing.assert_close(weight.grad, twin.grad[2 * rank :][:2], equal_nan=True)
    assert untouched == 1.0


@on_ranks(2)
def test_gradients_in_main_grad(rank):
    layer = ColumnParallelLinear(8, 4, bias=False, dtype=torch.bfloat16)
    layer.weight.main_grad = torch.zeros(layer.weight.shape)

    def add_up(weight):
        weight.main_grad.add_(weight.grad)
        weight.grad = None

    layer.weight.register_post_accumulate_grad_hook(add_up)
    for _ in range(2):
        layer(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    norm = clip_grad_norm_(layer, 1.0)
    assert norm.item() == pytest.approx(4.0 * 32**0.5)
    assert layer.weight.grad is None
    assert layer.weight.main_grad.norm() == pytest.approx(0.5**0.5)  # of each rank's half


@on_ranks(3)
def test_gradients_of_replicas_that_differ(rank):
    """A norm over features of a rank's heads: each rank's gradient is a part."""
    for context in (contextlib.nullcontext, varcomm.debug):
        norm = nn.RMSNorm(2)
        norm.weight.grad = torch.ones(2) * (1 + 1e-6 * rank)  # rounding
        with context():
            grad_norm(norm)
            norm.weight.grad += rank
            with pytest.raises(DisagreementError, match=r"'weight'.*differ between ranks"):
                clip_grad_norm_(norm, 1.0)
            with pytest.raises(DisagreementError, match=r"parameter 0.*differ between ranks"):
                grad_norm([norm.weight], 1.0)
    for of_one in (math.nan, math.inf):  # is no difference that torch would refuse
        norm.weight.grad = torch.ones(2) if rank else torch.full((2,), of_one)
        assert not grad_norm(norm).isfinite()


class LoRA(nn.Module):
    """An adapter written by hand around a layer with this rank's outputs."""

    def __init__(self, layer, into_shards):
        super().__init__()
        self.layer, self.into_shards = layer, into_shards
        self.A = nn.Parameter(torch.randn(2, layer.in_features, dtype=DOUBLE) / 3)
        self.B = mark(nn.Parameter(torch.zeros(len(layer.weight), 2, dtype=DOUBLE)), layer.spec)

    def forward(self, x):
        low = nn.functional.linear(x, self.A)
        if self.into_shards:
            low = copy_to_tensor_model_parallel_region(low)
        return self.layer(x) + nn.functional.linear(low, self.B)


@pytest.mark.parametrize("into_shards", [False, True])
@on_ranks(3)
def test_an_adapter_around_a_sharded_layer(rank, into_shards):
    torch.manual_seed(0)
    layers = nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 6)
    model = parallelize(nn.Sequential(*layers).double(), {"0": "column", "2": "row"})
    model[0] = LoRA(model[0], into_shards)
    x, y = torch.randn(2, 9, 6, dtype=DOUBLE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def train():
        for _ in range(10):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            clip_grad_norm_(model, 1.0)
            optimizer.step()

    if into_shards:
        return train()
    with pytest.raises(DisagreementError, match=r"'0\.A'.*copy_to_tensor_model_parallel_region"):
        train()


@on_ranks(2)
def test_a_generator_that_has_been_read(rank):
    parameters = ColumnParallelLinear(3, 5).parameters()
    clip_grad_norm_(parameters, 1.0)
    with pytest.raises(ArgumentError, match="generator"):
        clip_grad_norm_(parameters, 1.0)
