"""Let every backward through a module's output come by one place, whatever the output depends on.

On a rank with an empty shard the output may depend on no parameter. Its backward would reach none
of them, and this rank would not take part in sums that the others wait for.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version

__all__ = ["tie"]


def tie(
    output: Any,
    given: Any,
    anchor: torch.Tensor,
    keep: object,
    refuse: Callable[[str], NoReturn],
) -> Any:
    """Return `output` with each floating-point tensor in it tied to `anchor`.

    The result is equal to `output`, in the same memory; ``backward()`` from it, or from any of its
    derivatives, reaches `anchor`, a leaf, as well. It brings no gradient there.

    Tensors that the module has computed stay the same objects, so whoever else keeps them sees what
    is written into them, with its gradients. What is not the module's own result (inputs,
    parameters, constants) or is one of several that share memory is returned as a view, and torch
    raises where that is written to.

    Parameters
    ----------
    output : tensor, or list, tuple, dict or dataclass of them, nested as one likes
        What a module returns.
    given
        Its arguments, in which the same tensors may be.
    anchor : torch.Tensor
        Requires a gradient.
    keep : object
        Lives as long as the graph does.
    refuse : callable
        Raises the error, of the message that it is given, if there is no tensor to tie, but an
        object that may hold some.
    """
    # Who writes into one of several tensors that share memory changes all, and their gradients.
    # For tied ones torch would not know, unless it is told that they are views, which it refuses to
    # have written to. What is handed on from `given` counts twice.
    shared = Counter(
        _memory(x)
        for value in (output, given)
        for x in {id(x): x for x in _tensors(value)}.values()
    )
    tied: dict[int, torch.Tensor] = {}
    opaque: set[str] = set()

    def visit(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            if x is not None and not isinstance(x, str | bytes | int | float | complex):
                opaque.add(type(x).__name__)
            return x
        if not (x.is_floating_point() or x.is_complex()):
            return x
        if id(x) not in tied:
            alone = shared[_memory(x)] == 1
            if alone and not x.is_leaf and not _transforming():
                # no other values, so no other version for those who have saved it for backward
                with _unsafe_preserve_version_counter(x):
                    tied[id(x)] = _TieInPlace.apply(x, anchor, keep)  # type: ignore[no-untyped-call]
            else:
                # without elements there is nothing in a constant that could be written to
                tied[id(x)] = _tied(x, anchor, keep, alone and x.numel() == 0)
        return tied[id(x)]

    result = _mapped(visit, output)
    if opaque and not tied:
        refuse(
            f"the module returned no tensor that is seen, but {' and '.join(sorted(opaque))}. "
            "Return tensors, or lists, tuples, dicts or dataclasses of them."
        )
    return result


class _TieInPlace(torch.autograd.Function):
    """Identity; the tensor itself comes to depend on the anchor, and its views do with it."""

    @staticmethod
    def forward(x: torch.Tensor, anchor: torch.Tensor, keep: object) -> torch.Tensor:
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(output)
        _, ctx.anchor, ctx.keep = inputs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if gradient is not None and torch.is_grad_enabled():
            gradient = _tied(gradient, ctx.anchor, ctx.keep)
        return gradient, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:
        increment_version(tangent)  # by which torch knows that this is done in place
        return tangent


class _Tie(torch.autograd.Function):
    """Identity; its derivative is tied too, so that forces, say, reach the anchor."""

    @staticmethod
    def forward(x: torch.Tensor, anchor: torch.Tensor, keep: object, alone: bool) -> torch.Tensor:
        # detached, it shares the counter of changes in place, so torch sees when x is overwritten
        return x.detach() if alone else x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.set_materialize_grads(False)
        _, ctx.anchor, ctx.keep, _ = inputs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if gradient is not None and torch.is_grad_enabled():
            gradient = _tied(gradient, ctx.anchor, ctx.keep)
        return gradient, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Any, *others: Any) -> tuple[Any, Any]:
        return _tied(x, *others), in_dims[0]


def _tied(x: torch.Tensor, anchor: torch.Tensor, keep: object, alone: bool = True) -> torch.Tensor:
    return _Tie.apply(x, anchor, keep, alone)  # type: ignore[no-untyped-call, no-any-return]


def _transforming() -> bool:
    """Return whether torch.func looks at what is done."""
    return torch._C._are_functorch_transforms_active()


def _memory(x: torch.Tensor) -> int:
    """Return what tells tensors of the same memory, as autograd knows it."""
    return id(x._base) if x._is_view() and x._base is not None else id(x)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif (names := _fields(value)) is not None:
        yield from _tensors([getattr(value, name) for name in names])


def _mapped(fn: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with `fn` applied to what is in it; containers that change are new ones."""
    if isinstance(value, list | tuple):
        items = [_mapped(fn, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    named = value if isinstance(value, Mapping) else None
    if named is None and (names := _fields(value)) is not None:
        named = {name: getattr(value, name) for name in names}
    if named is None:
        return fn(value)
    changed = {key: new for key, old in named.items() if (new := _mapped(fn, old)) is not old}
    result = copy.copy(value) if changed else value
    for key, new in changed.items():
        if named is value:
            result[key] = new
        else:
            object.__setattr__(result, key, new)  # also into a frozen one
    return result


def _fields(value: Any) -> list[str] | None:
    """Return the names of what is in a dataclass, or None if `value` is none."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    return [field.name for field in dataclasses.fields(value)]
