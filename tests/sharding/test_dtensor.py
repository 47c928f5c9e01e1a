"""Shards as DTensors and back: the same memory, the same numbers, the same derivatives."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import varcomm as vc
from tests.ops.comparing import Failures
from tests.worlds import on_ranks
from varcomm import ShardSizes
from varcomm.sharding import from_dtensor, to_dtensor
from varcomm.testing import dot_test, gradcheck, gradgradcheck

# rows over 3 ranks: 3 3 1, 2 2 0, 1 1 1, 1 0 0, none
CASES = [(rows, torch.float64) for rows in (7, 4, 3, 1, 0)]
CASES += [(7, torch.bfloat16), (4, torch.int64)]


def drawn(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@on_ranks(3)
def test_the_same_as_torch_makes_of_the_whole(rank):
    """The same DTensor as torch makes of the whole, of the memory that was given."""
    mesh = init_device_mesh("cpu", (3,))
    failures = Failures()
    for rows, dtype in CASES:
        sizes = ShardSizes.chunked(rows, 3)
        for dim in (0, 1, -1):
            shape = [4, 4, 4]
            shape[dim] = rows
            whole = drawn(*shape).mul(9).to(dtype)
            own = vc.shard_v(whole, sizes, dim).clone()
            ours = to_dtensor(own, sizes, dim, mesh)
            theirs = distribute_tensor(whole, mesh, [Shard(dim)])
            back, spec = from_dtensor(ours)
            full = ours.full_tensor()
            own.add_(1)
            with failures.named(rows, dim):
                assert ours.placements == theirs.placements == (Shard(dim % 3),)
                assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
                assert torch.equal(full, whole)
                assert back.data_ptr() == ours.to_local().data_ptr() == own.data_ptr()
                assert torch.equal(ours.to_local(), own)
                assert torch.equal(back, own)
                assert (spec.sizes, spec.dim) == (sizes, dim % 3)
                assert spec.group.process_group == mesh.get_group()
                assert not back.requires_grad
    return failures


@on_ranks(3)
def test_strides(rank):
    """The full tensor has the memory layout of the shards, also of shards of one row or none."""
    mesh = init_device_mesh("cpu", (3,))
    failures = Failures()
    for rows in (6, 5, 3, 1):
        sizes = ShardSizes.chunked(rows, 3)
        image = torch.zeros(rows, 2, 3, 4).contiguous(memory_format=torch.channels_last)
        channels = torch.zeros(4, rows, 3, 4).contiguous(memory_format=torch.channels_last)
        for name, whole, dim in (
            ("rows", torch.zeros(rows, 4), 0),
            ("channels_last", image, 0),
            ("channels", channels, 1),
            ("transposed", torch.zeros(4, rows).t(), 0),
            ("columns", torch.zeros(4, rows), 1),
        ):
            part = whole.split(sizes, dim)[rank]
            for copied, own in (("view", part), ("clone", part.clone())):
                made = to_dtensor(own, sizes, dim, mesh)
                with failures.named(rows, name, copied):
                    assert made.stride() == whole.stride()
                    assert made.to_local().data_ptr() == own.data_ptr()
                    # the stride of a dimension of one row has no meaning
                    steps = zip(own.shape, made.to_local().stride(), own.stride(), strict=True)
                    assert not own.numel() or all(a == b for n, a, b in steps if n > 1)
    return failures


def through(x, sizes, group):
    """Rows by themselves, and numbers of them all; gradients are sharded and partial."""
    rows, summed, crossed = (to_dtensor(x, sizes, 0, group) for _ in range(3))
    back, _ = from_dtensor(torch.sin(rows) * summed.sum() ** 3 + rows @ (crossed.t() @ rows).sin())
    return back


def through_alone(x):
    return torch.sin(x) * x.sum() ** 3 + x @ (x.t() @ x).sin()


@on_ranks(3)
def test_derivatives_of_any_order(rank):
    """Gradients that reach ``to_dtensor`` with each placement, and their derivatives."""
    failures = Failures()
    mesh = init_device_mesh("cpu", (3,))
    for rows in (5, 4):  # 2 2 1 and 2 2 0
        sizes = ShardSizes.chunked(rows, 3)
        whole, weight = drawn(rows, 2).mul(0.3).requires_grad_(), drawn(2, rows).t()
        own = vc.shard_v(whole.detach(), sizes).requires_grad_()
        y = through(own, sizes, mesh)
        found = torch.autograd.grad(y, own, vc.shard_v(weight, sizes), create_graph=True)
        expected = torch.autograd.grad(through_alone(whole), whole, weight, create_graph=True)
        for _ in range(2):  # the next orders
            found += torch.autograd.grad(found[-1].sin().sum(), own, create_graph=True)
            expected += torch.autograd.grad(expected[-1].sin().sum(), whole, create_graph=True)
        for order, (got, want) in enumerate(zip(found, expected, strict=True), start=1):
            with failures.named(rows, "derivative", order):
                torch.testing.assert_close(got, vc.shard_v(want, sizes), rtol=0, atol=1e-12)
    for check in (gradcheck, gradgradcheck):
        with failures.named(check.__name__):
            check(lambda x: through(x, (2, 2, 0), mesh), own, forward_mode=False, fast_mode=True)
    dot_test(lambda x: from_dtensor(to_dtensor(x, (2, 2, 0), 0, mesh) * 3)[0], own)
    return failures


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


@on_ranks(3)
def test_without_a_gradient(rank):
    """No gradient is one of zeros: the adjoint of what was communicated before is entered."""
    mesh = init_device_mesh("cpu", (3,))
    x = drawn(4, 2).requires_grad_()
    shard = vc.reduce_scatter_v(x, (2, 2, 0))
    NoGradient.apply(to_dtensor(shard, (2, 2, 0), 0, mesh)).sum().full_tensor().backward()
    whole = distribute_tensor(drawn(4, 2), mesh, [Shard(0)]).requires_grad_()
    own, _ = from_dtensor(whole)
    NoGradient.apply(own).sum().backward()
    for gradient in (x.grad, whole.grad.full_tensor()):
        assert torch.equal(gradient, torch.zeros(4, 2, dtype=torch.float64))


@on_ranks(3)
def test_still_under_way(rank):
    """A result of DTensor's that is still in flight is waited for."""
    mesh = init_device_mesh("cpu", (3,))
    columns = distribute_tensor(drawn(5, 4), mesh, [Shard(1)])
    rows = distribute_tensor(drawn(4, 3), mesh, [Shard(0)]).requires_grad_()
    product = (columns @ rows).redistribute(placements=[Shard(0)], async_op=True)
    assert type(product.to_local()) is not torch.Tensor  # it has to be waited for
    own, spec = from_dtensor(product)
    assert type(own) is torch.Tensor
    own.sum().backward()
    assert spec.sizes == (2, 2, 1)
    expected = (drawn(5, 4) @ drawn(4, 3)).split((2, 2, 1))[rank]
    torch.testing.assert_close(own.detach(), expected)
    expected = drawn(5, 4).sum(0)[:, None].expand(4, 3)
    torch.testing.assert_close(rows.grad.full_tensor(), expected)


@pytest.mark.slow
@on_ranks(3)
def test_compiled(rank):
    """In one graph, forward and backward, with a gradient that comes back replicated."""
    mesh = init_device_mesh("cpu", (3,))
    x = drawn(5, 2).split((2, 2, 1))[rank].requires_grad_()

    def fn(x):
        return through(x, (2, 2, 1), mesh)

    found = []
    for call in (fn, torch.compile(fn, backend="aot_eager", fullgraph=True)):
        y = call(x)
        found.append((y.detach(), *torch.autograd.grad(y.cos().sum(), x)))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
