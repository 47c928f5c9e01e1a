"""Which atoms are near which, in a periodic box: a list, in time about linear in the atoms."""

from itertools import product

import torch
from torch import Tensor


def neighbours(pos: Tensor, box: Tensor, cutoff: float) -> tuple[Tensor, Tensor]:
    """Find all pairs within a distance, each in both directions.

    Atoms are sorted into cells, as wide as the cutoff or a bit more; each atom is compared with
    those in the cells around its own. The box may be of any size: where it is smaller than the
    cutoff, an atom has several images of others, and of itself, as neighbours.

    Parameters
    ----------
    pos : Tensor
        Positions, (N, 3), inside the box or not.
    box : Tensor
        Lengths of the box's sides, (3,); the crystal repeats along each.
    cutoff : float
        How far away neighbours are at most, in the same unit.

    Returns
    -------
    tuple of Tensor
        Neighbours above the atoms that have them, (2, E), and what is added to the neighbour's
        position to come to the image that is near, (E, 3).
    """
    image = (pos / box).floor()
    inside = pos - image * box
    cells = (box / cutoff).floor().clamp(min=1).long()
    width = box / cells
    cell = (inside / width).long().minimum(cells - 1)
    number, order = _number(cell, cells).sort(stable=True)
    # only cells with atoms are known: an empty box may have far more others
    occupied, count = number.unique_consecutive(return_counts=True)
    first = count.cumsum(0) - count

    found, shifts = [], []
    reach = [int(n) for n in (cutoff / width).ceil()]
    for offset in product(*(range(-n, n + 1) for n in reach)):
        other = cell + torch.tensor(offset)
        jump = other.div(cells, rounding_mode="floor")
        wanted = _number(other - jump * cells, cells)
        there = torch.searchsorted(occupied, wanted).clamp(max=len(occupied) - 1)
        many = count[there] * (occupied[there] == wanted)
        # one line for each atom and each atom in that cell
        atom = torch.arange(len(pos)).repeat_interleave(many)
        line = torch.arange(len(atom))
        begin = (many.cumsum(0) - many)[atom]
        near = order[first[there[atom]] + line - begin]
        shift = jump[atom] * box
        distance2 = (inside[near] + shift - inside[atom]).square().sum(1)
        kept = (distance2 <= cutoff**2) & ((near != atom) | (jump[atom] != 0).any(1))
        near, atom, shift = near[kept], atom[kept], shift[kept]
        found.append(torch.stack([near, atom]))
        shifts.append(shift + (image[atom] - image[near]) * box)
    return torch.cat(found, dim=1), torch.cat(shifts)


def _number(cell: Tensor, cells: Tensor) -> Tensor:
    return (cell[:, 0] * cells[1] + cell[:, 1]) * cells[2] + cell[:, 2]
