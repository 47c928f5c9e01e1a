"""Annotations of values that are neither identical on all ranks nor boxes of one tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["PerRank", "Rows"]


@dataclass(eq=False)
class Rows:
    r"""Rows of a larger tensor by their ids, such as a field on the nodes of a partitioned graph.

    A checkpoint holds the full tensor in the order of ids, so that ranks with other rows load it.

    Attributes
    ----------
    tensor : torch.Tensor
        Shape (n, \*F): the rank's rows. Loading overwrites them.
    ids : torch.Tensor
        Shape (n,), integers in any order, such as ``graph.owned_ids``. A save needs every row on
        exactly one rank. A load accepts rows on several ranks or on none.
    total : int
        N, the rows of the full tensor.

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
    """A value of each rank's own, such as a generator of random numbers.

    Rank r loads the value that rank r saved. If more ranks load than saved, the additional ranks
    keep their values, so that no two ranks draw the same random numbers. If fewer ranks load, the
    remaining values are not read.

    Attributes
    ----------
    value : object
        Any value of a state. Loading replaces a plain value.

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
