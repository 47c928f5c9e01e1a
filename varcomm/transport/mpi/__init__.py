"""MPI, through mpi4py: an engine, and a backend of torch.distributed for stock wheels of PyTorch.

The room's modules import mpi4py; this one does so when it is asked to.
"""

from __future__ import annotations

from contextlib import suppress

from varcomm.transport.engines import serve
from varcomm.transport.staged import Staged

__all__ = ["BACKEND", "register"]

# Torch's own "mpi" is built into no wheel, and its name is taken all the same.
BACKEND = "mpi4py"

# `from mpi4py import MPI` would start MPI. `start` does so, once its process manager is known.
with suppress(ImportError):
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False


def register() -> None:
    """Make the backend ``"mpi4py"`` known to torch.distributed, and its engine to varcomm; once."""
    from varcomm.transport.mpi.buffers import gpu_aware
    from varcomm.transport.mpi.engine import MPIEngine
    from varcomm.transport.mpi.process_group import register_backend

    register_backend(BACKEND)
    serve(BACKEND, "cpu", MPIEngine())
    serve(BACKEND, "cuda", MPIEngine() if gpu_aware() else Staged(MPIEngine()))
