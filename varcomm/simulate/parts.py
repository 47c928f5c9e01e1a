"""Partitions for any number of ranks, made by one process that has the full graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from varcomm.errors import ArgumentError
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.simulate.work import world
from varcomm.sizes import ShardSizes, at_least
from varcomm.transport.group import GroupLike, resolve

if TYPE_CHECKING:  # which needs PyTorch Geometric
    from varcomm.graph.build.assemble import Numbering
    from varcomm.graph.build.partition import Method
    from varcomm.graph.mesh.mesh import Mesh
    from varcomm.graph.partitioned_graph import PartitionedGraph
    from varcomm.graph.report import Report

_EDGES = 1 << 22  # per pass, so that temporary memory is a few hundred MB for any graph
_DRAWN = 200_000  # nodes in a picture, as in graph.plot


@dataclass(frozen=True, eq=False)
class Counts:
    """Numbers of nodes, edges and rows that each of P ranks owns, needs and sends.

    Attributes
    ----------
    owned, edges : torch.Tensor
        Nodes of all types that each rank owns, and edges into them; int64, shape (P,).
    flows : mapping of torch.Tensor
        Rows that each rank sends to each rank in a halo exchange, by edge type; int64, sparse,
        shape (P, P). The type is None in a graph with one type.

    See Also
    --------
    count, Work
    """

    owned: torch.Tensor
    edges: torch.Tensor
    flows: Mapping[Any, torch.Tensor] = field(repr=False)

    @property
    def size(self) -> int:
        """Number of ranks, P."""
        return len(self.owned)

    @cached_property
    def rows(self) -> torch.Tensor:
        """Rows that each rank sends to each rank in an exchange; sparse, shape (P, P)."""
        none = torch.zeros(0, dtype=torch.int64)
        return sum(self.flows.values(), _sparse(none, none, none, self.size)).coalesce()

    @cached_property
    def halo(self) -> torch.Tensor:
        """Rows that each rank receives in an exchange of its halo."""
        return sums(self.rows, 0)

    @cached_property
    def sent(self) -> torch.Tensor:
        """Rows that each rank sends in an exchange of halos, once per receiver."""
        return sums(self.rows, 1)

    @cached_property
    def neighbours(self) -> torch.Tensor:
        """Number of ranks with which each rank exchanges rows in at least one direction."""
        both_ways = (self.rows + self.rows.T).coalesce().indices()
        return torch.bincount(both_ways[0], minlength=self.size)

    def without_graph(self) -> Counts:
        """Return only the counts, which need little memory."""
        return Counts(self.owned, self.edges, self.flows)

    def refined(self, times: int) -> Counts:
        """Return the counts of a finer mesh of a surface, cut along the same lines.

        Each cell becomes ``times`` by ``times`` cells: ``times**2`` as many nodes and edges, and
        ``times`` as many rows along a cut. Use this estimate for meshes too large to be made.
        """
        flows = {key: (each * times).coalesce() for key, each in self.flows.items()}
        return Counts(self.owned * times**2, self.edges * times**2, flows)


@dataclass(frozen=True, eq=False)
class Needs:
    """Halo rows of all ranks for one edge type; int64 on the CPU.

    `edges` are the edges into the nodes of each rank, `cut` those of them from another rank; shape
    (P,). `row` has the global number of each row that a receiver needs, once per receiver, by
    receiver and then by row. `flows` as in :class:`Counts`.
    """

    sources: Numbering
    targets: Numbering
    edges: torch.Tensor
    cut: torch.Tensor
    row: torch.Tensor
    flows: torch.Tensor

    @classmethod
    def of(cls, edge_index: torch.Tensor, sources: Numbering, targets: Numbering) -> Self:
        """Collect them from all edges of the full graph, int64 of shape (2, E)."""
        ranks, rows = len(sources.sizes), max(1, sources.sizes.total)
        owner, target_owner = sources.owner.to(torch.int32), targets.owner.to(torch.int32)
        edges, cut = torch.zeros(2, ranks, dtype=torch.int64)
        found = [torch.zeros(0, dtype=torch.int64, device=edge_index.device)]
        for source, target in zip(*(ends.split(_EDGES) for ends in edge_index), strict=True):
            to = target_owner[target]
            edges += torch.bincount(to, minlength=ranks).cpu()
            crosses = torch.nonzero(owner[source] != to).view(-1)
            cut += torch.bincount(to[crosses], minlength=ranks).cpu()
            found.append(torch.unique(to[crosses].long() * rows + sources.number[source[crosses]]))
        pairs = torch.unique(torch.cat(found)).cpu()
        row = pairs % rows
        sender = torch.as_tensor(sources.sizes.owner(row))
        flows = _sparse(sender, pairs // rows, torch.ones_like(row), ranks)
        return cls(sources, targets, edges, cut, row, flows)


def _sparse(
    sender: torch.Tensor, receiver: torch.Tensor, rows: torch.Tensor, size: int
) -> torch.Tensor:
    ends, shape = torch.stack([sender, receiver]), (size, size)
    # torch 2.11 warns in spite of check_invariants=False
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_coo_tensor(ends, rows, shape).coalesce()


def sums(flows: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the rows that each rank receives (`dim` 0) or sends (`dim` 1); shape (P,)."""
    return torch.sparse.sum(flows, dim=dim).to_dense()


