"""Comparison of a graph model on ranks with the same model in one process."""

from __future__ import annotations

import copy
import inspect
import linecache
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import varcomm
from varcomm.errors import ArgumentError, LaunchError, VarcommError, at_least
from varcomm.testing.recording import Axis, Run, Task, expected, run

__all__ = ["Comparison", "same_as_one_process"]

_POOL = "a pool by graph.batch for features, and graph.mean for a loss"
_ONCE = "Wrap a loss of pooled values in vc.graph.replicated(loss, graph), or use graph.mean."


@dataclass
class Comparison:
    """Nodes per rank, and the largest relative difference of each kind of values; prints well.

    `first` describes the first wrong value, with its place, cause and fix, if there is one.
    """

    owned: list[int]
    tol: float
    errors: dict[str, float] = field(default_factory=dict)
    first: str = ""

    @property
    def wrong(self) -> set[str]:
        """The kinds of values that differ."""
        return {kind for kind, error in self.errors.items() if not error <= self.tol}

    def __str__(self) -> str:
        same = "not the same" if self.wrong else "the same"
        lines = [f"{same} as one process, on ranks that own {self.owned} nodes"]
        for kind, error in self.errors.items():
            lines.append(f"  {kind:<23}{error:8.1e}{'  WRONG' if kind in self.wrong else ''}")
        return "\n".join([*lines, *([self.first] if self.first else [])])


def same_as_one_process(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    data: Any,
    call: Callable[[torch.nn.Module, Any], Any] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    parts: int = 3,
    *,
    step: Callable[[torch.nn.Module, Any], Any] | None = None,
    tol: float = 1e-7,
) -> Comparison:
    """Assert that a model on a partitioned graph gives what it gives in one process.

    Runs the model in one process and on `parts` new local processes, in fp64 and without dropout.
    Each node has a random owner; with three parts or more, the last rank owns nothing. If outputs,
    loss, gradients or buffers differ, the error names the first submodule that differs, the line,
    and the fix.

    Parameters
    ----------
    model : torch.nn.Module or callable
        Before ``distribute``; it is copied. In its mode, train or eval. Or a function without
        arguments that returns it, for models that cannot be pickled, such as PyG's ``Sequential``;
        each process calls it with the same seed.
    data : torch_geometric.data.Data or torch_geometric.data.HeteroData
        A small graph.
    call : callable, optional
        ``call(model, data)`` returns the outputs. `data` is a PartitionedGraph, in one process the
        full graph. By default, the model gets the attributes that its ``forward`` names.
    loss : callable, optional
        ``loss(out, data)`` returns a number, for example ``data.mean((out - data.y) ** 2)``. By
        default, gradients are those of a random combination of the outputs.
    parts : int
        Number of ranks.
    step : callable, optional
        ``step(model, data)``, in place of `call` and `loss`: your training step, which calls
        ``distribute``, ``backward`` and ``sum_gradients`` itself and returns the loss.
    tol : float
        Largest difference, relative to the largest value.

    Returns
    -------
    Comparison
        The largest differences; prints as a table.

    Raises
    ------
    AssertionError
        If a value differs, or if ranks fail where one process does not.
    ArgumentError
        If an argument is wrong, if the model fails in one process, or if ``distribute`` refuses it.

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
    parts = at_least(1, parts, "parts")
    if not isinstance(model, torch.nn.Module) and not inspect.isroutine(model):
        raise ArgumentError(
            "model must be a torch.nn.Module or a function that returns one; got "
            f"{type(model).__name__}."
        )
    if step is not None and (call or loss):
        raise ArgumentError("step replaces call and loss. Pass step alone, or the other two.")
    several = getattr(data, "edge_types", None)
    if hasattr(data, "node_shards") or (
        several is None and getattr(data, "edge_index", None) is None
    ):
        raise ArgumentError(
            f"data must be a Data with edge_index or a HeteroData, before partition; got {data!r}."
        )
    kinds = data.node_types if several else [None]
    counts = {kind: (data[kind] if kind else data).num_nodes for kind in kinds}
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> torch.Tensor:
        return torch.randint(parts - (parts > 2), (count,), generator=generator)

    owners = {kind: drawn(n) for kind, n in counts.items()}
    if isinstance(model, torch.nn.Module):
        try:
            model = copy.deepcopy(model).double().cpu()
        except Exception as error:
            raise ArgumentError(
                f"model cannot be copied: {error}. Pass it before distribute."
            ) from error
    data = copy.copy(data).apply(_as_double)
    task = Task(model, data, call, loss, step, None, [])
    try:
        (whole,) = varcomm.launch(run, 1, task)
    except LaunchError as error:
        hint = "" if call or step else "\nPass call=lambda model, data: model(...) if needed."
        if "ModuleNotFoundError" in str(error):  # a class that PyG made in this process
            hint = "\nPass a function that makes the model, in place of the model."
        raise ArgumentError(f"the model fails in one process: {error}{hint}") from error
    if step is None and not whole.values["outputs"] and not whole.values["loss"]:
        raise ArgumentError("there is nothing to compare: the model returns no tensor or number.")
    task = replace(
        task,
        owners=owners if several else owners[None],
        shapes=[value.shape for value in whole.values["outputs"].values() if value is not None],
    )
    try:
        ranks = varcomm.launch(run, parts, task)
    except LaunchError as error:
        if isinstance(error.__cause__, VarcommError):
            raise error.__cause__ from error
        raise AssertionError(
            f"the model runs in one process, and fails on {parts} ranks: {error}\n"
            "Rows of other ranks' nodes are in graph.with_halo(x)[row]; a rank may own no rows, "
            "whose maximum is in graph.max or a pool by graph.batch."
        ) from error
    result = _compared(whole, ranks, tol)
    if result.wrong:
        raise AssertionError(f"{result}")
    return result


def _as_double(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().cpu()
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


def _compared(whole: Run, ranks: Sequence[Run], tol: float) -> Comparison:
    """Compare all values; describe the first that is wrong."""
    of_nodes = [[a for a in each.axes if a.rows.startswith("nodes")] for each in ranks]
    result = Comparison([sum(len(a.ids) for a in axes) for axes in of_nodes], tol)
    of_gradient = ""
    for kind, values in whole.values.items():
        # rounding in a gradient that is zero, as of a bias before a norm, is no error
        scale = max([_largest(value) for value in values.values() if value is not None], default=0)
        for name, value in values.items():
            parts = [each.values[kind].get(name) for each in ranks]
            pairs = zip(parts, ranks, strict=True)
            error = max(_error(value, part, each.axes) for part, each in pairs) / (scale or 1)
            result.errors[kind] = max(result.errors.get(kind, 0.0), error)
            if kind.startswith("gradients") and not error <= tol and not of_gradient:
                of_gradient = (
                    f"{kind}, {name}: {_cause_of_gradient(value, parts, ranks, tol * scale)}"
                )
    if forward := result.wrong & {"outputs", "loss", "buffers"}:
        outside = "outputs" in result.errors and forward == {"loss"}
        result.first = _first_record(whole, ranks, "loss" if outside else "", tol)
    if result.wrong == {"parameters"}:
        of_gradient = "ranks have other parameters after the step: is sum_gradients missing in it?"
    result.first = result.first or of_gradient
    return result


def _largest(value: torch.Tensor) -> float:
    return float(value.nan_to_num(0, 0, 0).abs().amax()) if value.numel() else 0.0


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference; infinite if shapes differ, or which values are finite."""
    if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    return _largest(a - b)


