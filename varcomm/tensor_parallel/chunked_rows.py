"""Functions of rows, computed in chunks of rows, with derivatives of any order.

Rows do not depend on each other, so the temporaries of a loss need to exist only for one *chunk*
of rows. The derivative of such a function is a function of rows again, and so are all higher
derivatives: each is computed chunk by chunk from the inputs, and nothing of the size of the logits
is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import torch

from varcomm.ops.reduction import accumulation_dtype
from varcomm.tensor_parallel.linear import refuse_vmap

__all__ = [
    "Chunks",
    "Gradients",
    "Product",
    "RowMap",
    "Sums",
    "Tensors",
    "in_chunks",
    "pulled_back",
    "results_in_chunks",
]

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Product:
    """A sum over rows as its factors, ``a @ b``, which ``addmm_`` adds without a temporary."""

    a: torch.Tensor
    b: torch.Tensor


Sums = tuple[torch.Tensor | Product, ...]
Values = tuple[Tensors, Sums]


@dataclass(frozen=True)
class Gradients:
    """Arguments of a hand-written adjoint; `needed` marks the inputs that get a gradient."""

    results: Tensors
    of_results: Tensors
    needed: tuple[bool, ...]


@dataclass(frozen=True)
class RowMap:
    """A function of rows, made of differentiable operations.

    Attributes
    ----------
    fn : callable
        ``fn(rows, shared) -> (results, sums)``: `rows` and `results` have an entry per row,
        `shared` are tensors that all rows use, and `sums` are totals over rows.
    results : int
        Number of results.
    constants : int
        Number of leading results that are constants in derivatives.
    adjoint : callable, optional
        ``adjoint(rows, shared, gradients) -> (of_rows, of_shared)``: the derivative by hand of a
        map without sums, for the inputs that are needed. Without it autograd differentiates `fn`.
    """

    fn: Callable[[Tensors, Tensors], Values]
    results: int
    constants: int = 0
    adjoint: Callable[[Tensors, Tensors, Gradients], Values] | None = None


@dataclass(frozen=True)
class Chunks:
    """Chunks of at most `size` rows; `shape` are the leading dimensions of all tensors."""

    shape: tuple[int, ...]
    size: int

    def __iter__(self) -> Iterator[tuple[slice, ...]]:
        """Yield the index of each chunk, a view for any strides; one chunk if there are no rows."""
        return _indices(self.shape, self.size)


def _indices(shape: tuple[int, ...], size: int) -> Iterator[tuple[slice, ...]]:
    inner = prod(shape[1:])
    if prod(shape) == 0 or not shape:
        yield (slice(None),) * len(shape)
    elif inner <= size:
        step = size // inner
        yield from ((slice(start, start + step),) for start in range(0, shape[0], step))
    else:
        for start in range(shape[0]):
            for rest in _indices(shape[1:], size):
                yield (slice(start, start + 1), *rest)


def in_chunks(
    of: RowMap, chunks: Chunks, rows: Sequence[torch.Tensor], shared: Sequence[torch.Tensor]
) -> Tensors:
    """Return the results of a map and its sums over all rows, computed chunk by chunk.

    Floats narrower than 4 bytes are summed in fp32 and rounded once.
    """
    return _InChunks.apply(of, chunks, len(rows), *rows, *shared)  # type: ignore[no-any-return, no-untyped-call]


def results_in_chunks(of: RowMap, chunks: Chunks, rows: Tensors, shared: Tensors) -> Tensors:
    """Return results and sums of a map, without derivatives."""
    results: list[torch.Tensor] = []
    totals: list[_Total] = []

    def collect(index: tuple[slice, ...]) -> None:
        # a function, so that the memory of one chunk is free for the next
        parts, sums = of.fn(tuple(x[index] for x in rows), shared)
        if not results:
            lead = len(chunks.shape)
            results.extend(part.new_empty(chunks.shape + part.shape[lead:]) for part in parts)
        for result, part in zip(results, parts, strict=True):
            result[index].copy_(part)
        if not totals:
            totals.extend(_Total() for _ in sums)
        for total, added in zip(totals, sums, strict=True):
            total.add(added)

    for index in chunks:
        collect(index)
    return (*results, *(total.value() for total in totals))


def pulled_back(
    of: RowMap,
    chunks: Chunks,
    rows: Tensors,
    shared: Tensors,
    kept: Tensors,
    gradients: Tensors,
    needed: tuple[bool, ...],
) -> Tensors:
    """Return gradients of the inputs that are needed.

    `kept` are all results of a map with a hand-written adjoint, otherwise nothing.
    """
    n, k, results = len(rows), len(kept), of.results - of.constants
    of_results, of_sums = gradients[:results], gradients[results:]

    def pull(x: Tensors, s: Tensors) -> Values:
        of_outputs = (*x[n + k :], *s[len(shared) :])
        return _pull(of, x[:n], s[: len(shared)], x[n : n + k], of_outputs, needed)

    given = RowMap(pull, sum(needed[:n]))
    return in_chunks(given, chunks, (*rows, *kept, *of_results), (*shared, *of_sums))


class _InChunks(torch.autograd.Function):
    """Applies a map; its derivatives apply the maps that are its derivatives."""

    @staticmethod
    def forward(of: RowMap, chunks: Chunks, split: int, *tensors: torch.Tensor) -> Tensors:
        plain = tuple(x.detach() for x in tensors)
        return results_in_chunks(of, chunks, plain[:split], plain[split:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        of, ctx.chunks, ctx.split, *tensors = inputs
        ctx.of, ctx.inputs = of, len(tensors)
        ctx.mark_non_differentiable(*output[: of.constants])
        # so that missing tangents are None, not zeros
        ctx.set_materialize_grads(False)
        ctx.like = [(y.shape, y.dtype, y.device) for y in output]
        kept = () if of.adjoint is None else output
        ctx.save_for_backward(*tensors, *kept)
        ctx.save_for_forward(*tensors, *kept)

    @staticmethod
    def backward(ctx: Any, *arrived: torch.Tensor | None) -> tuple[Any, ...]:
        gradients = [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (shape, dtype, device) in zip(arrived, ctx.like, strict=True)
        ]
        rows, shared, kept = _saved(ctx)
        needed = tuple(ctx.needs_input_grad[3:])
        found = iter(
            pulled_back(
                ctx.of, ctx.chunks, rows, shared, kept, tuple(gradients[ctx.of.constants :]), needed
            )
        )
        return None, None, None, *(next(found) if flag else None for flag in needed)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        rows, shared, kept = _saved(ctx)
        of, n, k = ctx.of, len(rows), len(kept)
        moving = tuple(tangent is not None for tangent in tangents[3:])
        of_rows = [tangent for tangent in tangents[3 : 3 + n] if tangent is not None]
        of_shared = [tangent for tangent in tangents[3 + n :] if tangent is not None]

        def push(x: Tensors, s: Tensors) -> Values:
            moved = (*x[n + k :], *s[len(shared) :])
            return _push(of, x[:n], s[: len(shared)], x[n : n + k], moved, moving)

        given = RowMap(push, of.results - of.constants)
        found = in_chunks(given, ctx.chunks, (*rows, *kept, *of_rows), (*shared, *of_shared))
        return (*[None] * of.constants, *found)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> NoReturn:
        refuse_vmap("a tensor-parallel cross entropy")


class _Total:
    """A sum over chunks."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._dtype = torch.float32

    def add(self, part: torch.Tensor | Product) -> None:
        if self._sum is None:
            # the total is written into, and `part` may be an input
            self._sum = _value(part) if isinstance(part, Product) else part.clone()
            self._dtype = self._sum.dtype
            return
        self._sum = self._sum.to(accumulation_dtype(self._dtype, True))
        if isinstance(part, Product) and self._sum.dtype == self._dtype:
            self._sum.addmm_(part.a, part.b)
        else:
            self._sum += _value(part)

    def value(self) -> torch.Tensor:
        assert self._sum is not None
        return self._sum.to(self._dtype)


