"""What each rank gets of the gradients is what one process has there."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import varcomm
from tests.data_parallel.cases import CASES, Layers, rows, square
from tests.data_parallel.sharded_cases import assert_gradients, plain, twins
from varcomm import ArgumentError
from varcomm.data_parallel import GlobalCount
from varcomm.data_parallel.sharded import ShardedGradients


def as_alone(rank, ranks, name, bucket_bytes, sizes, debug=False):
    """Two backwards, of which the second adds to the gradients of the first."""
    make, loss = CASES[name]
    model, twin = twins(make)
    own = ShardedGradients(model, plain, sizes=sizes, reduce="sum", bucket_bytes=bucket_bytes)
    with varcomm.debug() if debug else nullcontext():
        for _ in range(2):
            loss(model, rank, ranks).backward()
            sum(loss(twin, r, ranks) for r in range(ranks)).backward()
            elements = assert_gradients(own, twin)
    assert all(parameter.grad is None for parameter in model.parameters())
    return elements, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", CASES)
def test_as_in_one_process(worlds, ranks, name):
    """Checkpoints, forces, containers, dtypes; on ranks that use nothing, too."""
    for bucket_bytes, sizes in ((1, "whole-parameters"), (150, "balanced"), (2**20, "balanced")):
        if ranks in (2, 3) or bucket_bytes == 150:
            results = worlds.run(ranks, as_alone, ranks, name, bucket_bytes, sizes)
            owned, totals = zip(*results, strict=True)
            assert sum(owned) == totals[0] > 0
            if sizes == "balanced":
                assert max(owned) - min(owned) <= 1


@pytest.mark.parametrize("name", ["layers", "branches"])
def test_as_in_one_process_in_debug(worlds, name):
    (owned, total), (others, _) = worlds.run(2, as_alone, 2, name, 150, "balanced", True)
    assert owned + others == total


def without_elements(rank):
    """Parameters without elements, first, last, and alone of their dtype."""
    model = nn.ParameterList([torch.zeros(0), torch.ones(3), torch.zeros(0, 2)])
    model.append(nn.Parameter(torch.zeros(0).double()))
    given = list(model.named_parameters())
    own = ShardedGradients(given, plain, sizes=[1, 2], reduce="sum", bucket_bytes=8)
    sum(p.sum() for p in model).backward()
    own.step()
    return [p.grad for p in model], {n: p.value.grad.tolist() for n, p in own.pieces.items()}


def test_parameters_without_elements(worlds):
    """Each is on one rank, with a gradient."""
    none, empty = [None] * 4, {"0": [], "2": [], "3": []}
    first, second = {"1": [2.0], **empty}, {"1": [2.0, 2.0]}
    assert worlds.run(2, without_elements) == [(none, first), (none, second)]


def more_ranks_than_elements(rank):
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    own = ShardedGradients(model, plain, sizes=[0, 0, 1])
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    own.step()
    return len(own.pieces), model.weight.item()


def test_more_ranks_than_elements(worlds):
    assert [n for n, _ in worlds.run(3, more_ranks_than_elements)] == [0, 0, 1]
    assert {round(w, 6) for _, w in worlds.run(3, more_ranks_than_elements)} == {0.98}


def micro_batches(rank, orders):
    """Backwards with slope 1 on each of two ranks: summed at once, or left for the next."""
    found = []
    for order in orders:
        model = nn.Linear(1, 1, bias=False)
        own = ShardedGradients(model, plain, sizes=[1, 0], reduce="sum")
        for syncs in order:
            with nullcontext() if syncs else own.no_sync():
                model(torch.ones(1, 1)).sum().backward()
        left = model.weight.grad
        grads = [piece.value.grad for piece in own.pieces.values()]
        found.append((left and left.item(), [g if g is None else g.item() for g in grads]))
    return found


ORDERS = {
    (True, True): (None, 4.0),  # and not 6, as where what has been summed is summed again
    (False, True): (None, 4.0),
    (False, False, True, True): (None, 8.0),
    (True, False, True, False): (1.0, 6.0),
    (False,): (1.0, None),
}


def test_orders_of_micro_batches(worlds):
    first, second = worlds.run(2, micro_batches, list(ORDERS))
    assert first == [(left, [summed]) for left, summed in ORDERS.values()]
    assert second == [(left, []) for left, _ in ORDERS.values()]


def left_over(rank):
    """What one backward has used in no_sync, and the next has not, is summed with it."""
    model, twin = twins(lambda: nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 2)]).double())
    own = ShardedGradients(model.named_parameters(), plain, reduce="sum", bucket_bytes=1)
    x = torch.ones(1, 2).double()
    with own.no_sync():
        square(model[1](model[0](x) * rank)).backward()
    square(model[0](x)).backward()
    for r in range(2):
        square(twin[1](twin[0](x) * r)).backward()
        square(twin[0](x)).backward()
    assert_gradients(own, twin)
    with own.no_sync():
        square(model[0](x)).backward()
    own.zero_grad()
    empty = [piece.value.grad for piece in own.pieces.values()], model[0].weight.grad
    square(model[0](x)).backward()
    twin.zero_grad()
    (2 * square(twin[0](x))).backward()
    assert_gradients(own, twin)
    return all(x is None for x in empty[0]) and empty[1] is None


def test_gradients_of_no_sync_are_summed_with_the_next_or_dropped(worlds):
    assert worlds.run(2, left_over) == [True, True]


def zeroed(rank, by):
    model = nn.Linear(2, 2)
    own = ShardedGradients(model, plain, reduce="sum")
    for _ in range(2):
        {"own": own.zero_grad, "inner": own.optimizer.zero_grad}[by]()
        own.zero_grad(set_to_none=False) if by == "own" else None
        model(torch.ones(1, 2)).sum().backward()
    own_grads = [piece.value.grad.unique().tolist() for piece in own.pieces.values()]
    own.zero_grad(set_to_none=False)
    return own_grads, [piece.value.grad.any().item() for piece in own.pieces.values()]


@pytest.mark.parametrize("by", ["own", "inner"])
def test_zero_grad(worlds, by):
    for summed, left in worlds.run(2, zeroed, by):
        assert {x for values in summed for x in values} == {2.0}
        assert not any(left)


def reduced(rank, reduce, factor, dtype, in_fp32):
    model = nn.Linear(1, 3, bias=False).to(dtype)
    own = ShardedGradients(
        model,
        plain,
        sizes=[1, 0, 2],
        reduce=reduce,
        gradient_predivide_factor=factor,
        fp32_reduce_scatter=in_fp32,
        fp32_masters=False,
    )
    model(torch.full((1, 1), 3.0 * (rank + 1), dtype=dtype)).sum().backward()
    return [piece.value.grad.tolist() for piece in own.pieces.values()]


@pytest.mark.parametrize("in_fp32", [True, False])
@pytest.mark.parametrize("factor", [None, 1, 4, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mean_and_sum(worlds, factor, dtype, in_fp32):
    for reduce, each in (("mean", 6.0), ("sum", 18.0)):
        first, second, third = worlds.run(3, reduced, reduce, factor, dtype, in_fp32)
        assert second == []
        # thirds are not exact, and bfloat16 has 8 bits
        bound = 1e-6 if dtype == torch.float32 else 2**-7
        assert torch.tensor([*first[0], *third[0]]).allclose(torch.tensor(each), rtol=bound)


class Slope(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3, dtype=dtype))
        self.bias = nn.Parameter(torch.ones(2, dtype=dtype))

    def forward(self, n):
        return n * (self.weight.sum() + self.bias.sum()).abs()


def counted(rank, dtype, bucket_bytes):
    """A slope of 1 in no_sync, with a count of 100,000, and one of the rank's number."""
    model = Slope(dtype)
    counts = GlobalCount()
    own = ShardedGradients(model, plain, sizes=[3, 0, 5], reduce=counts, bucket_bytes=bucket_bytes)
    for _ in range(2):
        with own.no_sync():
            counts.add(100_000)
            model(1).backward()
        counts.add(rank)
        model(rank).backward()
    return [piece.value.grad.abs().tolist() for piece in own.pieces.values()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.complex128])
