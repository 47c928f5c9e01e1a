"""Links: pairs of nodes within a distance, found on one rank among its nodes and ghosts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Self

import numpy as np
import torch
from torch.autograd.forward_ad import unpack_dual

from varcomm.graph.neighbours.ghosts import Boxes
from varcomm.graph.on_device import positions
from varcomm.ops.packing import counted_from

EdgeCounts = tuple[int, int]  # of edges whose source is an own node, and of self loops

_ROWS = 1 << 15  # at a time, so that steps on them read from a core's cache


@dataclass(frozen=True, eq=False)
class Links:
    """Directed edges: sources over targets, (2, E), where own nodes come before ghosts.

    The last `mutual` edges are the first `mutual` edges reversed, all between own nodes. Their
    displacements are computed from the first edges by a change of sign. `shift`, int32 of shape
    (E, D), is None without a cell.
    """

    ends: torch.Tensor
    mutual: int
    shift: torch.Tensor | None
    # of pairs that cross a border of the cell; None until they are counted
    num_across: int | None = None

    @classmethod
    def found(
        cls,
        points: torch.Tensor,
        coordinates: torch.Tensor,
        home: torch.Tensor,
        boxes: Boxes,
        rank: int,
    ) -> Self:
        """Find all pairs within the reach of a rank.

        `points` are its own nodes, which `home` brings together, and ghosts; `coordinates` are the
        coordinates of these points in the frame.
        """
        frame, reach, owned = boxes.frame, float(boxes.reach[rank]), len(home)
        rows, shift = boxes.images(coordinates, rank)
        beyond = rows >= owned
        if frame.cell is not None:  # own nodes, but where they are at home
            own = (~beyond).nonzero().view(-1)
            beyond[own] = (shift[own] != home[rows[own]]).any(1)
        rows, shift = rows[beyond], shift[beyond]
        tree = tree_of(frame.moved(points[:owned], home))
        others = tree_of(frame.moved(points[rows], shift))
        both = torch.from_numpy(tree.query_pairs(reach, output_type="ndarray")).to(rows.device)
        near = tree.sparse_distance_matrix(others, reach, output_type="ndarray")
        target, ghost = (torch.from_numpy(near[end].astype(np.int64)).to(rows) for end in "ij")
        mutual, pairs = len(both), len(both) + len(near)
        ends = _empty((2, pairs + mutual), rows)
        for way, columns in ((0, slice(mutual)), (1, slice(pairs, None))):
            ends[way, columns], ends[1 - way, columns] = both.unbind(1)
        ends[0, mutual:pairs], ends[1, mutual:pairs] = rows[ghost], target
        if frame.cell is None:
            return cls(ends, mutual, None)
        home, shift = home.to(torch.int32), shift.to(torch.int32)
        # NumPy's zeros take no memory before they are written, and few are
        zeros = np.zeros((ends.shape[1], points.shape[1]), np.int32)
        shifts = torch.from_numpy(zeros).to(rows.device)
        shifts[mutual:pairs] = shift[ghost]
        if bool(home.any()):
            shifts[:mutual] = home[ends[0, :mutual]]
            shifts[pairs:] = home[ends[0, pairs:]]
            shifts -= home[ends[1]]
        return cls(ends, mutual, shifts)

    @property
    def count(self) -> int:
        """Number of edges."""
        return self.ends.shape[1]

    @property
    def pairs(self) -> int:
        """Number of edges without the reversed edges."""
        return self.count - self.mutual

    def displacements(self, pos: torch.Tensor, cell: torch.Tensor | None) -> torch.Tensor:
        """Return source minus target of each edge, (E, D); differentiable, in fp64."""
        out = self._away(slice(self.pairs), pos, cell)
        return torch.cat([out, -out[: self.mutual]])

    @cached_property
    def across(self) -> torch.Tensor:
        """Pairs that cross a border of the cell, ascending; int64."""
        assert self.shift is not None
        return positions(self.shift[: self.pairs].any(1), self.num_across)

    def _away(self, part: slice, pos: torch.Tensor, cell: torch.Tensor | None) -> torch.Tensor:
        source, target = self.ends[:, part]
        out = pos.index_select(0, source).sub_(pos.index_select(0, target))
        if self.shift is None or cell is None:
            return out
        across, first = self.across, part.start
        if len(out) < self.pairs:
            borders = torch.tensor([first, part.stop], device=across.device)
            start, end = torch.searchsorted(across, borders).tolist()
            across = across[start:end] - first
        shift = self.shift[part][across].to(cell.dtype)
        # a product of matrices may sum in another order for another number of rows
        offset = sum(shift[:, k, None] * vector for k, vector in enumerate(cell))
        return out.index_add_(0, across, offset)

    def limited(
        self,
        most_square: float,
        most: int | None,
        points: torch.Tensor,
        cell: torch.Tensor | None,
        ids: torch.Tensor | None,
        owned: int,
    ) -> tuple[Links, torch.Tensor, EdgeCounts]:
        """Return the edges up to a squared length, `most` per target; displacements; counts.

        `ids` belong to own nodes and ghosts, in the order of `points`; without `most` they may be
        None, and the host waits for a GPU once.
        """
        links, out = self, _empty((self.count, points.shape[1]), points)
        inside = points.new_empty(self.pairs, dtype=torch.bool)
        rows = _ROWS if points.device.type == "cpu" else max(1, self.pairs)
        for first in range(0, self.pairs, rows):
            part = slice(first, min(first + rows, self.pairs))
            out[part] = away = self._away(part, points, cell)
            torch.le(_square(away), most_square, out=inside[part])
        torch.neg(out[: self.mutual], out=out[self.pairs :])
        both, (source, target) = self.mutual, self.ends[:, self.mutual : self.pairs]
        sums = [
            inside.sum(),
            inside[:both].sum(),
            (inside[both:] & (source < owned)).sum(),
            (inside[both:] & (source == target)).sum(),
            inside.sum() if self.shift is None else inside[self.across].sum(),
        ]
        pairs, mutual, interior, loops, across = torch.stack(sums).tolist()
        if pairs < self.pairs:
            index = positions(inside, pairs)
            index = torch.cat([index, index[:mutual] + self.pairs])
            links, out = self._at(index, mutual, out, across)
        interior += 2 * mutual
        if most is not None:
            assert ids is not None
            kept = links._nearest(most, _square(out), ids, owned)
            if not bool(kept.all()):
                links, out = links._at(kept.nonzero().view(-1), 0, out)
                source, target = links.ends
                interior, loops = int((source < owned).sum()), int((source == target).sum())
        return links, out, (interior, loops)

    def _at(
        self, index: torch.Tensor, mutual: int, away: torch.Tensor, num_across: int | None = None
    ) -> tuple[Links, torch.Tensor]:
        """Return some of the edges, and their displacements."""
        shift = None if self.shift is None else self.shift.index_select(0, index)
        links = Links(self.ends.index_select(1, index), mutual, shift, num_across)
        return links, away.index_select(0, index)

    def _nearest(
        self, most: int, square: torch.Tensor, ids: torch.Tensor, owned: int
    ) -> torch.Tensor:
        """Return a mask of the first edges per target by (distance, source's id, shift)."""
        source, target = self.ends
        crowded = (torch.bincount(target, minlength=owned) > most)[target]
        among, kept = crowded.nonzero().view(-1), ~crowded
        shift = () if self.shift is None else self.shift[among].t().flip(0)
        keys = (*shift, ids[source[among]], square[among], target[among])
        order = np.lexsort([key.cpu().numpy() for key in keys])
        among = among[torch.from_numpy(order).to(among.device)]
        # ordered by target: position among the edges of the same target
        count = target[among].unique_consecutive(return_counts=True)[1]
        nth = counted_from(torch.zeros_like(count), count)
        kept[among[nth < most]] = True
        return kept

    def used(self, owned: int, ghosts: int) -> torch.Tensor:
        """Return whether each ghost is a source, bool of shape (ghosts,)."""
        mask = torch.zeros(owned + ghosts, dtype=torch.bool, device=self.ends.device)
        mask[self.ends[0, self.mutual : self.pairs]] = True
        return mask[owned:]

    def renumber(self, owned: int, used: torch.Tensor) -> None:
        """Count ghosts among the used ones from now on."""
        own = torch.arange(owned, device=used.device)
        number = torch.cat([own, owned - 1 + used.cumsum(0)])
        source = self.ends[0, self.mutual : self.pairs]
        source.copy_(number[source])


def _square(away: torch.Tensor) -> torch.Tensor:
    """Return squared lengths, whose bits do not depend on the number of rows, unlike sums."""
    length, *others = (axis * axis for axis in away.unbind(1))
    for other in others:
        length += other
    return length


def has_derivative(x: torch.Tensor | None) -> bool:
    """Return whether derivatives with respect to a tensor are asked for, in either mode."""
    if x is None:
        return False
    return (x.requires_grad and torch.is_grad_enabled()) or unpack_dual(x).tangent is not None


def tree_of(points: torch.Tensor) -> Any:
    """Return a tree of SciPy, in the order in which it is built fastest."""
    from scipy.spatial import cKDTree  # type: ignore[import-untyped]

    return cKDTree(points.cpu().numpy(), balanced_tree=False, compact_nodes=False)


def _empty(shape: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    """Return uninitialised rows; on a CPU by NumPy, whose huge pages are written faster."""
    if like.device.type != "cpu" or not prod(shape):
        return like.new_empty(shape)
    memory = np.empty(prod(shape) * like.element_size(), np.uint8)
    return torch.from_numpy(memory).view(like.dtype).view(shape)
