"""Runs of a model on one process or on ranks, with a record of the values they compute."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import is_dataclass, replace
from functools import partial
from math import prod
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode

import varcomm
from varcomm.data_parallel.buckets import is_owned
from varcomm.errors import ArgumentError
from varcomm.grid import Field, Grid
from varcomm.grid.field import part as part_of
from varcomm.ops.nested import leaves
from varcomm.transport.agreement import share
from varcomm.transport.group import resolve

__all__ = ["Axis", "Place", "Run", "Task", "Value", "as_double", "expected", "run"]


class Task(NamedTuple):
    """A model, data, and the functions that a run calls; see :func:`same_as_one_process`."""

    model: torch.nn.Module | Callable[[], torch.nn.Module]
    data: Any
    call: Callable[..., Any] | None
    loss: Callable[..., torch.Tensor] | None
    step: Callable[..., Any] | None
    groups: Sequence[str]  # names of attributes of nodes
    grid: Sequence[int] | None  # its points; None of a graph
    owners: Any  # the rank of each node, or sizes of a grid; None runs all in one process
    shapes: list[torch.Size]  # of the outputs in one process


class Axis(NamedTuple):
    """One kind of rows: their number in the full graph, and the ids of those on a rank."""

    rows: str
    total: int
    ids: torch.Tensor


class Value(NamedTuple):
    """A tensor; of a field, the rows that this rank has along each split dimension."""

    tensor: torch.Tensor
    rows: tuple[tuple[int, torch.Tensor], ...] | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Value:
        """Return the values of a tensor in a fp64 copy."""
        rows = None
        if isinstance(tensor, Field):
            splits = tensor.grid_layout.splits
            rows = tuple(
                (split.dim, part_of(torch.arange(split.total), replace(split, dim=-1)))
                for split in splits
            )
            tensor = tensor.local
        plain = tensor.detach().clone().as_subclass(torch.Tensor)
        return cls(plain if _has_gradient(plain) else plain.double(), rows)


class Place(NamedTuple):
    """An operation of a model; `during` is ``"call"``, ``"step"`` or ``"loss"``."""

    during: str
    module: str
    operation: str
    line: str  # of the user's code: file and number


class Run(NamedTuple):
    """Values by kind and name, and how rows are sharded."""

    owned: int  # nodes or points
    axes: list[Axis]
    values: dict[str, dict[str, Value | None]]
    records: dict[tuple[Place, int], Value]  # by place, and number of the call there


def run(rank: int, task: Task) -> Run:
    """Run a task in one process or, with the rank of each node given, as one of several ranks."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # also of tensors that the model makes
    try:
        with nullcontext() if task.owners is None else varcomm.debug():
            return _run(task)
    finally:
        torch.set_default_dtype(before)


def _run(task: Task) -> Run:
    in_one_process = task.owners is None
    if task.grid is not None:
        data, inputs, owned, axes = _of_grid(task)
    else:
        method = "block" if in_one_process else task.owners
        data = varcomm.graph.partition(task.data, method=method, groups=task.groups)
        inputs = _require_gradients(data)
        owned = sum(shard.num_owned for shard in data.node_shards.values())
    torch.manual_seed(0)
    model = task.model
    if not isinstance(model, torch.nn.Module):
        model = model()
        if not isinstance(model, torch.nn.Module):
            raise ArgumentError(f"the function returned a {type(model).__name__}, no Module.")
    model = model.double().cpu()  # pickles of lazy parameters forget their dtype
    if task.step is None and task.grid is None:
        if in_one_process:
            _use_ordinary_vectors(data)
        else:
            varcomm.graph.distribute(model, data)
    torch.manual_seed(0)
    outputs: list[torch.Tensor] = []
    value = None
    with _Recorder(model) as recorder:
        if task.step is not None:
            recorder.during = "step"
            value = task.step(model, data)
        else:
            recorder.during = "call"
            call = _call if task.grid is None else _call_of_grid
            result = (task.call or call)(model, data)
            kinds = torch.Tensor | int | float | complex
            outputs = [torch.as_tensor(x) for x in _values_in(result) if isinstance(x, kinds)]
            if task.loss is not None:
                recorder.during = "loss"
                value = task.loss(result, data)
    axes = _axes(data) if task.grid is None else axes
    if task.step is None:
        _backward(outputs, value, task, axes)
        varcomm.data_parallel.sum_gradients(model)
    # a ShardedGradients has pieces of the gradients that it owns
    gradients = {n: None if is_owned(p) else p.grad for n, p in model.named_parameters()}
    values: dict[str, dict[str, Any]] = {
        "outputs": {str(place): leaf for place, leaf in enumerate(outputs)},
        "loss": {"loss": value} if isinstance(value, torch.Tensor) else {},
        "gradients of inputs": {name: leaf.grad for name, leaf in inputs.items()},
        "gradients of parameters": gradients,
        "parameters": dict(model.named_parameters()),
        "buffers": dict(model.named_buffers()),
    }
    copies = {
        kind: {name: None if x is None else Value.of(x) for name, x in named.items()}
        for kind, named in values.items()
    }
    return Run(owned, axes, copies, recorder.records)


