"""Messages in two parts: those of interior edges are computed while the halo travels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch_geometric.nn import FAConv, MessagePassing
from torch_geometric.nn.aggr import Aggregation

from varcomm._torch_private import transforms_active, version_of
from varcomm.errors import ArgumentError
from varcomm.graph.index.edges import EdgeRules, joined
from varcomm.graph.index.partitioned_index import Numbering
from varcomm.graph.layers.norms import is_global_norm
from varcomm.graph.layers.refused import OF_ALL_EDGES
from varcomm.graph.node_shard import described
from varcomm.ops.checks import checking
from varcomm.ops.graph_operator import in_graph

# Values of a message that all edges share.
_SHARED = (type(None), bool, int, float, str)

# compute(rows, sources, targets, positions) returns values of edges: their sources are in `rows`.
Compute: TypeAlias = Callable[
    [Sequence[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor], Any
]


def overlaps(rules: Numbering, ids: torch.Tensor) -> bool:
    """Return whether messages along edges can be computed in two parts; equal on all ranks."""
    return (
        isinstance(rules, EdgeRules)
        and ids is rules.local_ids
        and rules.exchanges
        and rules.group.size > 1
        and not in_graph(None)
        and not transforms_active()
    )


def in_two_parts(
    rules: EdgeRules, sources: Sequence[torch.Tensor], compute: Compute
) -> tuple[Any, list[torch.Tensor]]:
    """Return values of interior edges and then of boundary edges, and the halo's rows.

    Messages are those of a plan's call with all of `sources`. In backward, gradients of the halo
    travel while those of interior edges are computed.
    """
    interior, boundary = rules.split_edges[:2]
    wait = _started(rules, sources)
    values = [compute(sources, *interior)] if len(interior[0]) else []
    halos = wait()
    if len(boundary[0]) or not values:  # a message may not know what to make of no edges
        values.append(compute(halos, *boundary))
    if len(values) == 1:
        return values[0], halos
    if isinstance(values[0], tuple | list):
        return [joined(one, two, 0) for one, two in zip(*values, strict=True)], halos
    return joined(values[0], values[1], 0), halos


def _started(rules: EdgeRules, sources: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """Start to fetch the halo of tensors; return a function that waits for it."""
    if len(sources) == 1:
        handle = rules.plan.start(sources[0])
        return lambda: [handle.wait()]
    alike = {x.dtype: [y for y in sources if y.dtype == x.dtype] for x in sources}
    columns = {
        dtype: [x.flatten(1) if x.dim() > 1 else x[:, None] for x in xs]
        for dtype, xs in alike.items()
    }
    handles = {dtype: rules.plan.start(torch.cat(xs, dim=1)) for dtype, xs in columns.items()}

    count = rules.plan.num_received

    def wait() -> list[torch.Tensor]:
        halos = {
            dtype: iter(handle.wait().split([x.shape[1] for x in columns[dtype]], dim=1))
            for dtype, handle in handles.items()
        }
        return [next(halos[x.dtype]).reshape(count, *x.shape[1:]) for x in sources]

    return wait


def is_per_edge(layer: MessagePassing) -> bool:
    """Return whether each message of a layer depends on its own edge, by what functions read."""
    message, *others = (
        {*layer.inspector.get_param_names(function)}
        for function in ("message", "aggregate", "update")
    )
    other = set().union(*others)
    return (
        type(layer).message is not MessagePassing.message  # which only selects rows
        and not isinstance(layer, FAConv)  # whose messages leave their weights in the layer
        and message.isdisjoint(OF_ALL_EDGES)
        and other.isdisjoint(OF_ALL_EDGES - {"index", "ptr", "dim_size"})
        and not any(name.endswith(("_i", "_j")) for name in other)
        and not any(map(is_global_norm, layer.modules()))
    )


def takes_any_order(aggregation: torch.nn.Module) -> bool:
    """Return whether PyG wrote all of an aggregation: own ones may rely on the order of edges."""
    parts = [part for part in aggregation.modules() if isinstance(part, Aggregation)]
    return all(type(part).__module__.startswith("torch_geometric.") for part in parts)


def propagate_overlapped(
    layer: MessagePassing,
    rules: EdgeRules,
    targets: torch.Tensor,
    values: dict[str, Any],
    call: str,
) -> tuple[Any, list[torch.Tensor]]:
    """Return the result of ``propagate`` with messages in two parts, and the halo's rows.

    `targets` are the ids of targets of all edges.
    """
    names = layer.inspector.get_param_names("message")
    ends: dict[str, Any] = {
        name: values[name[:-2]]
        for name in names
        if name.endswith(("_i", "_j")) and name[:-2] in values
    }
    for name, end in ends.items():
        if isinstance(end, tuple | list):
            ends[name] = end[name.endswith("_i")]
    rows_of = {name: x for name, x in ends.items() if isinstance(x, torch.Tensor)}
    of_sources = {name: x for name, x in rows_of.items() if name.endswith("_j")}
    sources = [*{id(x): x for x in of_sources.values()}.values()]
    others = {name: values[name] for name in names if name in values and name not in ends}
    _check_rows(rules, {n: x for n, x in rows_of.items() if n not in of_sources}, others, call)

    log = rules.group.log

    def compute(
        rows: Sequence[torch.Tensor], j: torch.Tensor, i: torch.Tensor, at: torch.Tensor
    ) -> Any:
        of_source = {id(x): row for x, row in zip(sources, rows, strict=True)}
        arguments = dict(ends)
        for name, x in rows_of.items():
            is_source = name in of_sources
            arguments[name] = (
                of_source[id(x)].index_select(0, j) if is_source else x.index_select(0, i)
            )
        for name, value in others.items():
            has_rows = isinstance(value, torch.Tensor) and value.dim() > 0
            arguments[name] = value.index_select(0, at) if has_rows else value
        calls = log.count if log is not None else 0
        messages = layer.message(**arguments)
        if log is not None and log.count != calls:
            with checking(call, rules.group) as where:
                raise ArgumentError(
                    f"{where}with overlap=True a message is computed once or twice, so it must not "
                    f"call collectives; it called {log.last[-1]}. Distribute the model without "
                    "overlap."
                )
        of_edges = messages if type(messages) in (tuple, list) else [messages]
        if not all(isinstance(x, torch.Tensor) and x.shape[:1] == j.shape for x in of_edges):
            with checking(call, rules.group) as where:
                raise ArgumentError(
                    f"{where}with overlap=True, a message returns tensors with one row for each of "
                    f"the {len(j)} edges that it was called with; got "
                    f"{', '.join(map(described, of_edges))}. Distribute the model without overlap."
                )
        return messages

    before = _stored(layer)
    messages, halos = in_two_parts(rules, sources, compute)
    for name, (held, version) in _stored(layer).items():
        old, old_version = before.get(name, (None, 0))
        if held is not old or version != old_version:
            with checking(call, rules.group) as where:
                raise ArgumentError(
                    f"{where}with overlap=True a layer computes messages in two parts, and this "
                    f"message stores {name} in the layer, which would have the second part only. "
                    "Distribute the model without overlap."
                )
    if type(layer).aggregate is MessagePassing.aggregate and takes_any_order(layer.aggr_module):
        targets = targets.index_select(0, rules.split_edges.order)
    else:  # which may keep the messages
        inverse = rules.split_edges.inverse
        if isinstance(messages, torch.Tensor):
            messages = messages.index_select(0, inverse)
        else:
            messages = tuple([x.index_select(0, inverse) for x in messages])
    given = values | {"index": targets, "ptr": None, "dim_size": rules.layer_counts()[2]}

    def arguments_of(function: str) -> dict[str, Any]:
        names = layer.inspector.get_param_names(function)
        return {name: given[name] for name in names if name in given}

    out = layer.aggregate(messages, **arguments_of("aggregate"))
    return layer.update(out, **arguments_of("update")), halos


def _stored(layer: MessagePassing) -> dict[str, tuple[object, int]]:
    """Return the values that a layer and its modules hold, and the changes to their buffers."""
    stored: dict[str, tuple[object, int]] = {}
    for path, module in layer.named_modules():
        stored |= {f"{path}.{name}".lstrip("."): (held, 0) for name, held in vars(module).items()}
    for name, buffer in layer.named_buffers():
        stored[name] = buffer, version_of(buffer)
    return stored


def _check_rows(
    rules: EdgeRules, of_targets: dict[str, torch.Tensor], others: dict[str, Any], call: str
) -> None:
    """Raise ArgumentError unless values have a row per target, or per edge."""
    _, _, count = rules.layer_counts()
    edges = rules.local_ids.shape[1]
    with checking(call, rules.group) as where:
        for name, x in of_targets.items():
            if x.shape[0] != count and not rules.is_up_to_last(x.shape[0]):
                raise ArgumentError(
                    f"{where}{name.removesuffix('_i')} must have {count} rows, those of the "
                    f"targets that this rank owns; got {described(x)}."
                )
        for name, value in others.items():
            of_edges = isinstance(value, torch.Tensor) and value.shape[:1] in ((), (edges,))
            of_edges = of_edges and not isinstance(value, torch.nn.Parameter)
            if not of_edges and not isinstance(value, _SHARED):
                raise ArgumentError(
                    f"{where}overlap=True computes messages in two parts, so a value that a "
                    f"message reads must have a row for each of the {edges} edges, or be one "
                    f"number; {name} is {described(value)}. Distribute the model without overlap."
                )
