"""Parameters that may not be read, since their new values are still being gathered."""

from __future__ import annotations

from typing import Any

import torch

from varcomm.errors import ArgumentError

__all__ = ["hide", "show"]

# What tells nothing of values.
_ALLOWED = {
    getattr(torch.Tensor, name)
    for name in (
        "__hash__",
        "dim",
        "element_size",
        "get_device",
        "is_complex",
        "is_floating_point",
        "nelement",
        "numel",
        "register_hook",
        "requires_grad_",
        "size",
        "stride",
    )
}
# Attributes that give values; others tell of shape, dtype, gradient or hooks.
_VALUES = {"data", "real", "imag", "T", "H", "mT", "mH"}


class _Pending:
    """Raises at whatever would read or write values."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        of_attribute = getattr(func, "__name__", "") in ("__get__", "__set__")
        if func in _ALLOWED or (of_attribute and func.__self__.__name__ not in _VALUES):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise ArgumentError(
            "ShardedGradients: this parameter is used before its new values are gathered: with "
            "overlap_forward=True the forward of the module that holds it waits for them. Call "
            "wait() before anything else that reads parameters."
        )


# From a class of parameters to what stands for it.
_classes: dict[type, type] = {}


def hide(parameter: torch.Tensor, nothing: torch.Tensor) -> None:
    """Make it an error to use the values of a parameter; keep shape, dtype and gradient.

    `nothing` is one NaN, of its dtype and device: what C++ reads of it is no number.
    """
    own = type(parameter)
    if own not in _classes:
        _classes[own] = type(own.__name__, (_Pending, own), {"_shown": own})
    parameter.data = nothing.as_strided(parameter.shape, (0,) * parameter.dim())
    parameter.__class__ = _classes[own]


def show(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Undo :func:`hide`, with `values`."""
    if isinstance(parameter, _Pending):
        parameter.__class__ = parameter._shown  # type: ignore[attr-defined]
    parameter.data = values
