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
from torch import Tensor

from varcomm.ops.reduction import accumulation_dtype
from varcomm.tensor_parallel.linear import refuse_vmap

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Product:
    """A sum over rows as its factors, ``a @ b``, which ``addmm_`` adds without a temporary."""

    a: Tensor
    b: Tensor


# Results with an entry per row, and totals over rows.
Values = tuple[Tensors, tuple[Tensor | Product, ...]]


@dataclass(frozen=True)
class Gradients:
    """Arguments of a hand-written adjoint; `needed` marks the inputs that get a gradient."""

    results: Tensors
    of_results: Tensors
    needed: tuple[bool, ...]


@dataclass(frozen=True)
class RowMap:
    """A function of rows, made of differentiable operations.

    ``fn(rows, shared)`` returns `results` tensors with an entry per row, of which the first
    `constants` have no derivative, and totals over rows. `rows` have an entry per row, and all rows
    use the tensors `shared`. ``adjoint(rows, shared, gradients)`` is the derivative by hand of a
    map without totals; without it torch differentiates `fn`.
    """

    fn: Callable[[Tensors, Tensors], Values]
    results: int
    constants: int = 0
    adjoint: Callable[[Tensors, Tensors, Gradients], Values] | None = None

    def pulled_back(
        self, rows: Tensors, shared: Tensors, kept: Tensors, of: Tensors, needed: tuple[bool, ...]
    ) -> Values:
        """Return the gradients of the needed inputs from those `of` the outputs."""
        if self.adjoint is not None:
            return self.adjoint(rows, shared, Gradients(kept, of, needed))
        everything = (*rows, *shared)

        def outputs(*inputs: Tensor) -> Tensors:
            own = iter(inputs)
            given = tuple(next(own) if c else x for x, c in zip(everything, needed, strict=True))
            return self._outputs(given[: len(rows)], given[len(rows) :])

        chosen = (x for x, flag in zip(everything, needed, strict=True) if flag)
        found = torch.func.vjp(outputs, *chosen)[1](of)
        count = sum(needed[: len(rows)])
        return found[:count], found[count:]

    def pushed(
        self,
        rows: Tensors,
        shared: Tensors,
        kept: Tensors,
        tangents: Tensors,
        moving: tuple[bool, ...],
    ) -> Values:
        """Return the tangents of the outputs: the transpose of `pulled_back`, which is linear."""

        def pulled(*of: Tensor) -> Tensors:
            of_rows, of_shared = self.pulled_back(rows, shared, kept, of, moving)
            return (*of_rows, *map(_value, of_shared))

        outputs = self._outputs(rows, shared) if self.adjoint is None else kept[self.constants :]
        found = torch.func.vjp(pulled, *map(torch.zeros_like, outputs))[1](tangents)
        count = self.results - self.constants
        return found[:count], found[count:]

    def _outputs(self, rows: Tensors, shared: Tensors) -> Tensors:
        """Return the outputs with a derivative."""
        results, sums = self.fn(rows, shared)
        return (*results[self.constants :], *map(_value, sums))


