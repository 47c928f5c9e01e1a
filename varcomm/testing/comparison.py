"""Comparison of a model on ranks, of a graph or a grid, with the same model in one process."""

from __future__ import annotations

import copy
import linecache
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import varcomm
from varcomm.errors import (
    ArgumentError,
    CommunicationError,
    DisagreementError,
    LaunchError,
    VarcommError,
    at_least,
)
from varcomm.sizes import checked_sizes
from varcomm.testing.recording import Axis, Place, Run, Task, Value, as_double, expected, run

__all__ = ["Comparison", "same_as_one_process"]

# Causes and fixes of a wrong value, by a pattern of the operation that made it.
_CAUSES = {
    "^rand|^normal|^bernoulli|^multinomial|^poisson": (
        "ranks draw other random numbers than one process. Draw them before vc.graph.partition, as "
        "an attribute of the data, or compare in eval mode."
    ),
    r"scatter|index_|bincount|segment": (
        "it covers this rank's rows and edges. A missing halo is in graph.with_halo(x)[row]; take "
        "the index from graph.edge_index itself, not from a copy by torch.tensor or tolist. If the "
        "index holds ids of groups of nodes, name the attribute: "
        'vc.graph.partition(data, groups=["cell"]), and groups=["cell"] here.'
    ),
    r"norm|softmax|std|var": (
        "it normalises over this rank's rows. Use a norm of torch or PyG as a module of the model, "
        "and call vc.graph.distribute(model, graph) after changes of the model; or use "
        "PyG's softmax by graph.batch."
    ),
    r"mean|sum|max|min|prod|loss|entropy|matmul|mm|dot": (
        "each rank has the {} of its own rows. Use a pool by graph.batch for features, and "
        "graph.mean for a loss."
    ),
    r"div|mul": (
        "it may use the number of this rank's rows in place of that of all. Use graph.num_nodes, "
        "or graph.num_edges."
    ),
}
_CAUSES_ON_GRIDS = {
    "^rand|^normal|^bernoulli|^multinomial|^poisson": (
        "ranks draw other random numbers than one process. Draw them before, as a part of the "
        "data, or compare in eval mode."
    ),
    "": (
        "it looks at this rank's rows alone: at field.local, its shape, or an ordinary tensor made "
        "of these. Compute with the field, whose shape is that of one process; grid.field(rows) "
        "makes a field of your own rows."
    ),
}


@dataclass(frozen=True)
class _Words:
    """The words of messages about a graph, or a grid."""

    rows: str = "nodes"
    other_calls: str = (
        "All ranks make the same calls in one order: loop over all types of edges or nodes, and "
        "not over those that this rank has."
    )
    fails: str = (
        "Rows of other ranks' nodes are in graph.with_halo(x)[row]; a rank may own no rows, whose "
        "maximum is in graph.max or a pool by graph.batch."
    )
    number: str = "Use graph.num_nodes, or graph.num_edges."
    causes: dict[str, str] = field(default_factory=lambda: _CAUSES)
    once: str = (
        "A loss that all ranks have counts once per rank: wrap a loss of pooled values in "
        "vc.graph.replicated(loss, graph), or use graph.mean."
    )


_GRID = _Words(
    rows="points",
    causes=_CAUSES_ON_GRIDS,
    other_calls="All ranks make the same calls in one order, also a rank without rows.",
    fails="A rank may have no rows: compute with the field, and not with field.local.",
    number="Use field.shape, and not that of field.local.",
    once="A loss of ordinary tensors that all ranks have counts once per rank: use grid.mean.",
)
_OTHER_CAUSE = "it has other values on ranks: it looks at this rank's rows alone."
_SUM = "Call vc.data_parallel.sum_gradients(model) once, after backward. "