def _error(whole: torch.Tensor | None, part: torch.Tensor | None, axes: list[Axis]) -> float:
    """Return the distance of a rank's value from what it may be; no gradient is one of zeros."""
    if whole is None or part is None:
        return sum(_largest(given) for given in (whole, part) if given is not None)
    known = expected(whole, part.shape, axes)
    return min([_distance(own, part) for own in known], default=math.inf)


def _first_record(whole: Run, ranks: Sequence[Run], during: str, tol: float) -> str:
    """Describe the first recorded value that differs on a rank, with its submodule and line."""
    of_ranks = []
    for each in (whole, *ranks):
        by_place: dict[Any, list[torch.Tensor]] = defaultdict(list)
        for record in each.records:
            by_place[record.place].append(record.value)
        of_ranks.append(by_place)
    calls: Counter[Any] = Counter()
    scale = 0.0
    for record in whole.records:
        place, call = record.place, calls[record.place]
        calls[place] += 1
        if not place[0].startswith(during):
            continue
        count = len(of_ranks[0][place])
        values = [known[place] for known in of_ranks[1:]]
        parts = [own[call] if len(own) == count else None for own in values]
        scale = max(1e-6 * scale, _largest(record.value))
        cause = _cause(record.value, parts, place, ranks, tol, scale)
        if cause:
            file, _, number = record.line.rpartition(":")
            code = linecache.getline(file, int(number or 0)).strip()
            what = f"{place[1] or place[0]}: {place[2] or 'its output'}"
            return f"first wrong value: {what}, {record.line}\n    {code}\n  {cause}"
    return ""


