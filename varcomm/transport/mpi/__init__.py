"""MPI by mpi4py. Nothing here is imported unless it is asked for."""

from contextlib import suppress

# `from mpi4py import MPI` would start MPI at once; `start` does so when its process manager is known.
with suppress(ImportError):
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
