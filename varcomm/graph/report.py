"""How good a partition is: even parts, few edges between them, few bytes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Report"]


@dataclass(frozen=True)
class Report:
    """What each rank has of a partitioned graph, rank by rank.

    Attributes
    ----------
    method : str
        How the ranks of nodes were decided.
    owned, halo : tuple of int
        Nodes that a rank owns, and copies of other ranks' nodes that it has.
    edges, cut : tuple of int
        Edges that a rank owns, and those of them that come from another rank.
    sent : tuple of int
        Rows that a rank sends when halos are exchanged.

    Examples
    --------
    >>> print(Report("block", (50, 50), (10, 10), (200, 200), (12, 12), (10, 10)))
    100 nodes and 400 edges on 2 ranks by block
    rank    owned     halo    edges
       0       50       10      200
       1       50       10      200
    edges between ranks: 24 (6.0 %); imbalance 1.00
    """

    method: str
    owned: tuple[int, ...]
    halo: tuple[int, ...]
    edges: tuple[int, ...]
    cut: tuple[int, ...]
    sent: tuple[int, ...]

    @property
    def edge_cut(self) -> float:
        """Edges between ranks, as a share of all."""
        return sum(self.cut) / max(1, sum(self.edges))

    @property
    def imbalance(self) -> float:
        """Nodes of the rank that owns most, over the mean."""
        return max(self.owned) * len(self.owned) / max(1, sum(self.owned))

    def nbytes(self, channels: int, itemsize: int = 4) -> tuple[int, ...]:
        """Return the bytes that each rank sends in a layer that exchanges `channels` values a node.

        As many travel back in its backward.
        """
        return tuple(rows * channels * itemsize for rows in self.sent)

    def __str__(self) -> str:
        """Return a table to print."""
        lines = [
            f"{sum(self.owned):,} nodes and {sum(self.edges):,} edges on {len(self.owned)} ranks "
            f"by {self.method}",
            "rank    owned     halo    edges",
        ]
        for rank, row in enumerate(zip(self.owned, self.halo, self.edges, strict=True)):
            lines.append(f"{rank:4} {row[0]:8,} {row[1]:8,} {row[2]:8,}")
        lines.append(
            f"edges between ranks: {sum(self.cut):,} ({100 * self.edge_cut:.1f} %); "
            f"imbalance {self.imbalance:.2f}"
        )
        return "\n".join(lines)
