"""Gradients of pieces: those of one process, however ranks come to them."""

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import varcomm
from tests.data_parallel.cases import CASES, DOUBLE, Fragile, Layers, backward, rows, square
from tests.data_parallel.sharded_cases import assert_gradients, plain, twins
from tests.worlds import WORLDS
from varcomm import ArgumentError, DisagreementError
from varcomm.data_parallel import GlobalCount, ShardedGradients

CUTS = ((1, "whole-parameters"), (150, "balanced"), (2**20, "balanced"))


def as_alone(rank, ranks, name, bucket_bytes, sizes, debug=False):
    """Two backwards, of which the second adds to the gradients of the first."""
    make, loss = CASES[name]
    model, twin = twins(make)
    own = ShardedGradients(model, plain, sizes=sizes, reduce="sum", bucket_bytes=bucket_bytes)
    for _ in range(2):
        with varcomm.debug() if debug else nullcontext():
            backward(loss(model, rank, ranks))
            own.reduce()
        sum(loss(twin, r, ranks) for r in range(ranks)).backward()
        elements = assert_gradients(own, twin)
    assert all(parameter.grad is None for parameter in model.parameters())
    own.close()
    return elements, sum(p.numel() for p in model.parameters())


def all_cases(rank, ranks):
    return {
        (name, *cut): as_alone(rank, ranks, name, *cut)
        for place, name in enumerate(CASES)
        for cut in (CUTS if ranks == 2 else [CUTS[place % 3], CUTS[(place + 1) % 3]])
    }


@pytest.mark.parametrize("ranks", WORLDS)
def test_as_in_one_process(worlds, ranks):
    """Checkpoints, forces, containers, dtypes; on ranks that use nothing, too."""
    results = worlds.run(ranks, all_cases, ranks)
    for (name, _, sizes), (_, total) in results[0].items():
        owned = [r[key][0] for r in results for key in r if key[0] == name and key[2] == sizes]
        assert sum(owned) % total == 0 < total
        assert sizes != "balanced" or max(owned) - min(owned) <= 1


@pytest.mark.parametrize("name", ["layers", "branches"])
def test_as_in_one_process_in_debug(worlds, name):
    (owned, total), (others, _) = worlds.run(2, as_alone, 2, name, 150, "balanced", True)
    assert owned + others == total


def without_elements(rank):
    """Parameters without elements, first, last, and alone of their dtype."""
    model = nn.ParameterList([torch.zeros(0), torch.ones(3), torch.zeros(0, 2)])
    model.append(nn.Parameter(torch.zeros(0).double()))
    given = list(model.named_parameters())
    own = ShardedGradients(given, plain, sizes=[1, 0, 2], reduce="sum", bucket_bytes=8)
    sum(p.sum() for p in model).backward()
    own.step()
    return {n: p.value.grad.tolist() for n, p in own.pieces.items()}


def test_parameters_without_elements(worlds):
    """Each is on one rank, with a gradient; a rank may own nothing."""
    first = {"1": [3.0], "0": [], "2": [], "3": []}
    assert worlds.run(3, without_elements) == [first, {}, {"1": [3.0, 3.0]}]


ORDERS = {
    (True, True): 4.0,  # and not 6, as if a sum were summed again
    (False, True): 4.0,
    (False, False, True, True): 8.0,
    (True, False, True, False): 8.0,
    (False,): 2.0,
}


def micro_batches(rank, debug):
    """Backwards with slope 1 on each of two ranks: sent at once, or left for the next."""
    found = []
    for order in ORDERS:
        model = nn.Linear(1, 1, bias=False)
        own = ShardedGradients(model, plain, sizes=[1, 0], reduce="sum")
        for syncs in order:
            with nullcontext() if syncs else own.no_sync():
                model(torch.ones(1, 1)).sum().backward()
        with varcomm.debug() if debug else nullcontext():
            own.reduce()
        assert model.weight.grad is None
        found.append([piece.value.grad.item() for piece in own.pieces.values()])
    return found


def test_orders_of_micro_batches(worlds):
    for debug in (False, True):
        summed = [[total] for total in ORDERS.values()]
        assert worlds.run(2, micro_batches, debug) == [summed, [[]] * len(ORDERS)]


def backwards_of_their_own(rank, ranks):
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
            with own.no_sync() if (number + step) % 3 == 1 else nullcontext():
                parts[number % 3](model, rank).backward()
        for r in range(ranks):
            for number in range(r):
                parts[number % 3](twin, r).backward()
        elements = assert_gradients(own, twin)
    return elements


