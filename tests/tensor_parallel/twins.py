"""Compare what ranks compute from shards with what one process computes from the whole.

Every rank knows the whole of everything, and runs the twin for itself. Under the conventions of
tensor parallelism a loss is one number that all ranks have: what is sharded is summed over ranks
by ``reduce_from_tensor_model_parallel_region``, what is replicated counts once.
"""

from dataclasses import dataclass

import pytest
import torch

import varcomm
from tests.ops.comparing import Failures
from varcomm import ShardSizes
from varcomm.tensor_parallel import reduce_from_tensor_model_parallel_region
from varcomm.transport.group import resolve

# Ranks, and how sizes differ between them.
SPLITS = [
    (1, "uneven"),
    (3, "uneven"),
    (3, "one empty"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [(2, "even"), (2, "all on one"), (3, "all on one"), (5, "uneven")]
    ),
]
BOUND = {"rtol": 1e-10, "atol": 1e-10}


def split(pattern, ranks, unit=1):
    """Sizes of a pattern; each a multiple of `unit`."""
    sizes = {
        "even": [2] * ranks,
        "uneven": [1 + (3 * rank + 1) % 4 for rank in range(ranks)],
        "one empty": [(rank + 2) % 3 if ranks > 1 else 2 for rank in range(ranks)],
        "all on one": [3 * (rank == ranks // 2) for rank in range(ranks)],
    }[pattern]
    return ShardSizes(size * unit for size in sizes)


def drawn(seed, *shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@dataclass(frozen=True)
class Sharded:
    """Along a dimension; without one, replicated."""

    dim: int | None = None
    sizes: tuple[int, ...] = ()

    def cut(self, whole, rank):
        if self.dim is None:
            return whole
        return whole.split(list(self.sizes), self.dim)[rank]

    def total(self, part, group):
        """One number for all ranks."""
        if self.dim is None:
            return part
        return reduce_from_tensor_model_parallel_region(part, group=group)


REPLICATED = Sharded()


def compare(fn, twin, inputs, output, group=None, bound=BOUND, second=True):
    """Return how values and derivatives of `fn` differ from those of `twin`.

    `inputs` are pairs of a whole tensor and how it is sharded; both functions take all of them, and
    return one tensor, of which `output` says how it is sharded.
    """
    rank, failures = resolve(group).rank, Failures()
    wholes = [whole.clone().requires_grad_() for whole, _ in inputs]
    layouts = [layout for _, layout in inputs]
    parts = [layout.cut(whole, rank).detach().clone().requires_grad_() for whole, layout in inputs]
    expected, got = twin(*wholes), fn(*parts)
    weights = drawn(17, *expected.shape)
    loss = (expected.sin() * weights).sum()
    own = output.total((got.sin() * output.cut(weights, rank)).sum(), group)
    plain = torch.autograd.grad(own, parts, retain_graph=True)
    of_wholes = torch.autograd.grad(loss, wholes, create_graph=True)
    of_parts = torch.autograd.grad(own, parts, create_graph=True)
    seconds, of_seconds = [], []
    if second:
        pulled = [drawn(19 + i, *g.shape) * g**2 for i, g in enumerate(of_wholes)]
        seconds = torch.autograd.grad(sum(p.sum() for p in pulled), wholes)
        total = sum(
            layout.total((layout.cut(drawn(19 + i, *w.shape), rank) * g**2).sum(), group)
            for i, (g, w, layout) in enumerate(zip(of_parts, wholes, layouts, strict=True))
        )
        of_seconds = torch.autograd.grad(total, parts)
    with failures.named("output"):
        torch.testing.assert_close(got, output.cut(expected, rank), **bound)
    for i, layout in enumerate(layouts):
        with failures.named("gradient", i):
            torch.testing.assert_close(plain[i], layout.cut(of_wholes[i], rank), **bound)
            torch.testing.assert_close(of_parts[i], layout.cut(of_wholes[i], rank), **bound)
        if second:
            with failures.named("second derivative", i):
                torch.testing.assert_close(of_seconds[i], layout.cut(seconds[i], rank), **bound)
    return failures


def traced(call):
    """Return the calls of a forward, and those of the backward of its sum."""
    with varcomm.trace() as forward:
        y = call()
    with varcomm.trace() as backward:
        y.sum().backward()
    return forward, backward


def compare_all(cases, **options):
    """Return the differences of cases, each by its name: function, twin, inputs and output."""
    return [f"{n}: {text}" for n, case in cases.items() for text in compare(*case, **options)]
