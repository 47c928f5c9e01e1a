"""Functions of rows, computed a few rows at a time, with derivatives of any order.

What a loss needs for a row of logits is several times as large as the row. Rows do not depend on
each other, so no more of it has to exist at once than a *chunk* of rows needs. The derivative of
such a function is of the same kind, and so is the derivative of that: each is computed chunk by
chunk from the inputs, and nothing of the size of the logits is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.reduction import accumulation_dtype

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
    """A sum over rows as its factors, ``a @ b``: what can be added to a total without memory."""

    a: torch.Tensor
    b: torch.Tensor


Sums = tuple[torch.Tensor | Product, ...]
Values = tuple[Tensors, Sums]


@dataclass(frozen=True)
class Gradients:
    """What an adjoint by hand is asked: gradients of `results`, and of which inputs to give any."""

    results: Tensors
    of_results: Tensors
    needed: tuple[bool, ...]


@dataclass(frozen=True)
class RowMap:
    """A function of rows, made of differentiable operations.

    Attributes
    ----------
    fn : callable
        ``fn(rows, shared) -> (results, sums)``: from tensors with a row for each row of the
        results, and tensors that all rows share, to such results and to sums over rows.
    results : int
        How many results it has.
    constants : int
        How many of them, the first ones, are constants in derivatives.
    adjoint : callable, optional
        ``adjoint(rows, shared, gradients) -> (of_rows, of_shared)``: the derivative by hand, for a
        map without sums, of those inputs that are needed. It is made of differentiable operations
        as well. Without it `fn` is computed again, and autograd differentiates it.
    """

    fn: Callable[[Tensors, Tensors], Values]
    results: int
    constants: int = 0
    adjoint: Callable[[Tensors, Tensors, Gradients], Values] | None = None


@dataclass(frozen=True)
class Chunks:
    """Rows in the leading dimensions `shape` of tensors, at most `size` of them at a time."""

    shape: tuple[int, ...]
    size: int

    def __iter__(self) -> Iterator[tuple[slice, ...]]:
        """Yield what gives a view of each chunk, whatever the strides; of no rows, one chunk."""
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
    """Apply a map chunk by chunk: return its results, and its sums over all rows.

    Sums of floats narrower than 4 bytes are taken in fp32 and rounded once.
    """
    return _InChunks.apply(of, chunks, len(rows), *rows, *shared)  # type: ignore[no-any-return, no-untyped-call]


def results_in_chunks(of: RowMap, chunks: Chunks, rows: Tensors, shared: Tensors) -> Tensors:
    """Return results and sums of a map, without derivatives."""
    results: list[torch.Tensor] = []
    totals: list[_Total] = []

    def collect(index: tuple[slice, ...]) -> None:
        # a function, so that nothing of a chunk is alive when the next one takes its memory
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
    """Return gradients of the inputs that are needed, from those of results and of sums.

    `kept` are all results of a map with an adjoint by hand, else nothing.
    """
    n, k, results = len(rows), len(kept), of.results - of.constants
    of_results, of_sums = gradients[:results], gradients[results:]

    def pull(x: Tensors, s: Tensors) -> Values:
        of_outputs = (*x[n + k :], *s[len(shared) :])
        return _pull(of, x[:n], s[: len(shared)], x[n : n + k], of_outputs, needed)

    given = RowMap(pull, sum(needed[:n]))
    return in_chunks(given, chunks, (*rows, *kept, *of_results), (*shared, *of_sums))


class _InChunks(torch.autograd.Function):
    """Apply a map; differentiate it by applying the maps that are its derivatives."""

    @staticmethod
    def forward(of: RowMap, chunks: Chunks, split: int, *tensors: torch.Tensor) -> Tensors:
        # a view that is made here would count as a leaf of its own, as its base may do
        plain = tuple(x.detach() for x in tensors)
        return results_in_chunks(of, chunks, plain[:split], plain[split:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        of, ctx.chunks, ctx.split, *tensors = inputs
        ctx.of, ctx.inputs = of, len(tensors)
        ctx.mark_non_differentiable(*output[: of.constants])
        # so that tangents which are not there can be told from zeros
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
    def vmap(
        info: Any, in_dims: Any, of: RowMap, chunks: Chunks, split: int, *tensors: torch.Tensor
    ) -> tuple[Tensors, int]:
        """Take the entries of a batch as more rows, in front of the others."""
        size, dims = info.batch_size, in_dims[3:]
        pairs = list(zip(tensors, dims, strict=True))
        if any(dim is not None for dim in dims[split:]):
            raise ArgumentError(
                "cross entropy: vmap has no rule for a batch of what all tokens share, such as the "
                "weights of a head. Loop over them on all ranks alike."
            )
        rows = [
            x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in pairs[:split]
        ]
        results = in_chunks(of, Chunks((size, *chunks.shape), chunks.size), rows, tensors[split:])
        if len(results) > of.results:
            raise ArgumentError(
                "cross entropy: vmap has no rule for sums over tokens of each entry of a batch, "
                "such as gradients of a head. Loop over the batch on all ranks alike."
            )
        return results, 0


class _Total:
    """A sum over chunks."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._dtype = torch.float32

    def add(self, part: torch.Tensor | Product) -> None:
        if self._sum is None:
            # a tensor may be one of the inputs, and this one is written into
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
    """Return rows and shared inputs, and the results where the adjoint takes them."""
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
    """Return gradients of those inputs that are needed, of rows and of what rows share."""
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
    """Compute the map with a graph; return what has a derivative, and the inputs asked for."""
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
    """Differentiate; what does not depend on an input gives it zeros."""
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