@dataclass
class Comparison:
    """Nodes or points per rank, and the largest relative difference of each kind; prints well.

    `first` describes the first wrong value, with its place, cause and fix, if there is one.
    """

    owned: list[int]
    tol: float
    rows: str = "nodes"
    errors: dict[str, float] = field(default_factory=dict)
    first: str = ""

    @property
    def wrong(self) -> set[str]:
        """The kinds of values that differ."""
        return {kind for kind, error in self.errors.items() if not error <= self.tol}

    def __str__(self) -> str:
        same = "not the same" if self.wrong else "the same"
        lines = [f"{same} as one process, on ranks that own {self.owned} {self.rows}"]
        for kind, error in self.errors.items():
            lines.append(f"  {kind:<23}{error:8.1e}{'  WRONG' if kind in self.wrong else ''}")
        return "\n".join([*lines, *([self.first] if self.first else [])])


def same_as_one_process(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    data: Any,
    call: Callable[[torch.nn.Module, Any], Any] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    parts: int | tuple[int, int] = 3,
    *,
    grid: Sequence[int] | None = None,
    step: Callable[[torch.nn.Module, Any], Any] | None = None,
    groups: Sequence[str] = (),
    tol: float = 1e-7,
) -> Comparison:
    """Assert that a model on a partitioned graph or a split grid equals it in one process.

    The model runs in one process and on `parts` new local processes, in fp64 and without dropout.
    Each node, or row, has a random owner; of three or more, the last owns nothing. If outputs,
    loss, gradients or buffers differ, the error names the first submodule that differs, the line,
    and the fix.

    Parameters
    ----------
    model : torch.nn.Module or callable
        The model before ``distribute``, in train or eval mode; it is copied. For a model that
        cannot be pickled, such as PyG's ``Sequential``, pass a function without arguments that
        returns it; each process calls the function with the same seed.
    data : torch_geometric.data.Data, torch_geometric.data.HeteroData, torch.Tensor or callable
        A small graph. With `grid`, a tensor, which the model gets as a field; or a function of the
        :class:`~varcomm.grid.Grid` that returns what the model gets: a value, or its arguments in a
        tuple or a dict.
    call : callable, optional
        ``call(model, data)`` returns the outputs. `data` is a PartitionedGraph, in one process the
        full graph. By default, the model gets the attributes that its ``forward`` names.
    loss : callable, optional
        ``loss(out, data)`` returns a number, for example ``data.mean((out - data.y) ** 2)``. By
        default, the loss is a random combination of the outputs.
    parts : int or tuple of int
        Number of ranks; with `grid`, ``(2, 2)`` splits two dimensions.
    grid : sequence of int, optional
        Points along each dimension of a grid, as of :class:`~varcomm.grid.Grid`.
    step : callable, optional
        ``step(model, data)``, in place of `call` and `loss`: your training step, which calls
        ``distribute``, ``backward`` and ``sum_gradients`` itself and returns the loss.
    groups : list of str
        Attributes of nodes that hold ids of groups; see :func:`varcomm.graph.partition`. Refused
        with `grid`.
    tol : float
        Largest difference, relative to the largest value.

    Returns
    -------
    Comparison
        The largest differences; prints as a table.

    Raises
    ------
    AssertionError
        If a value differs, or if ranks fail or make different calls where one process runs. The
        ranks run inside :func:`varcomm.debug`, so a rank that misses a call is named, with the
        line, after 30 seconds.
    ArgumentError
        If an argument is wrong, if the model fails in one process, or if ``distribute`` refuses it.

    See Also
    --------
    dot_test, varcomm.debug

    Examples
    --------
    >>> import torch, varcomm.testing
    >>> from torch_geometric.data import Data
    >>> from torch_geometric.nn import SAGEConv
    >>> data = Data(x=torch.rand(9, 2), edge_index=torch.randint(9, (2, 40)))
    >>> found = varcomm.testing.same_as_one_process(SAGEConv(2, 3), data)
    >>> len(found.owned), max(found.errors.values()) < 1e-12
    (3, True)
    """
    shape = (parts,) if grid is None or isinstance(parts, int) else tuple(parts)
    mesh = [at_least(1, ranks, "parts") for ranks in shape]
    words = _Words() if grid is None else _GRID
    if not callable(model):
        raise ArgumentError(
            "model must be a torch.nn.Module or a function that returns one; got "
            f"{type(model).__name__}."
        )
    for name, value in (("call", call), ("loss", loss), ("step", step)):
        if value is not None and not callable(value):
            raise ArgumentError(f"{name} must be a function; got {value!r}.")
    if not isinstance(tol, int | float) or not 0 <= tol < math.inf:
        raise ArgumentError(f"tol must be a number of at least 0; got {tol!r}.")
    if step is not None and (call or loss):
        raise ArgumentError("step replaces call and loss. Pass step alone, or the other two.")
    several = hasattr(data, "edge_types")
    if grid is not None:
        points = checked_sizes(grid, "grid")
        if groups:
            raise ArgumentError(f"groups are of graphs; got {groups!r} and a grid. Leave one out.")
        if len(mesh) > len(points):
            raise ArgumentError(f"parts must be {len(points)} ints or one; got {parts!r}.")
        if not callable(data) and not isinstance(data, torch.Tensor):
            raise ArgumentError(
                f"data must be a tensor or a function of the grid; got {type(data).__name__}."
            )
    elif hasattr(data, "node_shards") or not (
        several or getattr(data, "edge_index", None) is not None
    ):
        raise ArgumentError(
            f"data must be a Data with edge_index or a HeteroData, before partition; got {data!r}."
        )
    generator = torch.Generator().manual_seed(0)

    def drawn(rows: int, ranks: int = mesh[0]) -> torch.Tensor:
        return torch.randint(ranks - (ranks > 2), (rows,), generator=generator)

    owners: Any
    if grid is not None:
        split = zip(points, mesh, strict=False)
        sizes = [drawn(n, ranks).bincount(minlength=ranks).tolist() for n, ranks in split]
        owners = [*sizes, *[None] * (len(points) - len(mesh))]
    else:
        owners = (
            {kind: drawn(data[kind].num_nodes) for kind in data.node_types} if several else None
        )
        owners = drawn(data.num_nodes) if owners is None else owners
        data = copy.copy(data).apply(as_double)
    if isinstance(model, torch.nn.Module):
        model = copy.deepcopy(model).double().cpu()
    task = (model, data, call, loss, step, groups, grid)
    whole = None
    try:
        (whole,) = varcomm.launch(run, 1, Task(*task, None, []))
        if step is None and not whole.values["outputs"] and not whole.values["loss"]:
            raise ArgumentError(
                "there is nothing to compare: the model returns no tensor or number."
            )
        outputs = whole.values["outputs"].values()
        shapes = [value.tensor.shape for value in outputs if value is not None]
        ranks = varcomm.launch(run, math.prod(mesh), Task(*task, owners, shapes))
    except LaunchError as error:
        cause = error.__cause__
        if whole is not None and isinstance(cause, DisagreementError | CommunicationError):
            raise AssertionError(
                f"the model runs in one process, and its ranks make different calls: {cause}\n"
                f"{words.other_calls}"
            ) from error
        if isinstance(cause, VarcommError):
            raise cause from error
        if whole is not None:
            raise AssertionError(
                f"the model runs in one process, and fails on {parts} ranks: {error}\n{words.fails}"
            ) from error
        how = "\nPass call=lambda model, data: model(data.pos, ...), with what the model takes."
        hint = "" if call or step else how
        if "ModuleNotFoundError" in str(error):  # a class that PyG made in this process
            hint = "\nPass a function that makes the model, in place of the model."
        raise ArgumentError(f"the model fails in one process: {error}{hint}") from error
    result = _compared(whole, ranks, tol, words, has_step=step is not None)
    if result.wrong:
        raise AssertionError(f"{result}")
    return result


