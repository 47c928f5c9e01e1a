"""MPI, through mpi4py: an engine, and a backend of torch.distributed for stock wheels of PyTorch.

The room's modules import mpi4py, which starts MPI; this one does so when it is asked to.
"""

from __future__ import annotations

__all__ = ["BACKEND", "register"]

# Torch's own "mpi" is built into no wheel, and its name is taken all the same.
BACKEND = "mpi4py"


def register() -> None:
    """Make the backend ``"mpi4py"`` known to torch.distributed, and its engine to varcomm; once."""
    from varcomm.transport.mpi.process_group import register_backend

    register_backend(BACKEND)
