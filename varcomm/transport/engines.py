"""Which engine serves a group and a device."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from varcomm.errors import GroupError
from varcomm.transport.engine import Engine
from varcomm.transport.gloo import Gloo
from varcomm.transport.group import Group
from varcomm.transport.nccl import NCCL
from varcomm.transport.staged import Staged

__all__ = ["engine_for", "peers_answer", "serve"]

# By backend of torch.distributed and kind of device.
_ENGINES: dict[tuple[str, str], Engine] = {
    ("gloo", "cpu"): Gloo(),
    ("gloo", "cuda"): Staged(Gloo()),
    ("nccl", "cuda"): NCCL(),
}

# By group and kind of device: a call must not read the group's configuration each time.
_found: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Engine]]
_found = weakref.WeakKeyDictionary()


def serve(backend: str, device: str, engine: Engine) -> None:
    """Let an engine serve a kind of device where groups have this backend."""
    _ENGINES[backend, device] = engine


def engine_for(group: Group, device: torch.device) -> Engine:
    """Return the engine that moves bytes on `device` among the ranks of `group`.

    Raises
    ------
    GroupError
        If the group has none for it.
    """
    found = _found.get(group.process_group)
    engine = None if found is None else found.get(device.type)
    if engine is None:
        engine = _find(group, device)
        _found.setdefault(group.process_group, {})[device.type] = engine
    return engine


def peers_answer(group: Group) -> bool:
    """Return whether the other ranks of the group are there, or the world is only planned."""
    return group.size == 1 or engine_for(group, group.device()).peers_answer


def _find(group: Group, device: torch.device) -> Engine:
    backends = group.backends()
    engine = _ENGINES.get((backends.get(device.type, ""), device.type))
    if engine is None:
        served = [kind for kind, backend in backends.items() if (backend, kind) in _ENGINES]
        raise GroupError(
            f"{group}: the tensor is on {device}, but this group has an engine for "
            f"{' and '.join(served) or 'no device'} only (torch.distributed's backends: "
            f"{dist.get_backend_config(group.process_group)}). Move the tensor, or call "
            "varcomm.init with a backend for its device: gloo or mpi for cpu, nccl for cuda."
        )
    return engine
