"""``knn``: a partitioned graph of the nearest nodes of each node, found on ranks."""

from __future__ import annotations

from functools import partial
from math import dist, inf
from typing import Any

import numpy as np
import torch

from varcomm.errors import ArgumentError
from varcomm.graph.neighbours.ghosts import Boxes, Ghosts
from varcomm.graph.neighbours.links import EdgeCounts, Links, has_derivative, tree_of
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
from varcomm.sizes import ShardSizes, at_least
from varcomm.transport.agreement import agree, share
from varcomm.transport.group import GroupLike, resolve

_WHAT = "graph.knn"


def knn(pos: torch.Tensor, k: int, group: GroupLike = None) -> PartitionedGraph:
    """Connect each node with its k nearest nodes; each rank passes the positions that it owns.

    Collective; an error on one rank is raised on all ranks. As in :func:`radius`, ranks send each
    other nodes near their boxes: first within the distance of their own k-th neighbours, then at
    larger distances until all neighbours are found.

    Parameters
    ----------
    pos : torch.Tensor
        Positions of the nodes that this rank owns, finite floats of shape (n, D); n may be zero.
        The dtype and D are identical on all ranks.
    k : int
        Edges into each node, from its `k` nearest nodes by (distance, id). Nodes at the same
        position are neighbours.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.

    Returns
    -------
    PartitionedGraph
        It has `pos` as given, and ``edge_attr``, (n * k, D), ``pos[source] - pos[target]``,
        differentiable. Ids count the rows of rank 0, then the rows of rank 1, and so on.

    Raises
    ------
    ArgumentError
        On every rank, if an argument is invalid on one rank, or there are fewer than k other nodes.
    DisagreementError
        On every rank, if ranks differ in k, dtypes or D.
    MissingPackageError
        On every rank, if SciPy is missing on one.

    See Also
    --------
    radius, from_edges

    Notes
    -----
    Communication: at least three agreements; each node near another rank's box with 8 more bytes,
    and one byte in return. If a node is far from all other nodes, its rank receives many ghosts.

    In one process: ``scipy.spatial.cKDTree(pos).query(pos, k + 1)``.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     pos = torch.tensor([[0.0], [3.0]]) if rank == 0 else torch.tensor([[4.0], [9.0]])
    ...     graph = varcomm.graph.knn(pos, 1)
    ...     return graph.halo_ids.tolist(), graph.edge_attr.flatten().tolist()
    >>> varcomm.launch(fn, 2)
    [([2], [3.0, 1.0]), ([1], [-1.0, -5.0])]
    """
    ranks = resolve(group)

    def check() -> tuple[Own, dict[str, object]]:
        rows = checked_positions(pos, _WHAT, ranks)
        check_finite(rows, bool(rows.isfinite().all()))
        dims = rows.shape[1]
        return Own(rows, None, [False] * dims), {
            "k": at_least(1, k, "k"),
            "shape and dtype of pos": f"(n, {dims}) of {rows.dtype}",
            "the kind of device": rows.device.type,
            "use of derivatives": has_derivative(rows),
        }

    def outline(own: Own) -> list[Any]:
        return [len(own.pos), own.bounds(), _farthest(own.points, own.points, k)]

    own, outlines, identity = agreed(_WHAT, check, outline, ranks)
    counts, bounds, needed = zip(*outlines, strict=True)
    k = int(k)  # checked; may be an integer of NumPy
    sizes, owned = ShardSizes(counts), len(own.pos)
    if sizes.total <= k:
        raise ArgumentError(f"{_WHAT}: {k} neighbours of each node need more than {sizes.total}.")
    mine = sizes.range(ranks.rank)
    own_ids = torch.arange(mine.start, mine.stop, device=own.pos.device)
    low, high = (np.array(each) for each in zip(*bounds, strict=True))
    low, high = low.min(0), high.max(0)
    if (extent := dist(low, high)) > FARTHEST:
        raise ArgumentError(f"{_WHAT}: positions are {extent:g} apart. Use another unit of length.")
    margin = SLACK_AT * float(max(np.abs(low).max(), np.abs(high).max()))

    def certain(far: float) -> float:
        return far * (1 + SLACK) + margin

    reach = [extent * (k / sizes.total) ** (1 / own.pos.shape[1])] * ranks.size
    while True:
        # at first where a rank has too few nodes to know, a guess; later twice as far
        reach = [
            certain(far) if far < inf else 2 * before
            for far, before in zip(needed, reach, strict=True)
        ]
        boxes = Boxes.of(own.frame, bounds, reach)
        ghosts = Ghosts.fetched(boxes, own.points, own.pos, own_ids, ranks)
        points = torch.cat([own.points, ghosts.pos.double()])
        farthest = share(_WHAT, partial(_farthest, points, own.points, k), ranks)
        if all(certain(far) <= r for far, r in zip(farthest, reach, strict=True)):
            break
        needed = tuple(farthest)

    def search() -> tuple[Links, EdgeCounts]:
        known = torch.cat([own_ids, ghosts.ids])
        near = _nearest(points, owned, k)
        links, _, edge_counts = near.limited(inf, k, points, None, known, owned)
        return links, edge_counts

    links, edge_counts = agree(_WHAT, search, ranks)
    used = links.used(owned, len(ghosts.ids))
    plan, halo_ids = ghosts.plan(used, owned, identity), ghosts.ids[used]
    links.renumber(owned, used)
    full = torch.cat([own.pos, plan(own.pos)]).double()
    displacements = links.displacements(full, None)
    edges = ShardSizes(count * k for count in counts)
    parts = shards(own, own_ids, links, edge_counts, displacements, (sizes, edges), halo_ids, plan)
    return PartitionedGraph(*parts, "block")


def _farthest(points: torch.Tensor, own: torch.Tensor, k: int) -> float:
    """Return the greatest distance of own nodes to their k-th neighbour; infinite if too few."""
    if not len(own):
        return 0.0
    return float(tree_of(points).query(own.cpu().numpy(), [k + 1])[0].max())


def _nearest(points: torch.Tensor, owned: int, k: int) -> Links:
    """Return pairs of own nodes, which come first, with their k nearest and all as far as the k-th.

    Which of several equally distant nodes a tree returns is unknown, so it is asked for more.
    """
    if not owned:
        return Links(torch.zeros(2, 0, dtype=torch.int64, device=points.device), 0, None)
    many, tree, own, rows = k + 1, tree_of(points), points[:owned].cpu().numpy(), np.arange(owned)
    found = []
    while len(rows):
        many = min(2 * many, len(points))
        distance, near = tree.query(own[rows], many)
        wanted = distance <= distance[:, k : k + 1] * (1 + SLACK)
        done = ~wanted[:, -1] | (many == len(points))
        at, nth = np.nonzero(wanted & done[:, None] & (near != rows[:, None]))
        found.append(np.stack([near[at, nth], rows[at]]))
        rows = rows[~done]  # further rows may be as near, for these nodes alone
    ends = np.concatenate(found, axis=1).astype(np.int64)
    ends = ends[:, ends[1].argsort(kind="stable")]
    return Links(torch.from_numpy(ends).to(points.device), 0, None)
