"""Gradients of replicated modules are those of one process, whatever part a rank has in them."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import varcomm
from tests.data_parallel.cases import CASES, DOUBLE, Energy, Layers, rows, square
from tests.data_parallel.comparing import assert_same_gradients, replicated, seeded
from varcomm.data_parallel import replicate

WORLDS = (1, 2, 3, 5)
# one bucket a parameter; a few; one for all
BUCKETS = (1, 150, 25 * 2**20)


def as_alone(rank, ranks, name, bucket_bytes):
    """Two backwards, of which the second adds to the gradients of the first."""
    make, loss = CASES[name]
    model, twin = replicated(make, bucket_bytes=bucket_bytes)
    for _ in range(2):
        loss(model, rank, ranks).backward()
        sum(loss(twin, r, ranks) for r in range(ranks)).backward()
        assert_same_gradients(model, twin)
    return sum(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_as_in_one_process(worlds, ranks, name):
    for bucket_bytes in BUCKETS if ranks < 5 else BUCKETS[1:2]:
        learning = worlds.run(ranks, as_alone, ranks, name, bucket_bytes)
        assert learning == [learning[0]] * ranks
        assert learning[0] > 0


@pytest.mark.parametrize("name", ["layers", "branches", "energy and forces"])
def test_as_in_one_process_in_debug(worlds, name):
    assert len(set(worlds.run(3, in_debug, name))) == 1


def in_debug(rank, name):
    with varcomm.debug():
        return as_alone(rank, 3, name, 150)


def micro_batches(rank):
    """Two backwards with slope 1 on each of two ranks, after a gradient of 10 from before."""
    model = replicate(nn.Linear(1, 1, bias=False))
    model.weight.grad = torch.full((1, 1), 10.0)
    before = model.weight.grad
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()
    return model.weight.grad.item(), model.weight.grad is before


def test_micro_batches_are_summed_once(worlds):
    """A sum of what is in grad would sum the first one twice."""
    assert worlds.run(2, micro_batches) == [(14.0, True)] * 2


def trained(rank, ranks, set_to_none, dtype):
    """Train with momentum and weight decay, which tell no gradient from zeros."""
    torch.manual_seed(rank)  # rank 0 decides
    model = replicate(Layers().to(dtype), bucket_bytes=150)
    twin = copy.deepcopy(model).requires_grad_(True)
    twin._forward_hooks.clear()  # which refuses to train a copy
    for module, parts in ((model, [rank]), (twin, range(ranks))):
        optimizer = torch.optim.SGD(module.parameters(), 0.02, momentum=0.9, weight_decay=0.1)
        for step in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            for part in parts:
                square(module((rows(part, ranks) + step).to(dtype))).backward()
            optimizer.step()
    if dtype == DOUBLE:
        for own, one in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(own, one, rtol=1e-11, atol=1e-11)
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3])
def test_replicas_stay_equal_bit_for_bit(worlds, ranks, dtype):
    for set_to_none in (True, False):
        first, *others = worlds.run(ranks, trained, ranks, set_to_none, dtype)
        for parameters in others:
            assert all(map(torch.equal, first, parameters))


class Weight(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x):
        return self.weight * x


def narrow(rank, dtype, big):
    model = replicate(Weight(dtype))
    with varcomm.trace() as calls:
        model(torch.tensor([big if rank == 0 else 0.75], dtype=dtype)).backward()
    return model.weight.grad.item(), model.weight.grad.dtype == dtype, sum(c.sent for c in calls)


@pytest.mark.parametrize(("dtype", "big"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)])
def test_narrow_floats_are_summed_in_fp32_and_travel_narrow(worlds, dtype, big):
    """Beside `big` the spacing is 2, and 3/4 would be lost each time; two values to two ranks."""
    assert worlds.run(3, narrow, dtype, big) == [(big + 2, True, 2 * 2 * 2)] * 3


def in_a_part(rank):
    """Ranks 1 and 2 of three, which are 0 and 1 in their group."""
    group = dist.new_group([1, 2])
    result = None
    if rank:
        torch.manual_seed(rank)
        model = replicate(Layers(), group, bucket_bytes=150)
        weights = model.first.weight.sum().item()
        twin = copy.deepcopy(model)
        twin._forward_hooks.clear()
        square(model(rows(rank, 3))).backward()
        (square(twin(rows(1, 3))) + square(twin(rows(2, 3)))).backward()
        assert_same_gradients(model, twin)
        result = weights == seeded(Layers, 1).first.weight.sum().item()
    dist.barrier()
    return result


def test_subgroup_without_rank_0(worlds):
    assert worlds.run(3, in_a_part) == [None, True, True]


def frozen(rank):
    """One parameter learns no longer, then again; another only from some point on."""
    model, twin = replicated(Layers, bucket_bytes=150)
    model.first.weight.grad = None
    steps = []
    for module, parts in ((model, [rank]), (twin, [0, 1])):
        for step in range(3):
            module.first.weight.requires_grad_(step != 1)
            module.shared.bias.requires_grad_(step > 0)
            sum(square(module(rows(part, 2))) for part in parts).backward()
            steps.append(module.first.weight.grad.clone())
    assert_same_gradients(model, twin)
    torch.testing.assert_close(steps[:3], steps[3:], rtol=1e-12, atol=1e-12)
    return torch.equal(steps[0], steps[1]), torch.equal(steps[1], steps[2])


def test_parameters_that_are_frozen_for_some_time(worlds):
    assert worlds.run(2, frozen) == [(True, False)] * 2


def frozen_after_forward(rank):
    model = replicate(nn.Linear(2, 2))
    loss = model(torch.ones(1, 2)).sum()
    model.bias.requires_grad_(False)
    loss.backward()
    return model.bias.grad is None, model.weight.grad.tolist()


def test_a_parameter_frozen_after_forward_gets_nothing(worlds):
    assert worlds.run(2, frozen_after_forward) == [(True, [[2.0, 2.0]] * 2)] * 2


def nothing_learns(rank):
    model = replicate(nn.Linear(2, 2).requires_grad_(False))
    with varcomm.trace() as calls:
        out = model(torch.ones(1, 2))
        no_parameters = replicate(nn.Tanh())(torch.ones(1, 2))
        with torch.no_grad():
            learns = replicate(nn.Linear(2, 2), bucket_bytes=5)
            made = len(calls)
            evaluated = learns(torch.ones(1, 2))
    tied = [x.requires_grad for x in (out, no_parameters, evaluated)]
    return tied, len(calls) == made


def test_what_cannot_learn_is_left_as_it_is(worlds):
    assert worlds.run(2, nothing_learns) == [([False] * 3, True)] * 2


def sparse(rank):
    """Rank 1 uses no row."""
    model, twin = replicated(lambda: nn.EmbeddingBag(4, 2, mode="sum", sparse=True))
    parts = [torch.tensor([[1, 1, 3]]), torch.zeros(0, 3, dtype=torch.int64)]
    model(parts[rank]).sum().backward()
    twin(parts[0]).sum().backward()
    return torch.equal(model.weight.grad, twin.weight.grad.to_dense())


def test_sparse_gradients_become_dense(worlds):
    assert worlds.run(2, sparse) == [True, True]


def with_grad(rank):
    """torch.autograd.grad sums nothing, and leaves nothing behind."""
    model = replicate(nn.Linear(2, 1, bias=False))
    x = torch.ones(1, 2, requires_grad=True)
    with varcomm.trace() as calls:
        of_x, of_weight = torch.autograd.grad(model(x).sum() * rank, (x, model.weight))
    assert torch.equal(of_x, model.weight.detach() * rank)
    return of_weight.tolist(), model.weight.grad, calls


def test_autograd_grad_is_each_ranks_own(worlds):
    assert worlds.run(2, with_grad) == [([[float(r)] * 2], None, []) for r in range(2)]


def retained(rank):
    model, twin = replicated(Layers, bucket_bytes=150)
    loss = square(model(rows(rank, 2)))
    alone = sum(square(twin(rows(part, 2))) for part in range(2))
    for graph in (loss, alone):
        graph.backward(retain_graph=True)
        graph.backward()
    assert_same_gradients(model, twin)
    return model.first.weight.grad.abs().sum().item() > 0


def test_retained_graphs(worlds):
    assert worlds.run(2, retained) == [True, True]


def two_modules(rank):
    """One of them makes what the other takes; each has sums of its own."""
    (first, last), twins = zip(*(replicated(Energy, bucket_bytes=1) for _ in range(2)), strict=True)
    for models, parts in (((first, last), [rank]), (twins, range(3))):
        sum(models[1](models[0](rows(part, 3)) * rows(part, 3)) for part in parts).backward()
    assert_same_gradients(first, twins[0])
    assert_same_gradients(last, twins[1])
    return first.net[0].weight.grad.abs().sum().item() > 0


def test_two_replicated_modules_in_one_backward(worlds):
    assert worlds.run(3, two_modules) == [True] * 3
