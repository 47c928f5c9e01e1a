"""Traps that others fell into, each by its name."""

import pytest
import torch
import torch.distributed as dist

import varcomm
from varcomm import ExchangePlan, ShardSizes


def gathered_along_each_dim(rank):
    whole = torch.arange(24.0).view(2, 3, 4)
    for dim, sizes in ((0, [2, 0]), (1, [1, 2]), (2, [1, 3]), (-1, [0, 4])):
        shard = whole.split(sizes, dim)[rank].clone()
        assert torch.equal(varcomm.all_gather_v(shard, sizes, dim), whole)
        picked = [torch.arange(sizes[rank]) if r == 1 - rank else torch.arange(0) for r in (0, 1)]
        counts = [[0, sizes[0]], [sizes[1], 0]]
        other = whole.split(sizes, dim)[1 - rank]
        assert torch.equal(varcomm.indexed_all_to_all_v(shard, picked, counts, dim=dim), other)


def test_forward_ignores_dim(worlds):
    assert worlds.run(2, gathered_along_each_dim) == [None] * 2


def second_derivative_of_cubes(rank):
    x = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    whole = varcomm.all_gather_v(x, [1, 1, 1])
    (first,) = torch.autograd.grad((whole**3).sum(), x, create_graph=True)
    return torch.autograd.grad(first, x)[0].item()


def test_backward_built_from_raw_collectives(worlds):
    """On 3 ranks the losses add up to 3 (x0^3 + x1^3 + x2^3); one rank alone has 6 x = 12."""
    assert worlds.run(3, second_derivative_of_cubes) == [36.0] * 3


def off_the_root(rank):
    """Fill freed memory with NaN first: whatever is not initialised is likely to be there."""
    for _ in range(8):
        torch.full((64, 64), torch.nan)
    x = torch.ones(64, 64, requires_grad=True)
    reduced = varcomm.reduce(x, dst=1)
    parameter = torch.ones(64, 64, requires_grad=True)
    (varcomm.broadcast(x, src=1) * parameter + reduced).sum().backward()
    scattered = torch.ones(64, 64, requires_grad=True)
    varcomm.scatter_v(scattered, [32, 32], src=1).sum().backward()
    gathered = varcomm.gather_v(x[:32], [32, 32], dst=1)
    tensors = (reduced, parameter.grad, x.grad, scattered.grad, gathered)
    return [tensor.sum().item() for tensor in tensors]


def test_uninitialised_memory_off_the_root(worlds):
    off, at = worlds.run(2, off_the_root)
    n = 64.0 * 64
    assert off == [0.0, n, n, 0.0, 0.0]
    assert at == [2 * n, n, 3 * n, n, n]


def one_way(rank):
    """Rank 0 sends to 1 and 1 to 2, and nobody back: lists that are symmetric nowhere."""
    x = torch.full((2, 1), rank + 1.0, requires_grad=True)
    indices = [
        torch.tensor([1, 0, 1] if r == rank + 1 else [], dtype=torch.int64) for r in (0, 1, 2)
    ]
    plan = ExchangePlan.from_indices(indices, 2)
    y = plan(x)
    y.sum().backward()
    return y.flatten().tolist(), x.grad.flatten().tolist(), plan.recv_counts


def test_halo_lists_of_directed_graphs(worlds):
    assert worlds.run(3, one_way) == [
        ([], [1.0, 2.0], (0, 0, 0)),
        ([1.0] * 3, [1.0, 2.0], (3, 0, 0)),
        ([2.0] * 3, [0.0, 0.0], (0, 3, 0)),
    ]


def in_sender_order(rank):
    """Rank 2 lists rows out of order, and more than once; ranks 0 and 1 interleave with it."""
    rows = {0: [1, 0], 1: [0], 2: [2, 0, 2]}[rank]
    indices = [torch.tensor(rows if r == 0 else [], dtype=torch.int64) for r in range(3)]
    x = torch.arange(3) + 10 * rank
    sizes = [[2, 0, 0], [1, 0, 0], [3, 0, 0]]
    received = varcomm.indexed_all_to_all_v(x, indices, sizes)
    assert torch.equal(received, ExchangePlan.from_indices(indices, 3)(x))
    return received.tolist()


def test_rows_come_rank_by_rank_in_the_order_of_the_sender(worlds):
    assert worlds.run(3, in_sender_order) == [[1, 0, 10, 22, 20, 22], [], []]


def two_micro_batches(rank):
    weight = torch.nn.Parameter(torch.ones(1))
    for _ in range(2):
        weight.sum().backward()
    varcomm.data_parallel.sum_gradients([weight])
    return weight.grad.item()


def test_all_reduce_of_an_accumulated_gradient(worlds):
    assert worlds.run(2, two_micro_batches) == [4.0, 4.0]


def through_an_identity(rank):
    """The gradients of both copies come in as one tensor."""
    a = torch.ones(2, requires_grad=True)
    b = torch.ones(2, requires_grad=True)
    (varcomm.all_reduce(a) + varcomm.all_reduce(b)).sum().backward()
    return a.grad.tolist(), b.grad.tolist()


def test_all_reduce_in_place_on_the_incoming_gradient(worlds):
    assert worlds.run(2, through_an_identity) == [([2.0, 2.0], [2.0, 2.0])] * 2


