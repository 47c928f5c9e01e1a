"""``radius``: a partitioned graph of all nodes within a distance, found on ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import torch

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.graph.neighbours.ghosts import Boxes, Frame, Ghosts
from varcomm.graph.neighbours.links import Links, has_derivative
from varcomm.graph.neighbours.positions import (
    FARTHEST,
    SLACK,
    SLACK_AT,
    Own,
    agreed,
    checked_positions,
    shards,
)
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.ops.digest import digest
from varcomm.plan.checks import checked_index
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sizes import ShardSizes, at_least
from varcomm.transport.agreement import agree_and_share, share
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = ["radius"]

_WHAT = "graph.radius"


@dataclass(frozen=True, eq=False)
class _Kept:
    """Pairs within cutoff and skin, with ghosts in the order of the plan, and where nodes stood."""

    links: Links
    points: torch.Tensor
    cell: torch.Tensor | None
    plan: ExchangePlan


@dataclass(frozen=True, eq=False)
class _RadiusGraph(PartitionedGraph):
    """A graph from which :func:`radius` can continue; `kept` is None without a skin."""

    settings: Mapping[str, object]
    kept: _Kept | None


@dataclass(frozen=True, eq=False)
class _Request:
    """The checked arguments of one rank; `cell` is fp64 and has its gradient."""

    own: Own
    ids: torch.Tensor | None
    cell: torch.Tensor | None
    cutoff: float
    skin: float
    most: int | None
    settings: Mapping[str, object]

    @property
    def is_differentiable(self) -> bool:
        """Whether derivatives are asked for, as on all ranks."""
        return has_derivative(self.own.pos) or has_derivative(self.cell)

    @property
    def fixed_cell(self) -> torch.Tensor | None:
        """The cell without gradient."""
        return self.own.frame.cell

    def serves(self, kept: _Kept) -> bool:
        """Return whether own nodes are so near to where they stood that no pair is missing.

        A change of the cell that moves all positions with it does not count as motion: it only
        scales the distances that the skin guarantees.
        """
        points, scale, cell, then = kept.points, 1.0, self.fixed_cell, kept.cell
        if cell is not None and then is not None and not torch.equal(cell, then):
            change = torch.linalg.solve(then, cell)
            points, scale = points @ change, float(torch.linalg.svdvals(change)[-1])
        moved = (self.own.points - points).norm(dim=1).amax() if len(points) else 0.0
        return bool(2 * moved <= scale * (self.cutoff + self.skin) - self.cutoff)

    def reach(self, largest: float) -> float:
        """Return the reach of a search, for positions up to `largest`; raise if too wide."""
        reach, cell = self.cutoff + self.skin, self.fixed_cell
        largest += 0.0 if cell is None else float(cell.abs().max())
        if (slack := SLACK_AT * largest) > reach:
            raise ArgumentError(
                f"{_WHAT}: numbers up to {largest:g} are too large to find pairs within {reach:g}. "
                "Bring positions into the cell, or near zero."
            )
        return reach + SLACK * reach + slack

    def chosen(
        self, links: Links, points: torch.Tensor, ids: torch.Tensor
    ) -> tuple[Links, torch.Tensor]:
        """Return the pairs that are edges, and their displacements."""
        cell, owned = self.fixed_cell, len(self.own.pos)
        return links.limited(self.cutoff * self.cutoff, self.most, points, cell, ids, owned)


def radius(
    pos: torch.Tensor,
    cutoff: float,
    group: GroupLike = None,
    cell: Any = None,
    pbc: bool | Sequence[bool] | None = None,
    max_neighbours: int | None = None,
    skin: float = 0.0,
    previous: PartitionedGraph | None = None,
    *,
    ids: torch.Tensor | None = None,
) -> PartitionedGraph:
    """Connect nodes within a distance; each rank passes the positions that it owns.

    Collective; an error on one rank is raised on all ranks. Ranks exchange bounding boxes of their
    positions, and send each other the nodes within reach of a box; no rank holds all positions.
    Each periodic image within the cutoff is an edge, also of a node to itself.

    Parameters
    ----------
    pos : torch.Tensor
        Positions of the nodes that this rank owns, finite floats of shape (n, D), inside the cell
        or not; n may be zero. The dtype and D are identical on all ranks.
    cutoff : float
        Largest length of an edge, included.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
    cell : torch.Tensor or array, optional
        Vectors of the cell as rows, (D, D), regular, identical on all ranks. A vector that is not
        periodic must be given too; its length has no effect.
    pbc : bool or sequence of bool, optional
        Whether each cell vector is periodic; by default, all are periodic.
    max_neighbours : int, optional
        Largest number of edges into each node. The edges with the smallest (length, id of the
        source, shift) are kept.
    skin : float
        The halo contains all nodes within ``cutoff + skin``, so it can be kept while nodes move a
        little.
    previous : PartitionedGraph, optional
        Result of an earlier call with the same arguments, for these nodes at other positions. The
        halo and the plan of `previous` are kept while no node of any rank has moved by more than
        half the skin since they were made. An affine change of the cell and all positions together
        counts only as a small motion.
    ids : torch.Tensor, optional
        Ids of this rank's nodes in the full graph, ascending, such as ``graph.owned_ids``; int32 or
        int64 of shape (n,). By default, ids count the rows of rank 0, then the rows of rank 1, and
        so on.

    Returns
    -------
    PartitionedGraph
        It has `pos` as given, and ``edge_attr``, (E, D), the displacement from target to source,
        ``pos[source] + shift @ cell - pos[target]``, differentiable with respect to `pos` and
        `cell`. With a cell, the graph also has ``shift``, int32 of shape (E, D).

    Raises
    ------
    ArgumentError
        On every rank, if an argument is invalid on one rank, or a position or cell is larger than
        1e12 times the reach; `previous` stays valid.
    DisagreementError
        On every rank, if ranks differ in arguments, dtypes or D, or an id is missing or repeated.
    MissingPackageError
        On every rank, if SciPy is missing on one.

    See Also
    --------
    knn, from_edges

    Notes
    -----
    Lengths are compared in fp64, so that any number of ranks finds the same edges. The gradient of
    `cell` on a rank comes from its own edges: :func:`varcomm.all_reduce` of it is the full
    gradient.

    Communication: two agreements; each node within reach of another rank's box with 8 more bytes,
    and one byte in return. The positions of the halo are sent in backward, and in forward if a
    gradient is needed. If the plan of `previous` is kept, ranks send two agreements and the
    positions of the halo.

    In one process: ``j, i, D, S = ase.neighborlist.neighbor_list("jiDS", atoms, cutoff)``; j are
    sources and i targets, D is `edge_attr`, S is `shift`.

    Examples
    --------
    Two ranks own one atom each of a chain with a period of 3.

    >>> import torch, varcomm
    >>> def fn(rank):
    ...     pos = torch.tensor([[float(rank), 0.0]])
    ...     cell = torch.tensor([[3.0, 0.0], [0.0, 9.0]])
    ...     graph = varcomm.graph.radius(pos, 2.0, cell=cell, pbc=[True, False])
    ...     return graph.halo_ids.tolist(), sorted(graph.edge_attr[:, 0].tolist())
    >>> varcomm.launch(fn, 2)
    [([1], [-2.0, 1.0]), ([0], [-1.0, 2.0])]
    """
    ranks = resolve(group)

    def check() -> tuple[_Request, dict[str, object]]:
        rows = checked_positions(pos, _WHAT, ranks)
        reach = _checked_length(cutoff, "cutoff", 1e-150), _checked_length(skin, "skin", 0.0)
        vectors = _checked_cell(cell, rows)
        periodic = _checked_pbc(pbc, rows.shape[1], vectors is not None)
        most = None if max_neighbours is None else at_least(1, max_neighbours, "max_neighbours")
        fixed = None if vectors is None else vectors.detach().clone()
        settings: dict[str, object] = {
            "cutoff": reach[0],
            "skin": reach[1],
            "pbc": periodic,
            "max_neighbours": most,
            "shape and dtype of pos": f"(n, {rows.shape[1]}) of {rows.dtype}",
            "the kind of device": rows.device.type,
            "use of cell": cell is not None,
            "use of ids": ids is not None,
        }
        own = Own.of(rows, Frame.of(fixed, periodic, rows.device))
        request = _Request(own, _checked_ids(ids, rows), vectors, *reach, most, settings)
        if previous is not None:
            _check_previous(previous, request, ranks)
        return request, settings | {
            "cell": repr(digest(fixed)),
            "use of derivatives": [has_derivative(each) for each in (rows, vectors)],
            "previous": None if previous is None else previous.plan.identity,
        }

    def outline(request: _Request) -> list[Any]:
        kept = None if not isinstance(previous, _RadiusGraph) else previous.kept
        serves = kept is not None and request.serves(kept)
        return [len(request.own.pos), request.own.bounds(), request.own.largest(), serves]

    request, outlines, identity = agreed(_WHAT, check, outline, ranks)
    counts, bounds, largest, serves = zip(*outlines, strict=True)
    sizes, own = ShardSizes(counts), request.own
    if isinstance(previous, _RadiusGraph) and previous.kept is not None and all(serves):
        found = _continued(request, previous, previous.kept)
    else:
        ids_of_own = _agreed_ids(request, sizes, ranks)
        reach = request.reach(max(largest))
        boxes = Boxes.of(own.frame, bounds, [reach] * ranks.size)
        found = _searched(request, ids_of_own, boxes, identity, ranks)
    plan, displacements = found.plan, found.displacements
    if request.is_differentiable:  # on all ranks
        full = torch.cat([own.pos, plan(own.pos)]) if found.full is None else found.full
        displacements = found.links.displacements(full.double(), request.cell)
    counted = sizes, ShardSizes(found.counts)
    parts = shards(own, found.ids, found.links, displacements, counted, found.halo_ids, plan)
    method = "block" if ids is None else "the ranks given"
    return _RadiusGraph(*parts, method, request.settings, found.kept)


@dataclass(frozen=True, eq=False)
class _Found:
    """Pairs within the cutoff, their displacements without gradient, and edges per rank.

    `full` has the halo's positions behind own ones, if the plan has already been called.
    """

    ids: torch.Tensor
    halo_ids: torch.Tensor
    plan: ExchangePlan
    links: Links
    displacements: torch.Tensor
    counts: list[int]
    kept: _Kept | None
    full: torch.Tensor | None


def _continued(request: _Request, previous: PartitionedGraph, kept: _Kept) -> _Found:
    """Choose among the pairs that a graph has kept; collective."""
    pos, ids, halo_ids = request.own.pos, previous.owned_ids, previous.halo_ids
    full = torch.cat([pos, kept.plan(pos)])

    def choose() -> tuple[Links, torch.Tensor]:
        return request.chosen(kept.links, full.detach().double(), torch.cat([ids, halo_ids]))

    (links, away), counts = agree_and_share(_WHAT, choose, _count, kept.plan.group)
    return _Found(ids, halo_ids, kept.plan, links, away, counts, kept, full)


def _searched(
    request: _Request, ids: torch.Tensor, boxes: Boxes, identity: int, group: Group
) -> _Found:
    """Fetch ghosts, find pairs, and make the plan of the ghosts that they use; collective."""
    own, owned, skin = request.own, len(ids), request.skin
    ghosts = Ghosts.fetched(boxes, own.coordinates, own.pos, ids, group)

    def search() -> tuple[Links, torch.Tensor, Links]:
        points = torch.cat([own.points, ghosts.pos.double()])
        coordinates = own.frame.coordinates(points)
        near = Links.found(points, coordinates, own.home, boxes, group.rank)
        links, away = request.chosen(near, points, torch.cat([ids, ghosts.ids]))
        return links, away, near if skin else links

    (links, away, near), counts = agree_and_share(_WHAT, search, _count, group)
    used = near.used(owned, len(ghosts.ids))
    plan = ghosts.plan(used, owned, identity)
    for each in {links, near}:
        each.renumber(owned, used)
    kept = _Kept(near, own.points.clone(), request.fixed_cell, plan) if skin else None
    return _Found(ids, ghosts.ids[used], plan, links, away, counts, kept, None)


def _count(found: Sequence[Any]) -> int:
    return found[0].count  # type: ignore[no-any-return]


def _checked_length(value: Any, name: str, least: float) -> float:
    try:
        length = float(value)
    except (TypeError, ValueError):
        length = -inf
    if not least <= length <= FARTHEST:
        raise ArgumentError(
            f"{name} must be a number from {least:g} to {FARTHEST:g}; got {value!r}."
        )
    return length


def _checked_cell(cell: Any, pos: torch.Tensor) -> torch.Tensor | None:
    """Return the vectors of the cell in fp64, on the device of positions."""
    if cell is None:
        return None
    try:
        vectors = cell if isinstance(cell, torch.Tensor) else torch.from_numpy(np.array(cell))
        if vectors.is_complex():
            raise TypeError("these are complex")
        vectors = vectors.to(pos.device, torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"cell must hold numbers: {error}.") from error
    if vectors.shape != (pos.shape[1],) * 2 or not bool(vectors.isfinite().all()):
        raise ArgumentError(
            f"cell must hold finite vectors as rows, {(pos.shape[1],) * 2}; got shape "
            f"{tuple(vectors.shape)}. For lengths of a box pass torch.diag(lengths)."
        )
    volume = torch.linalg.det(vectors.detach() / vectors.detach().norm(dim=1, keepdim=True))
    if not bool(volume.abs() > SLACK):  # NaN too, of a zero vector
        raise ArgumentError(
            "cell is singular. A direction that is not periodic needs a vector too: pass "
            "ase.geometry.complete_cell(cell)."
        )
    return vectors


def _checked_pbc(pbc: Any, dims: int, has_cell: bool) -> tuple[bool, ...]:
    given = np.asarray(has_cell if pbc is None else pbc)
    if given.dtype != bool or given.shape not in ((), (dims,)):
        raise ArgumentError(f"pbc must be a bool or {dims} bools; got {pbc!r}.")
    if given.any() and not has_cell:
        raise ArgumentError("pbc needs a cell. Pass its vectors as rows: cell=...")
    return tuple(np.broadcast_to(given, dims).tolist())


def _checked_ids(ids: Any, pos: torch.Tensor) -> torch.Tensor | None:
    if ids is None:
        return None
    found = checked_index(ids, 2**62, "ids", "nodes")
    if len(found) != len(pos) or found.device != pos.device or bool((found.diff() <= 0).any()):
        raise ArgumentError(
            f"ids must be ascending, one for each of the {len(pos)} rows of pos, on its device. "
            "Sort the rows of pos by their ids."
        )
    return found


def _check_previous(previous: Any, request: _Request, group: Group) -> None:
    """Raise unless the graph is a result of :func:`radius` for the same nodes and arguments."""
    fix = "Leave previous out to build a new graph."
    if not isinstance(previous, _RadiusGraph) or (
        previous.kept is not None and previous.kept.plan is not previous.plan
    ):
        raise ArgumentError(f"previous must be a result of graph.radius as it came. {fix}")
    if previous.group != group:
        raise ArgumentError(f"previous is on another group, {previous.group!r}. {fix}")
    for name, value in request.settings.items():
        if previous.settings[name] != value:
            raise ArgumentError(
                f"previous has another {name}, {previous.settings[name]}; got {value}. {fix}"
            )
    same = previous.num_owned == len(request.own.pos)
    if not same or (request.ids is not None and not torch.equal(previous.owned_ids, request.ids)):
        raise ArgumentError(f"previous has other nodes on this rank. {fix}")


def _agreed_ids(request: _Request, sizes: ShardSizes, group: Group) -> torch.Tensor:
    """Return this rank's ids, once all ranks together have each id once; collective."""
    mine = sizes.range(group.rank)
    numbers = torch.arange(mine.start, mine.stop, device=request.own.pos.device)
    if request.ids is None:
        return numbers
    ids = request.ids
    # equal sums of hashes: the ids of all ranks are a permutation of all numbers
    sums = share(_WHAT, lambda: int((_hashed(ids) - _hashed(numbers)).sum()), group)
    if sum(sums) % 2**64:
        raise DisagreementError(
            f"{_WHAT}: ids must name each of the {sizes.total} nodes once, on all ranks together."
        )
    return ids


def _hashed(ids: torch.Tensor) -> torch.Tensor:
    """Return hashes of 64 bits, by the mixing steps of splitmix64."""
    for factor in (0x1F58476D1CE4E5B9, 0x14D049BB133111EB):
        ids = (ids ^ (ids >> 30)) * factor + 0x1E3779B97F4A7C15
    return ids ^ (ids >> 31)