@dataclass(frozen=True)
class Chunks:
    """Chunks of at most `size` rows; `shape` are the leading dimensions of all tensors."""

    shape: tuple[int, ...]
    size: int

    def __iter__(self) -> Iterator[tuple[slice, ...]]:
        """Yield the index of each chunk, a view for any strides; one chunk if there are no rows."""
        if prod(self.shape) == 0 or not self.shape:
            yield (slice(None),) * len(self.shape)
            return
        length, *rest = self.shape
        step = max(1, self.size // prod(rest))
        inner = Chunks(tuple(rest), self.size) if prod(rest) > self.size else ((),)
        for start in range(0, length, step):
            yield from ((slice(start, start + step), *index) for index in inner)


def in_chunks(
    of: RowMap, chunks: Chunks, rows: Sequence[Tensor], shared: Sequence[Tensor]
) -> Tensors:
    """Return the results of a map and its sums over all rows, computed chunk by chunk.

    Floats narrower than 4 bytes are summed in fp32 and rounded once.
    """
    return _InChunks.apply(of, chunks, len(rows), *rows, *shared)  # type: ignore[no-any-return, no-untyped-call]


class _InChunks(torch.autograd.Function):
    """Applies a map; its derivatives apply the maps that are its derivatives."""

    @staticmethod
    def forward(of: RowMap, chunks: Chunks, split: int, *tensors: Tensor) -> Tensors:
        results: list[Tensor] = []
        totals: list[Tensor] = []
        dtypes: list[torch.dtype] = []

        def collect(index: tuple[slice, ...]) -> None:
            # a function, so that the memory of one chunk is free for the next
            rows = tuple(x.detach()[index] for x in tensors[:split])
            parts, sums = of.fn(rows, tuple(x.detach() for x in tensors[split:]))
            if not results:
                lead = len(chunks.shape)
                results.extend(part.new_empty(chunks.shape + part.shape[lead:]) for part in parts)
            for result, part in zip(results, parts, strict=True):
                result[index].copy_(part)
            if not totals:
                dtypes.extend((x.a if isinstance(x, Product) else x).dtype for x in sums)
                totals.extend(map(_first, sums))
            else:
                for total, added in zip(totals, sums, strict=True):
                    _add(total, added)

        for index in chunks:
            collect(index)
        return (*results, *(x.to(dtype) for x, dtype in zip(totals, dtypes, strict=True)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.of, ctx.chunks, ctx.split, *tensors = inputs
        ctx.inputs = len(tensors)
        ctx.mark_non_differentiable(*output[: ctx.of.constants])
        # so that missing tangents are None, not zeros
        ctx.set_materialize_grads(False)
        ctx.like = [(y.shape, y.dtype, y.device) for y in output]
        kept = () if ctx.of.adjoint is None else output
        ctx.save_for_backward(*tensors, *kept)
        ctx.save_for_forward(*tensors, *kept)

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor | None) -> tuple[Any, ...]:
        gradients = tuple(
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (shape, dtype, device) in zip(arrived, ctx.like, strict=True)
        )
        tensors, kept = ctx.saved_tensors[: ctx.inputs], ctx.saved_tensors[ctx.inputs :]
        rows, shared = tensors[: ctx.split], tensors[ctx.split :]
        needed = tuple(ctx.needs_input_grad[3:])
        found = iter(
            pulled_back(
                ctx.of, ctx.chunks, rows, shared, kept, gradients[ctx.of.constants :], needed
            )
        )
        return None, None, None, *(next(found) if flag else None for flag in needed)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        of: RowMap = ctx.of
        n = ctx.split
        tensors, kept = ctx.saved_tensors[: ctx.inputs], ctx.saved_tensors[ctx.inputs :]
        moving = tuple(tangent is not None for tangent in tangents[3:])
        of_rows = [tangent for tangent in tangents[3 : 3 + n] if tangent is not None]
        of_shared = [tangent for tangent in tangents[3 + n :] if tangent is not None]
        k, held = n + len(kept), len(tensors) - n

        def push(x: Tensors, s: Tensors) -> Values:
            return of.pushed(x[:n], s[:held], x[n:k], (*x[k:], *s[held:]), moving)

        found = in_chunks(
            RowMap(push, of.results - of.constants),
            ctx.chunks,
            (*tensors[:n], *kept, *of_rows),
            (*tensors[n:], *of_shared),
        )
        return (*[None] * of.constants, *found)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> NoReturn:
        refuse_vmap("a tensor-parallel cross entropy")


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
    n, k, held, results = len(rows), len(kept), len(shared), of.results - of.constants

    def pull(x: Tensors, s: Tensors) -> Values:
        return of.pulled_back(x[:n], s[:held], x[n : n + k], (*x[n + k :], *s[held:]), needed)

    return in_chunks(
        RowMap(pull, sum(needed[:n])),
        chunks,
        (*rows, *kept, *gradients[:results]),
        (*shared, *gradients[results:]),
    )


def _value(part: Tensor | Product) -> Tensor:
    return part.a @ part.b if isinstance(part, Product) else part


def _first(part: Tensor | Product) -> Tensor:
    """Return a total to add to, in memory of its own, since `part` may be an input."""
    total = _value(part)
    wide = accumulation_dtype(total.dtype, True)
    return total.to(wide, copy=not isinstance(part, Product))


def _add(total: Tensor, part: Tensor | Product) -> None:
    if isinstance(part, Product) and part.a.dtype == total.dtype:
        total.addmm_(part.a, part.b)
    else:
        total += _value(part)
