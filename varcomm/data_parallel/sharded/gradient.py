"""``grad`` of a parameter whose gradient is summed in pieces that ranks own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn, TypeAlias

import torch

from varcomm.data_parallel.sharded.arguments import NAME
from varcomm.errors import ArgumentError
from varcomm.ops.nested import leaves

# Multiplies the gradients of parameters, by name, on all ranks; returns whether all were finite.
Unscale: TypeAlias = Callable[[set[str], torch.Tensor], torch.Tensor]


# Conversions by which Module.to(), and its relatives, copy a gradient.
_CONVERSIONS = {
    getattr(torch.Tensor, name)
    for name in ("to", "type", "half", "bfloat16", "float", "double", "cpu", "cuda")
}


class SummedGradient(torch.Tensor):
    """A gradient without memory, in the shape of its parameter: ranks have pieces of it elsewhere.

    ``Module.to()`` converts it, and a GradScaler unscales it, in one operation on a list of
    gradients. Any other operation raises ArgumentError.
    """

    is_placeholder = True

    parameter_name: str
    find_unscale: Callable[[], Unscale | None]

    @classmethod
    def of(
        cls,
        name: str,
        like: torch.Tensor,
        find_unscale: Callable[[], Unscale | None],
        dtype: torch.dtype,
        device: torch.device,
    ) -> SummedGradient:
        """Return the gradient of a parameter of the shape of `like`."""
        # one element, which no operation reads
        element = torch.full((), torch.nan, dtype=dtype, device=device)
        made = element.expand(like.shape).as_subclass(cls)
        made.parameter_name, made.find_unscale = name, find_unscale
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _CONVERSIONS or not isinstance(args[0], cls):
            plain: Any = super()
            return plain.__torch_function__(func, types, args, kwargs or {})
        first = args[0]
        empty = torch.empty(0, dtype=first.dtype, device=first.device)
        like = func(empty, *args[1:], **(kwargs or {}))
        if not isinstance(like, torch.Tensor):  # type() returns a name
            return like
        return first if like is empty else first._like(like.dtype, like.device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__.removeprefix("_foreach_")
        first = next(x for x in leaves([args, kwargs or {}]).values() if isinstance(x, cls))
        if name in ("detach", "alias"):
            return first._like(first.dtype, first.device)
        unscale = first.find_unscale()
        if unscale is None or [func] != _operators_of_scaler():
            _refuse(name, first)
        gradients, found_inf, inverse = args
        finite = unscale({each.parameter_name for each in gradients}, inverse)
        found_inf.logical_or_(~finite.to(found_inf.device))
        return None

    def _like(self, dtype: torch.dtype, device: torch.device) -> SummedGradient:
        return type(self).of(self.parameter_name, self, self.find_unscale, dtype, device)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"SummedGradient({self.parameter_name!r}, {tuple(self.shape)}, {self.dtype})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        _refuse("a copy", self)

    __deepcopy__ = __reduce_ex__


@cache
def _operators_of_scaler() -> list[Any]:
    """Return the operator that a gradient receives from a GradScaler, which has no public name."""
    received: list[Any] = []

    class Gradient(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, *_: Any) -> None:
            received.append(func)

    parameter = torch.nn.Parameter(torch.ones(1, device="cpu"))
    parameter.grad = torch.ones(1, device="cpu").as_subclass(Gradient)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1, device="cpu"))
    received.clear()
    scaler.unscale_(torch.optim.SGD([parameter]))
    return received


def _refuse(operation: str, gradient: SummedGradient) -> NoReturn:
    name = gradient.parameter_name
    raise ArgumentError(
        f"{NAME}: the gradient of parameter {name!r} is summed over ranks in pieces, and "
        f"{operation!r} needs all of it. Call clip_grad_norm_ or clip_grad_value_ of the {NAME} to "
        f"clip; its pieces[{name!r}].value.grad is this rank's. Use no DistributedDataParallel, no "
        "sum and no other optimizer for this model."
    )