def _compared(
    whole: Run, ranks: Sequence[Run], tol: float, words: _Words, has_step: bool
) -> Comparison:
    """Compare all values; describe the first that is wrong."""
    result = Comparison([each.owned for each in ranks], tol, words.rows)
    for kind, values in whole.values.items():
        # rounding in a gradient that is zero, as of a bias before a norm, is not an error
        present = [value.tensor for value in values.values() if value is not None]
        scale = max(map(_largest, present), default=0)
        for name, value in values.items():
            pairs = ((each.values[kind].get(name), each.axes) for each in ranks)
            error = max(_error(value, *pair) for pair in pairs) / (scale or 1)
            result.errors[kind] = max(result.errors.get(kind, 0.0), error)
            if not error <= tol and not result.first:
                result.first = f"first wrong value: {name} of the {kind}"
    if forward := result.wrong & {"outputs", "loss", "buffers"}:
        outside = "outputs" in result.errors and forward == {"loss"}
        found = _first_record(whole, ranks, "loss" if outside else "", tol, words)
        result.first = found or (
            f"{result.first}. No operation on floats differs before: it may be a number of this "
            f"rank's rows. {words.number}"
        )
    elif result.wrong:
        result.first += f"; outputs are right. {_SUM if has_step else ''}{words.once}"
    return result


