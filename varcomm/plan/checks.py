"""Checks of one rank's indices and counts, of which a plan is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.graph_operator import in_graph
from varcomm.sizes import checked_sizes
from varcomm.transport.group import Group


def checked_index(index: torch.Tensor, num_rows: int, name: str, rows: str) -> torch.Tensor:
    """Return `index` as int64 if it is one-dimensional, of integers and within `num_rows`.

    While a graph is recorded it has no values: :func:`checked_range` looks at them when it runs.
    """
    numbers = checked_integers(index, name)
    if not in_graph(index):
        checked_range(index, num_rows, name, rows)
    return numbers


def checked_integers(index: torch.Tensor, name: str, where: str = "") -> torch.Tensor:
    """Return `index` as int64 if it is one-dimensional and of integers."""
    if not isinstance(index, torch.Tensor):
        raise ArgumentError(f"{where}{name} must be a torch.Tensor; got {type(index).__name__}.")
    if index.dtype not in (torch.int32, torch.int64) or index.dim() != 1:
        raise ArgumentError(
            f"{where}{name} must be of torch.int64 or torch.int32 and of one dimension; got shape "
            f"{tuple(index.shape)} of {index.dtype}."
        )
    if in_graph(None) and not in_graph(index):
        raise ArgumentError(
            f"{where}{name} must be a fake tensor: pass mode.from_tensor(index), or a plan."
        )
    numbers = index.to(torch.int64)
    return numbers if in_graph(index) else numbers.as_subclass(torch.Tensor)


def checked_range(
    index: torch.Tensor, num_rows: int, name: str, rows: str, where: str = ""
) -> None:
    """Raise ArgumentError if `index` is out of range."""
    low, high = _span(index)
    if low < 0 or high >= num_rows:
        raise ArgumentError(
            f"{where}{name} spans {low}...{high}, out of range for {num_rows} {rows}."
        )


def _span(index: torch.Tensor) -> tuple[int, int]:
    """Return the first and the last row of an index; of an empty one, rows of any tensor."""
    low, high = torch.stack(index.aminmax()).tolist() if index.numel() else (0, -1)
    return low, high


def checked_indices(
    indices: Sequence[torch.Tensor], num_rows: int, group: Group, where: str = ""
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the rows for all ranks as one index, and the count for each."""
    names = [f"indices[{rank}]" for rank in range(group.size)]
    given = _per_rank(indices, "indices", group, where)
    checked = [
        checked_integers(index, name, where) for name, index in zip(names, given, strict=True)
    ]
    if len({index.device for index in checked}) > 1:
        devices = [str(index.device) for index in checked]
        raise ArgumentError(f"{where}indices must be on one device; got {devices}.")
    together = torch.cat(checked)
    if not in_graph(together):
        low, high = _span(together)  # the host waits for a GPU once
        if low < 0 or high >= num_rows:
            for name, index in zip(names, checked, strict=True):
                checked_range(index, num_rows, name, "own rows", where)
    return together, tuple(len(index) for index in checked)


def checked_count_matrix(
    sizes: Sequence[Sequence[int]], send_counts: Sequence[int], group: Group, where: str = ""
) -> list[tuple[int, ...]]:
    """Return ``sizes[i][j]``, rows from i to j, if this rank sends as many."""
    matrix = [
        checked_sizes(row, f"sizes[{rank}]", group.size, where)
        for rank, row in enumerate(_per_rank(sizes, "sizes", group, where))
    ]
    for rank, (count, size) in enumerate(zip(send_counts, matrix[group.rank], strict=True)):
        if count != size:
            raise ArgumentError(
                f"{where}indices[{rank}] has {count} rows, but sizes[{group.rank}][{rank}] is "
                f"{size}."
            )
    return matrix


def _per_rank(entries: Iterable[Any], name: str, group: Group, where: str) -> list[Any]:
    scalar = getattr(entries, "ndim", 1) == 0  # of numpy or torch: iterable by its type alone
    if scalar or not isinstance(entries, Iterable):
        raise ArgumentError(
            f"{where}{name} must be a list of one entry per rank; got {type(entries).__name__}."
        )
    per_rank = list(entries)
    if len(per_rank) != group.size:
        raise ArgumentError(
            f"{where}{name} must have one entry per rank, {group.size}; got {len(per_rank)}."
        )
    return per_rank
