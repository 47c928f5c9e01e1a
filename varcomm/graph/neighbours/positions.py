"""Positions that each rank brings: checked, agreed upon, and made the nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from secrets import randbits
from typing import Any, Self, TypeVar
from zlib import crc32

import torch

from varcomm.errors import ArgumentError, GroupError, MissingPackageError
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.neighbours.ghosts import Bounds, Frame
from varcomm.graph.neighbours.links import Links
from varcomm.graph.partitioned_graph import EdgeType, NodeType
from varcomm.graph.shard import AscendingIds, NodeShard, described
from varcomm.ops.checks import checked_tensor
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sizes import ShardSizes
from varcomm.transport.agreement import agree_and_share, compare
from varcomm.transport.engine import engine_for, is_simulated
from varcomm.transport.group import Group

__all__ = ["FARTHEST", "SLACK", "SLACK_AT", "Own", "agreed", "checked_positions", "shards"]

T = TypeVar("T")

# Parts of a distance and of the largest coordinate: differences of rounding stay below these.
SLACK, SLACK_AT = 1e-9, 1e-12

# Squares of distances up to this one are finite.
FARTHEST = 1e150


@dataclass(frozen=True, eq=False)
class Own:
    """Nodes of this rank: positions as given; and detached, in fp64, as points of a frame.

    `home` are the shifts that bring the nodes together.
    """

    pos: torch.Tensor
    frame: Frame
    points: torch.Tensor
    coordinates: torch.Tensor
    home: torch.Tensor

    @classmethod
    def of(cls, pos: torch.Tensor, frame: Frame) -> Self:
        """Place positions in a frame."""
        points = pos.detach().double()
        coordinates = frame.coordinates(points)
        return cls(pos, frame, points, coordinates, frame.home(coordinates))

    def bounds(self) -> Bounds:
        """Return the least and greatest coordinates at home; of no nodes, those of an empty box."""
        if not len(self.pos):
            none = [torch.inf] * self.pos.shape[1]
            return none, [-x for x in none]
        period = self.frame.period.nan_to_num(posinf=0)
        low, high = (self.coordinates + self.home * period).aminmax(dim=0)
        return low.tolist(), high.tolist()

    def largest(self) -> float:
        """Return the largest coordinate of a position, by size."""
        return float(self.points.abs().max()) if len(self.points) else 0.0


def checked_positions(pos: torch.Tensor, what: str, group: Group) -> torch.Tensor:
    """Return valid positions, if neighbours of them can be found here."""
    try:
        import scipy.spatial  # type: ignore[import-untyped]  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(f"{what} needs SciPy: pip install scipy.") from error
    checked_tensor(pos, "", "pos")
    if not pos.is_floating_point() or pos.dim() != 2 or not pos.shape[1]:
        raise ArgumentError(f"pos must be floats of shape (n, D); got {described(pos)}.")
    engine_for(group, pos.device)
    if not bool(pos.isfinite().all()):
        row = int((~pos.isfinite()).any(1).nonzero()[0])
        raise ArgumentError(f"pos must be finite; row {row} is {pos[row].tolist()}.")
    if group.size > 1 and is_simulated(group):
        raise GroupError(
            f"on {group}: in a simulated world no other rank brings positions. Find the edges in "
            "one process, and use varcomm.simulate.partition."
        )
    return pos


def agreed(
    what: str,
    check: Callable[[], tuple[T, dict[str, object]]],
    outline: Callable[[T], Any],
    group: Group,
) -> tuple[T, list[Any], int]:
    """Return the result of `check`, all ranks' outlines, and a number of this call; collective.

    `check` also returns what must be equal on all ranks; all raise if it is not.
    """

    def public(found: tuple[T, dict[str, object]]) -> tuple[int, int, Any]:
        return crc32(repr(found[1]).encode()), randbits(32), outline(found[0])

    (own, equal), shared = agree_and_share(what, check, public, group)
    digests, numbers, outlines = zip(*shared, strict=True)
    if len(set(digests)) > 1:
        compare(group, {"operation": what} | equal)  # raises on every rank
    return own, [*outlines], crc32(repr(numbers).encode())


def shards(
    own: Own,
    ids: torch.Tensor,
    links: Links,
    displacements: torch.Tensor,
    counts: tuple[ShardSizes, ShardSizes],
    halo_ids: torch.Tensor,
    plan: ExchangePlan,
) -> tuple[Mapping[NodeType, NodeShard], Mapping[EdgeType, EdgeShard], Mapping[str, Any]]:
    """Return the shards of a graph, and its attributes, which are none.

    `counts` are nodes and edges per rank.
    """
    attributes = {"edge_attr": displacements.to(own.pos.dtype)}
    if links.shift is not None:
        attributes["shift"] = links.shift
    source, target = links.ends[:, links.mutual : links.pairs]
    inside = 2 * links.mutual + int((source < len(ids)).sum())
    group = plan.group
    first = counts[1].offsets[group.rank]
    shard = EdgeShard(
        group=group,
        sizes=counts[1],
        attributes=attributes,
        ids=_consecutive(first, links.count, ids),
        local_ids=links.ends,
        plan=plan,
        num_targets=len(ids),
        counts=(inside, int((source == target).sum())),
        halo_ids=halo_ids,
    )
    nodes = NodeShard(group, counts[0], {"pos": own.pos}, AscendingIds.of(ids))
    return {None: nodes}, {None: shard}, {}


def _consecutive(first: int, count: int, like: torch.Tensor) -> AscendingIds:
    """Return consecutive ids from the first one on, on the device of `like`."""
    start = AscendingIds.of(like.new_full((min(count, 1),), first))
    ones = start.gaps.new_ones(max(count - 1, 0))
    return AscendingIds(torch.cat([start.gaps, ones]), start.rest)
