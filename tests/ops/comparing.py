"""What inputs may look like in memory, and how results are compared with a reference."""

from contextlib import contextmanager
from itertools import chain

import torch


def widened(x):
    """Return `x` in the dtype in which the reference is computed."""
    if x is None or x.dtype == torch.bool or not (x.is_floating_point() or x.is_complex()):
        return x
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


# The bound on a sum of at most 16 terms (more never meet in these cases), each rank's magnitudes
# being known: 16 roundings in the dtype that sums, and one to the dtype of the result.
TERMS = 16


def error_beyond_bound(case, inputs, rank, got):
    """Return how `got` differs from the reference by more than it may: "" if it does not."""
    want = case.reference([widened(x) for x in inputs] if case.sums else inputs)[rank]
    dtype = next(x.dtype for x in inputs if x is not None)
    if got.dtype != dtype or got.shape != want.shape:
        return f"{got.dtype} {tuple(got.shape)} in place of {dtype} {tuple(want.shape)}"
    if not (case.sums and (dtype.is_floating_point or dtype.is_complex)):
        return "" if torch.equal(got, want) else f"{got} in place of {want}"
    magnitudes = case.reference([widened(x).abs() for x in inputs])[rank]
    return _beyond_bound(got, want, magnitudes)


def _beyond_bound(got, want, magnitudes):
    """Compare a sum with the wide reference, of whose terms the magnitudes are summed as well."""
    summed_in = max(got.dtype, torch.float32, key=lambda d: d.itemsize)
    bound = TERMS * torch.finfo(summed_in).eps * magnitudes
    bound = bound + torch.finfo(got.dtype).eps / 2 * want.abs()
    error = (widened(got) - want).abs()
    return "" if bool((error <= bound).all()) else f"off by {error.max()}, allowed {bound.max()}"


def gradient_beyond_bound(case, inputs, weights, rank, got):
    """Return how a gradient differs from that of one process, as :func:`error_beyond_bound`."""

    def gradient(change):
        given = [x if x is None else change(widened(x.detach())).requires_grad_() for x in inputs]
        return twin_gradients(case, given, [change(widened(w)) for w in weights])[rank]

    want, magnitudes = gradient(torch.clone), gradient(torch.abs)  # an adjoint sums weights
    if want is None:  # a rank without an input
        return "" if not got.any() else f"{got} in place of zeros"
    if got.shape != want.shape:
        return f"{tuple(got.shape)} in place of {tuple(want.shape)}"
    return _beyond_bound(got, want, magnitudes)


def twin_gradients(case, inputs, weights):
    """Differentiate the reference in one process: the gradients of all ranks, None for no input."""
    given = [x for x in inputs if x is not None]
    pairs = zip(case.reference(inputs), weights, strict=True)
    outputs, weights = zip(*((y, w) for y, w in pairs if y.requires_grad), strict=True)
    found = iter(torch.autograd.grad(outputs, given, weights, materialize_grads=True))
    return [None if x is None else next(found) for x in inputs]


def transposed(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def strided(x):
    out = x.new_zeros([2 * n for n in x.shape])[tuple(slice(None, None, 2) for _ in x.shape)]
    return out.copy_(x)


def expanded(x):
    """Repeat the first entry along some dimension, so that memory overlaps."""
    axis = next((axis for axis, n in enumerate(x.shape) if n > 1), None)
    return x if axis is None else x.narrow(axis, 0, 1).expand(x.shape)


def conjugate(x):
    return x.conj().resolve_conj().conj()


def negative(x):
    return x if x.is_complex() else torch.complex(torch.zeros_like(x), -x).conj().imag


LAYOUTS = {f.__name__: f for f in (transposed, strided, expanded, conjugate, negative)}


class Failures(list):
    """What went wrong on a rank, named; several cases share one job."""

    @contextmanager
    def named(self, *words):
        """Collect assertions. All communication of a case comes before its first own assert."""
        try:
            yield
        except AssertionError as error:
            self.append(f"{', '.join(map(str, words))}: {error}")


def assert_none(results):
    """Assert that no rank has failures."""
    failures = list(
        chain.from_iterable(
            [f"rank {rank}: {text}" for text in texts] for rank, texts in enumerate(results)
        )
    )
    assert not failures, "\n".join(failures[:20])
