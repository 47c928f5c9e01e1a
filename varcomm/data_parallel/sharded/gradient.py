"""``grad`` of a parameter whose gradient is summed in pieces that ranks own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch

from varcomm._torch_private import UNSCALE
from varcomm.data_parallel.sharded.arguments import NAME
from varcomm.errors import ArgumentError

__all__ = ["SummedGradient", "Sums"]

# Conversions by which Module.to(), and its relatives, copy a gradient.
_CONVERSIONS = {
    getattr(torch.Tensor, name)
    for name in ("to", "type", "half", "bfloat16", "float", "double", "cpu", "cuda")
}


class Sums(Protocol):
    """Gradients of all ranks, by the names of their parameters; collective."""

    def _unscale(self, names: set[str], inverse: torch.Tensor) -> torch.Tensor:
        """Multiply gradients by `inverse`; return whether all of them were finite on all ranks."""


class SummedGradient(torch.Tensor):
    """A gradient without memory, in the shape of its parameter: ranks have pieces of it elsewhere.

    A GradScaler unscales it, in one operation on a list of gradients. Any other operation raises
    ArgumentError.
    """

    is_placeholder = True

    parameter_name: str
    find_sums: Callable[[], Sums | None]

    @classmethod
    def of(
        cls,
        name: str,
        like: torch.Tensor,
        find_sums: Callable[[], Sums | None],
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> SummedGradient:
        """Return the gradient of a parameter of the shape of `like`."""
        # one element, which no operation reads
        element = torch.full((), torch.nan, dtype=dtype, device=device or like.device)
        made = element.expand(like.shape).as_subclass(cls)
        made.parameter_name, made.find_sums = name, find_sums
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain: Any = torch.Tensor
        first = args[0] if args else None
        if func in _CONVERSIONS and isinstance(first, cls):
            return first._converted(func, args[1:], kwargs or {})
        # results of operations, such as norms, are plain tensors
        return plain.__torch_function__(func, (), args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__.removeprefix("_foreach_")
        first = next(x for x in _leaves([*args, *(kwargs or {}).values()]) if isinstance(x, cls))
        if name in ("detach", "alias"):
            return first._like(first.dtype, first.device)
        sums = first.find_sums()
        if func.overloadpacket is not UNSCALE or sums is None:
            _refuse(name, first)
        gradients, found_inf, inverse = args
        finite = sums._unscale({each.parameter_name for each in gradients}, inverse)
        found_inf.logical_or_(~finite.to(found_inf.device))
        return None

    def _like(self, dtype: torch.dtype, device: torch.device) -> SummedGradient:
        return type(self).of(self.parameter_name, self, self.find_sums, dtype, device)

    def _converted(
        self, conversion: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        """Return the gradient in another dtype or on another device, as an ordinary tensor."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        like = conversion(empty, *args, **options)
        if not isinstance(like, torch.Tensor):  # type() returns a name
            return like
        return self if like is empty else self._like(like.dtype, like.device)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"SummedGradient({self.parameter_name!r}, {tuple(self.shape)}, {self.dtype})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        _refuse("a copy", self)

    __deepcopy__ = __reduce_ex__


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _leaves(value)
        else:
            yield value


def _refuse(operation: str, gradient: SummedGradient) -> NoReturn:
    name = gradient.parameter_name
    raise ArgumentError(
        f"{NAME}: the gradient of parameter {name!r} is summed over ranks in pieces, and "
        f"{operation!r} needs all of it. Call clip_grad_norm_ or clip_grad_value_ of the {NAME} to "
        f"clip; its pieces[{name!r}].value.grad is this rank's. Use no DistributedDataParallel, no "
        "sum and no other optimizer for this model."
    )
