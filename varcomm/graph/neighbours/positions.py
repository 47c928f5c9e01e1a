"""Positions that each rank brings: checked, agreed upon, and made the nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from secrets import randbits
from typing import Any, TypeVar
from zlib import crc32

import torch

from varcomm.errors import ArgumentError, GroupError
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.libraries import package
from varcomm.graph.neighbours.ghosts import Bounds, Frame
from varcomm.graph.neighbours.links import EdgeCounts, Links
from varcomm.graph.node_shard import NodeShard, described
from varcomm.graph.partitioned_graph import EdgeType, NodeType
from varcomm.ops.checks import checked_tensor
from varcomm.ops.digest import require_equal
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sizes import ShardSizes
from varcomm.transport.agreement import agree_and_share
from varcomm.transport.engines.choose import engine_for
from varcomm.transport.group import Group

T = TypeVar("T")

# Parts of a distance and of the largest coordinate: differences of rounding stay below these.
SLACK, SLACK_AT = 1e-9, 1e-12

# Squares of distances up to this one are finite.
FARTHEST = 1e150


@dataclass(frozen=True, eq=False)
class Own:
    """Nodes of this rank: positions as given, and a cell in fp64 without gradient.

    Properties that only a search needs are computed when they are first read.
    """

    pos: torch.Tensor
    cell: torch.Tensor | None
    pbc: Sequence[bool]

    @cached_property
    def points(self) -> torch.Tensor:
        """Positions in fp64, without gradient."""
        return self.pos.detach().double()

    @cached_property
    def frame(self) -> Frame:
        """The frame of the cell."""
        return Frame.of(self.cell, self.pbc, self.pos.device)

    @cached_property
    def coordinates(self) -> torch.Tensor:
        """Coordinates of the points in the frame."""
        return self.frame.coordinates(self.points)

    @cached_property
    def home(self) -> torch.Tensor:
        """The shifts that bring the nodes together."""
        return self.frame.home(self.coordinates)

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
    """Return positions of which neighbours can be found here, if they are finite."""
    package("scipy.spatial", what)
    checked_tensor(pos, "", "pos")
    if not pos.is_floating_point() or pos.dim() != 2 or not pos.shape[1]:
        raise ArgumentError(f"pos must be floats of shape (n, D); got {described(pos)}.")
    engine_for(group, pos.device)
    if group.size > 1 and group.simulated:
        raise GroupError(
            f"on {group}: in a simulated world no other rank brings positions. Find the edges in "
            "one process, and use varcomm.simulate.partition."
        )
    return pos


def check_finite(pos: torch.Tensor, is_finite: bool) -> None:
    """Raise ArgumentError with the first position that is not finite, if there is one."""
    if not is_finite:
        row = int((~pos.isfinite()).any(1).nonzero()[0])
        raise ArgumentError(f"pos must be finite; row {row} is {pos[row].tolist()}.")


def agreed(
    what: str,
    check: Callable[[], tuple[T, dict[str, object]]],
    outline: Callable[[T], Any],
    group: Group,
) -> tuple[T, list[Any], int]:
    """Return the result of `check`, all ranks' outlines, and a number of this call; collective.

    `check` also returns what must be equal on all ranks; all raise if it is not.
    """

    def public(found: tuple[T, dict[str, object]]) -> tuple[dict[str, object], int, Any]:
        return found[1], randbits(32), outline(found[0])

    (own, _), shared = agree_and_share(what, check, public, group)
    equal, numbers, outlines = zip(*shared, strict=True)
    require_equal(what, equal)
    return own, [*outlines], crc32(repr(numbers).encode())


def shards(
    own: Own,
    ids: torch.Tensor,
    links: Links,
    counts: EdgeCounts,
    displacements: torch.Tensor,
    sizes: tuple[ShardSizes, ShardSizes],
    halo_ids: torch.Tensor,
    plan: ExchangePlan,
) -> tuple[Mapping[NodeType, NodeShard], Mapping[EdgeType, EdgeShard], Mapping[str, Any]]:
    """Return the shards of a graph, and its attributes, which are none.

    `sizes` are nodes and edges per rank.
    """
    attributes = {"edge_attr": displacements.to(own.pos.dtype)}
    if links.shift is not None:
        attributes["shift"] = links.shift
    group = plan.group
    edges = sizes[1].range(group.rank)
    shard = EdgeShard(
        group=group,
        sizes=sizes[1],
        attributes=attributes,
        ids=torch.arange(edges.start, edges.stop, device=own.pos.device),
        local_ids=links.ends,
        plan=plan,
        num_targets=len(own.pos),
        known_counts=counts,
        halo_ids=halo_ids,
    )
    nodes = NodeShard(group, sizes[0], {"pos": own.pos}, ids)
    return {None: nodes}, {None: shard}, {}
