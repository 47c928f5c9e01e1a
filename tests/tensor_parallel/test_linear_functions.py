"""Column- and row-parallel products against one process: values, derivatives, what travels."""

from functools import partial

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import varcomm
from tests.ops.comparing import Failures
from tests.tensor_parallel.twins import drawn, split, traced
from tests.worlds import on_ranks
from varcomm.tensor_parallel import column_parallel_linear, row_parallel_linear

IN, OUT = 4, 5


SHAPES = [(IN,), (3, IN), (0, IN), (2, 0, IN), (2, 1, 2, IN)]


@on_ranks(3)
def test_inputs_of_any_rank(rank):
    sizes = split("uneven", 3)
    weight, failures = drawn(1, sum(sizes), IN), Failures()
    own = weight.split(list(sizes))[rank]
    for shape in SHAPES:
        x = drawn(2, *shape)
        strided = x.transpose(0, -1).contiguous().transpose(0, -1)
        y = column_parallel_linear(strided, own)
        z = row_parallel_linear(y, own.T)
        with failures.named(shape):
            want = functional.linear(x, weight)
            torch.testing.assert_close(y, want.split(list(sizes), -1)[rank])
            torch.testing.assert_close(z, functional.linear(want, weight.T))
    return failures


@on_ranks(3, pytest.param(2, marks=pytest.mark.slow))
def test_what_travels_and_is_kept_is_the_least_possible(rank, ranks):
    """Elements that each way receives, forward and backward, and shapes that its graph keeps."""
    sequence = sizes = split("uneven", ranks)
    weight = torch.ones(sizes[rank], IN, requires_grad=True)
    across = torch.ones(OUT, sizes[rank], requires_grad=True)
    part = torch.ones(sequence[rank], IN, requires_grad=True)
    columns = torch.ones(sum(sequence), sizes[rank], requires_grad=True)
    column = partial(column_parallel_linear, sequence_sizes=sequence)
    ways = {
        "column": lambda: column(part, weight),
        "column, kept": lambda: column(part, weight, save="gathered"),
        "column, frozen": lambda: column(part, weight.detach()),
        "column, no gradient of the input": lambda: column(part.detach(), weight, save="gathered"),
        "row": lambda: row_parallel_linear(columns, across, sequence_sizes=sequence),
    }
    told, kept = {}, {}
    for name, way in ways.items():
        told[name] = [sum(call.received for call in calls) // 4 for calls in traced(way)]
        shapes = kept[name] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, shapes=shapes: shapes.append(tuple(t.shape)) or t, lambda t: t
        ):
            way()
    own, length = sequence[rank], sum(sequence)
    others, parts = (length - own) * IN, (ranks - 1) * own
    assert told == {
        "column": [others, others + parts * IN],
        "column, kept": [others, parts * IN],
        "column, frozen": [others, parts * IN],
        "column, no gradient of the input": [others, 0],
        "row": [parts * OUT, (length - own) * OUT],
    }
    assert {name: [shape for shape in kept[name] if shape != (0,)] for name in kept} == {
        "column": [(own, IN), (own, IN)],  # input and weight, which has as many rows
        "column, kept": [(IN, own), (length, IN)],
        "column, frozen": [(IN, own)],
        "column, no gradient of the input": [(length, IN)],
        "row": [(own, OUT), (length, own)],
    }


@on_ranks(2)
def test_autocast(rank):
    x, whole = drawn(1, 2, IN).float(), drawn(2, 3, IN).float()
    weight = whole.split([1, 2])[rank].clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = column_parallel_linear(x, weight)
        z = row_parallel_linear(y, weight.T)
        torch.testing.assert_close(y, functional.linear(x, whole).split([1, 2], -1)[rank])
    z.sum().backward()
    assert y.dtype == torch.bfloat16
    assert z.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32


@on_ranks(3)
def test_sums_of_narrow_floats(rank):
    """Gradients of bf16 are summed in fp32 and rounded once, unless use_fp32 is False.

    1 + 2^-8 rounds to 1 in bf16, so one after the other the small ones are lost.
    """
    x = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.full((1, 1), 1.0 if rank == 0 else 2.0**-8, dtype=torch.bfloat16)
    for use_fp32, total in ((True, 1 + 2 * 2.0**-8), (False, 1.0)):
        y = column_parallel_linear(x, weight, use_fp32=use_fp32)
        assert torch.autograd.grad(y, x, torch.ones_like(y))[0] == total
        assert row_parallel_linear(x, weight, use_fp32=use_fp32) == total


class Products(TorchDispatchMode):
    """Records how many messages have begun before each matrix product."""

    def __init__(self, calls):
        super().__init__()
        self.calls, self.begun = calls, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.begun.append(len(self.calls))
        return func(*args, **(kwargs or {}))


@on_ranks(3)
def test_the_weights_gradient_is_computed_while_messages_travel(rank):
    """The gather begins before the first product, and the sum before the second."""
    sequence, weight, told = [2, 1, 1], torch.ones(3, IN, requires_grad=True), []
    for parts, rows in ((None, 4), (sequence, sequence[rank])):
        x = torch.ones(rows, IN, requires_grad=True)
        y = column_parallel_linear(x, weight, sequence_sizes=parts)
        with varcomm.trace() as calls, Products(calls) as backward:
            y.sum().backward()
        told.append(backward.begun)
    assert told == [[0, 1], [1, 2]]