def test_mean_over_a_global_count(worlds, dtype):
    """More rows than float16 has numbers for: what is counted is exact in any dtype."""
    for bucket_bytes in (1, 2**20):
        first, second, third = worlds.run(3, counted, dtype, bucket_bytes)
        values = torch.tensor([x for part in (*first, *third) for x in part])
        assert second == []
        assert values.shape == (8,)
        assert values.allclose(torch.tensor(2 * 6 / 300_003), rtol=1e-6, atol=0)


def nothing_counted(rank, forgets):
    model = nn.Linear(1, 1)
    counts = GlobalCount()
    own = ShardedGradients(model, plain, sizes=[2, 0], reduce=counts)
    if not (forgets and rank):
        counts.add(1 if forgets else 0)
    said = "on 1 of 2 ranks GlobalCount.add was not" if forgets else "all ranks have counted 0 rows"
    with pytest.raises(ArgumentError, match=f"^ShardedGradients on rank {rank} of 2: {said}"):
        model(torch.ones(1, 1)).sum().backward()
    nothing = all(piece.value.grad is None for piece in own.pieces.values())
    counts.add(2)
    model(torch.ones(1, 1)).sum().backward()
    return nothing, [piece.value.grad.item() for piece in own.pieces.values()]


@pytest.mark.parametrize("forgets", [True, False])
def test_a_mean_over_nothing_is_refused_on_all_ranks(worlds, forgets):
    """And leaves nothing behind."""
    first, second = worlds.run(2, nothing_counted, forgets)
    assert first == (True, [0.5, 0.5])
    assert second == (True, [])


