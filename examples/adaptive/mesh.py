"""A square of cells of several sizes: refinement, faces between cells, and parents.

Cells are triples (level, row, column); level l has 2^l rows. Every rank holds these integers, and
fields are sharded.
"""

import torch
from torch import Tensor


def uniform(level: int) -> Tensor:
    """Return all cells of one level, (4^level, 3)."""
    row, column = torch.meshgrid(*[torch.arange(2**level)] * 2, indexing="ij")
    return torch.stack([torch.full_like(row, level), row, column], dim=-1).view(-1, 3)


def raster(cells: Tensor, finest: int) -> Tensor:
    """Return the index of the cell at each place of the finest level, (2^finest, 2^finest)."""
    side = 2**finest
    out = torch.full((side, side), -1)
    for level in cells[:, 0].unique().tolist():
        number = (cells[:, 0] == level).nonzero().view(-1)
        _, row, column = cells[number].T
        size = 2 ** (finest - level)
        blocks = out.view(side // size, size, side // size, size)
        blocks[row, :, column, :] = number[:, None, None]
    return out


def faces(cells: Tensor, finest: int) -> tuple[Tensor, Tensor]:
    """Return edges (2, E) between cells that touch, and face length / distance (E,)."""
    number, count = raster(cells, finest), len(cells)
    pairs = [(number[:-1], number[1:]), (number[:, :-1], number[:, 1:])]
    one, two = (torch.cat([pair[end].reshape(-1) for pair in pairs]) for end in (0, 1))
    keys = torch.cat([one * count + two, two * count + one])[torch.cat([one != two] * 2)]
    keys, length = keys.unique(return_counts=True)
    edge_index = torch.stack([keys // count, keys % count])
    size = 2.0 ** (finest - cells[:, 0])
    return edge_index, length / size[edge_index].mean(0)


def adapted(cells: Tensor, wanted: Tensor, coarsest: int, finest: int) -> tuple[Tensor, Tensor]:
    """Refine the cells `wanted` (N,) by one level, and merge other groups of four siblings.

    Returns new cells (M, 3) in the order of the old cells, and the indices of their parents (M, 4),
    -1 for none.
    """
    old, level = torch.arange(len(cells)), cells[:, 0]
    family = torch.stack([level, cells[:, 1] // 2, cells[:, 2] // 2], dim=1)
    families, number = family.unique(dim=0, return_inverse=True)
    others = torch.zeros(len(families)).index_add(0, number, (~wanted).float())
    merging = (others == 4) & (families[:, 0] > coarsest)
    merges, splits = merging[number], wanted & (level < finest)
    kept = ~merges & ~splits

    corner = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    children = torch.cat([level[splits].repeat_interleave(4)[:, None] + 1,
                          (2 * cells[splits, None, 1:] + corner).view(-1, 2)], dim=1)  # fmt: skip
    four = old[merges][number[merges].argsort(stable=True)].view(-1, 4)
    whole = families[merging] - torch.tensor([1, 0, 0])
    single = torch.cat([old[kept], old[splits].repeat_interleave(4)])
    single = torch.nn.functional.pad(single[:, None], (0, 3), value=-1)

    new, parents = torch.cat([cells[kept], children, whole]), torch.cat([single, four])
    order = parents[:, 0].argsort(stable=True)
    return new[order], parents[order]
