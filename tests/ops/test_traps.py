"""Traps of other libraries, each by its name, that no other test covers."""

import torch

import varcomm


def of_a_strided_gradient(rank):
    weight = torch.ones(3, 2).t().requires_grad_()
    weight.grad = (torch.arange(6.0) + rank).view(2, 3).t().contiguous().t()
    total = varcomm.all_reduce(weight.grad)
    varcomm.data_parallel.sum_gradients([weight])
    return weight.grad.is_contiguous(), weight.grad.flatten().tolist(), total.flatten().tolist()


def test_all_reduce_of_a_contiguous_copy(worlds):
    sums = [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]
    assert worlds.run(2, of_a_strided_gradient) == [(False, sums, sums)] * 2


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


def test_size_zero_as_end_of_shape(worlds):
    for shape in ((3, 0, 5), (0, 3), (3, 0), (1, 0, 0, 2)):
        twice = (2 * shape[0], *shape[1:])
        assert worlds.run(2, shapes_of, shape) == [[shape, shape, shape, shape, twice]] * 2
