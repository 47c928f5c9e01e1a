"""What a state says of values that are neither equal on all ranks nor parts of one tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["PerRank", "Rows"]


@dataclass(eq=False)
class Rows:
    r"""Rows of a larger tensor, by their numbers in it: the field of a partitioned graph's nodes.

    They are saved as the whole, in its own order, so that who loads them may have other rows.

    Attributes
    ----------
    tensor : torch.Tensor
        Shape (n, \*F): this rank's rows. Loading overwrites them.
    ids : torch.Tensor
        Shape (n,), integers: which rows of the whole they are, ``graph.owned_ids`` say; any order,
        and none on ranks that have nothing. When saved, every row is on one rank; when loaded, it
        may be on several or on none.
    total : int
        N, the rows of the whole.

    Examples
    --------
    >>> import tempfile, torch, varcomm
    >>> from varcomm.checkpoint import Rows, read, save
    >>> def fn(rank, folder):
    ...     ids = torch.tensor([2, 0] if rank == 0 else [1])
    ...     save({"u": Rows(10 * ids, ids, 3)}, folder)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = varcomm.launch(fn, 2, folder)
    ...     read(folder)
    {'u': tensor([ 0, 10, 20])}
    """

    tensor: torch.Tensor
    ids: torch.Tensor
    total: int


@dataclass(eq=False)
class PerRank:
    """What each rank has of its own, such as a generator of random numbers.

    Each rank loads what the rank of its number has saved. Where more ranks load than have saved,
    the others keep what they have: nobody has drawn from their streams, and to give them those of
    another rank would make two ranks draw alike. Where fewer load, what is left over is not read.

    Attributes
    ----------
    value : object
        Whatever else a state may have; a plain value is exchanged by loading.

    Examples
    --------
    >>> import tempfile, torch
    >>> from varcomm.checkpoint import PerRank, load, save
    >>> generator = torch.Generator().manual_seed(5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"noise": PerRank(generator)}, folder)
    ...     drawn = torch.rand(3, generator=generator)
    ...     load({"noise": PerRank(generator)}, folder)
    >>> torch.equal(drawn, torch.rand(3, generator=generator))
    True
    """

    value: Any
