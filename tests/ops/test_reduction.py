"""Sums over ranks, as one of them computes them."""

import pytest
import torch

from varcomm.ops import reduction
from varcomm.ops.reduction import accumulated, sum_in_rank_order


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("elements", [0, 1, 7, 8, 9, 24, 31])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_blocks_change_nothing(monkeypatch, dtype, elements, ranks):
    monkeypatch.setattr(reduction, "_BLOCK", 8)
    generator = torch.Generator().manual_seed(elements)
    parts = torch.randn(ranks, elements, 3, generator=generator).to(dtype)
    whole = sum_in_rank_order(parts, True)
    assert whole.dtype == dtype
    assert torch.equal(whole.float(), accumulated(parts, True).to(dtype).float())


def test_blocks_of_parts_that_are_not_contiguous(monkeypatch):
    monkeypatch.setattr(reduction, "_BLOCK", 8)
    parts = torch.randn(3, 6, 5).bfloat16().transpose(1, 2)
    assert torch.equal(sum_in_rank_order(parts, True), parts.float().sum(0).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_sum_is_a_new_tensor(dtype, ranks):
    parts = torch.ones(ranks, 4).to(dtype)
    total = sum_in_rank_order(parts, True)
    total += 1
    assert total.tolist() == [ranks + 1] * 4
    assert torch.equal(parts, torch.ones(ranks, 4).to(dtype))