def _cause(
    whole: torch.Tensor,
    parts: Sequence[torch.Tensor | None],
    place: tuple[str, ...],
    ranks: Sequence[Run],
    tol: float,
    scale: float,
) -> str:
    """Return how the values of ranks differ from those of one process, and the fix, if they do."""
    _, module, operation, _ = place
    found = [(part, each) for part, each in zip(parts, ranks, strict=True) if part is not None]

    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        return _distance(a, b) <= tol * scale

    wrong = []
    for part, each in found:
        known = list(expected(whole, part.shape, each.axes))
        if not known and _is_of_pairs(whole, part, each.axes):
            return (
                "it compares this rank's nodes with each other only. Find neighbours before "
                "vc.graph.partition, and pass them as edge_index."
            )
        if known and not any(same(own, part) for own in known):
            wrong.append((known[0], part, each))
    if not wrong:
        return ""
    if re.search(r"Norm\w*\)$", module):
        return (
            "it normalises over this rank's rows. Call vc.graph.distribute(model, graph), also "
            "after changes of the model."
        )
    for at, axis in enumerate(ranks[0].axes):
        rows, total = axis.rows, axis.total
        owning = [(p, n) for p, each in found if (n := len(each.axes[at].ids))]
        if owning and all(part.shape == whole.shape for part, _ in owning):
            shared = f"each rank has the {{}} its own {rows}. Use {_POOL}."
            stack = torch.stack([p for p, _ in owning])
            weights = stack.new_tensor([n for _, n in owning]) / total
            if same(torch.tensordot(weights, stack, 1), whole):
                return shared.format("mean over")
            if same(stack.sum(0), whole):
                return shared.format("sum over")
            if same(stack.amax(0), whole) or same(stack.amin(0), whole):
                return shared.format("maximum or minimum of")
            if operation.startswith(("std", "var")):
                return (
                    f"each rank has the {operation} of its own {rows}. Pool x and x**2 by "
                    "graph.batch, or use a norm of torch or PyG as a module of the model."
                )
        shares = [(own, p, len(e.axes[at].ids) / total) for own, p, e in wrong if total]
        scaled = [(own, p * share, p / share) for own, p, share in shares if share]
        if scaled and any(all(same(each[0], each[way]) for each in scaled) for way in (1, 2)):
            return (
                f"it has the number of this rank's {rows} in place of that of all. Use "
                "graph.num_nodes, or graph.num_edges."
            )
    if wrong[0][0] is not whole:
        if "norm" in operation or "softmax" in operation:
            return (
                "it normalises over this rank's rows. Use a norm of torch or PyG as a module of "
                "the model, which distribute adapts, or PyG's softmax by graph.batch."
            )
        if all(_is_wrong_at_halo(*each, same) for each in wrong):
            return (
                "it is wrong at nodes with edges from other ranks alone: a missing halo. Use "
                "x[graph.edge_index[0]], or graph.with_halo(x)[row]."
            )
    if operation.startswith(("scatter", "index_", "bincount")):
        return (
            "it sums over this rank's edges. Take the index from graph.edge_index itself, not from "
            "a copy by torch.tensor or tolist."
        )
    return "it has other values on ranks: it looks at this rank's rows alone."


def _is_of_pairs(whole: torch.Tensor, part: torch.Tensor, axes: list[Axis]) -> bool:
    sizes = [pair for pair in zip(whole.shape, part.shape, strict=False) if pair[0] != pair[1]]
    nodes = {(a.total, len(a.ids)) for a in axes if a.rows.startswith("nodes")}
    return whole.dim() == part.dim() and len(sizes) > 1 and nodes.issuperset(sizes)


def _is_wrong_at_halo(
    own: torch.Tensor, part: torch.Tensor, each: Run, same: Callable[..., bool]
) -> bool:
    for axis in each.axes:
        if len(axis.reached) and part.shape[:1] == (len(axis.ids),):
            inner = ~torch.isin(axis.ids, axis.reached)
            return bool(inner.any()) and same(own[inner], part[inner])
    return False


def _cause_of_gradient(
    whole: torch.Tensor | None,
    parts: Sequence[torch.Tensor | None],
    ranks: Sequence[Run],
    limit: float,
) -> str:
    given = [part for part in parts if part is not None]
    if whole is None or len(given) < len(parts):
        return "some ranks have no gradient. Use every parameter on every rank, or sum_gradients."
    count = len(given)
    has_all = all(part.shape == whole.shape for part in given)
    if has_all and _distance(torch.stack(given).sum(0), whole) <= limit:
        return (
            "a missing sum over ranks. Call vc.data_parallel.sum_gradients(model) once, after "
            "backward."
        )
    pairs = zip(given, ranks, strict=True)
    if all(_error(count * whole, part, each.axes) <= limit for part, each in pairs):
        return f"the loss counts {count} times, once per rank. {_ONCE}"
    return (
        "outputs are right and gradients are not. The loss may count once per rank, or a value "
        f"that all ranks have is not differentiated exactly, as by torch.distributed. {_ONCE}"
    )