def of_an_activation_that_is_saved(rank):
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    varcomm.all_reduce(torch.exp(x)).sum().backward()  # exp saves its result
    large = torch.zeros(20_000, dtype=torch.float64, requires_grad=True)
    (varcomm.all_reduce(large.exp())).sum().backward()
    reduced = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    varcomm.reduce(torch.exp(reduced)).sum().backward()
    return x.grad.tolist(), float(large.grad.min()), float(large.grad.max()), reduced.grad.tolist()


def test_all_reduce_in_place_on_a_saved_activation(worlds):
    assert worlds.run(3, of_an_activation_that_is_saved) == [([3.0] * 2, 3.0, 3.0, [1.0] * 2)] * 3


def of_a_strided_gradient(rank):
    x = torch.arange(6.0).view(2, 3) + rank
    weight = torch.arange(6.0).view(3, 2).t().requires_grad_()  # its gradient is strided as well
    (weight * x).sum().backward()
    weight.grad = weight.grad.t().contiguous().t()
    varcomm.data_parallel.sum_gradients([weight])
    return weight.grad.is_contiguous(), weight.grad.flatten().tolist(), varcomm.all_reduce(x.t())


def test_all_reduce_of_a_contiguous_copy(worlds):
    for contiguous, gradient, total in worlds.run(2, of_a_strided_gradient):
        assert not contiguous
        assert gradient == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]
        assert total.t().flatten().tolist() == gradient


def exact(rank):
    """Values that fp32 cannot hold: their digits, their imaginary part, their size."""
    xs = (
        torch.tensor([1 + 2.0**-40 * rank], dtype=torch.float64),
        torch.tensor([1 + 2j * rank], dtype=torch.complex64),
        torch.tensor([1 + 2j + 2.0**-40], dtype=torch.complex128),
        torch.tensor([2**53 + rank]),
    )
    plan = ExchangePlan.from_needed(torch.tensor([0]), [1, 0])
    return [
        [op(x).tolist() for x in xs]
        for op in (
            varcomm.all_reduce,
            lambda x: varcomm.reduce_scatter_v(x, [1, 0]),
            plan.adjoint,
        )
    ]


def test_float_on_everything(worlds):
    at_first, elsewhere = worlds.run(2, exact)
    want = [[2 + 2.0**-40], [2 + 2j], [2 + 4j + 2.0**-39], [2**54 + 1]]
    assert at_first == [want] * 3
    assert elsewhere == [want, [[]] * 4, [[]] * 4]


def with_empty_shards(rank):
    sizes = [0, 3, 0]
    x = torch.full((sizes[rank], 2), 2.0, requires_grad=True)
    y = varcomm.all_gather_v(x, sizes)
    back = varcomm.reduce_scatter_v(y, sizes)
    plan = ExchangePlan.from_needed(torch.arange(0 if rank == 1 else 2), sizes)
    (back.sum() + plan(x).sum()).backward()
    return x.grad.tolist()


def test_empty_shard_skips_a_collective(worlds):
    empty, full, last = worlds.run(3, with_empty_shards)
    assert empty == last == []
    assert full == [[5.0, 5.0], [5.0, 5.0], [3.0, 3.0]]


def roots_in_subgroups(rank):
    groups = {members: dist.new_group(members) for members in ((1, 2), (2, 3, 4))}
    answers = {}
    for members, group in groups.items():
        if rank in members:
            x = torch.tensor([float(rank)], requires_grad=True)
            root = len(members) - 1
            sizes = [1] * len(members)
            y = varcomm.broadcast(x if rank == members[-1] else None, root, group=group)
            whole = varcomm.gather_v(x, sizes, dst=root, group=group)
            shard = varcomm.scatter_v(
                torch.tensor(members) if rank == members[-1] else None, sizes, 0, root, group
            )
            total = varcomm.reduce(x, dst=root, group=group)
            (y.sum() + whole.sum() + total.sum()).backward()
            answers[members] = [t.tolist() for t in (y, whole, shard, total, x.grad)]
    return answers


def test_group_rank_where_torch_wants_a_global_rank(worlds):
    answers = worlds.run(5, roots_in_subgroups)
    assert answers[0] == {}
    assert answers[1] == {(1, 2): [[2.0], [], [1], [0.0], [2.0]]}
    assert answers[2] == {
        (1, 2): [[2.0], [1.0, 2.0], [2], [3.0], [4.0]],
        (2, 3, 4): [[4.0], [], [2], [0.0], [2.0]],
    }
    assert answers[4] == {(2, 3, 4): [[4.0], [2.0, 3.0, 4.0], [4], [9.0], [5.0]]}


def test_rest_to_the_last_rank():
    assert ShardSizes.balanced(14, 8) == (2, 2, 2, 2, 2, 2, 1, 1)


def shapes_of(rank, shape):
    x = torch.ones(shape)
    scattered = torch.ones(2 * shape[0], *shape[1:]) if rank == 1 else None
    return [
        tuple(y.shape)
        for y in (
            varcomm.broadcast(x if rank == 1 else None, src=1),
            varcomm.scatter_v(scattered, [shape[0]] * 2, src=1),
            varcomm.all_reduce(x),
            varcomm.reduce(x),
            varcomm.all_gather_v(x, [shape[0]] * 2),
        )
    ]


@pytest.mark.parametrize("shape", [(3, 0, 5), (0, 3), (3, 0), (1, 0, 0, 2)])
def test_size_zero_as_end_of_shape(worlds, shape):
    twice = (2 * shape[0], *shape[1:])
    assert worlds.run(2, shapes_of, shape) == [[shape, shape, shape, shape, twice]] * 2
