"""A simulated rank: one process as one of many ranks, and counts of its work."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from varcomm._torch_private import TorchDispatchMode
from varcomm.errors import GroupError
from varcomm.transport.engines.simulated import Transfer, alone, transfers
from varcomm.transport.trace import Trace, trace
from varcomm.transport.world import World, init

# Operators that read as many rows of their first tensor as they write.
_PICKING = ("index_select", "gather", "index", "embedding")
# Operators that touch no values; views are found by their storage.
_FREE = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_")


@contextmanager
def world(size: int, rank: int = 0) -> Iterator[World]:
    """Make this process one rank of a simulated world of `size` ranks.

    Nothing is sent, and received tensors hold zeros; shapes, memory and the counts of
    :func:`varcomm.trace` are as in a real run. Other ranks are assumed to pass this rank's
    arguments. Calls that need data of other ranks raise an error, such as
    :meth:`ExchangePlan.from_needed`.

    Parameters
    ----------
    size : int
        Number of ranks.
    rank : int
        Rank of this process.

    Yields
    ------
    World
        As :func:`varcomm.init` returns it.

    Raises
    ------
    ArgumentError
        If `size` is below 1, or `rank` is out of range.
    GroupError
        If torch.distributed is initialised already.

    See Also
    --------
    step, varcomm.init

    Examples
    --------
    >>> import torch, varcomm as vc
    >>> with vc.simulate.world(4096, rank=7) as world, vc.trace() as trace:
    ...     whole = vc.all_gather_v(torch.ones(2, 3), [2] * world.size)
    >>> whole.shape, trace.total.sent
    (torch.Size([8192, 3]), 98280)
    """
    with alone(size, rank):
        yield init()


@dataclass(frozen=True)
class Work:
    """Computation, memory and messages of one rank in a step.

    Attributes
    ----------
    flops, matmul_bytes : int
        Floating-point operations of matrix products, convolutions and attention, and the bytes that
        these read and write.
    other_bytes : int
        Bytes that all other operators read and write.
    kernels : int
        Operators that touch memory; each is a kernel on a GPU.
    memory : int
        Peak bytes of the tensors that the step uses and makes.
    calls : Trace
        Counts of :func:`varcomm.trace`.
    transfers : tuple of (str, Transfer)
        Calls of the engine, each with the name of its operation.

    See Also
    --------
    Counts, Machine
    """

    flops: int
    matmul_bytes: int
    other_bytes: int
    kernels: int
    memory: int
    calls: Trace
    transfers: tuple[tuple[str, Transfer], ...]


def count(step: Callable[[], object]) -> Work:
    """Run `step` once in the simulated world of this process, and count its work.

    Parameters
    ----------
    step : callable
        Takes no arguments. If the first run does additional work, call step once before.

    Returns
    -------
    Work
        Work of this rank.

    Raises
    ------
    GroupError
        If `step` exchanges messages with real ranks, outside :func:`world`.

    See Also
    --------
    Counts, step

    Examples
    --------
    >>> import torch, varcomm as vc
    >>> with vc.simulate.world(64):
    ...     layer, x = torch.nn.Linear(1000, 1000), torch.ones(10, 1000)
    ...     def step():
    ...         layer(x).sum().backward()
    ...         vc.data_parallel.sum_gradients(layer)
    ...     work = vc.simulate.count(step)
    >>> work.flops, work.calls.total.messages_sent
    (40000000, 28)
    """
    with _Meter() as meter, trace() as calls, transfers() as found:
        step()
    if calls.total.messages_sent + calls.total.messages_received and not found:
        raise GroupError(
            "simulate.count: the step exchanged messages with ranks that exist. Call it inside "
            "simulate.world; use varcomm.trace to count the messages of real ranks."
        )
    counts = (meter.flops, meter.matmul_bytes, meter.other_bytes, meter.kernels)
    return Work(*counts, meter.before + meter.peak, calls, tuple(found))


class _Meter(TorchDispatchMode):
    """Counter of operations (torch's formulas), bytes, kernels and tensor memory.

    Bytes count each input and each output once; views are free. Memory counts used storages:
    storages that existed before, and storages of the step while they are alive.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.matmul_bytes = self.other_bytes = self.kernels = 0
        self.before = self.peak = self._alive = 0  # bytes of storages
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        self.before += sum(self._new_bytes(tensor) for tensor in inputs)
        out = func(*args, **kwargs)
        outputs = _tensors(args[:1] if out is None else out)  # a list changed in place
        made = sum(self._new_bytes(tensor, is_made=True) for tensor in outputs)
        self._alive += made
        self.peak = max(self.peak, self._alive)
        name = func.overloadpacket.__name__
        writes = name.endswith("_") or "out" in kwargs
        is_view = not made and not writes and _storages(outputs) <= _storages(inputs)
        if is_view or name in _FREE or func.namespace in ("prim", "profiler"):
            return out
        written, read = sum(map(_bytes, outputs)), list(map(_bytes, inputs))
        if name in _PICKING and read:
            read[0] = min(read[0], written)
        self.kernels += 1
        formula = flop_registry.get(func.overloadpacket)
        if formula is None:
            self.other_bytes += written + sum(read)
        else:
            self.flops += int(formula(*args, **kwargs, out_val=out))
            self.matmul_bytes += written + sum(read)
        return out

    def _new_bytes(self, tensor: torch.Tensor, is_made: bool = False) -> int:
        """Return the bytes of a tensor's storage at its first use, else 0."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors have no storage
            return 0
        if storage in self._known:
            return 0
        self._known.add(storage)
        size: int = storage.nbytes()
        if is_made:
            weakref.finalize(storage, self._release, size)
        return size

    def _release(self, size: int) -> None:
        self._alive -= size


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dicts; each operator calls this twice."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    return [x for each in tree for x in _tensors(each)] if isinstance(tree, (tuple, list)) else []


def _storages(tensors: list[torch.Tensor]) -> set[torch.UntypedStorage]:
    return {tensor.untyped_storage() for tensor in tensors}


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's entries; an expanded entry counts once."""
    size = tensor.numel() * tensor.element_size()
    return min(size, tensor.untyped_storage().nbytes())
