"""Functions with planted defects: common mistakes around raw collectives."""

import torch
import torch.distributed as dist


def summed(x):
    """Sum over ranks by a raw collective, out of place."""
    total = x.detach().clone()
    dist.all_reduce(total)
    return total


def gathered(x):
    """Concatenate even shards by a raw collective."""
    shards = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, x.detach().contiguous())
    return torch.cat(shards)


class ForgetsTheSum(torch.autograd.Function):
    """An all-gather whose backward keeps the own slice and drops those of other ranks."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = len(x)
        return gathered(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.narrow(0, ctx.rows * dist.get_rank(), ctx.rows)


class Divides(torch.autograd.Function):
    """An all-reduce whose backward takes the mean for the sum."""

    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient) / dist.get_world_size()


class RawBackward(torch.autograd.Function):
    """An all-reduce whose backward is right, but communicates behind autograd's back."""

    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient + (summed(gradient) - gradient.detach())


class WrongOnOneRank(torch.autograd.Function):
    """A square whose derivative is wrong, on rank 1 alone, by what `spoil` adds."""

    @staticmethod
    def forward(ctx, x, spoil):
        ctx.save_for_backward(x)
        ctx.spoil = spoil
        return x**2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        right = 2 * x * gradient
        return (right + ctx.spoil if dist.get_rank() == 1 else right), None


class WrongTangent(torch.autograd.Function):
    """A square that is right in backward, and not in forward mode."""

    @staticmethod
    def forward(x):
        return x**2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient

    @staticmethod
    def jvp(ctx, tangent):
        (x,) = ctx.saved_tensors
        return 3 * x * tangent


class WrongScale(torch.autograd.Function):
    """Three times the input, backward four times: linear, so for the dot test; on rank 1 alone."""

    @staticmethod
    def forward(ctx, x):
        return 3 * x

    @staticmethod
    def backward(ctx, gradient):
        return (4 if dist.get_rank() == 1 else 3) * gradient


class ForgetsToConjugate(torch.autograd.Function):
    """A complex factor, and the factor itself as its adjoint."""

    @staticmethod
    def forward(ctx, x):
        return x * (1 + 2j)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + 2j)


class ShiftWithAdjointTangent(torch.autograd.Function):
    """Each rank gets the tensor of the rank before it; forward mode takes that of the rank after.

    The adjoint replaces the map itself; a test with equal vectors cannot detect this.
    """

    @staticmethod
    def forward(x, back):
        shards = gathered(x).split(len(x))
        return shards[(dist.get_rank() + (1 if back else -1)) % len(shards)].clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.back = inputs[1]

    @staticmethod
    def backward(ctx, gradient):
        return ShiftWithAdjointTangent.apply(gradient, not ctx.back), None

    @staticmethod
    def jvp(ctx, tangent, _):
        return ShiftWithAdjointTangent.apply(tangent, not ctx.back)


class SwapsGradients(torch.autograd.Function):
    """Right but for which input gets which gradient."""

    @staticmethod
    def forward(ctx, a, b):
        return a + 2 * b

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient, gradient
