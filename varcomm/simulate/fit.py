"""From what some ranks do to what all do: linear in what a rank owns, receives and sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from varcomm.simulate.counts import Counts
from varcomm.simulate.work import Work

__all__ = ["COUNTS", "Fit", "rows_of"]

# What is fitted, by its name in Work.
COUNTS = ("flops", "matmul_bytes", "other_bytes", "kernels", "memory")


def rows_of(parts: Counts) -> torch.Tensor:
    """Return what counts are linear in, nodes, edges, halo and rows sent; float64, shape (P, 4)."""
    return torch.stack([parts.owned, parts.edges, parts.halo, parts.sent], dim=1).double()


@dataclass(frozen=True)
class Fit:
    """``counts = constant + rows @ slopes``, by least squares over simulated ranks.

    Slopes are shared by all numbers of ranks, and each number of ranks has a constant of its own:
    what a step does with weights does not depend on the graph.

    Attributes
    ----------
    slopes : torch.Tensor
        Counts a row; float64, shape (4, 5).
    constants : mapping of int to torch.Tensor
        By number of ranks; float64, shape (5,).
    error : float
        The greatest deviation at a simulated rank, as a part of the count there.
    """

    slopes: torch.Tensor
    constants: Mapping[int, torch.Tensor]
    error: float

    @classmethod
    def of(cls, simulated: Sequence[tuple[Counts, Mapping[int, Work]]]) -> Self:
        """Fit the work of ranks, of one partition or of several for other numbers of ranks."""
        sizes = sorted({parts.size for parts, _ in simulated})
        known, which, found = [], [], []
        for parts, works in simulated:
            rows = rows_of(parts)
            for rank, work in works.items():
                known.append(rows[rank])
                which.append(sizes.index(parts.size))
                found.append([float(getattr(work, name)) for name in COUNTS])
        constant = torch.nn.functional.one_hot(torch.tensor(which), len(sizes)).double()
        design = torch.cat([constant, torch.stack(known)], dim=1)
        counts = torch.tensor(found, dtype=torch.float64)
        # of one size, so that what is small in a least norm is small beside its own values
        scale = design.abs().amax(dim=0).clamp(min=1)
        solution = torch.linalg.lstsq(design / scale, counts, driver="gelsd").solution
        off = (design / scale @ solution - counts).abs() / counts.abs().clamp(min=1)
        solution = solution / scale[:, None]
        constants = dict(zip(sizes, solution[: len(sizes)], strict=True))
        return cls(solution[len(sizes) :], constants, float(off.max()))

    def counts(self, parts: Counts) -> torch.Tensor:
        """Return the counts of all ranks; float64, shape (P, 5), none below zero."""
        return (self.constants[parts.size] + rows_of(parts) @ self.slopes).clamp(min=0)
