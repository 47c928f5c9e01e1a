"""Which engine serves a group and a device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from varcomm.errors import GroupError
from varcomm.transport.engine import Engine
from varcomm.transport.gloo import Gloo
from varcomm.transport.group import Group
from varcomm.transport.nccl import NCCL

__all__ = ["engine_for"]


def engine_for(group: Group, device: torch.device) -> Engine:
    """Return the engine that moves bytes on `device` among the ranks of `group`.

    Raises
    ------
    GroupError
        If the group has none for it.
    """
    engines = {("gloo", "cpu"): Gloo, ("nccl", "cuda"): NCCL}
    backends = group.backends()
    engine = engines.get((backends.get(device.type, ""), device.type))
    if engine is None:
        served = [kind for kind, backend in backends.items() if (backend, kind) in engines]
        raise GroupError(
            f"{group}: the tensor is on {device}, but this group has an engine for "
            f"{' and '.join(served) or 'no device'} only (torch.distributed's backends: "
            f"{dist.get_backend_config(group.process_group)}). Move the tensor, or call "
            "varcomm.init with a backend for its device: gloo for cpu, nccl for cuda."
        )
    return engine()
