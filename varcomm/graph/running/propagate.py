"""What stands before ``propagate`` and ``edge_updater`` of a layer: it exchanges halos."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch_geometric.nn import MessagePassing

from varcomm.errors import ArgumentError
from varcomm.graph.running.edges import Counts, EdgeSet, with_halo
from varcomm.graph.running.place import Place
from varcomm.graph.running.tied import tied
from varcomm.graph.running.turned import TurnedEdges, turned
from varcomm.ops.autograd import kept_from_compilation
from varcomm.ops.operator import checking

__all__ = ["attach", "names_read_at_source"]

Values = dict[str, Any]


def attach(layer: MessagePassing, place: Place) -> None:
    """Let a layer exchange halos before it propagates.

    At the instance: PyG's hooks are skipped under torch.compile, and the one for edge_updater comes
    too late, when values already are at the edges.
    """
    reads = _Reads.of(layer, ["message", "aggregate", "update"])
    layer.propagate = _WithHalos(layer, "propagate", place, reads)
    if reads.in_update:
        layer.update = _OfNodes(layer)
    if layer.inspector.implements("edge_update"):
        reads = _Reads.of(layer, ["edge_update"])
        layer.edge_updater = _WithHalos(layer, "edge_updater", place, reads)


def names_read_at_source(layer: MessagePassing, functions: Sequence[str]) -> frozenset[str]:
    """Return the values of nodes that these functions of a layer read at the source of an edge."""
    return _with_ending("_j", names_taken(layer, functions))


def names_taken(layer: MessagePassing, functions: Sequence[str]) -> list[str]:
    """Return the names of what these functions of a layer take, each once.

    Their types may differ between functions, as those of ``ptr`` and ``index`` do where a user has
    left them out.
    """
    names = (name for one in functions for name in layer.inspector.get_param_names(one))
    return list(dict.fromkeys(names))


@dataclass(frozen=True)
class _Reads:
    """Where the functions of a layer read what is propagated.

    Attributes
    ----------
    at_source, at_target : frozenset of str
        What they read at the source of an edge, and at its target: values of nodes.
    at_edges : tuple of str
        What they read as it is, where edges are: values of edges, and others.
    in_update : frozenset of str
        What they read at the source, and once more as a whole, when nodes are updated.
    """

    at_source: frozenset[str]
    at_target: frozenset[str]
    at_edges: tuple[str, ...]
    in_update: frozenset[str]

    @classmethod
    def of(cls, layer: MessagePassing, functions: Sequence[str]) -> _Reads:
        where_edges_are = [name for name in functions if name != "update"]
        at_edges = set(names_taken(layer, where_edges_are)) - layer.special_args
        at_source = names_read_at_source(layer, functions)
        updated = names_taken(layer, ["update"]) if "update" in functions else []
        return cls(
            at_source,
            _with_ending("_i", names_taken(layer, functions)),
            tuple(sorted(name for name in at_edges if not name.endswith(("_i", "_j")))),
            at_source & set(updated),
        )


class _Pair(tuple[Any, Any]):
    """What sources and what targets of edges have of a value, and the value as it was given."""

    given: Any


@dataclass(frozen=True, eq=False)
class _OfNodes:
    """Stands before ``update`` of a layer; gives it values as they were given to ``propagate``."""

    layer: MessagePassing

    def __call__(self, inputs: Any, **values: Any) -> Any:
        own: Callable[..., Any] = type(self.layer).update
        values = {k: v.given if isinstance(v, _Pair) else v for k, v in values.items()}
        return own(self.layer, inputs, **values)


@dataclass(frozen=True, eq=False)
class _WithHalos:
    """Stands before a method of a layer; turns what messages read at their source into pairs."""

    layer: MessagePassing
    method: str
    place: Place
    reads: _Reads

    def __call__(self, edge_index: torch.Tensor, size: Any = None, **values: Any) -> Any:
        if self.layer.flow == "target_to_source":
            return self._at_sources(edge_index, values)
        size, values = self._exchange(edge_index, values)
        return self._own(edge_index, size, values)

    def _at_sources(self, edge_index: torch.Tensor, values: Values) -> Any:
        """Do it where the sources of edges are owned, as if edges led there."""
        there, size, values = self._turn(edge_index, values)
        flow, self.layer.flow = self.layer.flow, "source_to_target"
        try:
            out = self._own(there.edges.edge_index, size, values)
        finally:
            self.layer.flow = flow
        if self.method == "edge_updater":
            out = tree_map_only(torch.Tensor, there.plan.adjoint, out)
        return out

    def _own(self, edge_index: torch.Tensor, size: tuple[int, int], values: Values) -> Any:
        own: Callable[..., Any] = getattr(type(self.layer), self.method)
        return tied(own(self.layer, edge_index, size=size, **values), values.values())

    def _exchange(self, edge_index: Any, values: Values) -> tuple[tuple[int, int], Values]:
        edges = self._checked(edge_index, values)
        counts = Counts.of(edges)
        return (counts.sources + counts.halo, counts.targets), self._paired(edges, values)

    @kept_from_compilation
    def _turn(self, edge_index: Any, values: Values) -> tuple[TurnedEdges, tuple[int, int], Values]:
        edges = self._checked(edge_index, values)
        count = edge_index.shape[1]
        names = [name for name in self.reads.at_edges if name in values]
        given = [values[name] for name in names]
        # what is of edges, and needs a gradient, all ranks have to see alike
        flags = [isinstance(one, torch.Tensor) and one.shape[:1] == (count,) for one in given]
        flags += [isinstance(one, torch.Tensor) and one.requires_grad for one in given]
        met = turned(edges).meet(edge_index, flags)
        of_edges, needed = met.on_all[: len(names)], met.on_some[len(names) :]
        values = self._paired(met.turned.edges, values)
        for name, is_of_edges, is_needed in zip(names, of_edges, needed, strict=True):
            if is_of_edges:
                value = values[name]
                if is_needed and not value.requires_grad:
                    value = value.detach().requires_grad_()
                values[name] = met.turned.plan(value)
        edges = met.turned.edges
        return met.turned, (edges.num_sources + edges.num_halo, edges.num_targets), values

    def _checked(self, edge_index: Any, values: Values) -> EdgeSet:
        with checking(self.method, self.place.group) as where:
            edges = self.place.checked(edge_index, where)
            if self.method == "propagate":
                self.place.step(where)
            counts = Counts.of(edges)
            rows = counts.sources, counts.targets
            if self.layer.flow == "target_to_source":
                rows = rows[::-1]
                for name in self.reads.at_edges:
                    if name.endswith("_ptr") and values.get(name) is not None:
                        raise ArgumentError(
                            f"{where}{name!r} counts on the order of the edges, which is another "
                            'one for flow="target_to_source".'
                        )
            for name in self.reads.at_source & values.keys():
                _check_rows(name, values[name], self.layer, rows, where)
        return edges

    def _paired(self, edges: EdgeSet, values: Values) -> Values:
        """Return the values, those that are read at the source of an edge as pairs."""
        pairs = {}
        for name in sorted(self.reads.at_source & values.keys()):
            value = values[name]
            source, target = self._sides(name, value)
            # whatever is no tensor is not read at edges, but handed on as it is
            if isinstance(source, torch.Tensor):
                along = self.layer.node_dim % source.dim()
                pairs[name] = pair = _Pair((with_halo(edges, source, along), target))
                pair.given = value
        # what is read but as pairs goes through torch.compile
        plain = {name: tuple(pair) for name, pair in pairs.items()}
        return values | plain | {name: pairs[name] for name in self.reads.in_update & pairs.keys()}

    def _sides(self, name: str, value: Any) -> tuple[Any, Any]:
        """Return what sources and what targets have of a value of nodes."""
        if not isinstance(value, tuple | list):  # PyG takes lists for pairs as well
            return value, value if name in self.reads.at_target else None
        source, target = value
        if self.layer.flow == "target_to_source" and not _is_compiled(self.layer, self.method):
            return target, source
        return source, target


def _is_compiled(layer: MessagePassing, method: str) -> bool:
    """Return whether PyG made a method of its template, which reads sources first by any flow."""
    kind = type(layer)
    made = getattr(kind, f"_jinja_{method}", None)
    return getattr(kind, method) is made and made is not getattr(kind, f"_orig_{method}", None)


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
                f"{where}{name!r} has shape {tuple(side.shape)}, in which there is no dimension "
                f"{layer.node_dim}, where the layer looks for nodes by its node_dim."
            )
        if side.shape[along] != owned:
            raise ArgumentError(
                f"{where}{name!r} has {side.shape[along]} rows, but this rank owns {owned} "
                "nodes. Call the model with the local part: graph.x, graph.edge_index, ...; halos "
                "are added by varcomm."
            )
