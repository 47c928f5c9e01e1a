"""``PartitionedGraph``: one rank's part of a graph, and its exchanges with other ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch_geometric.data import Data, HeteroData

from varcomm.errors import ArgumentError
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.index.node_groups import NodeGroups
from varcomm.graph.index.partitioned_index import PartitionedIndex
from varcomm.graph.node_shard import NodeShard, Ranks, Shard, moved
from varcomm.graph.report import Report
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sizes import ShardSizes
from varcomm.transport.group import Group, GroupLike, OfGroup

# None in a graph with one type of nodes and one type of edges.
NodeType = str | None
EdgeType = tuple[str, str, str] | None

S = TypeVar("S", bound=Shard)

# Counts of PyG that do not depend on the part.
_COUNTS = ("num_edge_features", "num_features", "num_node_features")


@dataclass(frozen=True, eq=False)
class PartitionedGraph(OfGroup):
    """One rank's part of a graph: owned nodes, all edges into them, and their attributes.

    Built by :func:`partition` or :func:`from_edges`, and immutable. ``graph.x``,
    ``graph.edge_attr``, ... are the rank's rows of the full graph's attributes, in the same order.
    ``graph.num_owned`` counts the rank's nodes; ``graph.num_nodes`` and ``graph.num_edges`` count
    the nodes and edges of all ranks. In ``graph.edge_index``, nodes ``0 ... n - 1`` are owned and
    ``n ... n + h - 1`` are the halo, by owner.

    A heterogeneous graph has one shard per type: ``graph["paper"]`` is a :class:`NodeShard`,
    ``graph["author", "writes", "paper"]`` is an :class:`EdgeShard` with its own halo and plan. A
    model receives ``graph.x_dict`` and ``graph.edge_index_dict``. A graph with one type has
    ``graph.nodes`` and ``graph.edges``, and the members of both are also members of the graph.

    Attributes
    ----------
    node_shards : mapping
        The rank's nodes by type; the type is None in a graph with one type.
    edge_shards : mapping
        The rank's edges by type; the type is None in a graph with one type.
    attributes : mapping of str
        Attributes of the full graph.
    method : str
        The method that assigned the nodes.

    See Also
    --------
    partition, from_edges, NodeShard, EdgeShard

    Notes
    -----
    A value of nodes has shape ``(n, *F)``, of the halo ``(h, *F)``, of edges ``(E, *F)``, all of
    this rank. Methods that communicate are collective: all ranks call them.

    Examples
    --------
    Rank 1 owns nodes 2 and 3, and its halo is node 1, the source of the edge into node 2.

    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank):
    ...     path = torch.tensor([[0, 1, 2], [1, 2, 3]])
    ...     data = Data(x=torch.tensor([[1.0], [2.0], [4.0], [8.0]]), edge_index=path)
    ...     graph = varcomm.graph.partition(data, method="block")
    ...     ids = graph.owned_ids.tolist(), graph.halo_ids.tolist()
    ...     return *ids, graph.with_halo(graph.x).flatten().tolist(), graph.mean(graph.x).item()
    >>> varcomm.launch(fn, 2)
    [([0, 1], [], [1.0, 2.0], 3.75), ([2, 3], [1], [4.0, 8.0, 2.0], 3.75)]
    """

    node_shards: Mapping[NodeType, NodeShard]
    edge_shards: Mapping[EdgeType, EdgeShard]
    attributes: Mapping[str, Any]
    method: str

    _instead_of_pickle = (
        "On all ranks, call graph.save(folder), and PartitionedGraph.load(folder) to read it. Of a "
        "model, save state_dict()."
    )

    def __post_init__(self) -> None:
        for shard in (*self.node_shards.values(), *self.edge_shards.values()):
            shard.counted()  # compiled code reads the extent, which it cannot make
        for kind, edges in self.edge_shards.items():
            ends = (None, None) if kind is None else (kind[0], kind[-1])
            edges.rules.sources = self.node_shards[ends[0]]
            edges.rules.has_loops = ends[0] == ends[1]

    @property
    def group(self) -> Group:
        """The ranks over which the graph is split."""
        return next(iter(self.node_shards.values())).group

    @property
    def node_types(self) -> list[NodeType]:
        """The types of nodes; [None] in a graph with one type."""
        return list(self.node_shards)

    @property
    def edge_types(self) -> list[EdgeType]:
        """The types of edges; [None] in a graph with one type."""
        return list(self.edge_shards)

    @property
    def nodes(self) -> NodeShard:
        """The nodes that this rank owns, in a graph with one type."""
        return self._only(self.node_shards)

    @property
    def edges(self) -> EdgeShard:
        """The edges that this rank owns, in a graph with one type."""
        return self._only(self.edge_shards)

    def _only(self, shards: Mapping[Any, S]) -> S:
        if None not in shards:
            names = ", ".join(f"graph[{key!r}]" for key in shards)
            raise ArgumentError(f"the graph has several types. Choose one: {names}.")
        return shards[None]

    def __getitem__(self, key: Any) -> Any:
        """Return the shard of a type; of a graph with one type, an attribute."""
        shards: dict[Any, Any] = {**self.node_shards, **self.edge_shards}
        if key is not None and key in shards:
            return shards[key]
        if isinstance(key, str) and None in shards and key in self:
            return getattr(self, key)
        types = [kind for kind in shards if kind is not None]
        raise KeyError(f"{key!r}; the graph has {types or 'one type, graph.nodes and graph.edges'}")

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the local part, such as ``x`` or ``edge_index``."""
        # unpickling and copying ask before there are attributes
        if name.startswith("__") or "attributes" not in self.__dict__:
            raise AttributeError(name)
        for attributes in (self.attributes, *self._of_one_type):
            if name in attributes:
                return attributes[name]
        if name == "batch" and None in self.node_shards:  # all nodes are one graph
            zeros = torch.zeros(self.num_owned, dtype=torch.int64, device=self.edge_index.device)
            return PartitionedIndex.make(zeros, self._one_graph, "group", whole=True)
        if name in _COUNTS or (name.endswith("_dict") and None not in self.node_shards):
            try:
                return getattr(self.data, name)
            except KeyError as error:  # as HeteroData says of x_dict
                raise AttributeError(f"{error.args[0]}.") from error
        shards: dict[Any, Shard] = {**self.node_shards, **self.edge_shards}
        have = [f"graph[{key!r}].{name}" for key, shard in shards.items() if key and name in shard]
        known = f"it has {sorted(self.data.keys())}"
        if have:
            known = f"choose a type: {', '.join(have)}"
        elif name.endswith("stores") or callable(getattr(Data, name, None)):
            known += ". Call transforms and methods of PyG's Data before graph.partition"
        raise AttributeError(f"the graph has no attribute {name!r}; {known}.")

    @cached_property
    def _one_graph(self) -> NodeGroups:
        return NodeGroups(self.group, 1)

    @property
    def _of_one_type(self) -> tuple[Mapping[str, Any], ...]:
        if None not in self.node_shards:
            return ()
        return self.nodes.attributes, self.edges.attributes

    def __contains__(self, name: object) -> bool:
        """Return whether an attribute exists, or a type in a graph with several types."""
        if None in self.node_shards:
            return name in self.data
        return name in self.node_shards or name in self.edge_shards or name in self.attributes

    def __repr__(self) -> str:
        """Return the sizes of this rank's part."""
        nodes, edges = self.node_shards.values(), self.edge_shards.values()
        return (
            f"PartitionedGraph({self.group}: {sum(shard.num_owned for shard in nodes)} of "
            f"{sum(shard.sizes.total for shard in nodes)} nodes, "
            f"{sum(shard.num_halo for shard in edges)} in the halo, "
            f"{sum(shard.num_owned for shard in edges)} edges, by {self.method})"
        )

    @cached_property
    def data(self) -> Data | HeteroData:
        """The part of this rank as a PyG object, with edges in local ids."""
        if None in self.node_shards:
            data = Data(edge_index=self.edges.edge_index, num_nodes=self.nodes.num_owned)
            for attributes in self._of_one_type:
                data.update(attributes)
        else:
            data = HeteroData()
            for node_type, nodes in self.node_shards.items():
                data[node_type].update({"num_nodes": nodes.num_owned, **nodes.attributes})
            for edge_type, edges in self.edge_shards.items():
                data[edge_type].update({"edge_index": edges.edge_index, **edges.attributes})
        for name, value in self.attributes.items():
            data[name] = value
        return data

    @property
    def edge_index(self) -> torch.Tensor:
        """Edges in local ids, int64 of shape (2, E)."""
        return self.edges.edge_index

    @property
    def num_nodes(self) -> int:
        """Nodes of the full graph, N, on every rank; this rank owns :attr:`num_owned`."""
        return sum(shard.sizes.total for shard in self.node_shards.values())

    @property
    def num_edges(self) -> int:
        """Number of edges of the full graph; this rank owns ``graph.edges.num_owned``."""
        return sum(shard.sizes.total for shard in self.edge_shards.values())

    @property
    def num_owned(self) -> int:
        """Number of nodes that this rank owns, n."""
        return self.nodes.num_owned

    @property
    def num_halo(self) -> int:
        """Halo nodes of this rank, h."""
        return self.edges.num_halo

    @property
    def node_sizes(self) -> ShardSizes:
        """Nodes per rank."""
        return self.nodes.sizes

    @property
    def owned_ids(self) -> torch.Tensor:
        """Ids of the owned nodes in the full graph, ascending; int64 of shape (n,)."""
        return self.nodes.owned_ids

    @property
    def halo_ids(self) -> torch.Tensor:
        """Ids of the halo nodes in the full graph; int64 of shape (h,)."""
        return self.edges.halo_ids

    @property
    def plan(self) -> ExchangePlan:
        """The plan that fills the halo."""
        return self.edges.plan

    @property
    def interior(self) -> torch.Tensor:
        """Positions of edges whose source this rank owns; see :attr:`EdgeShard.interior`."""
        return self.edges.interior

    @property
    def boundary(self) -> torch.Tensor:
        """Positions of edges whose source is in the halo; see :attr:`EdgeShard.boundary`."""
        return self.edges.boundary

    @property
    def hops(self) -> int:
        """Number of exchanges of one hop that the halo replaces."""
        return max((shard.hops for shard in self.edge_shards.values()), default=1)

    def halo(self, x: torch.Tensor) -> torch.Tensor:
        """Fetch the rows of the halo, (h, *F), from owned rows, (n, *F)."""
        return self.edges.halo(x)

    @overload
    def with_halo(self, x: torch.Tensor) -> torch.Tensor: ...

    @overload
    def with_halo(self, x: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]: ...

    def with_halo(self, x: Any) -> Any:
        """Append the halo's rows to owned ones; see :meth:`EdgeShard.with_halo`."""
        return self.edges.with_halo(x)

    def gather(self, x: torch.Tensor, dst: int | None = None) -> torch.Tensor:
        """Collect rows of all nodes, in the full graph's order; see :meth:`NodeShard.gather`."""
        return self.nodes.gather(x, dst)

    def scatter(self, x: torch.Tensor | None, src: int = 0) -> torch.Tensor:
        """Send each rank its rows of a tensor of all nodes on `src`; :meth:`NodeShard.scatter`."""
        return self.nodes.scatter(x, src)

    def rows(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Fetch rows of any nodes by their ids in the full graph; see :meth:`NodeShard.rows`."""
        return self.nodes.rows(values, ids)

    def owner(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the owners of nodes by their ids; see :meth:`NodeShard.owner`."""
        return self.nodes.owner(ids)

    def sum(self, values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Sum over the nodes of all ranks; see :meth:`NodeShard.sum`."""
        return self.nodes.sum(values, mask)

    def mean(self, values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Average over all nodes, and over their features; see :meth:`NodeShard.mean`."""
        return self.nodes.mean(values, mask)

    def max(self, values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the largest value of the nodes of all ranks; see :meth:`NodeShard.max`."""
        return self.nodes.max(values, mask)

    def to(self, device: torch.device | str) -> PartitionedGraph:
        """Return the same part on another device; the group must serve it."""
        return replace(
            self,
            node_shards={key: shard.to(device) for key, shard in self.node_shards.items()},
            edge_shards={key: shard.to(device) for key, shard in self.edge_shards.items()},
            attributes=moved(self.attributes, device),
        )

    def report(self) -> Report:
        """Return the balance of the parts and the volume of an exchange; collective."""
        return Report.of(self.node_shards.values(), self.edge_shards.values(), self.method)

    if TYPE_CHECKING:  # functions of modules above this one, which varcomm/graph/__init__.py sets

        def plot(
            self, /, path: str | os.PathLike[str], node_type: NodeType = None, mesh: object = None
        ) -> None:
            """Draw each node in the colour of its owner, darker if another rank has a copy."""

        def migrate(
            self,
            /,
            owner: str | Ranks | Mapping[str, Ranks],
            node_attrs: Mapping[str, Any] | None = None,
            groups: Sequence[str] = (),
        ) -> PartitionedGraph:
            """Return the graph with new owners of its nodes."""

        def save(self, /, folder: str | os.PathLike[str]) -> None:
            """Write each rank's part into a folder on a shared file system."""

        @staticmethod
        def load(folder: str | os.PathLike[str], group: GroupLike = None) -> PartitionedGraph:
            """Read a saved partition, on the same or on another number of ranks."""
