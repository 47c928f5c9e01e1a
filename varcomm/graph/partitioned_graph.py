"""``PartitionedGraph``: the part of a graph that one rank owns, and how it reaches the others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch_geometric.data import Data, HeteroData

from varcomm.errors import ArgumentError
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.report import Report
from varcomm.graph.shard import NodeShard, Shard, moved
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sizes import ShardSizes
from varcomm.transport.group import Group, GroupLike

__all__ = ["EdgeType", "NodeType", "PartitionedGraph"]

# None in a graph whose nodes, and whose edges, are all of one type.
NodeType = str | None
EdgeType = tuple[str, str, str] | None

S = TypeVar("S", bound=Shard)

# What Data counts, which is unambiguous for its local part.
_COUNTS = ("num_edges", "num_edge_features", "num_features", "num_node_features", "num_nodes")


@dataclass(frozen=True, eq=False)
class PartitionedGraph:
    """The part of a graph that this rank owns: nodes, all edges into them, and their attributes.

    Made by :func:`partition` or :func:`from_edges`. Attributes of nodes and edges are those of the
    whole graph, cut to what this rank owns: ``graph.x``, ``graph.edge_attr``, ``graph.y``, ... They
    keep the order that they have there. ``graph.num_nodes`` and ``graph.num_edges`` count what this
    rank owns, and ``"y" in graph`` tells whether there is such an attribute. The graph cannot be
    changed.

    Nodes have local numbers: ``0 ... n - 1`` are owned, ``n ... n + h - 1`` are the halo, copies of
    other ranks' nodes from which edges come, owner by owner. ``graph.edge_index`` is in local
    numbers.

    A heterogeneous graph has these per type: ``graph["paper"]`` is a :class:`NodeShard`,
    ``graph["author", "writes", "paper"]`` an :class:`EdgeShard` with a halo and a plan of its own,
    ``graph.x_dict`` and ``graph.edge_index_dict`` go into a model. A graph with one type is short
    for its ``graph.nodes`` and ``graph.edges``.

    Attributes
    ----------
    node_shards, edge_shards : mapping
        What this rank has of each type; of the type None in a graph with one type.
    attributes : mapping of str
        Attributes of the graph as a whole.
    method : str
        How the ranks of nodes were decided.
    """

    node_shards: Mapping[NodeType, NodeShard]
    edge_shards: Mapping[EdgeType, EdgeShard]
    attributes: Mapping[str, Any]
    method: str

    @property
    def group(self) -> Group:
        """The ranks that the graph is split over."""
        return next(iter(self.node_shards.values())).group

    @property
    def node_types(self) -> list[NodeType]:
        """The types of nodes; [None] if there is one."""
        return list(self.node_shards)

    @property
    def edge_types(self) -> list[EdgeType]:
        """The types of edges; [None] if there is one."""
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
            raise ArgumentError(f"the graph has several types; say of which: {names}.")
        return shards[None]

    def __getitem__(self, key: Any) -> Any:
        """Return the shard of a type; of a graph with one type, an attribute."""
        for shards in (self.node_shards, self.edge_shards):
            if key is not None and key in shards:
                return shards[key]
        if isinstance(key, str) and None in self.node_shards and key in self:
            return getattr(self, key)
        types = [key for key in (*self.node_shards, *self.edge_shards) if key is not None]
        raise KeyError(f"{key!r}; the graph has {types or 'one type, graph.nodes and graph.edges'}")

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the local part, such as ``x`` or ``edge_index``."""
        # not during unpickling or copying, when there is nothing yet
        if name.startswith("__") or "attributes" not in self.__dict__:
            raise AttributeError(name)
        for attributes in (self.attributes, *self._of_one_type):
            if name in attributes:
                return attributes[name]
        if name == "num_edges":  # of which the data have more, with halos of several hops
            return sum(shard.num_owned for shard in self.edge_shards.values())
        if name in _COUNTS or (name.endswith("_dict") and None not in self.node_shards):
            try:
                return getattr(self.data, name)
            except KeyError as error:  # as HeteroData says of x_dict
                raise AttributeError(f"{error.args[0]}.") from error
        if None not in self.node_shards:
            shards: dict[Any, Shard] = {**self.node_shards, **self.edge_shards}
            have = [f"graph[{key!r}].{name}" for key, shard in shards.items() if name in shard]
            hint = f"say of which type: {', '.join(have)}" if have else "nor has one of its types"
            raise AttributeError(f"the graph as a whole has no attribute {name!r}; {hint}.")
        names = [*self.data.keys()]
        raise AttributeError(
            f"the graph has no attribute {name!r}; its data have {', '.join(names)}."
        )

    @property
    def _of_one_type(self) -> tuple[Mapping[str, Any], ...]:
        if None not in self.node_shards:
            return ()
        return self.nodes.attributes, self.edges.attributes

    def __contains__(self, name: object) -> bool:
        """Return whether there is such an attribute, or, where there are several, such a type."""
        if None in self.node_shards:
            return name in self.data
        return name in self.node_shards or name in self.edge_shards or name in self.attributes

    def __deepcopy__(self, memo: dict[int, Any]) -> PartitionedGraph:
        """Return the graph itself, which is not changed: copies of a model run on the same."""
        return self

    def __repr__(self) -> str:
        """Return how much of the graph is here."""
        nodes = [shard.sizes for shard in self.node_shards.values()]
        mine = sum(sizes[self.group.rank] for sizes in nodes)
        total, edges = sum(sizes.total for sizes in nodes), self.edge_shards.values()
        return (
            f"PartitionedGraph({self.group}: {mine} of {total} nodes, "
            f"{sum(shard.num_halo for shard in edges)} in the halo, "
            f"{sum(shard.num_owned for shard in edges)} edges, by {self.method})"
        )

    @cached_property
    def data(self) -> Data | HeteroData:
        """The local part as PyG has it, edges in local numbers."""
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
        """Edges in local numbers, int64 of shape (2, E)."""
        return self.edges.edge_index

    @property
    def num_owned(self) -> int:
        """Nodes that this rank owns, n."""
        return self.nodes.num_owned

    @property
    def num_halo(self) -> int:
        """Nodes of other ranks that this one has copies of, h."""
        return self.edges.num_halo

    @property
    def node_sizes(self) -> ShardSizes:
        """Nodes that each rank owns."""
        return self.nodes.sizes

    @property
    def owned_ids(self) -> torch.Tensor:
        """Numbers of the owned nodes in the whole graph, ascending; int64 of shape (n,)."""
        return self.nodes.owned_ids

    @property
    def halo_ids(self) -> torch.Tensor:
        """Numbers of the halo's nodes in the whole graph; int64 of shape (h,)."""
        return self.edges.halo_ids

    @property
    def plan(self) -> ExchangePlan:
        """What fills the halo."""
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
        """How many exchanges of one hop the halo replaces."""
        return max((shard.hops for shard in self.edge_shards.values()), default=1)

    def halo(self, x: torch.Tensor) -> torch.Tensor:
        """Fetch the halo's rows, (h, *F), of owned ones, (n, *F); see :meth:`EdgeShard.halo`."""
        return self.edges.halo(x)

    def with_halo(self, x: torch.Tensor) -> torch.Tensor:
        """Append the halo's rows to owned ones; see :meth:`EdgeShard.with_halo`."""
        return self.edges.with_halo(x)

    def gather(self, x: torch.Tensor, dst: int | None = None) -> torch.Tensor:
        """Collect rows of all nodes, in the order of the whole graph; see :meth:`NodeShard.gather`.

        ``graph.edges.gather`` does it for edges.
        """
        return self.nodes.gather(x, dst)

    def scatter(self, x: torch.Tensor | None, src: int = 0) -> torch.Tensor:
        """Send each rank its rows of what `src` has for all nodes; see :meth:`NodeShard.scatter`.

        ``graph.edges.scatter`` does it for edges.
        """
        return self.nodes.scatter(x, src)

    def sum(self, values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Sum over the nodes of all ranks; see :meth:`NodeShard.sum`."""
        return self.nodes.sum(values, mask)

    def mean(self, values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Average over all nodes, and over their features; see :meth:`NodeShard.mean`."""
        return self.nodes.mean(values, mask)

    def max(self, values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the greatest value of the nodes of all ranks; see :meth:`NodeShard.max`."""
        return self.nodes.max(values, mask)

    def to(self, device: torch.device | str) -> PartitionedGraph:
        """Return the same part on another device; the group must serve it."""
        return replace(
            self,
            node_shards={key: shard.to(device) for key, shard in self.node_shards.items()},
            edge_shards={key: shard.to(device) for key, shard in self.edge_shards.items()},
            attributes=moved(self.attributes, device),
        )

    def plot(
        self,
        path: str | os.PathLike[str],
        projection: Literal["sphere", "lonlat", "latlon"] | None = None,
        node_type: NodeType = None,
        most: int = 200_000,
    ) -> None:
        """Draw each node in the colour of the rank that owns it, and darker where others copy it.

        Collective: rank 0 draws, and all return once the file is there. Positions are the attribute
        ``pos``, of shape (n, 2) or (n, 3). Needs matplotlib.

        Parameters
        ----------
        path : path
            The file that rank 0 writes, in the format that its suffix says: .png, .pdf, .svg, ... A
            file that is there is replaced; the folder must be there.
        projection : {None, "sphere", "lonlat", "latlon"}
            What positions are. None: points of the plane or of space. The others are drawn on a map
            of longitude and latitude: ``"sphere"`` takes vectors (n, 3) from the centre of a
            sphere, ``"lonlat"`` and ``"latlon"`` degrees (n, 2) in this order.
        node_type : str, optional
            Which nodes, in a graph of several types.
        most : int
            Nodes that are drawn at most. Of more, each rank draws the same share, by chance.

        Raises
        ------
        ArgumentError
            On every rank, if positions are missing or do not fit, if the suffix is none of a
            picture, or if rank 0 cannot write there.
        DisagreementError
            On every rank, if they call it with different arguments; of `path`, rank 0's counts.
        MissingPackageError
            On every rank, if rank 0 has no matplotlib.

        Notes
        -----
        A node is drawn darker if it is in the halo of another rank: such are the nodes whose values
        travel. In space they are drawn a second time by themselves, since they are hidden inside.

        More than 8 ranks share 8 colours, so that ranks that exchange rows differ as far as
        possible, and have their number written into their midst.

        Communication: 40 bytes a node that is drawn, to rank 0.
        """
        from varcomm.graph.files.plot import plot

        plot(self, path, projection, node_type, most)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write each rank's part into a folder that all ranks see; collective.

        Parameters
        ----------
        folder : path
            Made if it is not there. One rename replaces a partition saved there before.

        Raises
        ------
        ArgumentError
            On every rank, if one of them cannot write; if the folder is or has something else,
            which is left as it is; if an attribute is neither a tensor nor, of the graph as a
            whole, plain text and numbers.

        Notes
        -----
        One safetensors file per rank, with its owned rows, and one JSON index.
        """
        from varcomm.graph.files.saved import save  # which builds graphs: it imports this module

        save(self, folder)

    @staticmethod
    def load(folder: str | os.PathLike[str], group: GroupLike = None) -> PartitionedGraph:
        """Read what :meth:`save` wrote, on the same or on another number of ranks; collective.

        Parameters
        ----------
        folder : path
            As for :meth:`save`.
        group : ProcessGroup or DeviceMesh, optional
            The ranks that take part; None is the whole world.

        Returns
        -------
        PartitionedGraph
            On the CPU. On as many ranks as saved it, the same parts. On others, nodes in the order
            of the saved parts are cut evenly.

        Raises
        ------
        ArgumentError
            On every rank, if a file is missing, cut short, altered, or of another graph.

        Examples
        --------
        >>> import tempfile, torch, varcomm
        >>> from torch_geometric.data import Data
        >>> def save(rank, folder):
        ...     ring = Data(x=torch.arange(4.0), edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]))
        ...     varcomm.graph.partition(ring, method="block").save(folder)
        >>> def load(rank, folder):
        ...     return varcomm.graph.PartitionedGraph.load(folder).x.tolist()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     varcomm.launch(save, 2, folder), varcomm.launch(load, 1, folder)
        ([None, None], [[0.0, 1.0, 2.0, 3.0]])
        """
        from varcomm.graph.files.saved import load

        return load(folder, group)

    def report(self) -> Report:
        """Tell how even the parts are and what an exchange costs; collective."""
        return Report.of(self)


def _refuse_change(graph: PartitionedGraph, name: str, value: object = None) -> None:
    raise FrozenInstanceError(
        f"cannot change {name!r}: a partitioned graph stays as it is. Keep what you compute in a "
        "variable of your own; or put it into the whole graph, before partition."
    )


# The dataclass's own say no more than that it is frozen.
type.__setattr__(PartitionedGraph, "__setattr__", _refuse_change)
type.__setattr__(PartitionedGraph, "__delattr__", _refuse_change)
