"""A partition for any number of ranks, made by one process that has the whole graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from varcomm.errors import ArgumentError
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.simulate.counts import Counts
from varcomm.simulate.needs import Needs
from varcomm.simulate.world import world
from varcomm.sizes import ShardSizes, exact_int
from varcomm.transport.group import GroupLike, resolve

if TYPE_CHECKING:  # which needs PyTorch Geometric
    from varcomm.graph.building.assemble import Numbering
    from varcomm.graph.building.partition import Method
    from varcomm.graph.building.tables import Tables
    from varcomm.graph.files.plot import Projection
    from varcomm.graph.partitioned_graph import EdgeType, NodeType, PartitionedGraph
    from varcomm.graph.report import Report

__all__ = ["Parts", "partition"]

# Nodes in a picture, as graph.plot draws them.
_DRAWN = 200_000


@dataclass(frozen=True, eq=False)
class Parts(Counts):
    """A graph cut for P ranks: what each would own, need and send, and the part that it has.

    Made by :func:`partition`.

    Attributes
    ----------
    owned, edges, flows
        As of :class:`Counts`.
    method : str
        How the ranks of nodes were decided.
    needs : mapping of Needs
        Who needs which rows of whom, by type of edges; of the type None in a graph with one type.

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> edge_index = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])
    >>> ring = Data(x=torch.arange(6.0), edge_index=edge_index)
    >>> parts = varcomm.simulate.partition(ring, 2, "block")
    >>> parts.method, parts.size
    ('block', 2)
    >>> print(parts.report())
    6 nodes and 6 edges on 2 ranks by block
    rank    owned     halo    edges      cut     sent  neighbours
       0        3        1        3        1        1           1
       1        3        1        3        1        1           1
    edges between ranks: 2 (33.3 %); halo: 33.3 % of the nodes
    imbalance: 1.00 in nodes, 1.00 in edges
    """

    method: str
    needs: Mapping[EdgeType, Needs] = field(repr=False)
    _tables: Tables = field(repr=False)
    _numbered: Mapping[NodeType, Numbering] = field(repr=False)

    def part(self, group: GroupLike = None) -> PartitionedGraph:
        """Return what this rank of a group has of the graph; without communication.

        It is what :func:`varcomm.graph.partition` gives there, with the plan of each halo. Inside
        :func:`world`, or on ranks that are there and have the same graph.

        Parameters
        ----------
        group : ProcessGroup or DeviceMesh, optional
            Of P ranks; None is the whole world.

        Raises
        ------
        ArgumentError
            If the group has another number of ranks.
        """
        from varcomm.graph.building.assemble import localised, owned_edges
        from varcomm.graph.building.tables import ends
        from varcomm.graph.delta_ids import AscendingIds
        from varcomm.graph.edge_shard import EdgeShard
        from varcomm.graph.partitioned_graph import PartitionedGraph

        ranks = resolve(group)
        if ranks.size != self.size:
            raise ArgumentError(
                f"simulate: these parts are for {self.size} ranks; this is {ranks}. Enter "
                f"simulate.world({self.size}, rank), or cut the graph for {ranks.size}."
            )
        tables, numbered = self._tables, self._numbered
        nodes = {key: numbered[key].shard(table, ranks) for key, table in tables.nodes.items()}
        edges = {}
        for key, table in tables.edges.items():
            source, target = (numbered[end] for end in ends(key))
            own = owned_edges(table, ranks.rank, source, target)
            edge_index, halo = localised(own.source, own.target, source.sizes, target.sizes, ranks)
            needs = self.needs[key]
            send_index, send_counts = needs.asked_of(ranks.rank)
            plan = ExchangePlan(
                ranks,
                send_index.to(tables.device),
                send_counts,
                needs.asked_by(ranks.rank),
                source.sizes[ranks.rank],
            )
            edges[key] = EdgeShard(
                group=ranks,
                sizes=ShardSizes(needs.edges.tolist()),
                attributes=own.attributes,
                ids=AscendingIds.of(own.ids),
                edge_index=edge_index,
                halo_ids=source.order[halo],
                plan=plan,
                num_targets=target.sizes[ranks.rank],
            )
        return PartitionedGraph(nodes, edges, dict(tables.attributes), self.method)

    def report(self) -> Report:
        """Return what :meth:`varcomm.graph.PartitionedGraph.report` returns on P ranks."""
        from varcomm.graph.report import Report

        cut = _sum([needs.cut for needs in self.needs.values()], self.size)
        columns = (self.owned, self.halo, self.edges, cut, self.sent, self.neighbours)
        return Report(self.method, *(tuple(column.tolist()) for column in columns))

    def save(
        self, folder: str | os.PathLike[str], progress: Callable[[int], object] | None = None
    ) -> None:
        """Write what :meth:`varcomm.graph.PartitionedGraph.save` writes on P ranks.

        :meth:`varcomm.graph.PartitionedGraph.load` reads it, on any number of ranks. One part after
        the other is cut out of the graph, with a look at all edges for each, and written.

        Parameters
        ----------
        folder : path
            Where to; an earlier save there is replaced once the new one is whole. Until then,
            files are collected in ``folder.saving``.
        progress : callable, optional
            Called with the number of each rank whose part has been written.

        Raises
        ------
        ArgumentError
            If the folder is, or has, something else, or cannot be written; or an attribute cannot
            be saved.
        GroupError
            If torch.distributed is initialised already.
        """
        from varcomm.graph.building.tables import ends
        from varcomm.graph.files.staging import Staging, part_of

        try:
            staging = Staging.of(folder, self._tables.attributes)
            try:
                staging.begin()
                digests: list[str] = []
                first: dict[str, torch.Tensor] = {}
                for rank in range(self.size):
                    with world(self.size, rank):
                        graph = self.part()
                    numbers = {
                        key: self._numbered[ends(key)[0]].number[edges.halo_ids]
                        for key, edges in graph.edge_shards.items()
                    }
                    part = dict(part_of(graph, numbers))
                    first = first or part
                    digests.append(staging.write(rank, part))
                    if progress is not None:
                        progress(rank)
                staging.finish(graph, first, digests)
            except BaseException:
                staging.discard()
                raise
        except OSError as error:
            raise ArgumentError(f"{folder} cannot be written: {error}.") from error

    def plot(
        self,
        path: str | os.PathLike[str],
        projection: Projection = None,
        node_type: NodeType = None,
    ) -> None:
        """Draw what :meth:`varcomm.graph.PartitionedGraph.plot` draws on P ranks.

        Parameters
        ----------
        path, projection, node_type
            As there.

        Raises
        ------
        ArgumentError
            If positions are missing or do not fit, or the file cannot be written.
        MissingPackageError
            If matplotlib is not installed.
        """
        from varcomm.graph.files.plot import check_target, draw, places

        check_target(path)
        if node_type not in self._numbered:
            raise ArgumentError(
                f"node_type must be one of {list(self._numbered)}; got {node_type!r}."
            )
        numbered, table = self._numbered[node_type], self._tables.nodes[node_type]
        pos = table.attributes.get("pos")
        rows = places(None if pos is None else pos.rows(numbered.order), projection)
        copied = torch.zeros(len(rows), 1, dtype=torch.float64)
        for edge_type, needs in self.needs.items():
            if edge_type is None or edge_type[0] == node_type:
                copied[needs.row] = 1
        owner = numbered.owner[numbered.order].cpu()
        drawn = torch.arange(len(rows))
        if len(rows) > _DRAWN:
            chance = torch.Generator().manual_seed(0)
            drawn = torch.randperm(len(rows), generator=chance)[:_DRAWN].sort().values
        both = self.rows + self.rows.T
        adjacent: list[list[int]] = [[] for _ in range(self.size)]
        for one, other in both.coalesce().indices().T.tolist():
            adjacent[one].append(other)
        try:
            draw(
                Path(path),
                torch.cat([rows, copied], dim=1)[drawn].numpy(),
                owner[drawn].numpy(),
                adjacent,
                len(rows),
                self.report(),
                projection,
            )
        except OSError as error:
            raise ArgumentError(f"{path} cannot be written: {error}.") from error


def partition(data: Any, size: int, method: Method = None) -> Parts:
    """Cut a graph for `size` ranks, in one process and without any of them.

    Parameters
    ----------
    data : torch_geometric.data.Data or torch_geometric.data.HeteroData
        The whole graph, as :func:`varcomm.graph.partition` takes it. To count no more than
        ``edge_index`` and ``num_nodes`` are needed, and ``pos`` for the methods that take it.
    size : int
        Ranks, P.
    method : str or torch.Tensor or numpy.ndarray or mapping of str, optional
        As for :func:`varcomm.graph.partition`. ``"hilbert"`` and ``"block"`` take as long for
        thousands of ranks as for two.

    Returns
    -------
    Parts
        What each rank owns, needs and sends.

    Raises
    ------
    ArgumentError
        If the graph, `size` or the method will not do.
    MissingPackageError
        If `method` needs a package that is not installed.

    Notes
    -----
    No communication, and no loop over nodes or ranks: the edges are looked at once, a few million
    at a time, and what is kept beside the graph is in proportion to nodes and halos.

    Examples
    --------
    A directed ring of 6 nodes on 3 ranks: each needs one row of the rank before it.

    >>> import torch, varcomm as vc
    >>> from torch_geometric.data import Data
    >>> ring = Data(edge_index=torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]]), num_nodes=6)
    >>> parts = vc.simulate.partition(ring, 3, "block")
    >>> parts.owned, parts.halo, parts.neighbours
    (tensor([2, 2, 2]), tensor([1, 1, 1]), tensor([2, 2, 2]))
    >>> parts.rows.to_dense()
    tensor([[0, 1, 0],
            [0, 0, 1],
            [1, 0, 0]])
    >>> with vc.simulate.world(3, rank=2):
    ...     parts.part().halo_ids
    tensor([3])
    """
    from varcomm.graph.building.assemble import Numbering
    from varcomm.graph.building.partition import assigned, checked_method
    from varcomm.graph.building.tables import ends, read
    from varcomm.graph.partitioners.assign import method_used

    count = exact_int(size)
    if count is None or count < 1:
        raise ArgumentError(f"simulate.partition: size must be a positive integer; got {size!r}.")
    tables = read(data)
    owners = checked_method(method, tables, count)
    name = "the ranks given"
    if not isinstance(owners, dict):
        name = method_used(data, count, owners)
        owners = assigned(data, count, name)
    numbered = {key: Numbering.of(owners[key].to(tables.device), count) for key in tables.nodes}
    needs = {
        key: Needs.of(table.edge_index, *(numbered[end] for end in ends(key)))
        for key, table in tables.edges.items()
    }
    return Parts(
        owned=_sum([torch.tensor(own.sizes) for own in numbered.values()], count),
        edges=_sum([need.edges for need in needs.values()], count),
        flows={key: need.flows for key, need in needs.items()},
        method=name,
        needs=needs,
        _tables=tables,
        _numbered=numbered,
    )


def _sum(counts: list[torch.Tensor], size: int) -> torch.Tensor:
    return torch.stack([torch.zeros(size, dtype=torch.int64), *counts]).sum(dim=0)
