"""Former place of names for vmap, which is refused; goes when no layer imports it."""

from typing import Any, NoReturn

from varcomm.ops.operator import no_vmap, refuse_vmap

__all__ = ["batch_last", "compare_batches", "of_batch", "of_each", "refuse_vmap"]


def compare_batches(name: str, *_: Any) -> NoReturn:
    """Raise ArgumentError."""
    no_vmap(f"{name}: ")


def _never(*_: Any) -> Any:
    raise AssertionError("compare_batches raises before this is called")


batch_last = of_batch = of_each = _never
