"""``EdgeShard``: the edges of one type that a rank owns, and the halo that they come from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from varcomm.graph.local_edges import LocalEdges, interior_and_loops, positions, remember
from varcomm.graph.shard import Shard
from varcomm.ops.extent import counts_in, extent_of
from varcomm.plan.exchange_plan import ExchangePlan

__all__ = ["EdgeShard"]


@dataclass(frozen=True, eq=False)
class EdgeShard(Shard):
    """The edges of one type into nodes that this rank owns, and how it reaches their sources.

    Local numbers of sources: ``0 ... n - 1`` are owned nodes of the source's type, ``n ... n + h -
    1`` the halo, copies of other ranks' nodes from which these edges come, owner by owner. Local
    numbers of targets are those of owned nodes of the target's type.

    With ``hops`` above one the graph also has edges into nodes of the halo; they stand behind the
    owned ones in ``edge_index``, and so do their attributes.

    Attributes
    ----------
    group, sizes, attributes, ids
        As of a :class:`NodeShard`: of the owned edges.
    edge_index : torch.Tensor
        In local numbers, int64 of shape (2, E).
    halo_ids : torch.Tensor
        Numbers that the nodes of the halo have in the whole graph; int64 of shape (h,).
    plan : ExchangePlan
        Fills the halo: ``plan(x)`` of the owned sources gives the halo's rows.
    num_targets : int
        Nodes of the target's type that this rank owns.
    hops : int
        How many exchanges of one hop the halo replaces.
    counts : tuple of int
        How many edges are interior, and how many self loops.

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

    edge_index: torch.Tensor = field(repr=False)
    halo_ids: torch.Tensor = field(repr=False)
    plan: ExchangePlan = field(repr=False)
    num_targets: int
    hops: int = 1
    counts: tuple[int, int] | None = field(default=None, repr=False)

    rows = "edges"

    #: tells compiled code how many targets, interior edges and self loops there are
    extent: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        remember(self.edge_index, self.plan)
        counts = self.counts or interior_and_loops(self.edge_index, self.num_sources)
        extent = extent_of(self.num_targets, *counts, device=self.edge_index.device)
        vars(self).update(counts=counts, extent=extent)

    @property
    def num_sources(self) -> int:
        """Nodes of the source's type that this rank owns, n."""
        return self.plan.num_rows

    @property
    def num_halo(self) -> int:
        """Nodes of other ranks that this one has copies of, h."""
        return len(self.halo_ids)

    @property
    def interior(self) -> torch.Tensor:
        """Positions in ``edge_index`` of edges whose source this rank owns; int64, ascending."""
        if torch.compiler.is_compiling():
            sources, interior = self.plan.rows()[1], counts_in(self.extent)[1]
            return positions(self.edge_index[0] < sources, interior)
        return self._split[0]

    @property
    def boundary(self) -> torch.Tensor:
        """Positions in ``edge_index`` of edges whose source is in the halo; int64, ascending."""
        if torch.compiler.is_compiling():
            sources, interior = self.plan.rows()[1], counts_in(self.extent)[1]
            count = self.edge_index.shape[1] - interior
            return positions(self.edge_index[0] >= sources, count)
        return self._split[1]

    @cached_property
    def _split(self) -> tuple[torch.Tensor, torch.Tensor]:
        is_interior = self.edge_index[0] < self.num_sources
        return is_interior.nonzero().view(-1), (~is_interior).nonzero().view(-1)

    @cached_property
    def local_edges(self) -> LocalEdges:
        """The edges, prepared to compare with them what a layer is given."""
        return LocalEdges(self.edge_index, self.num_sources + self.num_halo)

    def halo(self, x: torch.Tensor) -> torch.Tensor:
        """Fetch the halo's rows: (n, *F) of the owned sources gives (h, *F); the plan itself."""
        return self.plan(x)

    def with_halo(self, x: torch.Tensor) -> torch.Tensor:
        """Append the halo's rows to the owned ones.

        Parameters
        ----------
        x : torch.Tensor
            Owned rows, (n, *F).

        Returns
        -------
        torch.Tensor
            Owned rows and the halo's, (n + h, *F). Its adjoint adds what arrives at copies to the
            rows that they are copies of.

        Notes
        -----
        Communication: ``plan.nbytes(x)`` from this rank; in backward, the halo's rows back to their
        owners.
        """
        return torch.cat([x, self.plan(x)])

    def nbytes(self) -> int:
        """Return the bytes that edges, their numbers, the halo and the plan take on this rank."""
        tensors = (
            self.edge_index,
            self.halo_ids,
            self.plan.send_index,
            self.ids.gaps,
            self.ids.rest,
        )
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def to(self, device: torch.device | str) -> EdgeShard:
        """Return the same on another device."""
        return replace(
            super().to(device),
            edge_index=self.edge_index.to(device),
            halo_ids=self.halo_ids.to(device),
            plan=self.plan.to(device),
        )