@dataclass(frozen=True, eq=False)
class Parts(Counts):
    """A graph cut for P ranks by :func:`partition`: its :class:`Counts`, and the part of each rank.

    Attributes
    ----------
    owned, edges, flows
        As in :class:`Counts`.
    method : str
        Method that assigned nodes to ranks.

    See Also
    --------
    partition, step
    """

    method: str
    _needs: Mapping[Any, Needs] = field(repr=False)
    _tables: Any = field(repr=False)
    _numbered: Mapping[Any, Numbering] = field(repr=False)

    def part(self, group: GroupLike = None) -> PartitionedGraph:
        """Return the part that :func:`varcomm.graph.partition` returns, without communication.

        Call this method inside :func:`world`, or on P real ranks that have the same graph.
        """
        from varcomm.graph.build.assemble import localised, owned_edges
        from varcomm.graph.edge_shard import EdgeShard
        from varcomm.graph.partitioned_graph import PartitionedGraph

        ranks = resolve(group)
        if ranks.size != self.size:
            raise ArgumentError(
                f"simulate: these parts are for {self.size} ranks; this is {ranks}. Enter "
                f"simulate.world({self.size}, rank), or cut the graph for {ranks.size}."
            )
        rank, tables, numbered = ranks.rank, self._tables, self._numbered
        nodes = {key: numbered[key].shard(table, ranks) for key, table in tables.nodes.items()}
        edges = {}
        for key, table in tables.edges.items():
            needs, flows = self._needs[key], self.flows[key]
            source, target = needs.sources, needs.targets
            own = owned_edges(table, rank, source, target)
            edge_index, halo = localised(own.edge_index, source.sizes, target.sizes, ranks)
            asked = needs.row - source.sizes.offsets[rank]
            asked = asked[(asked >= 0) & (asked < source.sizes[rank])].to(tables.device)
            send, recv = (tuple(each[rank].to_dense().tolist()) for each in (flows, flows.T))
            plan = ExchangePlan(ranks, asked, send, recv, source.sizes[rank])
            edges[key] = EdgeShard(
                group=ranks,
                sizes=ShardSizes(needs.edges.tolist()),
                attributes=own.attributes,
                ids=own.ids,
                local_ids=edge_index,
                halo_ids=source.order[halo],
                plan=plan,
                num_targets=target.sizes[rank],
            )
        return PartitionedGraph(nodes, edges, dict(tables.attributes), self.method)

    def report(self) -> Report:
        """Return the report of :meth:`varcomm.graph.PartitionedGraph.report` on P ranks."""
        from varcomm.graph.report import Report

        cut = sum((needs.cut for needs in self._needs.values()), torch.zeros_like(self.owned))
        columns = (self.owned, self.halo, self.edges, cut, self.sent, self.neighbours)
        return Report(self.method, *(tuple(column.tolist()) for column in columns))

    def save(
        self, folder: str | os.PathLike[str], progress: Callable[[int], object] | None = None
    ) -> None:
        """Write the files of :meth:`varcomm.graph.PartitionedGraph.save` on P ranks, part by part.

        `progress` is called with the number of each rank whose part has been written.
        """
        from varcomm.graph.saved_partition import Staging, part_of

        staging, digests = Staging(folder, self._tables.attributes), list[str]()
        try:
            staging.folder.mkdir(parents=True, exist_ok=True)
            for rank in range(self.size):
                with world(self.size, rank):
                    graph = self.part()
                halos = {key: edges.halo_ids for key, edges in graph.edge_shards.items()}
                numbers = {key: self._needs[key].sources.number[ids] for key, ids in halos.items()}
                part = dict(part_of(graph, numbers))
                digests.append(staging.write(rank, part))
                if progress is not None:
                    progress(rank)
            staging.finish(graph, part, digests)
        except BaseException:
            staging.discard()
            raise

    def plot(self, path: str | os.PathLike[str], mesh: Mesh | None = None) -> None:
        """Draw :meth:`varcomm.graph.PartitionedGraph.plot`, for a graph with one type of nodes."""
        from varcomm.graph.plot import check_target, draw, draw_cells, lists_to_draw, places

        check_target(path)
        if len(self._numbered) > 1:
            raise ArgumentError(
                "a picture shows one type of nodes. On ranks, call graph.plot(path, node_type)."
            )
        (numbered,), (table,) = self._numbered.values(), self._tables.nodes.values()
        copied = torch.zeros(table.count, dtype=torch.bool)
        for needs in self._needs.values():
            copied[needs.row] = True
        copied, owner = copied[numbered.number.cpu()], numbered.owner.cpu()
        lists, report = lists_to_draw(mesh, table.count), self.report()
        if mesh is not None and lists is not None:
            of_cells = mesh.nodes == "cells"
            draw_cells(Path(path), lists, of_cells, copied.numpy(), owner.numpy(), report)
            return
        rows = torch.cat([places(table.attributes.get("pos")), copied[:, None]], dim=1)
        chance = torch.Generator().manual_seed(0)
        drawn = torch.randperm(table.count, generator=chance)[:_DRAWN].sort().values
        draw(Path(path), rows[drawn].numpy(), owner[drawn].numpy(), table.count, report)


