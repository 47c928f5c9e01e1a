"""The updated pieces of all ranks, gathered at once or while the next forward goes on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from varcomm.data_parallel.sharded.shard import Shard
from varcomm.data_parallel.sharded.traffic import Traffic
from varcomm.ops.autograd import kept_from_compilation

__all__ = ["Gathering", "Nothing"]

_CONTAINERS = {
    torch.nn.Module,
    torch.nn.Sequential,
    torch.nn.ModuleList,
    torch.nn.ModuleDict,
    torch.nn.ParameterList,
    torch.nn.ParameterDict,
}


class Gathering:
    """Gathers all buckets after a step.

    Parameters
    ----------
    shards : sequence of Shard
        In the order of backward; they are gathered the other way round.
    traffic : Traffic
    module : torch.nn.Module, optional
        If gathers are to overlap with its forward: modules in it wait for what they use.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        traffic: Traffic,
        module: torch.nn.Module | None,
    ) -> None:
        self._shards, self._traffic = shards, traffic
        self._overlaps = module is not None
        self._removals: list[Callable[[], object]] = []
        if module is not None:
            where = {id(p): shard for shard in shards for p in shard.parameters}
            for part in module.modules():
                used = [where[id(p)] for p in _read_by(part) if id(p) in where]
                self._watch(part, list(dict.fromkeys(used)))
        self._end = weakref.finalize(self, _leave, shards, traffic, self._removals)
        self._end.atexit = False

    def _watch(self, part: torch.nn.Module, used: list[Shard]) -> None:
        me = weakref.ref(self)
        if used:
            handle = part.register_forward_pre_hook(_Wait(me, used))
            self._removals.append(handle.remove)
        before_state = part.register_state_dict_pre_hook(_Wait(me, None))
        before_load = part.register_load_state_dict_pre_hook(_Wait(me, None))
        self._removals += [before_state.remove, before_load.remove]

    def close(self) -> None:
        """Wait, and leave the modules as they were."""
        self._end()

    def start(self) -> None:
        """Begin to gather; wait for it, unless forward is to do so."""
        group = self._traffic.over()
        for shard in reversed(self._shards):
            self._traffic.begin()
            shard.start_gather(group, self._overlaps)
        if not self._overlaps:
            self.wait()

    def wait(self, shards: Sequence[Shard] | None = None) -> None:
        """Wait for some buckets, or for all."""
        _wait(self._shards if shards is None else shards, self._traffic)


class _Wait:
    """A hook that waits; in a copy of the module it does nothing."""

    def __init__(self, me: weakref.ref[Gathering], shards: Sequence[Shard] | None) -> None:
        self._me, self._shards = me, shards

    @kept_from_compilation
    def __call__(self, *_: Any) -> None:
        gathering = self._me()
        if gathering is not None:
            gathering.wait(self._shards)

    def __reduce__(self) -> tuple[Any, ...]:
        return Nothing, ()


class Nothing:
    """What a copied or loaded module has in the place of a hook."""

    def __call__(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


def _read_by(part: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters that a module's forward reads, rather than those in it do."""
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
            traffic.end()


def _leave(
    shards: Sequence[Shard], traffic: Traffic, removals: Sequence[Callable[[], object]]
) -> None:
    """Leave modules and parameters as they were."""
    _wait(shards, traffic)
    for remove in removals:
        remove()
