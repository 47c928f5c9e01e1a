"""Several ways to sum gradients in one backward, to which ranks come in different orders."""

import pytest
import torch

import varcomm
from varcomm.data_parallel import GlobalCount, ShardedGradients, replicate

STEPS = 10


def layers():
    torch.manual_seed(0)
    return [torch.nn.Linear(3, 3).double() for _ in range(2)]


def rows(rank):
    return torch.randn(
        rank + 1, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64
    )


def loss(first, second, rank):
    """Ranks come to the gradients of one layer first, or to those of the other."""
    x = rows(rank)
    inner, outer = (first, second) if rank % 2 else (second, first)
    return outer(torch.tanh(inner(x))).square().sum()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-2)


def trained(rank, debugged):
    first, second = layers()
    count = GlobalCount()
    replicate(first, reduce=count, bucket_bytes=8)
    sharded = ShardedGradients(second, sgd, reduce=count, bucket_bytes=8)
    whole = sgd(first.parameters())
    for _ in range(STEPS):
        count.add(rank + 1)
        if debugged:
            with varcomm.debug():
                loss(first, second, rank).backward()
        else:
            loss(first, second, rank).backward()
        for optimizer in (whole, sharded):
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for layer in (first, second) for p in layer.parameters()]


@pytest.mark.parametrize("debugged", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_replicas_and_pieces_end_together(worlds, ranks, debugged):
    first, second = layers()
    optimizer = sgd([*first.parameters(), *second.parameters()])
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = sum(loss(first, second, rank) for rank in range(ranks))
        (total / sum(rank + 1 for rank in range(ranks))).backward()
        optimizer.step()
    expected = [p.detach() for layer in (first, second) for p in layer.parameters()]
    for found in worlds.run(ranks, trained, debugged):
        for mine, one in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, one, rtol=0, atol=1e-12)


class EmptyFirst(torch.nn.Module):
    """Sums that begin with the last parameter come to one without elements first."""

    def __init__(self):
        super().__init__()
        self.some, self.none = (torch.nn.Parameter(torch.ones(n)) for n in (2, 0))

    def forward(self):
        return self.some.sum() + self.none.sum()


def empty_first(rank):
    model = replicate(EmptyFirst())
    model().backward()
    return model.some.grad.tolist(), model.none.grad.tolist()


def test_parameters_without_elements(worlds):
    assert worlds.run(2, empty_first) == [([2.0, 2.0], [])] * 2