def _of_grid(task: Task) -> tuple[Any, dict[str, torch.Tensor], int, list[Axis]]:
    """Return the data of a rank, its fields as leaves, its points, and its split dimensions."""
    ranks = [len(sizes) for sizes in task.owners or () if sizes is not None]
    mesh = init_device_mesh("cpu", tuple(ranks)) if len(ranks) > 1 else None
    grid = Grid(task.grid or (), mesh, task.owners)
    inputs: dict[str, torch.Tensor] = {}

    def leaf(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {key: leaf(inner, f"{name}[{key!r}]") for key, inner in value.items()}
        if type(value) in (list, tuple):
            return type(value)(leaf(inner, f"{name}[{i}]") for i, inner in enumerate(value))
        if not isinstance(value, torch.Tensor):
            return value
        value = as_double(value)
        if isinstance(value, Field) and value.is_floating_point():
            inputs[name] = value = value.requires_grad_()
            return value.clone()  # which a model may change in place
        return value

    data = leaf(task.data(grid) if callable(task.data) else grid.scatter(task.data), "the data")
    named = zip(grid.shape, grid.sizes, grid.ranges, strict=True)
    axes = [
        Axis("rows", points, torch.arange(own.start, own.stop))
        for points, sizes, own in named
        if sizes is not None
    ]
    return data, inputs, prod(map(len, grid.ranges)), axes


def _call_of_grid(model: torch.nn.Module, data: Any) -> Any:
    if isinstance(data, dict):
        return model(**data)
    return model(*data) if isinstance(data, list | tuple) else model(data)


def _values_in(result: Any) -> Iterator[Any]:
    """Yield the values in lists, tuples, dicts and dataclasses."""
    for leaf in leaves(result).values():
        if is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _values_in(vars(leaf))
        else:
            yield leaf


def expected(whole: torch.Tensor, value: Value, axes: list[Axis]) -> Iterator[torch.Tensor]:
    """Return the values that a rank may have in place of those of one process: all, or its rows."""
    shape = value.tensor.shape
    if value.rows is not None:
        try:
            for dim, ids in value.rows:
                whole = whole.index_select(dim, ids)
        except IndexError:
            return
        yield whole
    elif whole.shape == shape:
        yield whole
    elif whole.dim() == len(shape):
        differing = [d for d, size in enumerate(shape) if size != whole.shape[d]]
        for axis in axes:
            sizes = {(whole.shape[d], shape[d]) for d in differing}
            if len(differing) == 1 and sizes == {(axis.total, len(axis.ids))}:
                yield whole.index_select(differing[0], axis.ids)


def as_double(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU, out of autograd's graph, with floats in double precision."""
    value = value.detach().cpu()
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


def _has_gradient(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _shards(graph: Any) -> Iterator[tuple[str, Any]]:
    for rows, shards in (("nodes", graph.node_shards), ("edges", graph.edge_shards)):
        for kind, shard in shards.items():
            yield rows if kind is None else f"{rows} of {kind!r}", shard


def _require_gradients(graph: Any) -> dict[str, torch.Tensor]:
    """Let attributes of nodes and edges require gradients; return the leaves."""
    inputs = {}
    for rows, shard in _shards(graph):
        for name, value in [*shard.attributes.items()]:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                inputs[f"{name} of {rows}"] = leaf = value.detach().requires_grad_()
                shard.attributes[name] = leaf.clone()  # which a model may change in place
    return inputs


def _use_ordinary_vectors(graph: Any) -> None:
    """Replace index vectors by ordinary tensors, so that PyG computes the reference values."""
    for shard in graph.edge_shards.values():
        vars(shard)["is_plain"] = True
    for shard in graph.node_shards.values():
        values = shard.attributes
        values.update({name: getattr(value, "plain", value) for name, value in values.items()})


def _axes(graph: Any) -> list[Axis]:
    axes = [Axis(rows, shard.sizes.total, shard.owned_ids) for rows, shard in _shards(graph)]
    for edges in graph.edge_shards.values():
        with_halo = torch.cat([edges.rules.sources.owned_ids, edges.halo_ids])
        axes.append(Axis("rows with halo", edges.rules.sources.sizes.total, with_halo))
    return axes


def _call(model: torch.nn.Module, data: Any) -> Any:
    """Call a model with the attributes that its forward names; if there are none, with the data.

    A forward of ``*args``, as in PyG's Sequential, gets x and edge_index.
    """
    _, *parameters = inspect.signature(type(model).forward).parameters.values()
    if parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        of = "_dict" if hasattr(data, "x_dict") else ""
        return model(getattr(data, f"x{of}"), getattr(data, f"edge_index{of}"))
    # a graph has batch and the dicts of types, also where `in` does not list them
    names = [
        p.name
        for p in parameters
        if p.default is p.empty or p.name == "batch" or p.name.endswith("_dict") or p.name in data
    ]
    named = {name: getattr(data, name) for name in names if name != "data" and hasattr(data, name)}
    return model(**named) if named else model(data)


def _backward(outputs: list[torch.Tensor], value: Any, task: Task, axes: list[Axis]) -> None:
    """Differentiate the loss, or a random combination of all outputs, of which each counts once."""
    if value is not None:
        if not isinstance(value, torch.Tensor) or value.dim():
            raise ArgumentError(
                "loss(out, data) must return a tensor of one number; got "
                f"{getattr(value, 'shape', repr(value))}."
            )
        value.backward()
        return
    roots, weights = [], []
    parts = [Value.of(leaf) for leaf in outputs]
    of_ranks = share(
        "same_as_one_process", lambda: [list(x.tensor.shape) for x in parts], resolve(None)
    )
    for place, (leaf, part) in enumerate(zip(outputs, parts, strict=True)):
        if not leaf.requires_grad:
            continue
        shape = part.tensor.shape if task.owners is None else task.shapes[place]
        generator = torch.Generator().manual_seed(place)
        whole = torch.randn(shape, generator=generator, dtype=leaf.dtype)
        own = next(expected(whole, part, axes), torch.zeros_like(part.tensor))
        is_replicated = all(shapes[place] == list(shape) for shapes in of_ranks)
        roots.append(leaf.local if isinstance(leaf, Field) else leaf)
        weights.append(own / len(of_ranks) if is_replicated else own)
    if roots:
        torch.autograd.backward(roots, weights)


class _Recorder(TorchFunctionMode):
    """Records floats that operations and modules return; dropout returns its input."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.records: dict[tuple[Place, int], Value] = {}
        self._calls: Counter[Place] = Counter()
        self._names, self.during = [""], ""
        # PyG's layers that are running: inside, a distributed one may compute in another order
        self._layers = 0
        for name, module in model.named_modules():
            shown = f"{name or 'the model'} ({type(module).__name__})"
            module.register_forward_pre_hook(partial(self._enter, shown))
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, name: str, module: torch.nn.Module, args: Any) -> None:
        self._names.append(name)
        self._layers += _is_layer_of_pyg(module)

    def _leave(self, module: torch.nn.Module, args: Any, out: Any) -> None:
        self._layers -= _is_layer_of_pyg(module)
        code = getattr(type(module).forward, "__code__", None)
        line = f"{code.co_filename}:{code.co_firstlineno}" if code else ""
        self._record("", line, out)
        self._names.pop()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function, and record its results where they are a user's or PyG's."""
        name = getattr(func, "__name__", "").strip("_")
        if "dropout" in name:
            return args[0] if args else (kwargs or {})["input"]
        out = func(*args, **(kwargs or {}))
        if line := _line_of_user(sys._getframe(1)):
            self._record(name, line, out)
        return out

    def _record(self, name: str, line: str, values: Any) -> None:
        if self._layers:
            return
        for value in leaves(values).values():
            if type(value) in (torch.Tensor, torch.nn.Parameter, Field) and _has_gradient(value):
                place = Place(self.during, self._names[-1], name, line)
                self._calls[place] += 1
                self.records[place, self._calls[place]] = Value.of(value)


def _line_of_user(frame: FrameType | None) -> str:
    """Return the line of the user's code that called torch, or none if varcomm called it."""
    while frame is not None and frame.f_code is not _run.__code__:
        module = frame.f_globals.get("__name__", "").split(".")[0]
        if module == "varcomm":
            break
        if module not in ("torch", "torch_geometric"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_layer_of_pyg(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith("torch_geometric.nn.conv.")
