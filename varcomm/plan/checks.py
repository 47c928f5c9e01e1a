"""Checks of one rank's indices and counts, of which a plan is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from varcomm.errors import ArgumentError
from varcomm.ops.operator import in_graph
from varcomm.sizes import checked_sizes
from varcomm.transport.group import Group


def checked_index(
    index: torch.Tensor, num_rows: int, name: str, rows: str, where: str = ""
) -> torch.Tensor:
    """Return `index` as int64 if it is one-dimensional, of integers and within `num_rows`.

    While a graph is recorded it has no values: :func:`checked_range` looks at them when it runs.
    """
    if not isinstance(index, torch.Tensor):
        raise ArgumentError(f"{where}{name} must be a torch.Tensor; got {type(index).__name__}.")
    if index.dtype not in (torch.int32, torch.int64):
        hint = " Give an empty one its dtype." if index.numel() == 0 else ""
        raise ArgumentError(
            f"{where}{name} must be of torch.int64 or torch.int32; got {index.dtype}.{hint}"
        )
    if index.dim() != 1:
        raise ArgumentError(
            f"{where}{name} must have one dimension; got shape {tuple(index.shape)}."
        )
    if in_graph(None) and not in_graph(index):
        raise ArgumentError(
            f"{where}{name} must be a fake tensor, as others are inside FakeTensorMode. Pass "
            "mode.from_tensor(index), or make an ExchangePlan before."
        )
    if not in_graph(index):
        checked_range(index, num_rows, name, rows, where)
    return index.to(torch.int64)


def checked_range(
    index: torch.Tensor, num_rows: int, name: str, rows: str, where: str = ""
) -> None:
    """Raise ArgumentError if `index` is out of range."""
    if index.numel():
        low, high = torch.stack(index.aminmax()).tolist()
        if low < 0 or high >= num_rows:
            raise ArgumentError(
                f"{where}{name} spans {low}...{high}, out of range for {num_rows} {rows}."
            )


def checked_indices(
    indices: Sequence[torch.Tensor], num_rows: int, group: Group, where: str = ""
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the rows for all ranks as one index, and the count for each."""
    if isinstance(indices, torch.Tensor) or not isinstance(indices, Sequence):
        raise ArgumentError(
            f"{where}indices must be a list of tensors, one per rank; got {type(indices).__name__}."
        )
    if len(indices) != group.size:
        raise ArgumentError(
            f"{where}indices must have one tensor per rank, {group.size}; got {len(indices)}."
        )
    checked = [
        checked_index(index, num_rows, f"indices[{rank}]", "own rows", where)
        for rank, index in enumerate(indices)
    ]
    if len({index.device for index in checked}) > 1:
        devices = [str(index.device) for index in checked]
        raise ArgumentError(f"{where}indices must be on one device; got {devices}.")
    return torch.cat(checked), tuple(len(index) for index in checked)


def checked_count_matrix(
    sizes: Sequence[Sequence[int]], send_counts: Sequence[int], group: Group, where: str = ""
) -> tuple[int, ...]:
    """Return the rows that this rank gets from each by ``sizes[i][j]``, rows from i to j."""
    scalar = getattr(sizes, "ndim", 1) == 0  # of numpy or torch: iterable by its type alone
    if scalar or isinstance(sizes, str) or not isinstance(sizes, Iterable):
        raise ArgumentError(
            f"{where}sizes must be a list of lists, sizes[i][j] the rows that rank i sends to rank "
            f"j; got {type(sizes).__name__}."
        )
    rows = list(sizes)
    if len(rows) != group.size:
        raise ArgumentError(
            f"{where}sizes must have one list per rank, {group.size}; got {len(rows)}."
        )
    matrix = [
        checked_sizes(row, f"sizes[{rank}]", group.size, where) for rank, row in enumerate(rows)
    ]
    for rank, (count, size) in enumerate(zip(send_counts, matrix[group.rank], strict=True)):
        if count != size:
            raise ArgumentError(
                f"{where}indices[{rank}] has {count} rows, but sizes[{group.rank}][{rank}] is "
                f"{size}."
            )
    return tuple(row[group.rank] for row in matrix)
