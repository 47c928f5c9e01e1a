"""Halo exchange before ``propagate`` and ``edge_updater`` of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch_geometric.nn import MessagePassing

from varcomm.errors import ArgumentError
from varcomm.graph.adapt.shard_context import ShardContext
from varcomm.ops.operator import checking

__all__ = ["attach", "names_read_at_source", "names_taken"]

Values = dict[str, Any]


def attach(layer: MessagePassing, context: ShardContext) -> None:
    """Let a layer exchange halos before it propagates.

    The instance's methods are replaced: torch.compile skips PyG's hooks, and the hook of
    edge_updater runs when values already are at the edges.
    """
    reads = _Reads.of(layer, ["message", "aggregate", "update"])
    layer.propagate = _WithHalos(layer, "propagate", context, reads)
    if reads.in_update:
        layer.update = _OfNodes(layer)
    if layer.inspector.implements("edge_update"):
        reads = _Reads.of(layer, ["edge_update"])
        layer.edge_updater = _WithHalos(layer, "edge_updater", context, reads)


def names_read_at_source(layer: MessagePassing, functions: Sequence[str]) -> frozenset[str]:
    """Return the values of nodes that these functions of a layer read at the source of an edge."""
    return _with_ending("_j", names_taken(layer, functions))


def names_taken(layer: MessagePassing, functions: Sequence[str]) -> list[str]:
    """Return the names of the parameters of these functions of a layer, each once."""
    names = (name for one in functions for name in layer.inspector.get_param_names(one))
    return list(dict.fromkeys(names))


@dataclass(frozen=True)
class _Reads:
    """The names that functions of a layer read at the source of edges, at their target, or both.

    `in_update` are names that they read at the source and, as a whole, when nodes are updated.
    """

    at_source: frozenset[str]
    at_target: frozenset[str]
    in_update: frozenset[str]

    @classmethod
    def of(cls, layer: MessagePassing, functions: Sequence[str]) -> _Reads:
        at_source = names_read_at_source(layer, functions)
        updated = names_taken(layer, ["update"]) if "update" in functions else []
        at_target = _with_ending("_i", names_taken(layer, functions))
        return cls(at_source, at_target, at_source & set(updated))


class _Pair(tuple[Any, Any]):
    """A value at sources and at targets of edges, and the value as it was given."""

    given: Any


@dataclass(frozen=True, eq=False)
class _OfNodes:
    """An ``update`` that receives values as they were given to ``propagate``."""

    layer: MessagePassing

    def __call__(self, inputs: Any, **values: Any) -> Any:
        own: Callable[..., Any] = type(self.layer).update
        values = {k: v.given if isinstance(v, _Pair) else v for k, v in values.items()}
        return own(self.layer, inputs, **values)


@dataclass(frozen=True, eq=False)
class _WithHalos:
    """A method of a layer that first turns the values read at sources into pairs with halos."""

    layer: MessagePassing
    method: str
    context: ShardContext
    reads: _Reads

    def __call__(self, edge_index: torch.Tensor, size: Any = None, **values: Any) -> Any:
        with checking(self.method, self.context.group) as where:
            edges = self.context.checked(edge_index, where)
            if self.method == "propagate":
                self.context.step(where)
            if self.layer.flow != "source_to_target":
                raise ArgumentError(f"{where}{FLOW}")
            sources, halo, targets = edges.layer_counts()
            for name in self.reads.at_source & values.keys():
                _check_rows(name, values[name], self.layer, (sources, targets), where)
        pairs = {}
        for name in sorted(self.reads.at_source & values.keys()):
            value = values[name]
            source, target = self._sides(name, value)
            # a value that is no tensor is handed on as it is
            if isinstance(source, torch.Tensor):
                along = self.layer.node_dim % source.dim()
                pairs[name] = pair = _Pair((edges.layer_sources(source, along), target))
                pair.given = value
        # torch.compile accepts plain tuples
        plain = {name: tuple(pair) for name, pair in pairs.items()}
        values = (
            values | plain | {name: pairs[name] for name in self.reads.in_update & pairs.keys()}
        )
        own: Callable[..., Any] = getattr(type(self.layer), self.method)
        out = own(self.layer, edge_index, size=(sources + halo, targets), **values)
        return _kept_in_graph(out, values.values())

    def _sides(self, name: str, value: Any) -> tuple[Any, Any]:
        """Return a value of nodes at sources and at targets."""
        if not isinstance(value, tuple | list):  # PyG accepts lists as pairs
            return value, value if name in self.reads.at_target else None
        return value[0], value[1]


FLOW = (
    'flow="target_to_source" is not supported. Reverse the edges before the graph is partitioned, '
    'data.edge_index.flip(0), and use flow="source_to_target".'
)


def _with_ending(ending: str, names: Sequence[str]) -> frozenset[str]:
    return frozenset(name.removesuffix(ending) for name in names if name.endswith(ending))


def _check_rows(
    name: str, value: Any, layer: MessagePassing, rows: tuple[int, int], where: str
) -> None:
    """Raise unless a value of nodes, or both of a pair, have a row for each owned node."""
    sides = value if isinstance(value, tuple | list) else (value,)
    if len(sides) > 2:
        raise ArgumentError(
            f"{where}{name!r} must be a tensor or a pair of them, for sources and for targets; got "
            f"{len(sides)}."
        )
    for side, owned in zip(sides, rows, strict=False):
        if not isinstance(side, torch.Tensor):
            continue
        along = layer.node_dim + (side.dim() if layer.node_dim < 0 else 0)
        if not 0 <= along < side.dim():
            raise ArgumentError(
                f"{where}{name!r} has shape {tuple(side.shape)}, without a dimension "
                f"{layer.node_dim}, the layer's node_dim."
            )
        if side.shape[along] != owned:
            raise ArgumentError(
                f"{where}{name!r} has {side.shape[along]} rows, but this rank owns {owned} "
                "nodes. Call the model with the local part: graph.x, graph.edge_index, ...; halos "
                "are added by varcomm."
            )


def _kept_in_graph(result: Any, others: Iterable[Any]) -> Any:
    """Return `result`, through whose tensors backward also reaches the tensors in `others`.

    Backward is collective. A layer may return early on a rank without edges: its result then does
    not depend on the halo, and backward would skip the exchange in which other ranks wait.
    """
    given = [part for one in others for part in (one if isinstance(one, tuple | list) else (one,))]
    needed = [one for one in given if isinstance(one, torch.Tensor) and one.requires_grad]
    if not needed or not torch.is_grad_enabled():
        return result
    # torch.compile refuses functions with a jvp
    keep = _Keep if torch.compiler.is_compiling() else _KeepWithTangents
    return tree_map_only(torch.Tensor, lambda one: keep.apply(one, *needed), result)  # type: ignore[no-untyped-call]


class _Keep(torch.autograd.Function):
    """The first of its inputs; the gradients of the others are undefined, but are asked for.

    The result shares memory and version with the first input, and may be written to.
    """

    @staticmethod
    def forward(result: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return result.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.others = len(inputs) - 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*gradients, *[None] * ctx.others)


class _KeepWithTangents(_Keep):
    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> torch.Tensor:
        return tangents[0]
