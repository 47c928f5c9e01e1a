"""Gradients of pieces: those of one process, however ranks come to them."""

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import varcomm
from tests.data_parallel.cases import (
    CASES,
    DOUBLE,
    Fragile,
    Layers,
    assert_gradients,
    backward,
    plain,
    rows,
    square,
    twins,
)
from tests.worlds import WORLDS, on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.data_parallel import GlobalCount, ShardedGradients

CUTS = ((1, "whole-parameters"), (150, "balanced"), (2**20, "balanced"))


def gradients(own):
    return [piece.value.grad.item() for piece in own.pieces.values()]


@on_ranks(*WORLDS)
def test_as_in_one_process(rank, ranks):
    """Two backwards, of which the second adds to the gradients of the first.

    With checkpoints, forces, containers, dtypes; on ranks that use nothing, too; in debug().
    """
    for place, (name, (make, loss)) in enumerate(CASES.items()):
        for number, (nbytes, sizes) in enumerate(CUTS):
            debug = name in ("layers", "branches") and number == 1
            if (number - place) % 3 == 2 and not debug and ranks != 2:
                continue
            model, twin = twins(make)
            own = ShardedGradients(model, plain, sizes=sizes, reduce="sum", bucket_bytes=nbytes)
            for _ in range(2):
                with varcomm.debug() if debug else nullcontext():
                    backward(loss(model, rank, ranks))
                    own.reduce()
                sum(loss(twin, r, ranks) for r in range(ranks)).backward()
                assert_gradients(own, twin)
            assert not any(type(p.grad) is torch.Tensor for p in model.parameters())
            own.close()


@on_ranks(3)
def test_parameters_without_elements(rank, ranks):
    """First, last, and alone of their dtype: each on one rank; a rank may own nothing."""
    model = nn.ParameterList([torch.zeros(0), torch.ones(3), torch.zeros(0, 2)])
    model.append(nn.Parameter(torch.zeros(0).double()))
    given = list(model.named_parameters())
    own = ShardedGradients(given, plain, sizes=[1, 0, 2], reduce="sum", bucket_bytes=8)
    sum(p.sum() for p in model).backward()
    own.step()
    expected = {"1": [3.0], "0": [], "2": [], "3": []}, {}, {"1": [3.0, 3.0]}
    assert {n: p.value.grad.tolist() for n, p in own.pieces.items()} == expected[rank]


@on_ranks(*WORLDS)
def test_ranks_run_backwards_of_their_own(rank, ranks):
    """Each rank runs as many backwards as its number, each of another part of the model."""
    model, twin = twins(Layers)
    own = ShardedGradients(model, plain, reduce="sum", bucket_bytes=60)
    parts = (
        lambda m, r: square(m(rows(r + 1, ranks + 1))),
        lambda m, r: square(m.first(rows(1, 2))) * r,
        lambda m, r: square(m.shared(m.unused(torch.ones(2, 5, dtype=DOUBLE)))) + m.scale,
    )
    for step in range(2):
        for number in range(rank):
            with own.accumulate() if (number + step) % 3 == 1 else nullcontext():
                parts[number % 3](model, rank).backward()
        for r in range(ranks):
            for number in range(r):
                parts[number % 3](twin, r).backward()
        assert assert_gradients(own, twin) > 0


@on_ranks(3)
def test_a_skipped_batch_leaves_nothing(rank, ranks):
    """A batch that ranks skip together, however far its sums have come."""
    for how in ("failed", "accumulate", "one rank"):
        model, twin = twins(Fragile)
        count = GlobalCount()
        own = ShardedGradients(model, plain, reduce=count, bucket_bytes=1)
        x = rows(rank + 1, ranks + 1).requires_grad_()
        count.add(1000)
        if how == "failed":  # rank 0 fails when all sums but one are begun, the others earlier
            with pytest.raises(ValueError, match="out of memory, say"):
                square(model(x, 1 if rank == 0 else 2)).backward()
        elif how == "accumulate":
            with own.accumulate():
                square(model(x)).backward()
        elif rank == 1:
            square(model(x)).backward()
        own.zero_grad()
        count.add(len(x))
        square(model(x)).backward()
        total = sum(r + 1 for r in range(ranks))
        (sum(square(twin(rows(r + 1, ranks + 1))) for r in range(ranks)) / total).backward()
        assert assert_gradients(own, twin) == 12
        count.add(1)
        own.zero_grad(set_to_none=False)  # drops no count: there is no other gradient
        square(model(x * 0)).backward()
        own.reduce()
        assert all(piece.value.grad is not None for piece in own.pieces.values())


@on_ranks(2)
def test_the_inner_optimizer_drops_gradients(rank, ranks):
    """Its own zero_grad drops those that have been summed."""
    for set_to_none in (True, False):
        model = nn.Linear(1, 1, bias=False)
        own = ShardedGradients(model, plain, sizes=[1, 0], reduce="sum")
        model(torch.full((1, 1), 100.0)).sum().backward()
        own.reduce()
        own.optimizer.zero_grad(set_to_none)
        model(torch.ones(1, 1)).sum().backward()
        own.reduce()
        assert gradients(own) == ([] if rank else [2.0])


class Slope(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3, dtype=dtype))
        self.bias = nn.Parameter(torch.ones(2, dtype=dtype))

    def forward(self, n):
        return n * (self.weight.sum() + self.bias.sum()).abs()


