"""What a layer needs to know of the edges that it runs on: where they are and whence they come."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.local_edges import LocalEdges, interior_and_loops, positions, remember
from varcomm.ops.extent import counts_in, extent_of
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.transport.group import Group

__all__ = ["Counts", "DeepEdges", "EdgeSet", "Edges", "loops_of", "with_halo"]


class EdgeSet(Protocol):
    """Edges into nodes that this rank owns: of a graph, of one type of its edges, or made of these.

    Local numbers of sources: ``0 ... n - 1`` are owned, ``n ... n + h - 1`` the halo. Local numbers
    of targets are those of owned nodes.
    """

    @property
    def edge_index(self) -> torch.Tensor:
        """In local numbers, int64 of shape (2, E)."""

    @property
    def plan(self) -> ExchangePlan:
        """Gives the halo's rows of the owned sources' rows."""

    @property
    def group(self) -> Group:
        """The ranks that the edges are split over."""

    @property
    def num_sources(self) -> int:
        """Nodes that edges may come from and that this rank owns, n."""

    @property
    def num_halo(self) -> int:
        """Nodes that edges come from and that other ranks own, h."""

    @property
    def num_targets(self) -> int:
        """Nodes that edges may lead to, all of them owned."""

    @property
    def extent(self) -> torch.Tensor:
        """Tells compiled code how many targets, interior edges and self loops there are."""

    @property
    def local_edges(self) -> LocalEdges:
        """The edges, prepared to compare with them what a layer is given."""


@dataclass(frozen=True, eq=False)
class Edges:
    """An :class:`EdgeSet` that is made of others, such as all edges turned round.

    Attributes
    ----------
    edge_index, plan, num_targets
        As in :class:`EdgeSet`.
    """

    edge_index: torch.Tensor = field(repr=False)
    plan: ExchangePlan = field(repr=False)
    num_targets: int
    extent: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        remember(self.edge_index, self.plan)
        counts = interior_and_loops(self.edge_index, self.num_sources)
        extent = extent_of(self.num_targets, *counts, device=self.edge_index.device)
        vars(self)["extent"] = extent

    @property
    def group(self) -> Group:
        """The ranks that the edges are split over."""
        return self.plan.group

    @property
    def num_sources(self) -> int:
        """Nodes that edges may come from and that this rank owns."""
        return self.plan.num_rows

    @property
    def num_halo(self) -> int:
        """Nodes that edges come from and that other ranks own."""
        return sum(self.plan.recv_counts)

    @cached_property
    def local_edges(self) -> LocalEdges:
        """The edges, prepared to compare with them what a layer is given."""
        return LocalEdges(self.edge_index, self.num_sources + self.num_halo)


@dataclass(frozen=True, eq=False)
class DeepEdges:
    """The edges of a graph with halos of several hops, on which layers do not exchange.

    To a layer all local nodes, the halo's as well, are what it has values of and gives values for.
    """

    shard: EdgeShard

    @property
    def edge_index(self) -> torch.Tensor:
        """In local numbers, int64 of shape (2, E)."""
        return self.shard.edge_index

    @property
    def plan(self) -> ExchangePlan:
        """Gives the halo's rows of the owned sources' rows."""
        return self.shard.plan

    @property
    def group(self) -> Group:
        """The ranks that the edges are split over."""
        return self.shard.group

    @property
    def num_sources(self) -> int:
        """Local nodes, n + h."""
        return self.shard.num_sources + self.shard.num_halo

    @property
    def num_halo(self) -> int:
        """None beyond these."""
        return 0

    @property
    def num_targets(self) -> int:
        """Local nodes, n + h; those outermost have no edges here."""
        return self.num_sources

    @property
    def extent(self) -> torch.Tensor:
        """Those of the owned nodes alone."""
        return self.shard.extent

    @property
    def local_edges(self) -> LocalEdges:
        """The edges, prepared to compare with them what a layer is given."""
        return self.shard.local_edges

    def refreshed(self, values: torch.Tensor) -> torch.Tensor:
        """Give nodes of the halo what their owners have for them."""
        return self.shard.with_halo(values[: self.shard.num_sources])


@dataclass(frozen=True)
class Counts:
    """How many nodes edges are about: owned sources, the halo, and targets."""

    sources: int
    halo: int
    targets: int

    @classmethod
    def of(cls, edges: EdgeSet) -> Counts:
        """Count; in compiled code, so that other graphs may have other numbers."""
        if torch.compiler.is_compiling():
            halo, sources = edges.plan.rows()
            if isinstance(edges, DeepEdges):
                return cls(sources + halo, 0, sources + halo)
            targets, *_ = counts_in(edges.extent)
            return cls(sources, halo, targets)
        return cls(edges.num_sources, edges.num_halo, edges.num_targets)


def loops_of(edges: EdgeSet, edge_index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of edges that are no self loops, and of those that are."""
    is_loop = edge_index[0] == edge_index[1]
    if torch.compiler.is_compiling() and edge_index is edges.edge_index:
        *_, loops = counts_in(edges.extent)
        return positions(~is_loop, edge_index.shape[1] - loops), positions(is_loop, loops)
    return (~is_loop).nonzero().view(-1), is_loop.nonzero().view(-1)


def with_halo(edges: EdgeSet, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Append the halo's rows to those of the owned sources, along `dim`."""
    if isinstance(edges, DeepEdges):
        return x
    if x.dim() == 1:
        # torch cuts an empty tensor of one dimension out of what it concatenates
        return with_halo(edges, x.unsqueeze(1)).squeeze(1)
    return torch.cat([x, edges.plan(x, dim=dim)], dim=dim)