def partition(data: Any, size: int, method: Method = None) -> Parts:
    """Cut a graph for `size` ranks in one process, without communication.

    Parameters
    ----------
    data : torch_geometric.data.Data or torch_geometric.data.HeteroData
        The full graph. Counts need ``edge_index``, ``num_nodes``, and ``pos`` if `method` uses it.
    size : int
        Number of ranks, P.
    method : str or torch.Tensor or numpy.ndarray or sequence of int or mapping of str, optional
        As for :func:`varcomm.graph.partition`. The time of ``"hilbert"`` and ``"block"`` does not
        grow with P.

    Returns
    -------
    Parts
        Counts and parts of all ranks.

    Raises
    ------
    ArgumentError
        If `size` is below 1, and as in :func:`varcomm.graph.partition`.

    See Also
    --------
    Parts, varcomm.graph.partition

    Examples
    --------
    On a directed ring of 6 nodes and 3 ranks, each rank needs one row of the rank before it.

    >>> import torch, varcomm as vc
    >>> from torch_geometric.data import Data
    >>> ring = Data(edge_index=torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]]), num_nodes=6)
    >>> parts = vc.simulate.partition(ring, 3, "block")
    >>> parts.owned, parts.halo, parts.neighbours
    (tensor([2, 2, 2]), tensor([1, 1, 1]), tensor([2, 2, 2]))
    >>> with vc.simulate.world(3, rank=2):
    ...     parts.part().halo_ids
    tensor([3])
    """
    from varcomm.graph.build.assemble import Numbering
    from varcomm.graph.build.partition import assigned, checked_method
    from varcomm.graph.build.pyg_data import ends, read

    count = at_least(1, size, "simulate.partition: size")
    tables, name = read(data), "the ranks given"
    owners = checked_method(method, tables, count)
    if not isinstance(owners, dict):
        owners, name = assigned(data, count, owners)
    numbered = {key: Numbering.of(owners[key].to(tables.device), count) for key in tables.nodes}
    needs = {
        key: Needs.of(table.edge_index, *(numbered[end] for end in ends(key)))
        for key, table in tables.edges.items()
    }
    none = torch.zeros(count, dtype=torch.int64)
    return Parts(
        owned=sum((torch.tensor(own.sizes) for own in numbered.values()), none),
        edges=sum((need.edges for need in needs.values()), none),
        flows={key: need.flows for key, need in needs.items()},
        method=name,
        _needs=needs,
        _tables=tables,
        _numbered=numbered,
    )
