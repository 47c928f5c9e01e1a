"""``radius``: a partitioned graph of all nodes within a distance, found on ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import torch

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.graph.draws import hashed
from varcomm.graph.neighbours.ghosts import Bounds, Boxes, Ghosts
from varcomm.graph.neighbours.links import EdgeCounts, Links, has_derivative
from varcomm.graph.neighbours.positions import (
    FARTHEST,
    SLACK,
    SLACK_AT,
    Own,
    agreed,
    check_finite,
    checked_positions,
    shards,
)
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.ops.digest import digest
from varcomm.plan.checks import checked_integers, checked_range
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sizes import ShardSizes, at_least
from varcomm.transport.agreement import agree_and_share, share
from varcomm.transport.group import Group, GroupLike, resolve

_WHAT = "graph.radius"

_ID_END = 2**62


@dataclass(frozen=True, eq=False)
class _Kept:
    """Pairs within cutoff and skin, with ghosts in the order of the plan, and where nodes stood.

    `cell` is on the device of the nodes, `host_cell` the same on the CPU.
    """

    links: Links
    points: torch.Tensor
    cell: torch.Tensor | None
    host_cell: torch.Tensor | None
    plan: ExchangePlan

    def moved(self, points: torch.Tensor, cell: torch.Tensor | None) -> torch.Tensor:
        """Return the largest distance of a node to the place to which the cell alone moved it."""
        before = self.points
        if cell is not None and self.cell is not None:
            # unlike torch.linalg.solve, it does not wait for a GPU; the cell is regular
            change = torch.linalg.solve_ex(self.cell, cell)[0]
            same = torch.eye(len(cell), dtype=cell.dtype, device=cell.device)
            before = before @ torch.where((cell == self.cell).all(), same, change)
        way: torch.Tensor = (points - before).norm(dim=1)
        return way.amax() if len(way) else way.new_zeros(())

    def smallest_scale(self, host_cell: torch.Tensor | None) -> float:
        """Return the factor by which the change of the cell at least scales a distance."""
        then = self.host_cell
        if host_cell is None or then is None or torch.equal(host_cell, then):
            return 1.0
        return float(torch.linalg.svdvals(torch.linalg.solve(then, host_cell))[-1])


@dataclass(frozen=True, eq=False)
class _RadiusGraph(PartitionedGraph):
    """A graph from which :func:`radius` can continue; `kept` is None without a skin."""

    settings: Mapping[str, object]
    kept: _Kept | None


@dataclass(frozen=True, eq=False)
class _Request:
    """The checked arguments of one rank; `cell` is fp64 and has its gradient.

    `serves` is whether own nodes are so near to where the previous graph had them that no pair is
    missing; None without a skin or a previous graph.
    """

    own: Own
    ids: torch.Tensor | None
    cell: torch.Tensor | None
    host_cell: torch.Tensor | None
    cutoff: float
    skin: float
    most: int | None
    settings: Mapping[str, object]
    serves: bool | None

    @property
    def is_differentiable(self) -> bool:
        """Whether derivatives are asked for, as on all ranks."""
        return has_derivative(self.own.pos) or has_derivative(self.cell)

    def extent(self) -> tuple[Bounds, float]:
        """Return the bounds of own nodes, and their largest coordinate."""
        return self.own.bounds(), self.own.largest()

    def reach(self, largest: float) -> float:
        """Return the reach of a search, for positions up to `largest`; raise if too wide."""
        reach, cell = self.cutoff + self.skin, self.host_cell
        largest += 0.0 if cell is None else float(cell.abs().max())
        if (slack := SLACK_AT * largest) > reach:
            raise ArgumentError(
                f"{_WHAT}: numbers up to {largest:g} are too large to find pairs within {reach:g}. "
                "Bring positions into the cell, or near zero."
            )
        return reach + SLACK * reach + slack

    def chosen(
        self, links: Links, points: torch.Tensor, ids: torch.Tensor | None
    ) -> tuple[Links, torch.Tensor, EdgeCounts]:
        """Return the pairs that are edges, their displacements, and counts."""
        cell, owned = self.own.cell, len(self.own.pos)
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

    Communication: two agreements, or three with `previous` and a skin; each node within reach of
    another rank's box with 8 more bytes, and one byte in return. The positions of the halo are sent
    in backward, and in forward if a gradient is needed. If the plan of `previous` is kept, ranks
    send two agreements and the positions of the halo; without `max_neighbours`, the host then waits
    twice for a GPU.

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
        vectors = _checked_cell(cell, rows.shape[1])
        periodic = _checked_pbc(pbc, rows.shape[1], vectors is not None)
        most = None if max_neighbours is None else at_least(1, max_neighbours, "max_neighbours")
        settings: dict[str, object] = {
            # first: other settings differ if the dimensions do
            "shape and dtype of pos": f"(n, {rows.shape[1]}) of {rows.dtype}",
            "cutoff": reach[0],
            "skin": reach[1],
            "pbc": periodic,
            "max_neighbours": most,
            "the kind of device": rows.device.type,
            "use of cell": cell is not None,
            "use of ids": ids is not None,
        }
        own_ids = None if ids is None else _checked_ids(ids, rows)
        before: _RadiusGraph | None = None
        if previous is not None:
            before = _checked_previous(previous, settings, len(rows), ranks)
        own, vectors, host_cell, moved = _read(rows, vectors, periodic, own_ids, before)
        serves = None
        if before is not None and before.kept is not None:
            scale = before.kept.smallest_scale(host_cell)
            serves = 2 * moved <= scale * (reach[0] + reach[1]) - reach[0]
        request = _Request(own, own_ids, vectors, host_cell, *reach, most, settings, serves)
        return request, settings | {
            "cell": repr(digest(host_cell)),
            "use of derivatives": [has_derivative(each) for each in (rows, vectors)],
            "previous": None if previous is None else previous.plan.identity,
        }

    def outline(request: _Request) -> list[Any]:
        # while nothing is searched, the extent need not be known
        extent = request.extent() if request.serves is None else None
        return [len(request.own.pos), request.serves, extent]

    request, outlines, identity = agreed(_WHAT, check, outline, ranks)
    counts, serves, extents = zip(*outlines, strict=True)
    sizes, own = ShardSizes(counts), request.own
    if isinstance(previous, _RadiusGraph) and previous.kept is not None and all(serves):
        found = _continued(request, previous, previous.kept)
    else:
        if request.serves is not None:  # on all ranks
            extents = tuple(share(_WHAT, request.extent, ranks))
        bounds, largest = zip(*extents, strict=True)
        ids_of_own = _agreed_ids(request, sizes, ranks)
        reach = request.reach(max(largest))
        boxes = Boxes.of(own.frame, bounds, [reach] * ranks.size)
        found = _searched(request, ids_of_own, boxes, identity, ranks)
    plan, displacements = found.plan, found.displacements
    if request.is_differentiable:  # on all ranks
        full = torch.cat([own.pos, plan(own.pos)]) if found.full is None else found.full
        displacements = found.links.displacements(full.double(), request.cell)
    counted = sizes, ShardSizes(found.counts)
    links = found.links, found.edge_counts
    parts = shards(own, found.ids, *links, displacements, counted, found.halo_ids, plan)
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
    edge_counts: EdgeCounts
    displacements: torch.Tensor
    counts: list[int]
    kept: _Kept | None
    full: torch.Tensor | None


def _continued(request: _Request, previous: PartitionedGraph, kept: _Kept) -> _Found:
    """Choose among the pairs that a graph has kept; collective."""
    pos, halo_ids = request.own.pos, previous.halo_ids
    full = torch.cat([pos, kept.plan(pos)])

    def choose() -> tuple[Links, torch.Tensor, EdgeCounts]:
        ids = None if request.most is None else torch.cat([previous.owned_ids, halo_ids])
        return request.chosen(kept.links, full.detach().double(), ids)

    chosen, counts = agree_and_share(_WHAT, choose, lambda own: own[0].count, kept.plan.group)
    links, away, of_edges = chosen
    ids = previous.nodes.ids
    return _Found(ids, halo_ids, kept.plan, links, of_edges, away, counts, kept, full)


def _searched(
    request: _Request, ids: torch.Tensor, boxes: Boxes, identity: int, group: Group
) -> _Found:
    """Fetch ghosts, find pairs, and make the plan of the ghosts that they use; collective."""
    own, owned, skin = request.own, len(ids), request.skin
    ghosts = Ghosts.fetched(boxes, own.coordinates, own.pos, ids, group)

    def search() -> tuple[Links, torch.Tensor, EdgeCounts, Links]:
        points = torch.cat([own.points, ghosts.pos.double()])
        coordinates = own.frame.coordinates(points)
        near = Links.found(points, coordinates, own.home, boxes, group.rank)
        known = torch.cat([ids, ghosts.ids])
        links, away, of_edges = request.chosen(near, points, known)
        return links, away, of_edges, near if skin else links

    found, counts = agree_and_share(_WHAT, search, lambda own: own[0].count, group)
    links, away, of_edges, near = found
    used = near.used(owned, len(ghosts.ids))
    plan = ghosts.plan(used, owned, identity)
    for each in {links, near}:
        each.renumber(owned, used)
    kept = None
    if skin:
        kept = _Kept(near, own.points.clone(), own.cell, request.host_cell, plan)
    halo_ids = ghosts.ids[used]
    return _Found(ids, halo_ids, plan, links, of_edges, away, counts, kept, None)


def _read(
    pos: torch.Tensor,
    cell: torch.Tensor | None,
    pbc: Sequence[bool],
    ids: torch.Tensor | None,
    previous: _RadiusGraph | None,
) -> tuple[Own, torch.Tensor | None, torch.Tensor | None, float]:
    """Check values of arguments, for all of which the host waits for a GPU once.

    Return own nodes, the cell on the device of the positions and on the CPU, and how far nodes have
    moved since the pairs of the previous graph were found.
    """
    kept = None if previous is None else previous.kept
    host_cell = cell.detach().clone() if cell is not None and cell.device.type == "cpu" else None
    if cell is not None and cell.device != pos.device:
        before = None if kept is None else kept.host_cell
        same = before is not None and host_cell is not None and torch.equal(host_cell, before)
        if kept is not None and same and not has_derivative(cell):
            cell = kept.cell
        else:
            cell = cell.to(pos.device)
    own = Own(pos, None if cell is None else cell.detach().clone(), pbc)
    flag = torch.ones((), device=pos.device)
    if ids is not None and previous is not None:
        flag = (ids == previous.owned_ids).all()
    elif ids is not None:
        flag = (ids.diff() > 0).all() & ((ids >= 0) & (ids < _ID_END)).all()
    values = [pos.isfinite().all(), flag]
    values.append(flag if kept is None else kept.moved(own.points, own.cell))
    if own.cell is not None and host_cell is None:
        values.append(own.cell)
    read = torch.cat([value.double().view(-1) for value in values]).tolist()
    check_finite(pos, bool(read[0]))
    if ids is not None and not read[1]:
        _refuse_ids(ids, pos, previous)
    if own.cell is not None and host_cell is None:
        host_cell = torch.tensor(read[3:], dtype=torch.float64).view(own.cell.shape)
    if host_cell is not None:
        _check_regular(host_cell)
    return own, cell, host_cell, read[2]


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


def _checked_cell(cell: Any, dims: int) -> torch.Tensor | None:
    """Return the vectors of the cell in fp64, once their number fits."""
    if cell is None:
        return None
    try:
        vectors = cell if isinstance(cell, torch.Tensor) else torch.from_numpy(np.array(cell))
        if vectors.is_complex():
            raise TypeError("these are complex")
        vectors = vectors.to(torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"cell must hold numbers: {error}.") from error
    if vectors.shape != (dims, dims):
        raise _not_vectors(vectors, dims)
    return vectors


def _not_vectors(cell: torch.Tensor, dims: int) -> ArgumentError:
    return ArgumentError(
        f"cell must hold finite vectors as rows, {(dims, dims)}; got shape {tuple(cell.shape)}. "
        "For lengths of a box pass torch.diag(lengths)."
    )


def _check_regular(cell: torch.Tensor) -> None:
    """Raise ArgumentError if vectors, on the CPU, are not finite or span no volume."""
    if not bool(cell.isfinite().all()):
        raise _not_vectors(cell, len(cell))
    volume = torch.linalg.det(cell / cell.norm(dim=1, keepdim=True))
    if not bool(volume.abs() > SLACK):  # NaN too, of a zero vector
        raise ArgumentError(
            "cell is singular. A direction that is not periodic needs a vector too: pass "
            "ase.geometry.complete_cell(cell)."
        )


def _checked_pbc(pbc: Any, dims: int, has_cell: bool) -> tuple[bool, ...]:
    given = np.asarray(has_cell if pbc is None else pbc)
    if given.dtype != bool or given.shape not in ((), (dims,)):
        raise ArgumentError(f"pbc must be a bool or {dims} bools; got {pbc!r}.")
    if given.any() and not has_cell:
        raise ArgumentError("pbc needs a cell. Pass its vectors as rows: cell=...")
    return tuple(np.broadcast_to(given, dims).tolist())


def _checked_ids(ids: Any, pos: torch.Tensor) -> torch.Tensor:
    """Return a copy of ids as int64, if there is one for each row; their values are not read."""
    found = checked_integers(ids, "ids")
    if len(found) != len(pos) or found.device != pos.device:
        raise _not_ascending(pos)
    return found.clone()


def _not_ascending(pos: torch.Tensor) -> ArgumentError:
    return ArgumentError(
        f"ids must be ascending, one for each of the {len(pos)} rows of pos, on its device. "
        "Sort the rows of pos by their ids."
    )


def _refuse_ids(ids: torch.Tensor, pos: torch.Tensor, previous: _RadiusGraph | None) -> None:
    """Raise the error of ids that are not ascending, or not those of the previous graph."""
    checked_range(ids, _ID_END, "ids", "nodes")
    if previous is None or bool((ids.diff() <= 0).any()):
        raise _not_ascending(pos)
    raise _other_nodes()


_WITHOUT = "Leave previous out to build a new graph."


def _other_nodes() -> ArgumentError:
    return ArgumentError(f"previous has other nodes on this rank. {_WITHOUT}")


def _checked_previous(
    previous: Any, settings: Mapping[str, object], count: int, group: Group
) -> _RadiusGraph:
    """Return the previous graph, if :func:`radius` made it for as many nodes and these settings."""
    if not isinstance(previous, _RadiusGraph) or (
        previous.kept is not None and previous.kept.plan is not previous.plan
    ):
        raise ArgumentError(f"previous must be a result of graph.radius as it came. {_WITHOUT}")
    if previous.group != group:
        raise ArgumentError(f"previous is on another group, {previous.group!r}. {_WITHOUT}")
    for name, value in settings.items():
        if previous.settings[name] != value:
            raise ArgumentError(
                f"previous has another {name}, {previous.settings[name]}; got {value}. {_WITHOUT}"
            )
    if previous.num_owned != count:
        raise _other_nodes()
    return previous


def _agreed_ids(request: _Request, sizes: ShardSizes, group: Group) -> torch.Tensor:
    """Return this rank's ids, once all ranks together have each id once; collective."""
    mine, ids = sizes.range(group.rank), request.ids
    if ids is None:
        return torch.arange(mine.start, mine.stop, device=request.own.pos.device)
    own, numbers = ids.cpu().numpy(), np.arange(mine.start, mine.stop)
    # equal sums of hashes: the ids of all ranks are a permutation of all numbers
    sums = share(_WHAT, lambda: int((hashed(own) - hashed(numbers)).sum()), group)
    if sum(sums) % 2**64:
        raise DisagreementError(
            f"{_WHAT}: ids must name each of the {sizes.total} nodes once, on all ranks together."
        )
    return ids
