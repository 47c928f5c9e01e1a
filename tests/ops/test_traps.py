"""Traps that others fell into, each by its name."""

import pytest
import torch
import torch.distributed as dist

import varcomm


def two_micro_batches(rank):
    weight = torch.nn.Parameter(torch.ones(1))
    for _ in range(2):
        weight.sum().backward()
    varcomm.data_parallel.sum_gradients([weight])
    return weight.grad.item()


def test_all_reduce_of_an_accumulated_gradient(worlds):
    assert worlds.run(2, two_micro_batches) == [4.0, 4.0]


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


def roots_in_subgroups(rank):
    groups = {members: dist.new_group(members) for members in ((1, 2), (0, 2))}
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
    answers = worlds.run(3, roots_in_subgroups)
    assert answers[0] == {(0, 2): [[2.0], [], [0], [0.0], [2.0]]}
    assert answers[1] == {(1, 2): [[2.0], [], [1], [0.0], [2.0]]}
    assert answers[2] == {
        (1, 2): [[2.0], [1.0, 2.0], [2], [3.0], [4.0]],
        (0, 2): [[2.0], [0.0, 2.0], [2], [2.0], [4.0]],
    }


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