def _largest(value: torch.Tensor) -> float:
    return float(value.nan_to_num(0, 0, 0).abs().amax()) if value.numel() else 0.0


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference; infinite if shapes differ, or which values are finite."""
    if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    return _largest(a - b)


def _error(whole: Value | None, part: Value | None, axes: list[Axis]) -> float:
    """Return the distance of a rank's value from the allowed ones; no gradient counts as zeros."""
    if whole is None or part is None:
        return sum(_largest(given.tensor) for given in (whole, part) if given is not None)
    known = expected(whole.tensor, part, axes)
    return min([_distance(own, part.tensor) for own in known], default=math.inf)


def _first_record(whole: Run, ranks: Sequence[Run], during: str, tol: float, words: _Words) -> str:
    """Describe the first recorded value that differs on a rank, with its submodule and line."""
    counts = [Counter(place for place, _ in each.records) for each in (whole, *ranks)]
    scale = 0.0
    for (place, call), value in whole.records.items():
        if not place.during.startswith(during):
            continue
        scale = max(1e-6 * scale, _largest(value.tensor))
        for each, count in zip(ranks, counts[1:], strict=True):
            if count[place] != counts[0][place]:
                continue  # which calls correspond is unknown
            part = each.records[place, call]
            of_pairs = _is_of_pairs(value.tensor, part.tensor, each.axes)
            is_known = of_pairs or any(True for _ in expected(value.tensor, part, each.axes))
            if is_known and not _error(value, part, each.axes) <= tol * scale:
                file, _, number = place.line.rpartition(":")
                code = linecache.getline(file, int(number or 0)).strip()
                what = f"{place.module or place.during}: {place.operation or 'its output'}"
                cause = _cause(place, of_pairs, words)
                return f"first wrong value: {what}, {place.line}\n    {code}\n  {cause}"
    return ""


def _is_of_pairs(whole: torch.Tensor, part: torch.Tensor, axes: list[Axis]) -> bool:
    sizes = [pair for pair in zip(whole.shape, part.shape, strict=False) if pair[0] != pair[1]]
    nodes = {(a.total, len(a.ids)) for a in axes if a.rows.startswith("nodes")}
    return whole.dim() == part.dim() and len(sizes) > 1 and nodes.issuperset(sizes)


def _cause(place: Place, of_pairs: bool, words: _Words) -> str:
    if of_pairs:
        return (
            "it compares this rank's nodes with each other only. Find neighbours before "
            "vc.graph.partition, and pass them as edge_index."
        )
    name = (place.operation or place.module).lower()
    texts = (text for pattern, text in words.causes.items() if re.search(pattern, name))
    return next(texts, _OTHER_CAUSE).format(name)
