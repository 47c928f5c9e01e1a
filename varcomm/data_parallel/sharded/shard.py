"""One rank's part of a bucket: the parameters in a row, and the piece that the rank owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version

from varcomm.data_parallel.buckets import Message
from varcomm.data_parallel.sharded.partition import Split
from varcomm.ops import packing
from varcomm.ops.compilation import kept_from_compilation
from varcomm.transport.group import Group

__all__ = ["Piece", "Shard", "wait_in"]


@dataclass(frozen=True)
class Piece:
    """One rank's part of a parameter.

    Attributes
    ----------
    name : str
        Of the parameter.
    shape : torch.Size
        Of the full parameter.
    start, stop : int
        Range of its elements, in row-major order.
    value : torch.nn.Parameter
        Values that the optimizer updates, and their ``grad``: of one dimension, or of the
        parameter's shape if parameters have one owner. A scalar always has its own shape.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    value: torch.nn.Parameter


class Shard:
    """A bucket on one rank; its parameters become views of one row."""

    def __init__(
        self, split: Split, parameters: Mapping[str, torch.nn.Parameter], rank: int
    ) -> None:
        self.split, self.segments = split, split.segments[rank]
        self.parameters = {name: parameters[name] for name in split.members}
        example = parameters[split.members[0]].detach()
        self.row = example.new_empty(split.sizes.total)
        self._nothing = example.new_full((), torch.nan)
        self._views: dict[str, torch.Tensor] = {}
        place = 0
        for name, parameter in self.parameters.items():
            view = self.row.narrow(0, place, parameter.numel()).view(parameter.shape)
            parameter.data = self._views[name] = view.copy_(parameter.detach())
            place += parameter.numel()
        self._own = self.row.narrow(0, split.sizes.offsets[rank], split.sizes[rank])
        self._masters = self._own
        self._gather: Message | None = None
        self._total: torch.Tensor | None = None
        self._used: list[bool] = []
        self._arriving: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self.pieces: list[Piece] = []

    def cut_pieces(self, whole: bool, dtype: torch.dtype, device: torch.device) -> None:
        """Make the values that the optimizer updates, of `dtype` on `device`."""
        own = self._own
        if (dtype, device) != (own.dtype, own.device):
            pinned = device.type == "cpu" and own.is_cuda
            empty = torch.empty(len(own), dtype=dtype, device=device, pin_memory=pinned)
            self._masters = empty.copy_(own)
        for (name, part), value in zip(self.segments, self._parts(self._masters), strict=True):
            shape = self._views[name].shape
            # a scalar has one owner in any case, and states like those of one process
            own = torch.nn.Parameter(value.view(shape) if whole or not shape else value)
            self.pieces.append(Piece(name, shape, part.start, part.stop, own))

    def _parts(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return values.split([len(part) for _, part in self.segments])  # type: ignore[no-any-return]

    def add(self, total: torch.Tensor, used: list[bool]) -> None:
        """Add a sum of this rank's piece to the sums since the last :meth:`settle`."""
        self._used = [a or b for a, b in zip(self._used, used, strict=True)] if self._used else used
        if self._masters.device != total.device:
            host = torch.empty(total.shape, dtype=total.dtype, device="cpu", pin_memory=True)
            host.copy_(total, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._arriving.append((host, event))
        else:
            self._total = total if self._total is None else self._total.add_(total)

    def settle(self, divisor: float | None) -> None:
        """Divide the sums and add them to the gradients of the pieces; None drops them."""
        for host, event in self._arriving:
            event.synchronize()
            self._total = host if self._total is None else self._total.add_(host)
        total, used = self._total, self._used
        self._total, self._used, self._arriving = None, [], []
        if total is None or divisor is None:
            return
        if divisor != 1:
            total /= divisor
        parts = self._parts(total.to(self._masters.dtype))
        # The pieces say whether there is a gradient: so the optimizer's own zero_grad works too.
        fresh = all(piece.value.grad is None for piece in self.pieces)
        for piece, part, is_used in zip(self.pieces, parts, used, strict=True):
            value, part = piece.value, part.view(piece.value.shape)
            if is_used and value.grad is not None:
                value.grad.add_(part)
            elif is_used:
                # no view, which could not be detached in place; alone, it keeps no other in memory
                value.grad = part.data if fresh else part.clone()

    def take_over(self) -> None:
        """Copy values that were written into the parameters since the last step to the masters.

        A master that rounds to the parameter's value keeps its precision. All elements are
        compared, because torch does not count writes to ``.data``.
        """
        if self.has_masters:
            own = self._own.to(self._masters.device)
            self._masters.copy_(own.where(self._masters.to(own.dtype) != own, self._masters))

    def start_gather(self, group: Group, hidden: bool) -> None:
        """Begin to send this rank's piece to all; `hidden` parameters are NaN until `wait`."""
        if self.has_masters:
            self._own.copy_(self._masters, non_blocking=True)
        # a graph that has saved a parameter for backward must not find other values there
        increment_version(list(self.parameters.values()))
        arguments = group, self._own, self.split.sizes, self.row
        self._gather = Message(packing.all_gather, "all_gather_v", *arguments)
        if hidden:
            for parameter in self.parameters.values():
                parameter.data = self._nothing.expand(parameter.shape)

    def wait(self) -> None:
        """Wait for the pieces of all ranks, and show the parameters again."""
        if self._gather is None:
            return
        self._gather.wait()
        self._gather = None
        for name, parameter in self.parameters.items():
            # one that was moved meanwhile stays so
            if _is_same(parameter, self._nothing.expand(parameter.shape)):
                parameter.data = self._views[name]

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates other values than the parameters' own."""
        return self._masters is not self._own

    def moved(self) -> list[str]:
        """Return the parameters that are not in the row any more; after `wait`.

        A parameter that was filled while it was hidden has lost these values.
        """
        lost = not self._nothing.isnan()
        views = self._views.items()
        return [name for name, view in views if lost or not _is_same(self.parameters[name], view)]


def _is_same(parameter: torch.Tensor, view: torch.Tensor) -> bool:
    same = (parameter.dtype, parameter.device) == (view.dtype, view.device)
    return same and parameter.is_set_to(view)


_CONTAINERS = {
    torch.nn.Module,
    torch.nn.Sequential,
    torch.nn.ModuleList,
    torch.nn.ModuleDict,
    torch.nn.ParameterList,
    torch.nn.ParameterDict,
}


def wait_in(module: torch.nn.Module, shards: Sequence[Shard]) -> list[Callable[[], None]]:
    """Let modules wait in forward for the parameters that they read; return the hooks' removals.

    They wait for all when states are saved or loaded.
    """
    shard_of = {id(p): shard for shard in shards for p in shard.parameters.values()}
    hooks = []
    for part in module.modules():
        used = dict.fromkeys(shard_of[id(p)] for p in _read_by(part) if id(p) in shard_of)
        if used:
            hooks.append(part.register_forward_pre_hook(_Wait(list(used))))
        hooks.append(part.register_state_dict_pre_hook(_Wait(shards)))
        hooks.append(part.register_load_state_dict_pre_hook(_Wait(shards)))
    return [hook.remove for hook in hooks]


class _Wait:
    """A hook that waits; in a copy of the module it does nothing."""

    def __init__(self, shards: Sequence[Shard] = ()) -> None:
        self._shards = shards

    @kept_from_compilation
    def __call__(self, *_: Any) -> None:
        for shard in self._shards:
            shard.wait()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Wait, ()


def _read_by(part: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters that the module's own forward reads."""
    kinds = set(type(part).__mro__) - _CONTAINERS
    # MultiheadAttention reads out_proj.weight, and does not call out_proj
    whole = any(kind.__module__.startswith("torch.nn.") for kind in kinds)
    yield from part.parameters(recurse=whole)
    for child in () if whole else part.children():
        if isinstance(child, torch.nn.ParameterList | torch.nn.ParameterDict):
            yield from _read_by(child)