@pytest.mark.parametrize("ranks", WORLDS)
def test_ranks_run_backwards_of_their_own(worlds, ranks):
    assert sum(worlds.run(ranks, backwards_of_their_own, ranks)) > 0


class Late(nn.Module):
    """A layer is used both in a reentrant checkpoint and after it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3).double()

    def forward(self, x):
        return self.layer(checkpoint(self.layer, x, use_reentrant=True))


def late(rank):
    model, twin = twins(Late)
    own = ShardedGradients(model, plain, reduce="sum", bucket_bytes=1)
    for part in (model, twin, twin):
        square(part(torch.ones(1, 3, dtype=DOUBLE, requires_grad=True))).backward()
    return assert_gradients(own, twin)


def test_a_parameter_inside_and_beside_a_reentrant_checkpoint(worlds):
    assert worlds.run(2, late) == [6, 6]


def dropped(rank, ranks, how):
    """A batch that ranks skip together leaves nothing, however far its sums have come."""
    model, twin = twins(Fragile)
    count = GlobalCount()
    own = ShardedGradients(model, plain, reduce=count, bucket_bytes=1)
    x = rows(rank + 1, ranks + 1).requires_grad_()
    count.add(1000)
    if how == "failed":  # rank 0 fails when all sums but one are begun, the others earlier
        with pytest.raises(ValueError, match="out of memory, say"):
            square(model(x, 1 if rank == 0 else 2)).backward()
    elif how == "no_sync":
        with own.no_sync():
            square(model(x)).backward()
    elif rank == 1:
        square(model(x)).backward()
    own.zero_grad()
    count.add(len(x))
    square(model(x)).backward()
    total = sum(r + 1 for r in range(ranks))
    (sum(square(twin(rows(r + 1, ranks + 1))) for r in range(ranks)) / total).backward()
    elements = assert_gradients(own, twin)
    count.add(1)
    own.zero_grad(set_to_none=False)  # drops no count: there is no other gradient
    square(model(x * 0)).backward()
    own.reduce()
    assert all(piece.value.grad is not None for piece in own.pieces.values())
    return elements


@pytest.mark.parametrize("how", ["failed", "no_sync", "one rank"])
def test_a_skipped_batch_leaves_nothing(worlds, how):
    assert sum(worlds.run(3, dropped, 3, how)) == 36


def inner(rank, set_to_none):
    """The optimizer's own zero_grad drops what has been summed."""
    model, _ = twins(lambda: nn.Linear(1, 1, bias=False))
    own = ShardedGradients(model, plain, sizes=[1, 0], reduce="sum", cpu_offload=True)
    model(torch.full((1, 1), 100.0)).sum().backward()
    own.reduce()
    own.optimizer.zero_grad(set_to_none)
    model(torch.ones(1, 1)).sum().backward()
    own.reduce()
    return [piece.value.grad.item() for piece in own.pieces.values()]


def test_the_inner_optimizer_drops_gradients(worlds):
    for set_to_none in (True, False):
        assert worlds.run(2, inner, set_to_none) == [[2.0], []]


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
    own.reduce()
    own.close()
    return [x for piece in own.pieces.values() for x in piece.value.grad.tolist()]


def all_reduced(rank):
    return [
        (dtype, each, reduced(rank, reduce, factor, dtype, in_fp32))
        for dtype, in_fp32 in (
            (torch.float32, True),
            (torch.bfloat16, True),
            (torch.bfloat16, False),
        )
        for factor in (None, 1, 4, 3.0)
        for reduce, each in (("mean", 6.0), ("sum", 18.0))
    ]


def test_mean_and_sum(worlds):
    for first, second, third in zip(*worlds.run(3, all_reduced), strict=True):
        dtype, each, values = first
        # thirds are not exact, and bfloat16 has 8 bits
        bound = 1e-6 if dtype == torch.float32 else 2**-7
        assert torch.tensor(values + third[2]).allclose(torch.tensor(each), rtol=bound)
        assert second[2] == []


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
        own.reduce()
    return [piece.value.grad.abs().tolist() for piece in own.pieces.values()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.complex128])
def test_mean_over_a_global_count(worlds, dtype):
    """More rows than float16 has numbers for: counts are exact in any dtype."""
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
    own.step()  # nothing to sum, and nothing to divide
    if not (forgets and rank):
        counts.add(1 if forgets else 0)
    model(torch.ones(1, 1)).sum().backward()
    said = "on 1 of 2 ranks GlobalCount.add was not" if forgets else "all ranks have counted 0 rows"
    with pytest.raises(ArgumentError, match=said):
        own.reduce()
    nothing = all(piece.value.grad is None for piece in own.pieces.values())
    counts.add(2)
    model(torch.ones(1, 1)).sum().backward()
    own.reduce()
    return nothing, [piece.value.grad.item() for piece in own.pieces.values()]


