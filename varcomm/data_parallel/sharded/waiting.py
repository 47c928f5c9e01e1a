"""Hooks by which the modules of a model wait for the parameters that they use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from varcomm.data_parallel.sharded.shard import Shard, Traffic
from varcomm.ops.compilation import kept_from_compilation

__all__ = ["wait_in"]

_CONTAINERS = {
    torch.nn.Module,
    torch.nn.Sequential,
    torch.nn.ModuleList,
    torch.nn.ModuleDict,
    torch.nn.ParameterList,
    torch.nn.ParameterDict,
}


def wait_in(
    module: torch.nn.Module, shards: Sequence[Shard], traffic: Traffic
) -> list[Callable[[], None]]:
    """Let modules wait in forward, and when states are saved or loaded; return the removals."""
    waits = [partial(shard.wait, traffic) for shard in shards]
    of = {id(p): wait for shard, wait in zip(shards, waits, strict=True) for p in shard.parameters}
    hooks = []
    for part in module.modules():
        used = dict.fromkeys(of[id(p)] for p in _read_by(part) if id(p) in of)
        if used:
            hooks.append(part.register_forward_pre_hook(_Wait(list(used))))
        hooks.append(part.register_state_dict_pre_hook(_Wait(waits)))
        hooks.append(part.register_load_state_dict_pre_hook(_Wait(waits)))
    return [hook.remove for hook in hooks]


class _Wait:
    """A hook that waits; in a copy of the module it does nothing."""

    def __init__(self, waits: Sequence[Callable[[], None]] = ()) -> None:
        self._waits = waits

    @kept_from_compilation
    def __call__(self, *_: Any) -> None:
        for wait in self._waits:
            wait()

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
