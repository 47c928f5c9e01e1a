"""Defects that chance vectors which happen to be alike would hide."""

import pytest
import torch

from tests.testing import planted
from tests.testing.test_checks import same_everywhere, shard, verdict
from varcomm.testing import gradcheck


def of_shift(rank, fast):
    def fn(x):
        return planted.ShiftWithAdjointTangent.apply(x, False)

    x = shard(rank)
    return [
        verdict(gradcheck, fn, x, fast_mode=fast, forward_mode=False),
        verdict(gradcheck, fn, x, fast_mode=fast),
    ]


@pytest.mark.parametrize("fast", [False, True])
def test_the_adjoint_in_forward_mode_is_found(worlds, fast):
    backward, forward = zip(*worlds.run(3, of_shift, fast), strict=True)
    assert same_everywhere(backward) == ""
    assert same_everywhere(forward).startswith("forward mode: a derivative on rank ")


def of_swap(rank, fast):
    inputs = shard(rank), shard(rank + 9)
    how = {"fast_mode": fast, "forward_mode": False}
    return verdict(gradcheck, planted.SwapsGradients.apply, *inputs, **how)


@pytest.mark.parametrize("fast", [False, True])
def test_swapped_gradients_are_found(worlds, fast):
    said = same_everywhere(worlds.run(2, of_swap, fast))
    assert said.startswith("backward: a derivative on rank ")


def of_single_precision(rank):
    with pytest.raises(
        ValueError, match=r"need inputs of torch\.float64 or torch\.complex128; got"
    ):
        gradcheck(torch.sin, torch.ones(2))


def test_single_precision_is_refused(worlds):
    assert worlds.run(2, of_single_precision) == [None] * 2
