"""Edges into the nodes that a rank owns, and the exchange that fills their halo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, overload

import torch

from varcomm._torch_private import let_vary
from varcomm.graph.index.edges import EdgeRules
from varcomm.graph.index.partitioned_index import PartitionedIndex
from varcomm.graph.node_shard import Shard, moved
from varcomm.plan.exchange_plan import ExchangePlan


@dataclass(frozen=True, eq=False)
class EdgeShard(Shard):
    """The edges of one type into nodes that this rank owns, and the halo of their sources.

    Local ids of sources: ``0 ... n - 1`` are owned nodes. ``n ... n + h - 1`` are the halo, owner
    by owner: copies of other ranks' nodes that are sources of these edges. Targets are owned nodes.
    With ``hops`` above one, edges into the halo and their attributes follow the owned edges.

    Attributes
    ----------
    group, sizes, attributes, ids
        As in :class:`NodeShard`, for the owned edges.
    local_ids : torch.Tensor
        Local ids of sources and targets as an ordinary tensor, int64 of shape (2, E). They select
        from :meth:`with_halo`; ``x[row]`` with a tensor of owned rows only is out of range.
    halo_ids : torch.Tensor
        Ids of the halo nodes in the full graph; int64 of shape (h,).
    plan : ExchangePlan
        The plan that fills the halo: if ``x`` has the owned source rows, ``plan(x)`` returns the
        halo rows.
    num_targets : int
        Number of nodes of the target's type that this rank owns.
    hops : int
        The number of exchanges of one hop that the halo replaces.
    known_counts : tuple of int, optional
        The :attr:`counts`, if they need not be counted.

    See Also
    --------
    NodeShard, PartitionedGraph

    Examples
    --------
    Rank 0 owns three nodes of a ring of six, and its halo is the node before them.

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

    local_ids: torch.Tensor = field(repr=False)
    plan: ExchangePlan = field(repr=False)
    num_targets: int
    known_counts: tuple[int, int] | None = field(default=None, repr=False)
    halo_ids: torch.Tensor = field(repr=False, kw_only=True)
    hops: int = 1

    # whether edge_index is an ordinary tensor; set by varcomm.testing
    is_plain: bool = field(init=False, repr=False, default=False)

    noun = "edges"

    @cached_property
    def counts(self) -> tuple[int, int]:
        """The number of interior edges, and the number of self loops."""
        source, target = self.local_ids
        return self.known_counts or (
            int((source < self.num_sources).sum()),
            int((source == target).sum()),
        )

    @cached_property
    def rules(self) -> EdgeRules:
        """The rules of operations on :attr:`edge_index`."""
        ids = let_vary(self.local_ids, 1)
        numbers = self.halo_ids, self.plan, self.num_targets, self.counts, self.hops
        return EdgeRules(self.group, ids, *numbers)

    @property
    def edge_index(self) -> torch.Tensor:
        """Local ids, int64 of shape (2, E); ``x[edge_index[0]]`` fetches the rows of the halo."""
        if self.is_plain:
            return self.local_ids
        if torch.compiler.is_compiling():
            return PartitionedIndex.make(self.local_ids, self.rules, "edges", whole=True)
        return self._index

    @cached_property
    def _index(self) -> PartitionedIndex:
        out = PartitionedIndex.make(self.local_ids, self.rules, "edges", whole=True)
        let_vary(out, 1)
        return out

    @property
    def num_sources(self) -> int:
        """Number of owned nodes of the source's type, n."""
        return self.plan.num_rows

    @property
    def num_halo(self) -> int:
        """Number of halo nodes, h."""
        return self.plan.num_received

    @property
    def interior(self) -> torch.Tensor:
        """Positions in ``edge_index`` of edges whose source this rank owns; int64, ascending."""
        return self.rules.split_edges.order[: self.counts[0]]

    @property
    def boundary(self) -> torch.Tensor:
        """Positions in ``edge_index`` of edges whose source is in the halo; int64, ascending."""
        return self.rules.split_edges.order[self.counts[0] :]

    def halo(self, x: torch.Tensor) -> torch.Tensor:
        """Fetch the rows of the halo, (h, *F), from owned rows, (n, *F)."""
        self.plan.compare_first(x)
        return self.plan(x)

    @overload
    def with_halo(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor: ...

    @overload
    def with_halo(self, x: Sequence[torch.Tensor], dim: int = 0) -> tuple[torch.Tensor, ...]: ...

    def with_halo(self, x: Any, dim: int = 0) -> Any:
        """Append the halo rows to the owned rows: (n, *F) to (n + h, *F) along `dim`.

        For a tuple or list of tensors, the result is a tuple; tensors of one dtype share one
        exchange.

        The adjoint adds the gradients of copies to the original rows.
        Communication: ``plan.nbytes(x)`` from this rank; in backward, the gradients of the halo's
        rows to their owners.
        """
        return self.rules.with_halo(x, dim)

    def nbytes(self) -> int:
        """Return the bytes of edges, ids, halo ids and plan on this rank."""
        tensors = (self.local_ids, self.halo_ids, self.plan.send_index, self.ids)
        return sum(tensor.nbytes for tensor in tensors)

    def to(self, device: torch.device | str) -> EdgeShard:
        """Return a copy on another device."""
        return replace(
            self,
            attributes=moved(self.attributes, device),
            ids=self.ids.to(device),
            local_ids=self.local_ids.to(device),
            halo_ids=self.halo_ids.to(device),
            plan=self.plan.to(device),
            known_counts=self.counts,
        )
