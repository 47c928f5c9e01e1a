"""A function of a field beside the same on one process: results, gradients, second derivatives."""

import itertools
import random

import torch

import varcomm as vc
from tests.grid.functions import FUNCTIONS, M, N

ROWS_ONLY = ("fold", "tokens of an image")  # refused where columns are split


# of which torch has no second derivative on CPUs
FIRST_ONLY = ("attention", "causal attention", "hardsigmoid")


def derivatives(function, x, parameters, reduce, second=True):
    """Return the result, gradients and second derivatives; `reduce` sums those of parameters."""
    out = function(x, *parameters)
    loss = (out * _numbers(out, 0.5, 1.5)).sum() + out.square().sum()
    leaves = [x, *parameters]
    first = _gradients(loss, leaves, reduce, create_graph=second)
    if not second:
        return [out, *first]
    scalar = sum((g * _numbers(g, -0.5, 1)).sum() for g in reversed(first))
    if not scalar.requires_grad:
        return [out, *first]
    return [out, *first, *_gradients(scalar, leaves, reduce)]


def _numbers(like, low, high):
    return torch.linspace(low, high, like.numel(), dtype=like.dtype).view(like.shape)


def _gradients(loss, leaves, reduce, **how):
    found = torch.autograd.grad(loss, leaves, allow_unused=True, **how)
    zeros = zip(found, leaves, strict=True)
    own, *others = [torch.zeros_like(leaf) if g is None else g for g, leaf in zeros]
    return [own, *map(reduce, others)]


def apart(found, expected):
    """Return the largest difference, in units of the largest expected value."""
    found = found.gather() if isinstance(found, vc.grid.Field) else found
    found, expected = found.detach(), expected.detach()
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    same = (found == expected) | expected.isnan()  # of which torch has no value
    difference = (found - expected).masked_fill(same, 0).abs().max()
    return float(difference / expected.nan_to_num(0, 0, 0).abs().max().clamp_min(1.0))


def lengths_of(draw, spatial, dims, ranks):
    """Draw the rows of each rank along some dimensions, zeros included."""
    sizes = [None] * len(spatial)
    for dim, count in zip(dims, ranks, strict=True):
        cuts = sorted(draw.randint(0, spatial[dim]) for _ in range(count - 1))
        ends = [0, *cuts, spatial[dim]]
        sizes[dim] = [b - a for a, b in itertools.pairwise(ends)]
    return sizes


def compare(name, seed, ranks, mesh=None):
    """Return a line if a function of random sizes differs from one process, or is refused."""
    draw = random.Random(f"{name} {seed}")
    shape, function, parameters = FUNCTIONS[name]
    lengths = {N: draw.randint(1, 14), M: draw.randint(4, 9)}
    full = [lengths.get(n, n) for n in shape]
    torch.manual_seed(seed)
    x = torch.randn(full, dtype=torch.float64)
    made = [torch.randn(p, dtype=torch.float64) for p in parameters]

    second = name not in FIRST_ONLY
    try:
        function(x, *made)
    except (RuntimeError, ValueError, IndexError):
        return ""  # torch refuses these sizes
    first = shape.index(N)
    spatial = full[first:]
    dims = [0, shape.index(M) - first] if len(ranks) == 2 else [0]
    if len(ranks) == 1 and M in shape and name not in ROWS_ONLY and draw.random() < 0.4:
        dims = [shape.index(M) - first]
    sizes = lengths_of(draw, spatial, dims, ranks)
    where = f"{name}, seed {seed}, {full} in {sizes}"
    try:
        worst = apart_from_one(function, x, made, vc.grid.Grid(spatial, mesh, sizes), second)
    except vc.ArgumentError as error:
        return f"{where}: {error}"
    return "" if worst < 1e-12 else f"{where}: {worst}"


def apart_from_one(function, x, parameters, grid, second=True):
    """Return the largest difference of a result or gradient from those of one process."""

    def leaves(*tensors):
        return [t.clone().requires_grad_() for t in tensors]

    expected = derivatives(function, *leaves(x), leaves(*parameters), lambda g: g, second)
    own = x[(..., *[slice(part.start, part.stop) for part in grid.ranges])]
    field = grid.field(*leaves(own))
    found = derivatives(function, field, leaves(*parameters), vc.all_reduce, second)
    return max(apart(a, b) for a, b in zip(found, expected, strict=True))