@on_ranks(3)
def test_mean_over_a_global_count(rank, ranks):
    """A slope of 1 in accumulate(), with a count of 100,000, and one of the rank's number.

    float16 has no number for so many rows: counts are exact in any dtype.
    """
    for dtype in (DOUBLE, torch.float16, torch.complex128):
        for nbytes in (1, 2**20):
            model, count = Slope(dtype), GlobalCount()
            sizes = [3, 0, 5]
            own = ShardedGradients(model, plain, sizes=sizes, reduce=count, bucket_bytes=nbytes)
            for _ in range(2):
                with own.accumulate():
                    count.add(100_000)
                    model(1).backward()
                count.add(rank)
                model(rank).backward()
                own.reduce()
            values = [x for p in own.pieces.values() for x in p.value.grad.abs().tolist()]
            assert len(values) == sizes[rank]
            assert values == pytest.approx([2 * 6 / 300_003] * len(values), rel=1e-6)


@on_ranks(2)
def test_a_mean_over_nothing_is_refused_on_all_ranks(rank, ranks):
    """And leaves nothing behind; rows counted for a step without gradients divide no other."""
    for forgets, said in ((True, "on 1 of 2 ranks GlobalCount.add was"), (False, "counted 0 rows")):
        model, count = nn.Linear(1, 1), GlobalCount()
        own = ShardedGradients(model, plain, sizes=[2, 0], reduce=count)
        count.add(4)
        own.step()  # nothing to sum, and nothing to divide
        if not (forgets and rank):
            count.add(1 if forgets else 0)
        model(torch.ones(1, 1)).sum().backward()
        with pytest.raises(ArgumentError, match=said):
            own.reduce()
        assert all(piece.value.grad is None for piece in own.pieces.values())
        count.add(2)
        model(torch.ones(1, 1)).sum().backward()
        own.reduce()
        assert gradients(own) == ([] if rank else [0.5, 0.5])


@on_ranks(2)
def test_two_to_which_ranks_come_in_other_orders(rank, ranks):
    for in_debug in (False, True):
        modules = [twins(lambda: nn.Linear(3, 3).double()) for _ in range(2)]
        named = [list(model.named_parameters()) for model, _ in modules]
        owns = [ShardedGradients(given, plain, reduce="sum", bucket_bytes=1) for given in named]
        x = torch.ones(1, 3).double()
        first, last = [model for model, _ in modules][:: 1 if rank else -1]
        with varcomm.debug() if in_debug else nullcontext():
            square(last(first.weight.sum(0)) @ x[0]).backward()
            for own in owns:
                own.reduce()
        a, b = (twin for _, twin in modules)
        (square(b(a.weight.sum(0)) @ x[0]) + square(a(b.weight.sum(0)) @ x[0])).backward()
        for own, (_, twin) in zip(owns, modules, strict=True):
            assert_gradients(own, twin)


@on_ranks(2)
def test_sparse_gradients(rank, ranks):
    model, twin = twins(lambda: nn.EmbeddingBag(4, 2, mode="sum", sparse=True))
    own = ShardedGradients(model, plain, sizes=[3, 5], reduce="sum")
    parts = [torch.tensor([[1, 1, 3]]), torch.zeros(0, 3, dtype=torch.int64)]
    with own.accumulate():
        model(parts[rank]).sum().backward()
    model(parts[rank]).sum().backward()
    dense = copy.deepcopy(twin.weight.detach()).requires_grad_()
    (2 * dense[torch.tensor([1, 1, 3])].sum()).backward()
    twin.weight.grad = dense.grad
    assert assert_gradients(own, twin) == [3, 5][rank]


@on_ranks(2)
def test_parameters_that_are_frozen_later(rank, ranks):
    """A parameter that is frozen after forward gets nothing, and is not stepped."""
    model = nn.Linear(2, 2)
    own = ShardedGradients(model, plain, reduce="sum")
    loss = model(torch.ones(1, 2)).sum()
    model.bias.requires_grad_(False)
    bias = model.bias.tolist()
    loss.backward()
    model(torch.ones(1, 2)).sum().backward()
    own.step()
    grads = {name: piece.value.grad for name, piece in own.pieces.items()}
    assert grads.get("bias") is None
    assert model.bias.tolist() == bias
    assert grads["weight"].unique().tolist() == [4.0]


@on_ranks(2)
def test_create_graph_is_refused(rank, ranks):
    """Where it is asked for; in debug() on all ranks."""
    said = r"backward.create_graph=True. would need derivatives"
    for debug in (False, True):
        model = nn.Linear(2, 2)
        own = ShardedGradients(model, plain, reduce="sum")
        loss = model(torch.ones(1, 2)).sum()
        with varcomm.debug() if debug else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, once per process
            if rank == 1:
                with pytest.raises(DisagreementError if debug else ArgumentError, match=said):
                    loss.backward(create_graph=True)
            else:
                loss.backward()
                if debug:
                    with pytest.raises(DisagreementError, match=r"rank 1: .*create_graph=True"):
                        own.reduce()
        for parameter in model.parameters():
            parameter.grad = None
        own.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        own.reduce()
        assert all(p.value.grad.eq(2).all() for p in own.pieces.values())
