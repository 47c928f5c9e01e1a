"""Gathers of new parameters after a step, and modules that wait for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from varcomm.data_parallel.sharded.reducer import Traffic
from varcomm.data_parallel.sharded.shard import Shard
from varcomm.ops.compilation import kept_from_compilation

__all__ = ["Gathering"]

_CONTAINERS = {
    torch.nn.Module,
    torch.nn.Sequential,
    torch.nn.ModuleList,
    torch.nn.ModuleDict,
    torch.nn.ParameterList,
    torch.nn.ParameterDict,
}


class Gathering:
    """Gathers of all buckets after a step, in the opposite order of backward.

    With a `module` they overlap its forward: modules in it wait for the parameters that they use.
    """

    def __init__(
        self, shards: Sequence[Shard], traffic: Traffic, module: torch.nn.Module | None
    ) -> None:
        self._shards, self._traffic = shards, traffic
        self._overlaps = module is not None
        removals: list[Callable[[], object]] = []
        if module is not None:
            me, where = weakref.ref(self), {id(p): s for s in shards for p in s.parameters}
            for part in module.modules():
                used = dict.fromkeys(where[id(p)] for p in _read_by(part) if id(p) in where)
                if used:
                    hook = _Wait(me, list(used))
                    removals.append(part.register_forward_pre_hook(hook).remove)
                saving = part.register_state_dict_pre_hook(_Wait(me, None))
                loading = part.register_load_state_dict_pre_hook(_Wait(me, None))
                removals += [saving.remove, loading.remove]
        self._end = weakref.finalize(self, _leave, shards, traffic, removals)
        self._end.atexit = False

    def close(self) -> None:
        """Wait, and leave the modules as they were."""
        self._end()

    def start(self) -> None:
        """Begin to gather; wait for the gathers, unless forward does."""
        group = self._traffic.group()
        for shard in reversed(self._shards):
            self._traffic.note(1)
            shard.start_gather(group, self._overlaps)
        if not self._overlaps:
            self.wait()

    def wait(self, shards: Sequence[Shard] | None = None) -> None:
        """Wait for some buckets, or for all."""
        _wait(self._shards if shards is None else shards, self._traffic)


class _Wait:
    """A hook that waits; in a copy of the module it does nothing."""

    def __init__(
        self, me: weakref.ref[Gathering] | None = None, shards: Sequence[Shard] | None = None
    ) -> None:
        self._me, self._shards = me, shards

    @kept_from_compilation
    def __call__(self, *_: Any) -> None:
        gathering = None if self._me is None else self._me()
        if gathering is not None:
            gathering.wait(self._shards)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Wait, ()


def _read_by(part: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters that the module's own forward reads."""
    whole = any(
        kind.__module__.startswith("torch.nn.") and kind not in _CONTAINERS
        for kind in type(part).__mro__
    )
    if whole:  # MultiheadAttention reads out_proj.weight, and does not call out_proj
        yield from part.parameters()
        return
    yield from part.parameters(recurse=False)
    for child in part.children():
        if isinstance(child, torch.nn.ParameterList | torch.nn.ParameterDict):
            yield from _read_by(child)


def _wait(shards: Sequence[Shard], traffic: Traffic) -> None:
    for shard in shards:
        if shard.waiting:
            shard.wait()
            traffic.note(-1)


def _leave(
    shards: Sequence[Shard], traffic: Traffic, removals: Sequence[Callable[[], object]]
) -> None:
    _wait(shards, traffic)
    for remove in removals:
        remove()
