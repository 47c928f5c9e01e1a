"""From what some ranks do to what all do: linear in what a rank owns, receives and sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from varcomm.simulate.counts import Counts
from varcomm.simulate.work import Work

__all__ = ["COUNTS", "Fit", "rows_of"]

# What is told of each rank, by its name in Work.
COUNTS = ("flops", "matmul_bytes", "other_bytes", "memory", "kernels")
_BY_ROWS = ("flops", "matmul_bytes", "other_bytes")


def rows_of(parts: Counts) -> torch.Tensor:
    """Return what counts are linear in, nodes, edges, halo and rows sent; float64, shape (P, 4)."""
    return torch.stack([parts.owned, parts.edges, parts.halo, parts.sent], dim=1).double()


@dataclass(frozen=True)
class Fit:
    """``counts = constant + rows @ slopes``, by least squares over simulated ranks.

    No slope is below zero: more rows are never less work. What a step does with weights does not
    depend on the graph, but on how many ranks sum their gradients: so operations and bytes have a
    constant for each number of ranks. Memory, at its worst moment, has one constant. Kernels do not
    depend on rows at all: each number of ranks has the most that were counted.

    Attributes
    ----------
    slopes : torch.Tensor
        Operations and bytes a row; float64, shape (4, 3).
    constants : mapping of int to torch.Tensor
        By number of ranks; float64, shape (3,).
    memory : torch.Tensor
        The constant, then bytes a row; float64, shape (5,).
    kernels : mapping of int to float
        By number of ranks.
    error : mapping of str to float
        The greatest deviation at a simulated rank, as a part of the greatest count.
    """

    slopes: torch.Tensor
    constants: Mapping[int, torch.Tensor]
    memory: torch.Tensor
    kernels: Mapping[int, float]
    error: Mapping[str, float]

    @classmethod
    def of(cls, simulated: Sequence[tuple[Counts, Mapping[int, Work]]]) -> Self:
        """Fit the work of ranks, of one partition or of several for other numbers of ranks."""
        sizes = sorted({parts.size for parts, _ in simulated})
        kernels = dict.fromkeys(sizes, 0.0)
        known, which, works = [], [], []
        for parts, some in simulated:
            rows = rows_of(parts)
            for rank, work in some.items():
                known.append(rows[rank])
                which.append(sizes.index(parts.size))
                works.append(work)
                kernels[parts.size] = max(kernels[parts.size], float(work.kernels))
        rows = torch.stack(known)
        of_size = torch.nn.functional.one_hot(torch.tensor(which), len(sizes)).double()
        design, error = torch.cat([of_size, rows], dim=1), {}
        columns = []
        for name in _BY_ROWS:
            column, error[name] = _fitted(design, _column(works, name), len(sizes))
            columns.append(column)
        ones = torch.ones(len(rows), 1, dtype=torch.float64)
        memory, error["memory"] = _fitted(
            torch.cat([ones, rows], dim=1), _column(works, "memory"), 1
        )
        solution = torch.stack(columns, dim=1)
        constants = dict(zip(sizes, solution[: len(sizes)], strict=True))
        return cls(solution[len(sizes) :], constants, memory, kernels, error)

    def counts(self, parts: Counts) -> torch.Tensor:
        """Return the counts of all ranks, in the order of `COUNTS`; float64, shape (P, 5)."""
        rows = rows_of(parts)
        by_rows = self.constants[parts.size] + rows @ self.slopes
        memory = self.memory[:1] + rows @ self.memory[1:, None]
        kernels = torch.full_like(memory, self.kernels[parts.size])
        return torch.cat([by_rows, memory, kernels], dim=1).clamp(min=0)


def _column(works: Sequence[Work], name: str) -> torch.Tensor:
    return torch.tensor([float(getattr(work, name)) for work in works], dtype=torch.float64)


def _fitted(design: torch.Tensor, counts: torch.Tensor, free: int) -> tuple[torch.Tensor, float]:
    """Return coefficients, of which all but the first `free` are not negative, and the error."""
    # of one size, so that what is small in a least norm is small beside its own values
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
