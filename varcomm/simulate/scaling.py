"""Time of a step by number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

import torch

from varcomm.errors import ArgumentError
from varcomm.simulate.machine import Machine
from varcomm.simulate.parts import Counts, partition
from varcomm.simulate.step import Fit, Prepare, Step, StepCall, calls_of_all, run
from varcomm.simulate.table import aligned

__all__ = ["Sample", "Scaling", "sample", "scaling"]

# Columns of the printed table: name in Scaling.columns, unit and format.
_TABLE = {name: (name, 1, ",.0f") for name in ("ranks", "nodes", "owned", "halo", "neighbours")} | {
    "MB sent": ("sent", 1e6, ".2f"),
    "messages": ("messages", 1, ",.0f"),
    "GB ": ("memory", 1e9, ".2f"),
    "compute ms": ("compute", 1e-3, ".2f"),
    "halo ms": ("halos", 1e-3, ".2f"),
    "sums ms": ("sums", 1e-3, ".2f"),
    "step ms": ("step", 1e-3, ".2f"),
    "efficiency": ("efficiency", 1, ".2f"),
}
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
    sample, Scaling
    """

    fit: Fit
    transfers: Mapping[int, tuple[StepCall, ...]]

    def step(self, counts: Counts) -> Step:
        """Return the step on a partition, for a number of ranks that was sampled."""
        return Step(counts, {}, self.fit, self.transfers[counts.size])


def sample(prepare: Prepare, data: Any, sizes: Iterable[int], method: Any = None) -> Sample:
    """Run a step on a small graph for several numbers of ranks, to predict steps on large graphs.

    A few ranks are simulated for each number of ranks. :func:`scaling` has an example.

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
    Sample, scaling
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


@dataclass(frozen=True)
class Scaling:
    """A step for growing numbers of ranks on one machine.

    Attributes
    ----------
    machine : Machine
    steps : tuple of Step
        One per number of ranks.

    See Also
    --------
    scaling, Times
    """

    machine: Machine
    steps: tuple[Step, ...]

    @cached_property
    def columns(self) -> dict[str, list[float]]:
        """Numbers by name, one per step; ``pandas.DataFrame`` accepts this dict.

        ``ranks`` and ``nodes`` of the full graph; the maximum over ranks of ``owned``, ``halo`` and
        ``neighbours``, of the ``sent`` bytes, ``messages`` and ``memory`` of a step, and of its
        seconds: ``busy`` (arithmetic and memory), ``launching`` (of operators), ``compute`` (the
        greater of both on a GPU), exchanges of ``halos``, all other calls (``sums``) and ``step``.
        Also ``efficiency``, nodes per second and rank relative to the first step.
        """
        rows = [self._row(step) for step in self.steps]
        rates = [row["nodes"] / row["step"] / row["ranks"] for row in rows]
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        return columns | {"efficiency": [rate / rates[0] for rate in rates]}

    def _row(self, step: Step) -> dict[str, float]:
        parts, counts, times = step.parts, step.counts, step.times(self.machine)
        halos = {call.name for call in step.transfers if call.width is not None}
        of_halos, of_sums = torch.zeros(2, parts.size, dtype=torch.float64)
        for name, seconds in times.communication.items():
            (of_halos if name in halos else of_sums).add_(seconds)
        operators = (counts[name] for name in ("flops", "matmul_bytes", "other_bytes"))
        of_ranks = {
            **{name: getattr(parts, name) for name in ("owned", "halo", "neighbours")},
            **{name: counts[name] for name in ("sent", "messages", "memory")},
            "busy": self.machine.busy(*operators),
            "launching": counts["kernels"] * self.machine.launch,
            **{"compute": times.compute, "halos": of_halos, "sums": of_sums, "step": times.total},
        }
        most = {name: values.max().item() for name, values in of_ranks.items()}
        return {"ranks": parts.size, "nodes": int(parts.owned.sum()), **most}

    def __str__(self) -> str:
        """Return a table."""
        lines = [list(_TABLE)]
        is_full = [memory > self.machine.memory for memory in self.columns["memory"]]
        for place, full in enumerate(is_full):
            cells = [format(self.columns[n][place] / unit, f) for n, unit, f in _TABLE.values()]
            lines.append(cells)
            lines[-1][list(_TABLE).index("GB ")] += "*" if full else " "
        note = [f"* more than the {self.machine.memory / 1e9:.0f} GB of a rank"] * any(is_full)
        return "\n".join([*aligned(lines, left=0), *note])


def scaling(sample: Sample, counts: Sequence[Counts], machine: Machine) -> Scaling:
    """Predict a step on a machine for several numbers of ranks.

    Parameters
    ----------
    sample : Sample
        Work of the step.
    counts : sequence of Counts
        A graph cut for each number of ranks; for weak scaling, graphs whose size grows with the
        number of ranks.
    machine : Machine
        Machine of all ranks.

    Returns
    -------
    Scaling
        One step per number of ranks.

    See Also
    --------
    Scaling, sample, partition

    Examples
    --------
    >>> import numpy as np, varcomm as vc
    >>> small, large = (vc.simulate.ocean(np.ones((n, 2 * n), dtype=bool)) for n in (8, 64))
    >>> def prepare(graph):
    ...     return lambda: graph.halo(graph.pos)
    >>> sample = vc.simulate.sample(prepare, small, [2, 4], "block")
    >>> counts = [vc.simulate.partition(large, ranks, "block") for ranks in (2, 4)]
    >>> curve = vc.simulate.scaling(sample, counts, vc.simulate.MACHINES["h100-ndr"])
    >>> curve.columns["ranks"], curve.columns["owned"], curve.columns["sent"]
    ([2, 4], [4096, 2048], [1536.0, 3072.0])
    """
    return Scaling(machine, tuple(sample.step(each) for each in counts))
