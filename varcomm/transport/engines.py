"""Choice of the engine for a group and a kind of device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from varcomm.errors import GroupError
from varcomm.transport.engine import Engine
from varcomm.transport.gloo import Gloo
from varcomm.transport.group import Group, resolve
from varcomm.transport.nccl import NCCL
from varcomm.transport.pinned import Pinned
from varcomm.transport.simulated import Simulated

__all__ = ["engine_for", "peers_answer"]

# By backend of torch.distributed and kind of device.
_ENGINES: dict[tuple[str, str], Engine] = {
    ("gloo", "cpu"): Gloo(),
    ("gloo", "cuda"): Pinned(Gloo()),
    ("nccl", "cuda"): NCCL(),
    ("fake", "cpu"): Simulated(),
    ("fake", "cuda"): Simulated(),
}


def engine_for(group: Group, device: torch.device) -> Engine:
    """Return the engine that moves bytes on `device` among the ranks of `group`.

    Raises
    ------
    GroupError
        If the group has no engine for the device.
    """
    engine: Engine | None = group.engines.get(device.type)
    if engine is None:
        engine = group.engines[device.type] = _found(group, device)
    return engine


def peers_answer(group: Group) -> bool:
    """Return whether the other ranks of the group are real; False in a simulated world."""
    return group.size == 1 or not engine_for(group, group.device()).simulated


def _found(group: Group, device: torch.device) -> Engine:
    backends = group.backends()
    backend = backends.get(device.type, "")
    if backend == "gloo" and resolve(None).over_mpi:
        from varcomm.transport.mpi import MPIEngine, gpu_aware  # mpi4py is an optional package

        direct = device.type == "cpu" or gpu_aware()
        return MPIEngine() if direct else Pinned(MPIEngine())
    engine = _ENGINES.get((backend, device.type))
    if engine is None:
        served = [kind for kind, backend in backends.items() if (backend, kind) in _ENGINES]
        raise GroupError(
            f"{group}: the tensor is on {device}, but this group has an engine for "
            f"{' and '.join(served) or 'no device'} only (torch.distributed's backends: "
            f"{dist.get_backend_config(group.process_group)}). Move the tensor, or call "
            "varcomm.init with a backend for its device: gloo or mpi for cpu, nccl for cuda."
        )
    return engine
