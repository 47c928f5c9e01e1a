"""What a piece of work computes and keeps: a look at each operator as it runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

__all__ = ["Meter", "Totals"]

# These read as many rows of their first tensor as they write, and not all of it.
_PICKING = ("index_select", "gather", "index", "embedding")

# These touch no values, whatever they return.
_FREE = (
    *("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"),
    *("detach", "alias", "select", "_local_scalar_dense", "resize_"),
)


@dataclass
class Totals:
    """Sums over operators, as :class:`varcomm.simulate.Work` has them."""

    flops: int = 0
    matmul_bytes: int = 0
    other_bytes: int = 0
    kernels: int = 0


class Meter(TorchDispatchMode):
    """Count floating-point operations, bytes read and written, kernels, and bytes of tensors alive.

    Entered as a context. Operators of forward and backward are seen alike, on real tensors and on
    fake ones, which have shapes and no memory.

    - *Floating-point operations* are those of matrix products, convolutions and attention, by
      torch's own formulas (``torch.utils.flop_counter``).
    - *Bytes* are those of an operator's inputs and outputs, each once, as if nothing stayed in a
      cache from one operator to the next and each operator were one pass over memory. Views are
      free; an operator that picks rows reads those that it picks.
    - *Memory* is what storages hold: those that were there before and are used, and those made
      meanwhile for as long as something refers to them. What operators need while they run, and
      what an allocator keeps beyond, is not in it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.totals = Totals()
        self.before = 0  # bytes of storages that were there, and have been used
        self.peak = 0  # bytes of storages made meanwhile that were alive at a time
        self._alive = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and count it."""
        inputs = _tensors((args, kwargs))
        for tensor in inputs:
            self.before += self._new(tensor)
        out = func(*args, **(kwargs or {}))
        outputs = _tensors(out)
        made = False
        for tensor in outputs:
            if size := self._new(tensor, counted=True):
                self._alive += size
                made = True
        self.peak = max(self.peak, self._alive)
        if func.namespace in ("prim", "profiler") or func._overloadpacket.__name__ in _FREE:
            return out
        if not made and not func._schema.is_mutable and _shares(inputs, outputs):
            return out  # a view
        self._count(func, args, kwargs or {}, inputs, outputs, out)
        return out

    def _count(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        out: Any,
    ) -> None:
        written = sum(map(_bytes, outputs))
        read = list(map(_bytes, inputs))
        if func._overloadpacket.__name__ in _PICKING and read:
            read[0] = min(read[0], written)
        totals = self.totals
        moved = written + sum(read)
        totals.kernels += 1
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            totals.other_bytes += moved
        else:
            totals.flops += int(formula(*args, **kwargs, out_val=out))
            totals.matmul_bytes += moved

    def _new(self, tensor: torch.Tensor, counted: bool = False) -> int:
        """Return the bytes of a tensor's storage, where it has not been seen yet."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a tensor that has none, as sparse ones
            return 0
        if storage in self._known:
            return 0
        self._known.add(storage)
        size: int = storage.nbytes()
        if counted:
            weakref.finalize(storage, self._gone, size)
        return size

    def _gone(self, size: int) -> None:
        self._alive -= size


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storages(tensors: list[torch.Tensor]) -> Iterator[int]:
    for tensor in tensors:
        yield tensor.untyped_storage()._cdata


def _shares(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    return bool(outputs) and set(_storages(outputs)) <= set(_storages(inputs))


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor takes; of an expanded one, those that there are."""
    size = tensor.numel() * tensor.element_size()
    return min(size, tensor.untyped_storage().nbytes())
