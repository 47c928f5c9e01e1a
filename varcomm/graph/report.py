"""Quality of a partition: balance of parts, cut edges, bytes per exchange."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from varcomm.errors import ArgumentError
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.node_shard import NodeShard
from varcomm.sizes import at_least
from varcomm.transport.agreement import share

# Columns of the table, and their widths.
_COLUMNS = {"owned": 8, "halo": 8, "edges": 8, "cut": 8, "sent": 8, "neighbours": 11}


@dataclass(frozen=True)
class Report:
    """Balance and volume of a partition, summed over all types; identical on all ranks.

    Built by :meth:`PartitionedGraph.report`.

    Attributes
    ----------
    method : str
        The method that assigned the nodes.
    owned : tuple of int
        Owned nodes per rank.
    halo : tuple of int
        Halo nodes per rank.
    edges : tuple of int
        Edges per rank.
    cut : tuple of int
        Cut edges per rank.
    sent : tuple of int
        Rows that each rank sends in one exchange; each rank receives ``halo`` rows.
    neighbours : tuple of int
        Number of ranks with which each rank exchanges rows, in at least one direction.

    See Also
    --------
    PartitionedGraph.report, partition

    Examples
    --------
    >>> report = Report("rcb", (50, 49), (10, 9), (200, 190), (12, 11), (9, 10), (1, 1))
    >>> print(report.table(channels=64, bandwidth=1e9, edge_rate=1e7))
    99 nodes and 390 edges on 2 ranks by rcb
    rank    owned     halo    edges      cut     sent  neighbours     bytes sent bytes received
       0       50       10      200       12        9           1          2,304          2,560
       1       49        9      190       11       10           1          2,560          2,304
    edges between ranks: 23 (5.9 %); halo: 19.2 % of the nodes
    imbalance: 1.01 in nodes, 1.03 in edges
    bytes: in a layer that exchanges 64 values of 4 bytes
    predicted: communication takes 11.3 % of such a layer
    """

    method: str
    owned: tuple[int, ...]
    halo: tuple[int, ...]
    edges: tuple[int, ...]
    cut: tuple[int, ...]
    sent: tuple[int, ...]
    neighbours: tuple[int, ...]

    @classmethod
    def of(
        cls, node_shards: Iterable[NodeShard], edge_shards: Iterable[EdgeShard], method: str
    ) -> Report:
        """Collect the numbers of all ranks; collective, about 48 bytes per rank."""
        nodes, shards = [*node_shards], [*edge_shards]
        own = (
            sum(shard.num_owned for shard in nodes),
            sum(edges.num_halo for edges in shards),
            sum(edges.num_owned for edges in shards),
            # edges into the halo, if any, follow the owned edges
            sum(int((e.local_ids[0, : e.num_owned] >= e.num_sources).sum()) for e in shards),
            sum(sum(edges.plan.send_counts) for edges in shards),
            len({rank for edges in shards for rank in edges.plan.neighbours}),
        )
        columns = zip(*share("graph.report", lambda: own, nodes[0].group), strict=True)
        return cls(method, *columns)

    @property
    def edge_cut(self) -> float:
        """Cut edges as a share of all edges."""
        return sum(self.cut) / max(1, sum(self.edges))

    @property
    def imbalance(self) -> float:
        """Largest number of nodes per rank divided by the mean; 1 is even."""
        return _over_mean(self.owned)

    @property
    def edge_imbalance(self) -> float:
        """Largest number of edges per rank divided by the mean; all ranks wait for that rank."""
        return _over_mean(self.edges)

    @property
    def halo_share(self) -> float:
        """Halo nodes of all ranks as a share of the nodes."""
        return sum(self.halo) / max(1, sum(self.owned))

    def nbytes(self, channels: int, itemsize: int = 4) -> tuple[int, ...]:
        """Return the bytes that each rank sends in a layer; backward sends the same number."""
        return tuple(rows * channels * itemsize for rows in self.sent)

    def nbytes_received(self, channels: int, itemsize: int = 4) -> tuple[int, ...]:
        """Return the bytes that each rank receives in a layer."""
        return tuple(rows * channels * itemsize for rows in self.halo)

    def communication_share(
        self,
        channels: int,
        bandwidth: float,
        edge_rate: float,
        *,
        itemsize: int = 4,
        latency: float = 0.0,
    ) -> float:
        """Predict the share of a layer's time that its exchange takes, from 0 to 1.

        Parameters
        ----------
        channels : int
            Values per node that the layer exchanges.
        itemsize : int
            Bytes per value.
        bandwidth : float
            Bytes per second that a rank can send, and receive at the same time.
        edge_rate : float
            Edges per second that a rank computes in this layer, measured on one rank.
        latency : float
            Seconds per message in addition to its bytes.

        Raises
        ------
        ArgumentError
            If a number is out of range.

        Notes
        -----
        The prediction is Hockney's model, without overlap or shared links: rank r computes for
        ``c_r = edges / edge_rate`` and exchanges for ``e_r = neighbours * latency + max(sent,
        received) bytes / bandwidth``. The layer takes ``T = max(c_r + e_r)``, and the share is ``1
        - max(c_r) / T``.
        """
        nbytes = at_least(1, channels, "channels") * at_least(1, itemsize, "itemsize")
        if not (bandwidth > 0 and edge_rate > 0 and latency >= 0):
            raise ArgumentError(
                "bandwidth and edge_rate must be positive, latency not negative; got "
                f"{bandwidth!r}, {edge_rate!r} and {latency!r}."
            )
        computing = [edges / edge_rate for edges in self.edges]
        exchanging = (
            neighbours * latency + max(sent, halo) * nbytes / bandwidth
            for neighbours, sent, halo in zip(self.neighbours, self.sent, self.halo, strict=True)
        )
        together = max(map(sum, zip(computing, exchanging, strict=True)))
        return 1 - max(computing) / together if together else 0.0

    def to_dict(
        self, channels: int | None = None, itemsize: int = 4, **rates: float
    ) -> dict[str, Any]:
        """Return all numbers as a dictionary for JSON.

        Parameters
        ----------
        channels : int
            Values per node. If ``channels`` is passed, the result also has ``"bytes_sent"`` and
            ``"bytes_received"``, the bytes that each rank sends and receives per layer.
        itemsize : int
            Bytes per value.
        **rates : float
            Arguments of :meth:`communication_share`, whose result is then included.

        Raises
        ------
        ArgumentError
            If a number is out of range, or if rates are passed without channels.
        """
        found: dict[str, Any] = {
            "method": self.method,
            "ranks": len(self.owned),
            "nodes": sum(self.owned),
            **{name: list(getattr(self, name)) for name in _COLUMNS},
        }
        for name in ("edge_cut", "imbalance", "edge_imbalance", "halo_share"):
            found[name] = getattr(self, name)
        if rates or channels is not None:
            channels = at_least(1, channels, "channels")
            found["bytes_sent"] = list(self.nbytes(channels, at_least(1, itemsize, "itemsize")))
            found["bytes_received"] = list(self.nbytes_received(channels, itemsize))
            if rates:
                predicted = self.communication_share(channels, itemsize=itemsize, **rates)
                found["communication_share"] = predicted
        return found

    def table(self, channels: int | None = None, itemsize: int = 4, **rates: float) -> str:
        """Return a table with one line per rank; arguments are as in :meth:`to_dict`."""
        found = self.to_dict(channels, itemsize, **rates)
        heads = _COLUMNS | ({} if channels is None else {"bytes_sent": 14, "bytes_received": 14})
        names = (f" {name.replace('_', ' '):>{width}}" for name, width in heads.items())
        lines = [
            f"{found['nodes']:,} nodes and {sum(self.edges):,} edges on {found['ranks']} ranks "
            f"by {self.method}",
            f"rank{''.join(names)}",
        ]
        for rank in range(found["ranks"]):
            cells = (f" {found[name][rank]:{width},}" for name, width in heads.items())
            lines.append(f"{rank:4}{''.join(cells)}")
        lines += [
            f"edges between ranks: {sum(self.cut):,} ({100 * self.edge_cut:.1f} %); "
            f"halo: {100 * self.halo_share:.1f} % of the nodes",
            f"imbalance: {self.imbalance:.2f} in nodes, {self.edge_imbalance:.2f} in edges",
        ]
        if channels is not None:
            lines.append(f"bytes: in a layer that exchanges {channels} values of {itemsize} bytes")
        if rates:
            share_of_time = 100 * found["communication_share"]
            lines.append(f"predicted: communication takes {share_of_time:.1f} % of such a layer")
        return "\n".join(lines)

    def __str__(self) -> str:
        """Return the table to print."""
        return self.table()


def _over_mean(counts: Sequence[int]) -> float:
    return max(counts) * len(counts) / max(1, sum(counts))
