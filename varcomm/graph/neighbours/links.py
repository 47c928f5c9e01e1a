"""Links: pairs of nodes within a distance, found on one rank among its nodes and ghosts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

import numpy as np
import torch
from torch.autograd.forward_ad import unpack_dual

from varcomm.graph.neighbours.ghosts import Boxes

__all__ = ["Links", "has_derivative", "tree_of"]


@dataclass(frozen=True, eq=False)
class Links:
    """Pairs of nodes: sources over targets, (2, m), where own nodes come before ghosts.

    The first `mutual` pairs are of own nodes and stand for edges in both directions. `shift`, int32
    of shape (m, D), is None without a cell.
    """

    ends: torch.Tensor
    mutual: int
    shift: torch.Tensor | None

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

        `points` are its own nodes, which `home` brings together, and ghosts; `coordinates` are
        those of the points in the frame.
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
        pairs = torch.from_numpy(tree.query_pairs(reach, output_type="ndarray"))
        near = tree.sparse_distance_matrix(others, reach, output_type="ndarray")
        device, mutual = points.device, len(pairs)
        target, ghost = (torch.from_numpy(near[end].astype(np.int64)).to(device) for end in "ij")
        ends = _empty((2, mutual + len(near)), rows)
        ends[:, :mutual] = pairs.t()
        ends[0, mutual:], ends[1, mutual:] = rows[ghost], target
        if frame.cell is None:
            return cls(ends, mutual, None)
        home, shift = home.to(torch.int32), shift.to(torch.int32)
        shifts = _empty((ends.shape[1], points.shape[1]), shift).zero_()
        shifts[mutual:] = shift[ghost]
        if bool(home.any()):
            shifts[:mutual] = home[ends[0, :mutual]]
            shifts -= home[ends[1]]
        return cls(ends, mutual, shifts)

    @property
    def count(self) -> int:
        """Number of edges."""
        return self.ends.shape[1] + self.mutual

    def displacements(self, pos: torch.Tensor, cell: torch.Tensor | None) -> torch.Tensor:
        """Return source minus target of each pair, (m, D); differentiable, in fp64.

        Bits depend on positions and shifts alone, not on the rank that computes them.
        """
        ends = [
            pos.index_select(0, end) if has_derivative(pos) else _rows(pos, end)
            for end in self.ends
        ]
        out = ends[0].sub_(ends[1])
        if self.shift is None or cell is None:
            return out
        across = self.shift.any(1).nonzero().view(-1)
        shift = self.shift[across].to(cell.dtype)
        # a product of matrices may sum in another order for another number of rows
        offset = sum(shift[:, k, None] * vector for k, vector in enumerate(cell))
        return out.index_add_(0, across, offset)  # type: ignore[arg-type]

    def at(self, index: torch.Tensor) -> Links:
        """Return some of the pairs, by ascending positions."""
        shift = None if self.shift is None else self.shift.index_select(0, index)
        mutual = int((index < self.mutual).sum())
        return Links(self.ends.index_select(1, index), mutual, shift)

    def directed(self) -> Links:
        """Return one pair per edge; the second directions of mutual pairs stand behind."""
        if not self.mutual:
            return self
        count, pairs = self.ends.shape[1], self.ends[:, : self.mutual]
        ends = _empty((2, self.count), self.ends)
        ends[:, :count], ends[:, count:] = self.ends, pairs.flip(0)
        return Links(ends, 0, None if self.shift is None else self.with_reversed(self.shift))

    def with_reversed(self, x: torch.Tensor) -> torch.Tensor:
        """Return vectors of pairs, (m, D), as those of directed edges."""
        if has_derivative(x):
            return torch.cat([x, -x[: self.mutual]])
        out = _empty((self.count, x.shape[1]), x)
        out[: len(x)] = x
        torch.neg(x[: self.mutual], out=out[len(x) :])
        return out

    def limited(
        self,
        square: float,
        most: int | None,
        points: torch.Tensor,
        cell: torch.Tensor | None,
        ids: torch.Tensor,
        owned: int,
    ) -> tuple[Links, torch.Tensor]:
        """Return the pairs up to a squared length, `most` per target, and their displacements.

        `ids` are those of own nodes and ghosts, as `points`.
        """
        links, found = self, self.displacements(points, cell)
        lengths = _square(found)
        inside = lengths <= square
        if not bool(inside.all()):
            index = inside.nonzero().view(-1)
            links, found, lengths = self.at(index), found.index_select(0, index), lengths[index]
        if most is not None:
            links = links.nearest(most, lengths, ids, owned)
            found = links.displacements(points, cell)
        return links, found

    def nearest(self, most: int, square: torch.Tensor, ids: torch.Tensor, owned: int) -> Links:
        """Return at most `most` edges per target, the first by (distance, source's id, shift).

        `square` are squared distances of pairs, `ids` those of own nodes and ghosts.
        """
        edges = self.directed()
        square = torch.cat([square, square[: self.mutual]])
        source, target = edges.ends
        crowded = (torch.bincount(target, minlength=owned) > most)[target]
        among = crowded.nonzero().view(-1)
        if not len(among):
            return self
        shift = () if edges.shift is None else edges.shift[among].t().flip(0)
        keys = (*shift, ids[source[among]], square[among], target[among])
        order = np.lexsort([key.cpu().numpy() for key in keys])
        among = among[torch.from_numpy(order).to(among.device)]
        # ordered by target: position among the edges of the same target
        _, count = target[among].unique_consecutive(return_counts=True)
        first = (count.cumsum(0) - count).repeat_interleave(count)
        nth = torch.arange(len(among), device=among.device) - first
        kept = ~crowded
        kept[among[nth < most]] = True
        return edges.at(kept.nonzero().view(-1))

    def used(self, owned: int, ghosts: int) -> torch.Tensor:
        """Return which ghosts are sources, bool of shape (ghosts,)."""
        source = self.ends[0, self.mutual :]
        mask = torch.zeros(owned + ghosts, dtype=torch.bool, device=source.device)
        mask[source] = True
        return mask[owned:]

    def renumbered(self, owned: int, used: torch.Tensor) -> Links:
        """Return the same pairs, with ghosts counted among the used ones."""
        own = torch.arange(owned, device=used.device)
        number = torch.cat([own, owned - 1 + used.cumsum(0)])
        ends = self.ends.clone()
        ends[0, self.mutual :] = number[ends[0, self.mutual :]]
        return replace(self, ends=ends)


def has_derivative(x: torch.Tensor | None) -> bool:
    """Return whether derivatives with respect to a tensor are asked for, in either mode."""
    if x is None:
        return False
    return (x.requires_grad and torch.is_grad_enabled()) or unpack_dual(x).tangent is not None


def _empty(shape: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    """Return uninitialised rows; on a CPU by NumPy, whose huge pages are written faster."""
    if like.device.type != "cpu":
        return like.new_empty(shape)
    memory = np.empty(prod(shape) * like.element_size(), np.uint8)
    return torch.from_numpy(memory).view(like.dtype).view(shape)


def _rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.index_select(x, 0, index, out=_empty((len(index), x.shape[1]), x))


def _square(displacements: torch.Tensor) -> torch.Tensor:
    """Return squared lengths, (m,), summed axis by axis: the same bits for any m."""
    length, *others = (axis * axis for axis in displacements.unbind(1))
    for other in others:
        length += other
    return length


def tree_of(points: torch.Tensor) -> Any:
    """Return a tree of SciPy, in the order in which it is built fastest."""
    from scipy.spatial import cKDTree  # type: ignore[import-untyped]

    return cKDTree(points.cpu().numpy(), balanced_tree=False, compact_nodes=False)