@pytest.mark.parametrize("forgets", [True, False])
def test_a_mean_over_nothing_is_refused_on_all_ranks(worlds, forgets):
    """And leaves nothing behind."""
    first, second = worlds.run(2, nothing_counted, forgets)
    assert first == (True, [0.5, 0.5])
    assert second == (True, [])


def in_any_order(rank, in_debug):
    """Ranks come to two of them in opposite orders."""
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
    return sum(assert_gradients(own, twin) for own, (_, twin) in zip(owns, modules, strict=True))


@pytest.mark.parametrize("in_debug", [False, True])
def test_two_to_which_ranks_come_in_other_orders(worlds, in_debug):
    assert sum(worlds.run(2, in_any_order, in_debug)) == 24


def sparse(rank):
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


def without_module(rank):
    model, twin = twins(lambda: nn.Linear(3, 2).double())
    own = ShardedGradients(list(model.parameters()), plain, sizes=[8, 0])
    assert set(own.pieces) <= {"0.0", "0.1"}
    if not rank:
        square(model(rows(1, 2))).backward()
    (square(twin(rows(1, 2))) / 2).backward()
    own.step()
    torch.optim.SGD(twin.parameters(), lr=0.01).step()
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-12, atol=1e-12)
    return len(own.pieces)


def with_grad(rank):
    """torch.autograd.grad sums nothing, and leaves nothing behind."""
    model = nn.Linear(2, 1, bias=False)
    own = ShardedGradients(model, plain)
    x = torch.ones(1, 2, requires_grad=True)
    with varcomm.trace() as calls:
        _, of_weight = torch.autograd.grad(model(x).sum() * rank, (x, model.weight))
        own.reduce()
    return of_weight.tolist(), [p.value.grad for p in own.pieces.values()], calls


def in_ddp(rank):
    """DistributedDataParallel around the model, later, finds no gradient to average."""
    model, twin = twins(lambda: nn.Linear(3, 2).double())
    own = ShardedGradients(model, plain, reduce="sum")
    ddp = DistributedDataParallel(model, process_group=dist.new_group())
    for _ in range(2):
        square(ddp(rows(rank + 1, 3))).backward()
        sum(square(twin(rows(r + 1, 3))) for r in range(2)).backward()
        assert_gradients(own, twin)


def test_other_ways_to_gradients(worlds):
    worlds.run(2, in_ddp)
    assert worlds.run(2, sparse) == [3, 5]
    assert worlds.run(2, without_module) == [2, 0]
    assert worlds.run(2, with_grad) == [([[float(r)] * 2], [None], []) for r in range(2)]


def in_a_part(rank):
    """Ranks 1 and 2 of three, which are 0 and 1 in their group."""
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


def frozen_later(rank):
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
    return model.bias.tolist() == bias, grads["weight"].unique().tolist()


def test_parameters_that_are_frozen_later(worlds):
    assert worlds.run(2, frozen_later) == [(True, [4.0])] * 2


def with_graph(rank, debug):
    """create_graph is refused where it is asked for; in debug() on all ranks."""
    model = nn.Linear(2, 2)
    own = ShardedGradients(model, plain, reduce="sum")
    loss = model(torch.ones(1, 2)).sum()
    with varcomm.debug() if debug else nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, once per process
        if rank == 1:
            error = DisagreementError if debug else ArgumentError
            with pytest.raises(error, match=r"backward.create_graph=True. would need derivatives"):
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
    return {x for p in own.pieces.values() for x in p.value.grad.flatten().tolist()}


@pytest.mark.parametrize("debug", [False, True])
def test_create_graph_is_refused(worlds, debug):
    assert worlds.run(2, with_graph, debug) == [{2.0}] * 2


def empty_step(rank):
    """Rows counted for a step without gradients do not divide the next step."""
    count = GlobalCount()
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = ShardedGradients([weight], lambda p: torch.optim.SGD(p, lr=1.0), reduce=count)
    count.add(4)
    optimizer.step()
    optimizer.zero_grad()
    count.add(2)
    weight.sum().backward()
    optimizer.step()
    optimizer.wait()
    return weight.tolist()


def test_a_step_without_gradients_ends_its_count(worlds):
    assert worlds.run(3, empty_step) == [[-0.5] * 4] * 3
