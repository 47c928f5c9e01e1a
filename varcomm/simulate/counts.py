"""How much of a graph each rank has, and how many rows go from whom to whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

__all__ = ["Counts", "Flows"]


@dataclass(frozen=True, eq=False)
class Flows:
    """The messages of one exchange of halos, among all ranks.

    Attributes
    ----------
    sender, receiver, rows : torch.Tensor
        Of each message; int64, shape (messages,). Each pair is there once.
    """

    sender: torch.Tensor
    receiver: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, eq=False)
class Counts:
    """How much of a graph each of P ranks owns, needs and sends.

    Tensors are int64 of shape (P,), one entry a rank, summed over the types of nodes and edges,
    where there are several.

    Attributes
    ----------
    owned : torch.Tensor
        Nodes that each rank owns.
    edges : torch.Tensor
        Edges that each rank owns: those into its nodes.
    flows : mapping of Flows
        The exchange of halos of each type of edges; of the type None in a graph with one type.

    Examples
    --------
    Of a partition, which is counts and more.

    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> edge_index = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])
    >>> ring = Data(x=torch.arange(6.0), edge_index=edge_index)
    >>> counts = varcomm.simulate.partition(ring, 3, "block")
    >>> counts.owned, counts.halo, counts.edges
    (tensor([2, 2, 2]), tensor([1, 1, 1]), tensor([2, 2, 2]))
    """

    owned: torch.Tensor
    edges: torch.Tensor
    flows: Mapping[Any, Flows] = field(repr=False)

    @property
    def size(self) -> int:
        """Ranks, P."""
        return len(self.owned)

    @cached_property
    def halo(self) -> torch.Tensor:
        """Rows that each rank receives in an exchange of its halo."""
        return self._rows("receiver")

    @cached_property
    def sent(self) -> torch.Tensor:
        """Rows that each rank sends in an exchange of halos, once for each receiver."""
        return self._rows("sender")

    def _rows(self, end: str) -> torch.Tensor:
        total = torch.zeros(self.size, dtype=torch.int64)
        for flows in self.flows.values():
            total.index_add_(0, getattr(flows, end), flows.rows)
        return total

    @cached_property
    def neighbours(self) -> torch.Tensor:
        """Other ranks with which each exchanges rows, in one direction at least."""
        rows = self.rows
        both = (rows + rows.T).coalesce().indices()
        return torch.bincount(both[0], minlength=self.size)

    @cached_property
    def rows(self) -> torch.Tensor:
        """Rows that each rank sends to each in an exchange of halos; sparse, shape (P, P)."""
        none = torch.zeros(0, dtype=torch.int64)
        sender, receiver, rows = (
            torch.cat([none, *(getattr(flows, name) for flows in self.flows.values())])
            for name in ("sender", "receiver", "rows")
        )
        return torch.sparse_coo_tensor(
            torch.stack([sender, receiver]), rows, (self.size,) * 2, check_invariants=False
        ).coalesce()

    def without_graph(self) -> Counts:
        """Return the counts alone, which take little memory."""
        return Counts(self.owned, self.edges, self.flows)

    def refined(self, times: int) -> Counts:
        """Return the counts of a finer mesh of a surface, cut along the same lines.

        Each cell becomes ``times`` by ``times``: as many times the nodes and edges squared, and
        ``times`` the rows along a cut. An estimate, for meshes that are too large to be made.
        """
        flows = {
            key: Flows(flow.sender, flow.receiver, flow.rows * times)
            for key, flow in self.flows.items()
        }
        return Counts(self.owned * times**2, self.edges * times**2, flows)
