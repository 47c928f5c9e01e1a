"""Maps of rows in chunks: what they give and what they differentiate to."""

import pytest
import torch

from varcomm.tensor_parallel.cross_entropy.row_map import Chunks, Product, RowMap, in_chunks


@pytest.mark.parametrize(
    ("shape", "size", "count"),
    [
        ((), 1, 1),
        ((0,), 3, 1),
        ((2, 0, 3), 1, 1),
        ((7,), 3, 3),
        ((7,), 100, 1),
        ((4, 5), 10, 2),
        ((4, 5), 11, 2),
        ((4, 5), 3, 8),
        ((2, 3, 4), 4, 6),
        ((2, 3, 4), 1, 24),
    ],
)
def test_chunks_hold_each_row_once(shape, size, count):
    times = torch.zeros(shape)
    indices = list(Chunks(shape, size))
    for index in indices:
        times[index] += 1
        assert times[index].numel() <= size
    assert len(indices) == count
    assert bool((times == 1).all())


def forward(rows, shared):
    """One result and two sums, one of them as factors."""
    x, y = rows
    w, v = shared
    z = torch.tanh(x @ w.t())
    return (z.sum(-1) * y,), (Product((z * v).t(), x), (z**2).sum(0))


def whole(x, y, w, v):
    (result,), (product, squares) = forward((x, y), (w, v))
    return result, product.a @ product.b, squares


def chunked(size):
    def fn(x, y, w, v):
        return in_chunks(RowMap(forward, results=1), Chunks((len(x),), size), (x, y), (w, v))

    return fn


def inputs(rows=5):
    torch.manual_seed(0)
    shapes = ((rows, 3), (rows,), (4, 3), (4,))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_values_and_three_derivatives(size):
    xs = inputs()
    found = want = None
    for fn in (chunked(size), whole):
        outputs = fn(*xs)
        derivatives = [outputs]
        for _ in range(3):
            loss = sum((y**2).sum() for y in outputs)
            outputs = torch.autograd.grad(loss, xs, create_graph=True)
            derivatives.append(outputs)
        found, want = want, derivatives
    for some, others in zip(found, want, strict=True):
        for a, b in zip(some, others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_against_finite_differences():
    xs = inputs(3)
    assert torch.autograd.gradcheck(chunked(2), xs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(chunked(2), xs, check_fwd_over_rev=True)


def test_no_rows():
    result, product, squares = chunked(2)(*inputs(0))
    assert result.shape == (0,)
    assert product.tolist() == torch.zeros(4, 3).tolist()
    assert squares.tolist() == [0.0] * 4


def test_results_that_nothing_depends_on():
    """A map that does not use an input gives it zeros, as does a result that is not used."""
    of = RowMap(lambda rows, shared: ((rows[0] * 2, rows[1].detach()), ()), results=2)
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    first, second = in_chunks(of, Chunks((3,), 2), (x, y), ())
    (first + second).sum().backward()
    assert x.grad.tolist() == [2.0] * 3
    assert y.grad.tolist() == [0.0] * 3


def test_a_sum_that_is_an_input_is_not_written_into():
    of = RowMap(lambda rows, shared: ((), (shared[0],)), results=0)
    w = torch.ones(2)
    (total,) = in_chunks(of, Chunks((5,), 2), (torch.ones(5),), (w,))
    assert total.tolist() == [3.0, 3.0]  # once a chunk
    assert w.tolist() == [1.0, 1.0]


def test_inputs_of_any_strides():
    x = torch.arange(24.0).view(2, 3, 4).transpose(0, 1)
    of = RowMap(lambda rows, shared: ((rows[0] + shared[0],), ()), results=1)
    for size in range(1, 8):
        (result,) = in_chunks(of, Chunks((3, 2), size), (x,), (torch.ones(4),))
        assert torch.equal(result, x + 1)