def in_any_order(rank, in_debug):
    """Ranks come to two of them in opposite orders, with one count for both."""
    count = GlobalCount()
    modules = [twins(lambda: nn.Linear(3, 3).double()) for _ in range(2)]
    named = [list(model.named_parameters()) for model, _ in modules]
    owns = [ShardedGradients(given, plain, reduce=count, bucket_bytes=1) for given in named]
    x = torch.ones(1, 3).double()
    first, last = [model for model, _ in modules][:: 1 if rank else -1]
    count.add(rank + 1)
    with varcomm.debug() if in_debug else nullcontext():
        # nobody reaches all of both, so that sums are left for the end
        square(last(first.weight.sum(0)) @ x[0]).backward()
    a, b = (twin for _, twin in modules)
    ((square(b(a.weight.sum(0)) @ x[0]) + square(a(b.weight.sum(0)) @ x[0])) / 3).backward()
    return sum(assert_gradients(own, twin) for own, (_, twin) in zip(owns, modules, strict=True))


@pytest.mark.parametrize("in_debug", [False, True])
def test_two_of_them_in_another_order_on_another_rank(worlds, in_debug):
    assert sum(worlds.run(2, in_any_order, in_debug)) == 24


def sparse(rank):
    """Rank 1 uses no row; the gradient of no_sync is sparse as well."""
    model, twin = twins(lambda: nn.EmbeddingBag(4, 2, mode="sum", sparse=True))
    own = ShardedGradients(model, plain, sizes=[3, 5], reduce="sum")
    parts = [torch.tensor([[1, 1, 3]]), torch.zeros(0, 3, dtype=torch.int64)]
    with own.no_sync():
        model(parts[rank]).sum().backward()
    model(parts[rank]).sum().backward()
    dense = copy.deepcopy(twin.weight.detach()).requires_grad_()
    (2 * dense[torch.tensor([1, 1, 3])].sum()).backward()
    twin.weight.grad = dense.grad
    return assert_gradients(own, twin)


def test_sparse_gradients_become_dense(worlds):
    assert worlds.run(2, sparse) == [3, 5]


def in_a_part(rank):
    """Ranks 1 and 2 of three, which are 0 and 1 in their group; there is no lane for them."""
    group = dist.new_group([1, 2])
    elements = None
    if rank:
        model, twin = twins(Layers)
        own = ShardedGradients(model, plain, group, reduce="sum", bucket_bytes=150)
        square(model(rows(rank, 3))).backward()
        (square(twin(rows(1, 3))) + square(twin(rows(2, 3)))).backward()
        elements = assert_gradients(own, twin)
        own.step()
        torch.optim.SGD(twin.parameters(), lr=0.01).step()
        for mine, one in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, one, rtol=1e-12, atol=1e-12)
    dist.barrier()
    return elements


def test_subgroup_without_rank_0(worlds):
    none, first, second = worlds.run(3, in_a_part)
    assert none is None
    assert abs(first - second) <= 1


def without_module(rank):
    model, twin = twins(lambda: nn.Linear(3, 2).double())
    own = ShardedGradients(list(model.parameters()), plain, sizes=[8, 0])
    assert set(own.pieces) <= {"0.0", "0.1"}
    square(model(rows(rank, 2) + 1) + 0 * model.weight.sum()).backward()
    (sum(square(twin(rows(r, 2) + 1)) for r in range(2)) / 2).backward()
    own.step()
    torch.optim.SGD(twin.parameters(), lr=0.01).step()
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-12, atol=1e-12)
    return len(own.pieces)


def test_parameters_without_a_module(worlds):
    assert worlds.run(2, without_module) == [2, 0]


def with_grad(rank):
    """torch.autograd.grad sums nothing, and leaves nothing behind."""
    model = nn.Linear(2, 1, bias=False)
    own = ShardedGradients(model, plain)
    x = torch.ones(1, 2, requires_grad=True)
    with varcomm.trace() as calls:
        _, of_weight = torch.autograd.grad(model(x).sum() * rank, (x, model.weight))
    return of_weight.tolist(), [p.value.grad for p in own.pieces.values()], calls


def test_autograd_grad_is_each_ranks_own(worlds):
    assert worlds.run(2, with_grad) == [([[float(r)] * 2], [None], []) for r in range(2)]
