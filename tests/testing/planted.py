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


def planted(forward, backward):
    """Make a function of one tensor, with a derivative of its own."""
    methods = {
        "forward": staticmethod(lambda ctx, x: forward(x)),
        "backward": staticmethod(lambda ctx, gradient: backward(gradient)),
    }
    return type("Planted", (torch.autograd.Function,), methods)


def on_rank_1(wrong, right):
    return wrong if dist.get_rank() == 1 else right


# an all-gather of two rows per rank whose backward keeps the own slice and drops the others'
ForgetsTheSum = planted(gathered, lambda gradient: gradient.narrow(0, 2 * dist.get_rank(), 2))
# an all-reduce whose backward is the mean in place of the sum
Divides = planted(summed, lambda gradient: summed(gradient) / dist.get_world_size())
# an all-reduce whose backward is right, but communicates without autograd
RawBackward = planted(summed, lambda g: g + (summed(g) - g.detach()))
# three times the input, backward four times on rank 1: linear, so for the dot test
WrongScale = planted(lambda x: 3 * x, lambda gradient: on_rank_1(4, 3) * gradient)
# wrong by one part in ten thousand
Slightly = planted(lambda x: 2 * x, lambda gradient: 2.0002 * gradient)
# a complex factor, and the factor itself as its adjoint
ForgetsToConjugate = planted(lambda x: x * (1 + 2j), lambda gradient: gradient * (1 + 2j))


class WrongOnOneRank(torch.autograd.Function):
    """A square whose derivative is wrong on rank 1 alone, by `spoil`."""

    @staticmethod
    def forward(ctx, x, spoil):
        ctx.save_for_backward(x)
        ctx.spoil = spoil
        return x**2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        right = 2 * x * gradient
        return on_rank_1(right + ctx.spoil, right), None


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