def _value(part: torch.Tensor | Product) -> torch.Tensor:
    return part.a @ part.b if isinstance(part, Product) else part


def _saved(ctx: Any) -> tuple[Tensors, Tensors, Tensors]:
    """Return rows, shared inputs, and the results that a hand-written adjoint uses."""
    tensors = ctx.saved_tensors
    return tensors[: ctx.split], tensors[ctx.split : ctx.inputs], tensors[ctx.inputs :]


def _pull(
    of: RowMap,
    rows: Tensors,
    shared: Tensors,
    kept: Tensors,
    gradients: Tensors,
    needed: tuple[bool, ...],
) -> Values:
    if of.adjoint is not None:
        return of.adjoint(rows, shared, Gradients(kept, gradients, needed))
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        outputs, inputs = _recorded(of, rows, shared, needed)
        found = _grad(outputs, inputs, gradients, again)
    count = sum(needed[: len(rows)])
    return found[:count], found[count:]


def _push(
    of: RowMap,
    rows: Tensors,
    shared: Tensors,
    kept: Tensors,
    tangents: Tensors,
    moving: tuple[bool, ...],
) -> Values:
    """Return tangents of the outputs: the transpose of :func:`_pull`, which is linear."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        if of.adjoint is not None:
            weights = _weights(kept[of.constants :])
            of_rows, of_shared = of.adjoint(rows, shared, Gradients(kept, weights, moving))
            pulled = (*of_rows, *map(_value, of_shared))
        else:
            outputs, inputs = _recorded(of, rows, shared, moving)
            weights = _weights(outputs)
            pulled = _grad(outputs, inputs, weights, True)
        found = _grad(pulled, weights, tangents, again)
    count = of.results - of.constants
    return found[:count], found[count:]


def _recorded(
    of: RowMap, rows: Tensors, shared: Tensors, needed: tuple[bool, ...]
) -> tuple[Tensors, Tensors]:
    """Compute the map with a graph; return outputs with a derivative, and the inputs needed."""
    inputs = tuple(
        x.detach().requires_grad_() if flag and not x.requires_grad else x
        for x, flag in zip((*rows, *shared), needed, strict=True)
    )
    results, sums = of.fn(inputs[: len(rows)], inputs[len(rows) :])
    asked = tuple(x for x, flag in zip(inputs, needed, strict=True) if flag)
    return (*results[of.constants :], *map(_value, sums)), asked


def _weights(outputs: Tensors) -> Tensors:
    return tuple(torch.zeros_like(y, requires_grad=True) for y in outputs)


def _grad(outputs: Tensors, inputs: Tensors, gradients: Tensors, again: bool) -> Tensors:
    """Differentiate; an input that no output depends on gets zeros."""
    pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
    if not pairs:
        return tuple(map(torch.zeros_like, inputs))
    return torch.autograd.grad(
        [y for y, _ in pairs],
        inputs,
        [g for _, g in pairs],
        create_graph=again,
        allow_unused=True,
        materialize_grads=True,
    )
