"""Kinds of rows that a normalisation, a pool or a readout may run over: nodes or edges of a type.

A single rank may have as many nodes as edges, or as many of one type as of another. So ranks agree
on the kinds that fit on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.index import plain
from varcomm.graph.nn.batches import Batch, check_ids, largest
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.graph.shard import Shard
from varcomm.ops.checks import checked_tensor
from varcomm.ops.operator import checking
from varcomm.transport.agreement import share
from varcomm.transport.group import Group

__all__ = ["Rows", "Where", "batch_of", "check_rows", "node_rows", "rows_of_any_kind"]

# A graph with rows of several kinds, or the rows themselves.
Where: TypeAlias = PartitionedGraph | Shard


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of one kind: the owned ones, and the number of halo rows behind them.

    `name` stands for the rows in messages, `key` is their expression in code.
    """

    shard: Shard
    num_halo: int
    name: str
    key: str

    @property
    def group(self) -> Group:
        """The ranks that the rows are sharded over."""
        return self.shard.group

    @property
    def num_owned(self) -> int:
        """Rows that this rank owns."""
        return self.shard.num_owned

    @property
    def total(self) -> int:
        """Rows of all ranks."""
        return self.shard.sizes.total

    @property
    def owned_ids(self) -> torch.Tensor:
        """Ids of the owned rows in the full graph, ascending; int64."""
        return self.shard.owned_ids


def check_rows(x: torch.Tensor, rows: Rows, where: str) -> None:
    """Raise ArgumentError unless `x` has a row for each owned one, or for these and the halo."""
    checked_tensor(x, where, "x")
    if not any(_fits(x, rows)):
        raise ArgumentError(where + _refusal(x, [rows]))


def node_rows(name: str, x: torch.Tensor, where: Where) -> Rows:
    """Return the nodes that `x` has rows of.

    Collective in a graph with several types of nodes: all ranks raise ArgumentError unless exactly
    one type fits `x` on all ranks. Otherwise nothing is checked.
    """
    found = _fitting(name, x, _nodes(where))
    if len(found) > 1:
        raise ArgumentError(
            f"{name}: x has as many rows as there are {' and '.join(rows.name for rows in found)}, "
            f"on every rank. Choose one: pass {found[0].key} in place of the graph."
        )
    return found[0]


def rows_of_any_kind(name: str, x: torch.Tensor, where: Where) -> Rows:
    """Return the nodes, or else the edges, that `x` has rows of; collective.

    All ranks raise ArgumentError if no kind fits `x` on all ranks, or several of different sizes.
    """
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
    return [
        Rows(
            shard,
            shard.edge_index.shape[1] - shard.num_owned,
            "edges" if kind is None else f"edges of {kind!r}",
            "graph.edges" if kind is None else f"graph[{kind!r}]",
        )
        for kind, shard in shards.items()
    ]


def _fits(x: torch.Tensor, rows: Rows) -> tuple[bool, bool]:
    """Return whether `x` has a row for each owned one, and whether for these and the halo."""
    given = len(x) if x.dim() else -1
    return given == rows.num_owned, given == rows.num_owned + rows.num_halo


def _fitting(name: str, x: torch.Tensor, kinds: Sequence[Rows]) -> list[Rows]:
    """Return the kinds that fit `x` on all ranks: on all without halos, or on all with them."""
    if len(kinds) == 1:
        return [*kinds]

    def local() -> list[tuple[bool, bool]]:
        checked_tensor(x, "", "x")
        fits = [_fits(x, rows) for rows in kinds]
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


def batch_of(
    name: str, rows: Rows, x: torch.Tensor, index: torch.Tensor | None, size: int | None
) -> Batch:
    """Check rows and batch vector of a call on this rank; if `size` is None, ask all ranks."""
    index = plain(index)
    with checking(name, rows.group) as where:
        check_rows(x, rows, where)
        if index is None:
            return Batch(rows, None, 1)
        end = check_ids(index, size, x, where)
    if size is None:
        size = largest(end, rows.group, x.device)
    return Batch(rows, index, size)
