"""Linear model of a rank's work in the rows that it owns, receives and sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from varcomm.simulate.parts import Counts
from varcomm.simulate.work import Work

__all__ = ["COUNTS", "Fit"]

# The fitted attributes of Work.
COUNTS = ("flops", "matmul_bytes", "other_bytes", "memory", "kernels")


@dataclass(frozen=True)
class Fit:
    """Least-squares fit ``counts = constant + rows @ slopes`` over simulated ranks.

    `rows` are owned nodes, edges, halo rows and sent rows. Slopes are not negative. The work on
    weights depends on the number of ranks that sum gradients, so operations and bytes have one
    constant per number of ranks. Memory has one constant. Kernels do not depend on rows: each
    number of ranks has the largest count.

    Attributes
    ----------
    slopes : torch.Tensor
        Operations and bytes per row; fp64, shape (4, 3).
    constants : mapping of int to torch.Tensor
        By number of ranks; fp64, shape (3,).
    memory : torch.Tensor
        Constant, then bytes per row; fp64, shape (5,).
    kernels : mapping of int to float
        By number of ranks.
    error : mapping of str to float
        Largest deviation at a simulated rank over the largest count.
    """

    slopes: torch.Tensor
    constants: Mapping[int, torch.Tensor]
    memory: torch.Tensor
    kernels: Mapping[int, float]
    error: Mapping[str, float]

    @classmethod
    def of(cls, simulated: Sequence[tuple[Counts, Mapping[int, Work]]]) -> Self:
        """Fit the work of ranks of one partition, or of partitions for several numbers of ranks."""
        sizes = sorted({parts.size for parts, _ in simulated})
        kernels = dict.fromkeys(sizes, 0.0)
        rows, place, counts = [], [], []
        for parts, works in simulated:
            all_rows = _rows(parts)
            for rank, work in works.items():
                rows.append(all_rows[rank])
                place.append(sizes.index(parts.size))
                counts.append([float(getattr(work, name)) for name in COUNTS])
                kernels[parts.size] = max(kernels[parts.size], float(work.kernels))
        regressors = torch.stack(rows)
        of_size = torch.nn.functional.one_hot(torch.tensor(place), len(sizes)).double()
        design = torch.cat([of_size, regressors], dim=1)
        *columns, memory, _ = torch.tensor(counts, dtype=torch.float64).T
        fits = [_fitted(design, column, len(sizes)) for column in columns]
        ones = torch.ones(len(regressors), 1, dtype=torch.float64)
        fits.append(_fitted(torch.cat([ones, regressors], dim=1), memory, 1))
        error = dict(zip(COUNTS, (off for _, off in fits), strict=False))
        solution = torch.stack([found for found, _ in fits[:-1]], dim=1)
        constants = dict(zip(sizes, solution[: len(sizes)], strict=True))
        return cls(solution[len(sizes) :], constants, fits[-1][0], kernels, error)

    def counts(self, parts: Counts) -> torch.Tensor:
        """Return the counts of all ranks, in the order of `COUNTS`; fp64, shape (P, 5)."""
        rows = _rows(parts)
        by_rows = self.constants[parts.size] + rows @ self.slopes
        memory = self.memory[:1] + rows @ self.memory[1:, None]
        kernels = torch.full_like(memory, self.kernels[parts.size])
        return torch.cat([by_rows, memory, kernels], dim=1).clamp(min=0)


def _rows(parts: Counts) -> torch.Tensor:
    return torch.stack([parts.owned, parts.edges, parts.halo, parts.sent], dim=1).double()


def _fitted(design: torch.Tensor, counts: torch.Tensor, free: int) -> tuple[torch.Tensor, float]:
    """Return coefficients, of which only the first `free` may be negative, and the error."""
    # Columns are scaled to one size: the least norm must not prefer a column for its unit.
    scale = design.abs().amax(dim=0).clamp(min=1)
    scaled, used = design / scale, torch.ones(design.shape[1], dtype=torch.bool)
    solution = torch.zeros(design.shape[1], dtype=torch.float64)
    while True:
        found = torch.linalg.lstsq(scaled[:, used], counts[:, None], driver="gelsd").solution
        solution.zero_()[used] = found[:, 0]
        worst = int(solution[free:].argmin()) + free
        if solution[worst] >= -1e-12 * counts.abs().max():
            break
        used[worst] = False
    solution[free:].clamp_(min=0)
    off = (scaled @ solution - counts).abs().max() / counts.abs().max().clamp(min=1)
    return solution / scale, float(off)
