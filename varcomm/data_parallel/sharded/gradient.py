"""``grad`` of a parameter whose gradient is summed in pieces that ranks own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch

from varcomm._torch_private import UNSCALE
from varcomm.data_parallel.sharded.arguments import NAME
from varcomm.errors import ArgumentError

__all__ = ["SummedGradient", "Sums"]

# Changes in place in which an element of the result depends on its own element alone.
_CHANGES = {"mul_", "div_", "clamp_", "clamp_min_", "clamp_max_"}

# Conversions by which Module.to(), and its relatives, copy a gradient.
_CONVERSIONS = {
    getattr(torch.Tensor, name)
    for name in ("to", "type", "half", "bfloat16", "float", "double", "cpu", "cuda")
}


class Sums(Protocol):
    """Gradients of all ranks, by the names of their parameters; collective."""

    def _gradient_norm(
        self, name: str, order: float, compared: Mapping[str, object] = ...
    ) -> torch.Tensor:
        """Return the norm of a full gradient in float64, bit for bit the same on all ranks."""

    def _change_gradient(
        self, name: str, change: Callable[[torch.Tensor], object], values: Sequence[object] = ...
    ) -> None:
        """Apply a change in place to this rank's piece of a gradient, if it has one."""


class SummedGradient(torch.Tensor):
    """A gradient without memory, in the shape of its parameter: ranks have pieces of it elsewhere.

    Norms, scaling and clamping are collective, and those of the gradient of all ranks. So torch's
    functions that clip and unscale gradients are right. Any other operation raises ArgumentError.
    """

    is_placeholder = True

    parameter_name: str
    find_sums: Callable[[], Sums | None]
    is_copy: bool = False  # Module.to() makes copies, which no operation accepts

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
        operation, options = func.overloadpacket.__name__, kwargs or {}
        first, *rest = args
        own, others = list(_leaves([first])), list(_leaves([*rest, *options.values()]))
        name = operation.removeprefix("_foreach_")
        if not all(isinstance(x, cls) for x in own) or any(isinstance(x, cls) for x in others):
            pass
        elif name in ("detach", "alias"):
            return first._like(first.dtype, first.device, first.is_copy)
        elif name in ("linalg_vector_norm", "norm") and len(rest) < 2 and not options.get("dim"):
            order, dtype = float(rest[0]) if rest else 2.0, options.get("dtype")
            norms = [
                each._sums(name)._gradient_norm(each.parameter_name, order).to(dtype or each._real)
                for each in own
            ]
            return norms[0] if first is own[0] else norms
        elif name in _CHANGES and any(isinstance(x, list | tuple) for x in rest):
            pass  # on all ranks; torch would refuse it only on ranks that own a piece
        elif name in _CHANGES and not any(isinstance(x, torch.Tensor) and x.dim() for x in others):
            change = getattr(torch.Tensor, name)
            values = (name, *rest, *options.values())
            for each in own:
                each._change(name, lambda piece: change(piece, *rest, **options), values)
            return first if first is own[0] else None
        elif func.overloadpacket is UNSCALE:
            return _unscale(own, *rest)
        _refuse(name, next(x for x in (*own, *others) if isinstance(x, cls)))

    def _like(self, dtype: torch.dtype, device: torch.device, is_copy: bool) -> SummedGradient:
        made = type(self).of(self.parameter_name, self, self.find_sums, dtype, device)
        made.is_copy = is_copy
        return made

    def _converted(
        self, conversion: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        """Return the gradient in another dtype or on another device, as an ordinary tensor."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        like = conversion(empty, *args, **options)
        if not isinstance(like, torch.Tensor):  # type() returns a name
            return like
        return self if like is empty else self._like(like.dtype, like.device, is_copy=True)

    @property
    def _real(self) -> torch.dtype:
        return self.dtype.to_real()

    def _sums(self, operation: str) -> Sums:
        if self.is_copy:
            raise ArgumentError(
                f"{NAME}: {operation!r} of a copy of the gradient of parameter "
                f"{self.parameter_name!r}, as float() or to() make it: it has no values. Use the "
                "grad of the parameter."
            )
        return self.find_sums() or _refuse(operation, self)

    def _change(
        self,
        operation: str,
        change: Callable[[torch.Tensor], object],
        values: Sequence[object] = (),
    ) -> None:
        self._sums(operation)._change_gradient(self.parameter_name, change, values)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"SummedGradient({self.parameter_name!r}, {tuple(self.shape)}, {self.dtype})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        _refuse("a copy", self)

    __deepcopy__ = __reduce_ex__


def _unscale(own: Iterable[SummedGradient], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """Divide gradients by the scale of a GradScaler, and note whether one is not finite."""
    own, name = list(own), "unscale_"
    scale = {"the scale of the GradScaler": 1 / inverse.item()}
    for each in own:
        norm = each._sums(name)._gradient_norm(each.parameter_name, torch.inf, scale)
        found_inf.logical_or_(~norm.isfinite().to(found_inf.device))
    for each in own:
        each._change(name, lambda piece: piece.mul_(inverse))


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
        f"{operation!r} needs all of it. Norms, torch.nn.utils.clip_grad_norm_, clip_grad_value_ "
        f"and GradScaler accept it; pieces[{name!r}].value.grad of the {NAME} is this rank's. "
        "Use no DistributedDataParallel, no sum and no other optimizer for this model."
    )
