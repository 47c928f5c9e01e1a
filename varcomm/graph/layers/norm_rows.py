"""Rows that a normalisation runs over, as the numbers of all ranks show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.index.node_groups import NodeGroups, accumulated, number_of
from varcomm.graph.index.partitioned_index import PartitionedIndex, plain
from varcomm.graph.node_shard import Shard
from varcomm.graph.on_device import require
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.ops.all_reduce import all_reduce
from varcomm.ops.checks import checked_tensor, checking
from varcomm.ops.digest import digest
from varcomm.sizes import ShardSizes, checked_sizes
from varcomm.transport.agreement import share
from varcomm.transport.group import Group, resolve

# A graph with rows of several kinds, the rows themselves, or rows per rank; None: in any number.
Where: TypeAlias = PartitionedGraph | Shard | Sequence[int] | None


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of one kind: the owned ones, and the number of halo rows behind them.

    `name` stands for the rows in messages, `key` is their expression in code. Without sizes, the
    rows are all those that a call is given on any rank; `replicated` ones are equal on all ranks.
    """

    group: Group
    name: str
    key: str = ""
    sizes: ShardSizes | None = None
    num_halo: int = 0
    replicated: bool = False

    @property
    def num_owned(self) -> int | None:
        """Rows that count, of which halo rows may follow; None if all do."""
        return self.sizes[self.group.rank] if self.sizes is not None else None

    def fits(self, x: torch.Tensor) -> tuple[bool, bool]:
        """Return whether `x` has a row for each owned one, and whether for these and the halo."""
        if self.num_owned is None:
            return x.dim() > 0, False
        given = len(x) if x.dim() else -1
        return given == self.num_owned, given == self.num_owned + self.num_halo

    def check(self, x: torch.Tensor, where: str) -> None:
        """Raise ArgumentError unless `x` is of floats, for each owned row or with the halo's."""
        checked_tensor(x, where, "x")
        if not x.is_floating_point():
            raise ArgumentError(f"{where}x must be of floats; got {x.dtype}.")
        if not any(self.fits(x)):
            raise ArgumentError(where + _refusal(x, [self]))

    def total(self, x: torch.Tensor) -> int | torch.Tensor:
        """Return the number of values per channel on all ranks, of which this rank's are `x`.

        If no sizes have the number, it is a sum over ranks, fp64 of shape (), and stays on the
        device of `x`. So it is for (rows, C, *L): lengths, at least of no rows, may differ.
        """
        if self.sizes is not None and x.dim() < 3:
            return self.sizes.total
        rows = len(x) if self.num_owned is None else self.num_owned
        own = x.new_full((1,), rows * prod(x.shape[2:]), dtype=torch.float64)
        return all_reduce(own, group=self.group.process_group)[0]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum floats (rows, *F) over all ranks: (1, *F), narrow ones in fp32."""
        part = x[: self.num_owned].sum(0, keepdim=True, dtype=accumulated(x.dtype))
        return all_reduce(part, group=self.group.process_group)

    def index(
        self,
        name: str,
        x: torch.Tensor,
        index: torch.Tensor | None,
        size: int | None,
        argument: str = "batch",
    ) -> tuple[PartitionedIndex, int]:
        """Return the group of each row of `x`, checked, and the number of groups on all ranks."""
        if index is None:
            ids, size = torch.zeros(len(x), dtype=torch.int64, device=x.device), 1
        else:
            ids = plain(index)
            with checking(name, self.group) as where:
                self._check_ids(ids, size, x, where, argument)
            if size is None:
                if isinstance(index, PartitionedIndex) and index.kind == "group":
                    size = index.of.count("group", ids, index.whole)
                else:
                    size = number_of(ids, self.group)
        of = NodeGroups(self.group, size, self.num_owned if self.fits(x)[1] else None)
        return PartitionedIndex.make(ids, of, "group", whole=True), size

    def _check_ids(
        self, ids: torch.Tensor, size: int | None, x: torch.Tensor, where: str, name: str
    ) -> None:
        """Raise ArgumentError unless there is a number below `size` for each row of `x`."""
        checked_tensor(ids, where, name)
        if ids.dtype != torch.int64 or ids.shape != x.shape[:1]:
            raise ArgumentError(
                f"{where}{name} must be of torch.int64, with a number for each of the {len(x)} "
                f"rows that are given; got {ids.dtype} of shape {tuple(ids.shape)}."
            )
        below = "" if size is None else f" and below {size}"
        wanted = f"{where}numbers in {name} must be at least 0{below}"

        def error() -> ArgumentError:
            low, high = (int(end) for end in ids.aminmax())
            return ArgumentError(f"{wanted}; got {low} to {high}.")

        fits = ids >= 0 if size is None else (ids >= 0) & (ids < size)
        require(fits.all(), error, self, (name, size), f"{wanted}.")


def rows_of_any_kind(name: str, x: torch.Tensor, where: Where, in_layer: bool) -> Rows:
    """Return the rows that a normalisation is given, as all ranks agree.

    These are nodes, or else edges, or else rows that are equal on all ranks, as pools return them;
    on all ranks without halos, or on all with them. Else they are some nodes or edges, such as
    those of a mask, without halos. Inside a layer they are the edges that it computes with.
    """
    kinds = _kinds(where)
    group = kinds[0].group
    if group.size == 1:
        return Rows(group, "rows of one process", replicated=True)
    if len(kinds) == 1:
        return kinds[0]
    one_hop = isinstance(where, PartitionedGraph) and all(
        edges.rules.exchanges for edges in where.edge_shards.values()
    )
    if in_layer and one_hop:
        return Rows(group, "rows of a layer")

    def local() -> tuple[object, list[tuple[bool, bool]], list[bool], str]:
        checked_tensor(x, "", "x")
        fits = [rows.fits(x) for rows in kinds]
        known = digest(x) if x.dim() and len(x) else group.rank
        refusal = "" if any(map(any, fits)) else _refusal(x, kinds)
        # one sample of shape (1, C, rows), or rows
        count = (x.shape[2] if x.dim() == 3 and len(x) == 1 else len(x)) if x.dim() else 0
        some = [
            count <= (rows.num_owned or 0) and bool(fit[0] or refusal or not count)
            for rows, fit in zip(kinds, fits, strict=True)
        ]
        return known, fits, some, refusal

    digests, fits, some, refusals = zip(*share(name, local, group), strict=True)
    found = [
        rows
        for rows, of_ranks in zip(kinds, zip(*fits, strict=True), strict=True)
        if any(map(all, zip(*of_ranks, strict=True)))
    ]
    equal = all(one == digests[0] for one in digests)
    if equal and found:  # rows that do not vary have one mean in either case
        equal = bool((x != x[:1]).any())
    if equal and not found:
        return Rows(group, "rows that are equal on all ranks", replicated=True)
    if not found and one_hop and any(map(all, zip(*some, strict=True))):
        return Rows(group, "rows that are given")
    if not found:
        wrong = next((rank for rank, text in enumerate(refusals) if text), 0)
        text = refusals[wrong] or "x has no rows of the same kind on all ranks."
        raise ArgumentError(f"{name}: refused on rank {wrong} of {group.size}: {text}")
    if equal or len({rows.sizes for rows in found if rows.sizes is not None}) > 1:
        names = [rows.name for rows in found] + ["what is equal on all ranks"] * equal
        raise ArgumentError(
            f"{name}: on every rank, x may have rows of {' or of '.join(names)}, some with the "
            "halo's. Choose one: module.forward = varcomm.graph.global_norm(module, "
            f"{found[0].key})."
        )
    return found[0]


def _kinds(where: Where) -> list[Rows]:
    """Return the rows that there are: nodes of each type, then edges of each type."""
    found: list[tuple[Any, Shard]]
    if where is None:
        return [Rows(resolve(None), "rows")]
    if isinstance(where, Shard):
        found = [(None, where)]
    elif not isinstance(where, PartitionedGraph):
        group = resolve(None)
        sizes = ShardSizes(checked_sizes(where, "sizes", group.size))
        return [Rows(group, "rows", "sizes", sizes)]
    else:
        found = [*where.node_shards.items(), *where.edge_shards.items()]
    rows = []
    for kind, shard in found:
        halo = 0
        if isinstance(shard, EdgeShard):
            halo = shard.local_ids.shape[1] - shard.num_owned
        elif kind is None and isinstance(where, PartitionedGraph):
            halo = where.num_halo
        name = shard.noun if kind is None else f"{shard.noun} of {kind!r}"
        key = f"graph.{shard.noun}" if kind is None else f"graph[{kind!r}]"
        rows.append(Rows(shard.group, name, key, shard.sizes, halo))
    return rows


def _refusal(x: torch.Tensor, kinds: Sequence[Rows]) -> str:
    wanted = ", or ".join(
        f"for each of the {rows.num_owned} owned {rows.name}"
        + (f", or for these and the {rows.num_halo} in the halo" if rows.num_halo else "")
        for rows in kinds
    )
    any_number = (
        "rows, set module.forward = varcomm.graph.global_norm(module, None)."
        if kinds[0].key == "sizes"
        else "nodes or edges, without halos, set module.forward = "
        "varcomm.graph.global_norm(module, graph, in_layer=True)."
    )
    return (
        f"x must have one row {wanted}; got shape {tuple(x.shape)}. Pass the rows of this rank. "
        f"For any number of {any_number}"
    )
