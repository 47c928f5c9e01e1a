"""Training with ShardedGradients, and the same in one process."""

import copy

import torch
from torch import nn

from tests.data_parallel.cases import DOUBLE, close
from varcomm.data_parallel import ShardedGradients


class Net(nn.Module):
    """Layers used twice, frozen, unused, or used by some ranks only; all of odd sizes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 7)
        self.convolution = nn.Conv1d(7, 7, 1)
        self.shared = nn.Linear(7, 7, bias=False)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.unused = nn.Linear(5, 2)
        self.branch = nn.Linear(7, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.again = self.shared
        self.last = nn.Linear(7, 2)
        self.register_buffer("count", torch.tensor([3]))
        self.double()

    def forward(self, x, branch):
        h = self.first(x).tanh()
        h = self.convolution(h.unsqueeze(-1)).squeeze(-1)
        h = self.frozen(self.again(self.shared(h).tanh()))
        return self.scale * self.last(h) + (self.branch(h) if branch else 0)


def batch(step, rank, part):
    """The rows of a rank in a micro-batch of a step; some ranks have none."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    n = (step + rank + part) % 3
    return torch.randn(n, 3, dtype=DOUBLE, generator=generator)


def loss_of(model, step, rank, part):
    return model(batch(step, rank, part), (rank + step) % 2).square().sum()


def groups_of(model):
    """Weights decay, others do not."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
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
    options.setdefault("module", model)
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
