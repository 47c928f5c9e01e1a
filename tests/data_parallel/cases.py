"""Modules, and the part of the loss that each rank computes; the whole is the sum over ranks."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch.utils.checkpoint import checkpoint

from varcomm.data_parallel import ShardedGradients

DOUBLE = torch.float64
SOME = (3, pytest.param(2, marks=pytest.mark.slow))


def close(got, wanted, tolerance=1e-12, message=None):
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, msg=message)


def rows(rank, ranks, width=3):
    """This rank's rows: as many as its number, so rank 0 has none where there are others."""
    generator = torch.Generator().manual_seed(7 + rank)
    n = rank if ranks > 1 else 2
    return torch.randn(n, width, dtype=DOUBLE, generator=generator)


class Layers(nn.Module):
    """Layers of odd sizes: channels_last, used twice, frozen, unused, or used by some ranks."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 12)
        self.convolution = nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last)
        self.shared = nn.Linear(2, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.unused = nn.Linear(5, 2)
        self.branch = nn.Linear(12, 2)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.again = self.shared
        self.register_buffer("count", torch.tensor([3]))
        self.double()

    def forward(self, x, branch=False):
        h = self.first(x).tanh()
        more = self.branch(h) if branch else 0
        h = self.convolution(h.view(-1, 3, 2, 2)).flatten(1)
        return self.scale * self.frozen(self.again(self.shared(h).tanh())) + self.empty.sum() + more


class Branches(nn.Module):
    """A rank takes one branch; the last of three or more takes none."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(3, 2) for _ in range(3)).double()
        # whatever is infinite must not reach ranks that do not use it
        self.infinite = nn.Parameter(torch.full((2,), torch.inf, dtype=DOUBLE))

    def forward(self, x, branch):
        if branch == 2:
            return x.new_zeros(0, 2)
        return self.branches[branch](x + 1)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.first = nn.Linear(3, 4).double()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
        self.last = nn.Linear(4, 2).double()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        h = self.first(x)
        for _ in range(2):
            h = checkpoint(self.inner, h, use_reentrant=self.use_reentrant)
        return self.last(h)


class Energy(nn.Module):
    """Smooth, with a last bias on which forces do not depend."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def forward(self, pos, alone=False):
        return pos.sum() if alone else self.net(pos).sum()


class Types(nn.Module):
    """Real and complex parameters of several widths."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def draw(dtype):
            return nn.Parameter(torch.randn(3, dtype=dtype, generator=generator))

        self.a, self.b = draw(torch.float64), draw(torch.complex128)
        self.c, self.d = draw(torch.float64), draw(torch.complex128)

    def forward(self, x):
        return (x * self.a * self.b).sum(-1) * (self.c * self.d).sum()


def backward(loss):
    """Run backward, unless the loss depends on no parameter, as it may on some ranks."""
    if loss.requires_grad:
        loss.backward()


def square(y):
    return y.square().sum()


def on_forces_without_parameters(model, rank, ranks):
    """On rank 0 the energy is linear and depends on no parameter, so its forces are constants."""
    pos = (rows(1, 2) + rank).requires_grad_()
    energy = model(pos, alone=rank == 0 and ranks > 1)
    (force,) = torch.autograd.grad(energy, pos, create_graph=True)
    return square(force - 1)


def on_energy_and_forces(model, rank, ranks):
    pos = rows(rank, ranks).requires_grad_()
    energy = model(pos)
    (force,) = torch.autograd.grad(energy, pos, create_graph=True)
    (curvature,) = torch.autograd.grad(force.sum(), pos, create_graph=True)
    return energy.square() + square(force) + square(curvature)


# a module, and the loss of a rank
CASES = {
    "layers": (Layers, lambda model, *place: square(model(rows(*place)))),
    "branches": (Branches, lambda model, rank, ranks: square(model(rows(2, 3), rank % 3))),
    "checkpoints": (lambda: Checkpointed(False), lambda m, *place: square(m(rows(*place)))),
    "reentrant": (
        lambda: Checkpointed(True),
        lambda m, *place: square(m(rows(*place).requires_grad_())),
    ),
    "forces without parameters": (Energy, on_forces_without_parameters),
    "energy and forces": (Energy, on_energy_and_forces),
    "dtypes": (Types, lambda m, *place: m(rows(*place)).abs().square().sum()),
}


