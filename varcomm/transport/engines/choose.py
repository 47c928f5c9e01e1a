"""The choice of an engine for the tensors of a group, and calls through the chosen engine."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from varcomm.errors import GroupError
from varcomm.transport.engine import Engine, EngineFailure, Route, Start, Works, recorders
from varcomm.transport.group import Group, resolve

# Backends of torch.distributed that have an engine, and its kinds of devices.
_SERVED = {"gloo": ("cpu", "cuda"), "fake": ("cpu", "cuda"), "nccl": ("cuda",)}


def engine_for(group: Group, device: torch.device) -> Engine:
    """Return the engine for bytes on `device`, or raise GroupError."""
    engine: Engine | None = group.engines.get(device)
    if engine is None:
        engine = group.engines[device] = _new_engine(group, device)
    return engine


def _new_engine(group: Group, device: torch.device) -> Engine:
    """Make the engine for a device. A process imports only the engines that its groups use."""
    backends = group.backends()
    backend = backends.get(device.type, "")
    if device.type not in _SERVED.get(backend, ()):
        served = [kind for kind, backend in backends.items() if kind in _SERVED.get(backend, ())]
        raise GroupError(
            f"{group}: the tensor is on {device}, but this group has an engine for "
            f"{' and '.join(served) or 'no device'} only (torch.distributed's backends: "
            f"{dist.get_backend_config(group.process_group)}). Move the tensor, or call "
            "varcomm.init with a backend for its device: gloo or mpi for cpu, nccl for cuda."
        )
    if backend == "nccl":
        from varcomm.transport.engines.nccl import NCCL

        return NCCL()
    if backend == "fake":
        from varcomm.transport.engines.simulated import Simulated

        return Simulated()
    engine: Engine
    if resolve(None).over_mpi:
        from varcomm.transport.engines.mpi import MPIEngine  # mpi4py is an optional package

        engine = MPIEngine()
    else:
        from varcomm.transport.engines.gloo import Gloo

        engine = Gloo()
    if device.type == "cpu":
        return engine
    from varcomm.transport.engines.pinned import Pinned

    return Pinned(engine)


def prepared(route: Route, device: torch.device, name: str | None = None) -> Start:
    """Return the function that starts a route by the engine for `device`, or raises EngineFailure.

    Its tensors are contiguous. Calls with a `name` are recorded.
    """
    group = route.group
    engine = engine_for(group, device)
    start: Start
    if group.size == 1:
        start = _keep if route.recv[0] else _nothing
    elif route.schedule == "broadcast" and not any((*route.recv, *route.send)):
        start = _nothing
    else:
        start = engine.prepare(route)

    received, sent = route.nbytes()

    def begin(out: Tensor, data: Tensor) -> Works:
        # NCCL refuses other lengths on this rank alone, and the other ranks wait
        assert out.nbytes == received, (route, out.nbytes)
        assert sent is None or data.nbytes == sent, (route, data.nbytes)
        if name is not None:
            for record in recorders:
                record(name, route, device)
        try:
            return start(out, data)
        except RuntimeError as error:
            raise EngineFailure(str(error)) from error

    return begin


def _keep(out: Tensor, data: Tensor) -> Works:
    """Move the data of a single rank."""
    if data.data_ptr() != out.data_ptr():
        (out if out.shape == data.shape else out.view(data.shape)).copy_(data)
    return ()


def _nothing(out: Tensor, data: Tensor) -> Works:
    return ()
