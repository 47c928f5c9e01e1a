"""Rows that a normalisation, a pool or a readout runs over: nodes or edges of a type.

A single rank may have as many nodes as edges, or as many of one type as of another. So ranks agree
on the kinds that fit on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.index import plain
from varcomm.graph.nn.graphs import Batch, largest
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.graph.shard import Shard
from varcomm.ops.checks import checked_tensor
from varcomm.ops.operator import checking
from varcomm.sizes import exact_int
from varcomm.transport.agreement import share
from varcomm.transport.group import Group

__all__ = [
    "Rows",
    "Where",
    "batch_of",
    "check_floats",
    "check_ids",
    "check_rows",
    "node_rows",
    "rows_of_any_kind",
]

# A graph with rows of several kinds, or the rows themselves.
Where: TypeAlias = PartitionedGraph | Shard


class Rows:
    """Rows of one kind: the owned ones, and the number of halo rows behind them.

    `name` stands for the rows in messages, `key` is their expression in code.
    """

    def __init__(self, shard: Shard, num_halo: int, name: str, key: str) -> None:
        self.shard, self.num_halo, self.name, self.key = shard, num_halo, name, key
        self.group: Group = shard.group
        self.num_owned, self.total = shard.num_owned, shard.sizes.total

    @property
    def owned_ids(self) -> torch.Tensor:
        """Ids of the owned rows in the full graph, ascending; int64."""
        return self.shard.owned_ids

    def fits(self, x: torch.Tensor) -> tuple[bool, bool]:
        """Return whether `x` has a row for each owned one, and whether for these and the halo."""
        given = len(x) if x.dim() else -1
        return given == self.num_owned, given == self.num_owned + self.num_halo


def check_rows(x: torch.Tensor, rows: Rows, where: str) -> None:
    """Raise ArgumentError unless `x` has a row for each owned one, or for these and the halo."""
    checked_tensor(x, where, "x")
    if not any(rows.fits(x)):
        raise ArgumentError(where + _refusal(x, [rows]))


def node_rows(name: str, x: torch.Tensor, where: Where) -> Rows:
    """Return the nodes that `x` has rows of; where there are several types, all ranks agree."""
    found = _fitting(name, x, _nodes(where))
    if len(found) > 1:
        raise ArgumentError(
            f"{name}: x has as many rows as there are {' and '.join(rows.name for rows in found)}, "
            f"on every rank. Choose one: pass {found[0].key} in place of the graph."
        )
    return found[0]


def rows_of_any_kind(name: str, x: torch.Tensor, where: Where) -> Rows:
    """Return the nodes, or else the edges, that `x` has rows of, as all ranks agree."""
    found = _fitting(name, x, [*_nodes(where), *_edges(where)])
    if len({tuple(rows.shard.sizes) for rows in found}) > 1:
        raise ArgumentError(
            f"{name}: on every rank, x may have rows of {' or of '.join(r.name for r in found)}, "
            "some with the halo's. Choose one: module.forward = "
            f"varcomm.graph.global_norm(module, {found[0].key})."
        )
    return found[0]


def _nodes(where: Where) -> list[Rows]:
    if isinstance(where, EdgeShard):
        return _edges(where)
    if isinstance(where, Shard):
        return [Rows(where, 0, "nodes", "graph.nodes")]
    if None in where.node_shards:
        return [Rows(where.nodes, where.num_halo, "nodes", "graph.nodes")]
    return [
        Rows(shard, 0, f"nodes of {kind!r}", f"graph[{kind!r}]")
        for kind, shard in where.node_shards.items()
    ]


def _edges(where: Where) -> list[Rows]:
    if isinstance(where, PartitionedGraph):
        shards = where.edge_shards
    elif isinstance(where, EdgeShard):
        shards = {None: where}
    else:
        shards = {}
    found = []
    for kind, shard in shards.items():
        name, key = "edges", "graph.edges"
        if kind is not None:
            name, key = f"edges of {kind!r}", f"graph[{kind!r}]"
        found.append(Rows(shard, shard.edge_index.shape[1] - shard.num_owned, name, key))
    return found


def _fitting(name: str, x: torch.Tensor, kinds: Sequence[Rows]) -> list[Rows]:
    """Return the kinds that fit `x` on all ranks: on all without halos, or on all with them."""
    if len(kinds) == 1:
        return [*kinds]

    def local() -> list[tuple[bool, bool]]:
        checked_tensor(x, "", "x")
        fits = [rows.fits(x) for rows in kinds]
        if not any(map(any, fits)):
            raise ArgumentError(_refusal(x, kinds))
        return fits

    shared = share(name, local, kinds[0].group)
    found = [
        rows
        for rows, fits in zip(kinds, zip(*shared, strict=True), strict=True)
        if any(map(all, zip(*fits, strict=True)))
    ]
    if not found:
        of = [
            " or of ".join(
                rows.name if fit[0] else f"{rows.name} and the halo"
                for rows, fit in zip(kinds, fits, strict=True)
                if any(fit)
            )
            for fits in shared
        ]
        other = next(rank for rank, names in enumerate(of) if names != of[0])
        raise ArgumentError(
            f"{name}: x has no rows that are of the same kind on all ranks: on rank 0 of {of[0]}, "
            f"on rank {other} of {of[other]}."
        )
    return found


def _refusal(x: torch.Tensor, kinds: Sequence[Rows]) -> str:
    wanted = ", or ".join(
        f"for each of the {rows.num_owned} owned {rows.name}"
        + (f", or for these and the {rows.num_halo} in the halo" if rows.num_halo else "")
        for rows in kinds
    )
    return f"x must have one row {wanted}; got shape {tuple(x.shape)}. Pass the rows of this rank."


def check_floats(x: torch.Tensor, dims: tuple[int, ...], where: str) -> None:
    """Raise ArgumentError unless `x` is of floats, and of one of `dims` dimensions if any."""
    checked_tensor(x, where, "x")
    if not x.is_floating_point() or (dims and x.dim() not in dims):
        shapes = {2: "(rows, C)", 3: "(rows, C, L)"}
        of = f" and shape {' or '.join(shapes[dim] for dim in dims)}" if dims else ""
        raise ArgumentError(
            f"{where}x must be of floats{of}; got {x.dtype} of shape {tuple(x.shape)}."
        )


def check_ids(
    index: torch.Tensor, size: int | None, x: torch.Tensor, where: str, name: str = "batch"
) -> int:
    """Return one more than the largest number in `index`, if it fits to `x` and `size`."""
    checked_tensor(index, where, name)
    if index.dtype != torch.int64 or index.shape != x.shape[:1]:
        raise ArgumentError(
            f"{where}{name} must be of torch.int64, with a number for each of the {len(x)} rows "
            f"that are given; got {index.dtype} of shape {tuple(index.shape)}."
        )
    if size is not None and (exact_int(size) is None or size < 0):
        raise ArgumentError(
            f"{where}the number of graphs must be an int of at least 0; got {size!r}."
        )
    low, high = (int(end) for end in index.aminmax()) if len(index) else (0, -1)
    if low < 0 or (size is not None and high >= size):
        below = "" if size is None else f" and below {size}"
        raise ArgumentError(
            f"{where}numbers in {name} must be at least 0{below}; got {low} to {high}."
        )
    return high + 1


def batch_of(
    name: str,
    rows: Rows,
    x: torch.Tensor,
    index: torch.Tensor | None,
    size: int | None,
    dims: tuple[int, ...] | None = None,
) -> Batch:
    """Check rows and batch vector of a call on this rank; if `size` is None, ask all ranks.

    With `dims`, rows must be of floats, and of one of these dimensions if there are any.
    """
    index = plain(index)
    with checking(name, rows.group) as where:
        check_rows(x, rows, where)
        if dims is not None:
            check_floats(x, dims, where)
        if index is None:
            return Batch(rows, None, 1)
        end = check_ids(index, size, x, where)
    return Batch(rows, index, largest(end, rows.group, x.device) if size is None else size)