class Look(torch.autograd.Function):
    """Identity, whose backward calls something."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.call()
        return gradient, None


class Looking(nn.Module):
    """Two layers; between their backwards it notes what ranks have exchanged."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.calls, self.seen = [], []

    def forward(self, x):
        h = Look.apply(self.first(x), lambda: self.seen.append([c.name for c in self.calls]))
        return self.last(h)


class Exchanging(nn.Module):
    """Ranks exchange between layers, of which a rank uses those that its number says."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(5)).double()

    def forward(self, x, rank, exchange):
        x = x.requires_grad_()  # on all ranks, or not all would exchange gradients
        for number, layer in enumerate(self.layers):
            x = (layer(x) if (number + rank) % 3 else x).tanh()
            x = x + exchange(x)
        return x


class Graphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = pyg.SAGEConv(4, 6), pyg.SAGEConv(6, 2)
        self.double()

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index).tanh(), edge_index)


class Failing(torch.autograd.Function):
    """Identity, whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("out of memory, say")


class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)).double()

    def forward(self, x, fails_before=None):
        for number, layer in enumerate(self.layers):
            x = layer(Failing.apply(x) if number == fails_before else x)
        return x


def seeded(make, seed=11):
    torch.manual_seed(seed)
    return make()


def assert_same_gradients(model, twin, tolerance=1e-12):
    """Compare also which parameters have a gradient; in memory it lies as the parameter does."""
    for (name, own), one in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (own.grad is None) == (one.grad is None), name
        if own.grad is not None:
            close(own.grad, one.grad, tolerance)
            assert strides(own.grad) == strides(own), name


def strides(x):
    return [stride for stride, n in zip(x.stride(), x.shape, strict=True) if n > 1]


# Training with ShardedGradients, and the same in one process


def batch(step, rank, part):
    """The rows of a rank in a micro-batch of a step; some ranks have none."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    n = (step + rank + part) % 3
    return torch.randn(n, 3, dtype=DOUBLE, generator=generator)


def loss_of(model, step, rank, part):
    return square(model(batch(step, rank, part), branch=(rank + step) % 2))


def groups_of(model):
    """Weights decay, others do not."""
    weights = [(n, p) for n, p in model.named_parameters() if p.dim() > 1]
    others = [(n, p) for n, p in model.named_parameters() if p.dim() <= 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


OPTIMIZERS = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01),
}


def sizes_of(kind, ranks, total):
    """Explicit ones are zero on rank 0, and uneven; on one rank it has all."""
    if kind != "explicit":
        return kind
    if ranks == 1:
        return [total]
    sizes = [0, *(5 * r for r in range(1, ranks - 1))]
    return [*sizes, total - sum(sizes)]


def twins(make, seed=3):
    torch.manual_seed(seed)
    model = make()
    return model, copy.deepcopy(model)


def sharded(model, kind, ranks, optimizer="AdamW", **options):
    total = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return ShardedGradients(
        groups_of(model), OPTIMIZERS[optimizer], sizes=sizes_of(kind, ranks, total), **options
    )


def assert_equal(model, twin, tolerance):
    for (name, own), one in zip(model.named_parameters(), twin.parameters(), strict=True):
        close(own, one, tolerance, name)


def assert_gradients(own, twin, tolerance=1e-12):
    """Compare the pieces of this rank with the gradients of one process; return their elements."""
    own.reduce()
    one = dict(twin.named_parameters())
    for name, piece in own.pieces.items():
        gradient, whole = piece.value.grad, one[name].grad
        assert (gradient is None) == (whole is None), name
        if whole is not None:
            part = whole.contiguous().view(-1)[piece.start : piece.stop]
            close(gradient.reshape(-1), part, tolerance, name)
    return sum(piece.stop - piece.start for piece in own.pieces.values())


def plain(groups):
    return torch.optim.SGD(groups, lr=0.01)
