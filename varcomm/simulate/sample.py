"""Work of a step per row of a graph, which predicts steps on larger graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from varcomm.errors import ArgumentError
from varcomm.simulate.parts import Counts, partition
from varcomm.simulate.step import Fit, Prepare, Step, StepCall, calls_of_all, run

__all__ = ["Sample", "sample"]

_RANKS = 8  # simulated ranks of all numbers of ranks together; at least two of each


@dataclass(frozen=True)
class Sample:
    """Work of a step per row of a graph, for some numbers of ranks.

    Attributes
    ----------
    fit : Fit
        Operations, bytes and memory.
    transfers : mapping of int to tuple
        Calls of a step, by number of ranks.

    See Also
    --------
    sample, Step
    """

    fit: Fit
    transfers: Mapping[int, tuple[StepCall, ...]]

    def step(self, counts: Counts) -> Step:
        """Return the step on a partition, for a number of ranks that was sampled."""
        return Step(counts, {}, self.fit, self.transfers[counts.size])


def sample(prepare: Prepare, data: Any, sizes: Iterable[int], method: Any = None) -> Sample:
    """Run a step on a small graph for several numbers of ranks, to predict steps on large graphs.

    A few ranks are simulated for each number of ranks.

    Parameters
    ----------
    prepare : callable
        As for :func:`step`.
    data : torch_geometric.data.Data or torch_geometric.data.HeteroData
        A graph of a few thousand nodes of any shape, with the attributes that `prepare` uses.
    sizes : iterable of int
        Numbers of ranks. Ranks may own nothing of the small graph.
    method : str or torch.Tensor, optional
        As for :func:`partition`.

    Returns
    -------
    Sample
        A sample that applies to the counts of any graph.

    Raises
    ------
    ArgumentError
        If the small graph has no edges between parts.

    See Also
    --------
    Sample, step

    Examples
    --------
    >>> import varcomm as vc
    >>> from torch_geometric.data import Data
    >>> from torch_geometric.utils import grid
    >>> def of_side(n):
    ...     edge_index, pos = grid(n, n)
    ...     return Data(edge_index=edge_index, pos=pos)
    >>> def prepare(graph):
    ...     return lambda: graph.halo(graph.pos)
    >>> sample = vc.simulate.sample(prepare, of_side(8), [2, 4], "block")
    >>> for ranks in (2, 4):
    ...     step = sample.step(vc.simulate.partition(of_side(64), ranks, "block"))
    ...     print(ranks, step.sent.tolist())
    2 [512.0, 512.0]
    4 [512.0, 1024.0, 1024.0, 512.0]
    """
    different = list(dict.fromkeys(sizes))
    simulated, transfers = [], {}

    def simulate(size: int, ranks_each: int) -> None:
        parts = partition(data, size, method)
        order = parts.edges.argsort()
        order = order[parts.edges[order] > 0] if parts.edges.any() else order
        places = torch.linspace(len(order) - 1, len(order) // 4, ranks_each).round().long()
        # A rank with a halo determines the bytes per row.
        ranks = dict.fromkeys([*order[places].tolist(), int(parts.halo.argmax())])
        works = run(prepare, parts, list(ranks))
        simulated.append((parts, works))
        transfers[size] = calls_of_all(parts, works)
        if size > 1 and any(call.width == 0 for call in transfers[size]):
            raise ArgumentError(
                f"simulate.sample: the small graph has no halos on {size} ranks, so that the bytes "
                "per row are not determined. Use a graph with edges between parts."
            )

    for size in different:
        simulate(size, max(2, ceil(_RANKS / len(different))))
    # Each number of ranks has its own constant, so a few ranks do not determine the slopes.
    if sum(len(works) - 1 for _, works in simulated) < _RANKS:
        simulate(2 * max(different) + _RANKS, 2 * _RANKS)
    return Sample(Fit.of(simulated), transfers)
