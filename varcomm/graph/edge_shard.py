"""Edges into the nodes that a rank owns, and the exchange that fills their halo."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from varcomm.graph.shard import Shard
from varcomm.ops.compilation import counts_in, extent_of
from varcomm.plan.exchange_plan import ExchangePlan

__all__ = ["EdgeShard", "LocalEdges"]


@dataclass(frozen=True, eq=False)
class LocalEdges:
    """Edges in local ids, with the plan that fills their halo.

    Attributes are documented at :class:`EdgeShard`, the edges of one type of a graph. Layers derive
    other edges from these, such as reversed ones.
    """

    edge_index: torch.Tensor = field(repr=False)
    plan: ExchangePlan = field(repr=False)
    num_targets: int
    counts: tuple[int, int] | None = field(default=None, repr=False)

    # shows compiled code the numbers of targets, interior edges and self loops
    extent: torch.Tensor = field(init=False, repr=False)

    # exchanges of one hop that the halo replaces
    hops = 1

    # The edge_index of every graph that is alive, with its plan: an edge_index of another graph is
    # refused even if all its edges exist in this graph.
    _plans: ClassVar[WeakTensorKeyDictionary] = WeakTensorKeyDictionary()

    def __post_init__(self) -> None:
        self._plans[self.edge_index] = self.plan
        source, target = self.edge_index
        counts = self.counts or (
            int((source < self.num_sources).sum()),
            int((source == target).sum()),
        )
        extent = extent_of(self.num_targets, *counts, device=self.edge_index.device)
        vars(self).update(counts=counts, extent=extent)

    @classmethod
    def plan_of(cls, edge_index: torch.Tensor) -> ExchangePlan | None:
        """Return the plan of the edges whose ``edge_index`` this tensor is, or None."""
        return cls._plans.get(edge_index)  # type: ignore[no-any-return]

    @property
    def num_sources(self) -> int:
        """Owned nodes of the source's type, n."""
        return self.plan.num_rows

    @property
    def num_halo(self) -> int:
        """Nodes of other ranks that this rank has copies of, h."""
        return self.plan.num_received

    def layer_counts(self) -> tuple[int, int, int]:
        """Return the numbers of sources, halo nodes and targets that a layer computes with.

        With halos of several hops a layer does not exchange: owned nodes and halo are its sources
        and its targets. In compiled code the numbers are symbolic, so that one graph of code serves
        other partitions.
        """
        if torch.compiler.is_compiling():
            halo, sources = self.plan.rows()
            targets = counts_in(self.extent)[0]
        else:
            halo, sources, targets = self.num_halo, self.num_sources, self.num_targets
        return (sources + halo, 0, sources + halo) if self.hops > 1 else (sources, halo, targets)

    def with_halo(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Append the halo's rows to the owned ones: (n, *F) to (n + h, *F) along `dim`.

        The adjoint adds the gradients of copies to the rows that they are copies of. Communication:
        ``plan.nbytes(x)`` from this rank; in backward, the halo's rows back to their owners.
        """
        if x.dim() == 1:
            # torch.cat drops an empty tensor of one dimension from the autograd graph
            return self.with_halo(x.unsqueeze(1)).squeeze(1)
        return torch.cat([x, self.plan(x, dim=dim)], dim=dim)

    def layer_sources(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return the rows of all sources from the rows that a layer has; see `layer_counts`."""
        return x if self.hops > 1 else self.with_halo(x, dim)

    def split_self_loops(self, edge_index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions of edges that are no self loops, and of those that are."""
        is_loop = edge_index[0] == edge_index[1]
        if torch.compiler.is_compiling() and edge_index is self.edge_index:
            loops = counts_in(self.extent)[2]
            others = edge_index.shape[1] - loops
            return _positions(~is_loop, others), _positions(is_loop, loops)
        return (~is_loop).nonzero().view(-1), is_loop.nonzero().view(-1)

    def includes(self, edge_index: torch.Tensor, self_loops: bool = True) -> bool:
        """Return whether each edge is one of these or, if allowed, a self loop.

        The ids must be in range. Each tensor is looked at once.
        """
        if self_loops not in self._lookups:
            known = _without_loops(self.edge_index) if self_loops else self.edge_index
            self._lookups[self_loops] = known, WeakTensorKeyDictionary()
        known, passed = self._lookups[self_loops]
        # tensors of inference mode have no version, which would show that they were written to
        version = None if edge_index.is_inference() else edge_index._version
        if version is not None and passed.get(edge_index) == version:
            return True
        rest, count = edge_index.to(known.dtype), known.shape[1]
        # Layers that add self loops make a new tensor at each call, in which all other edges stand
        # first, in their order: one comparison in place of a search.
        if torch.equal(rest[:, :count], known):
            rest = rest[:, count:]
        rest = _without_loops(rest) if self_loops else rest
        found = not rest.shape[1] or bool(torch.isin(self._key(rest), self._key(known)).all())
        if found and version is not None:
            passed[edge_index] = version
        return found

    def _key(self, edges: torch.Tensor) -> torch.Tensor:
        return edges[1] * (self.num_sources + self.num_halo) + edges[0]

    @cached_property
    def _lookups(self) -> dict[bool, tuple[torch.Tensor, WeakTensorKeyDictionary]]:
        return {}


@dataclass(frozen=True, eq=False)
class EdgeShard(LocalEdges, Shard):
    """The edges of one type into nodes that this rank owns, and the halo of their sources.

    Local ids of sources: ``0 ... n - 1`` are owned nodes, ``n ... n + h - 1`` the halo, copies of
    other ranks' nodes from which these edges come, owner by owner. Targets are owned nodes. With
    ``hops`` above one, edges into the halo, and their attributes, stand behind the owned ones.

    Attributes
    ----------
    group, sizes, attributes, ids
        As of a :class:`NodeShard`: of the owned edges.
    edge_index : torch.Tensor
        Local ids, int64 of shape (2, E).
    halo_ids : torch.Tensor
        Ids of the halo's nodes in the whole graph; int64 of shape (h,).
    plan : ExchangePlan
        Fills the halo: ``plan(x)`` of the owned sources returns the halo's rows.
    num_targets : int
        Nodes of the target's type that this rank owns.
    hops : int
        The number of exchanges of one hop that the halo replaces.
    counts : tuple of int
        The number of interior edges and of self loops.

    Examples
    --------
    Of a ring of six, rank 0 owns three nodes, and has a copy of the one before them.

    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> edge_index = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])
    >>> ring = Data(x=torch.arange(6.0), edge_index=edge_index)
    >>> with varcomm.simulate.world(2, rank=0):
    ...     edges = varcomm.simulate.partition(ring, 2, "block").part().edges
    >>> edges.edge_index, edges.halo_ids
    (tensor([[0, 1, 3],
            [1, 2, 0]]), tensor([5]))
    >>> edges.num_sources, edges.num_halo, edges.interior
    (3, 1, tensor([0, 1]))
    """

    halo_ids: torch.Tensor = field(repr=False, kw_only=True)
    hops: int = 1

    rows = "edges"

    def __post_init__(self) -> None:
        Shard.__post_init__(self)
        LocalEdges.__post_init__(self)

    @property
    def interior(self) -> torch.Tensor:
        """Positions in ``edge_index`` of edges whose source this rank owns; int64, ascending."""
        return self._interior_and_boundary()[0]

    @property
    def boundary(self) -> torch.Tensor:
        """Positions in ``edge_index`` of edges whose source is in the halo; int64, ascending."""
        return self._interior_and_boundary()[1]

    def _interior_and_boundary(self) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.compiler.is_compiling():
            is_interior = self.edge_index[0] < self.plan.rows()[1]
            count = counts_in(self.extent)[1]
            others = self.edge_index.shape[1] - count
            return _positions(is_interior, count), _positions(~is_interior, others)
        return self._split

    @cached_property
    def _split(self) -> tuple[torch.Tensor, torch.Tensor]:
        is_interior = self.edge_index[0] < self.num_sources
        return is_interior.nonzero().view(-1), (~is_interior).nonzero().view(-1)

    def halo(self, x: torch.Tensor) -> torch.Tensor:
        """Fetch the halo's rows: (n, *F) of the owned sources gives (h, *F); the plan itself."""
        return self.plan(x)

    def nbytes(self) -> int:
        """Return the bytes of edges, ids, halo ids and plan on this rank."""
        ids = self.ids.gaps, self.ids.rest
        tensors = (self.edge_index, self.halo_ids, self.plan.send_index, *ids)
        return sum(tensor.nbytes for tensor in tensors)

    def to(self, device: torch.device | str) -> EdgeShard:
        """Return the same on another device."""
        return replace(
            super().to(device),
            edge_index=self.edge_index.to(device),
            halo_ids=self.halo_ids.to(device),
            plan=self.plan.to(device),
        )


def _without_loops(edge_index: torch.Tensor) -> torch.Tensor:
    return edge_index[:, edge_index[0] != edge_index[1]]


def _positions(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` positions of a mask; in compiled code no shape may depend on data."""
    return torch.nonzero_static(mask, size=count).view(-1)
