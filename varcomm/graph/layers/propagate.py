"""``propagate`` and ``edge_updater`` of a layer on a partitioned graph: checks, one exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric import nn as pyg
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.models.attentive_fp import GATEConv

from varcomm._torch_private import transforms_active
from varcomm.errors import ArgumentError
from varcomm.graph.index.edges import EdgeRules
from varcomm.graph.index.partitioned_index import Numbering, PartitionedIndex
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.ops.checks import checking

__all__ = ["SCORES_FIRST", "Digests", "Running", "Scores", "attach", "is_attached"]


Digests: TypeAlias = MutableMapping[torch.Tensor, tuple[int, object]]


@dataclass(eq=False)
class Running:
    """The graph that a model runs on; all modules of a distributed model, `root`, share it."""

    graph: PartitionedGraph
    root: torch.nn.Module
    # of parameters on a GPU, by their versions
    digests: Digests = field(default_factory=WeakTensorKeyDictionary)
    # called with a layer's name when it propagates, in a call that exchanges once for all layers
    step: Callable[[str], None] | None = None
    rules: frozenset[Numbering] = field(init=False)  # of the graph's edges

    def __post_init__(self) -> None:
        self.move(self.graph)

    def move(self, graph: PartitionedGraph) -> None:
        """Let the model run on another graph."""
        self.graph = graph
        self.rules = frozenset(edges.rules for edges in graph.edge_shards.values())

    def check(self, edge_index: Any, name: str) -> None:
        """Raise ArgumentError unless these are edges of the graph."""
        if isinstance(edge_index, PartitionedIndex) and edge_index.kind in ("edges", "reversed"):
            if torch.compiler.is_compiling() or edge_index.of in self.rules:
                return
            wrong = (
                "these are the edges of another graph than the one that the model is distributed "
                "on. If the model is to run on another graph, call distribute(model, graph) again."
            )
        elif isinstance(edge_index, PartitionedIndex):
            wrong = f"these are numbers of another kind than edges: {edge_index.kind}."
        else:
            wrong = (
                "edges must be given as graph.edge_index, of shape (2, E), or as what operations "
                f"of torch and PyG make of it; got {type(edge_index).__name__}."
            )
        with checking(name, self.graph.group) as where:
            raise ArgumentError(f"{where}{wrong}")


def attach(layer: MessagePassing, running: Running) -> None:
    """Let a layer check the edges that it propagates along, and exchange once to propagate.

    The instance's methods are replaced, because torch.compile skips PyG's hooks.
    """
    take = layer.inspector.get_param_names

    def adapted(method: str, functions: Sequence[str]) -> _Adapted:
        names = [name for of in functions for name in take(of)]
        ends = ([name[:-2] for name in names if name.endswith(end)] for end in ("_j", "_i"))
        return _Adapted(layer, method, running, *ends)

    layer.propagate = adapted("propagate", ("message", "aggregate", "update"))
    if layer.inspector.implements("edge_update"):
        layer.edge_updater = adapted("edge_updater", ("edge_update",))


def is_attached(layer: MessagePassing) -> bool:
    """Return whether a layer checks its edges; PyG replaces its methods to explain a model."""
    return isinstance(vars(layer).get("propagate"), _Adapted)


# Layers whose forward only passes the result of edge_updater to propagate, and return it.
SCORES_FIRST = (pyg.GATConv, pyg.GATv2Conv, GATEConv)


@dataclass(eq=False)
class Scores:
    """A call of ``edge_updater``, which ``propagate`` makes after the exchange of both."""

    own: Callable[..., Any]
    values: dict[str, Any]
    read: list[torch.Tensor]
    result: Any = None


@dataclass(frozen=True, eq=False)
class _Adapted:
    """A method of a layer after a check of the edges and one exchange for all that it reads."""

    layer: MessagePassing
    method: str
    running: Running
    # values of which the layer's functions take rows at one end of the edges, or at the other
    at_j: list[str]
    at_i: list[str]

    def __call__(self, edge_index: PartitionedIndex, size: Any = None, **values: Any) -> Any:
        self.running.check(edge_index, self.method)
        if self.method == "propagate" and self.running.step is not None:
            self.running.step(self.method)
        layer, edges = self.layer, edge_index.of
        assert isinstance(edges, EdgeRules)
        read = self._at_sources(edge_index, values)
        own = partial(getattr(type(layer), self.method), layer, size=size)
        forward = type(layer).forward
        if self.method == "edge_updater" and any(forward is one.forward for one in SCORES_FIRST):
            return Scores(own, values, read)
        waiting = {}
        for name, one in values.items():
            if isinstance(one, Scores):
                waiting[name] = one
                read += one.read

        def run() -> Any:
            known = edges.fetched(edge_index, read, layer.node_dim)
            for name, scores in waiting.items():
                values[name] = scores.result = scores.own(known, **scores.values)
            return own(known, **values)

        if torch.compiler.is_compiling():
            return run()
        before, exchanged = edges.exchanged, list[torch.Tensor]()
        edges.exchanged = exchanged
        try:
            out = run()
        finally:
            edges.exchanged = before
        given: list[Any] = []
        if edge_index.plain.shape[1] == 0:
            # backward is collective: it must contain all tensors that a message reads
            given = [*values.values(), *(one.values for one in waiting.values())]
        if not given and not exchanged:
            return out
        return _with_first(out, partial(_depending, given=given, exchanged=exchanged))

    def _at_sources(
        self, edge_index: PartitionedIndex, values: dict[str, Any]
    ) -> list[torch.Tensor]:
        """Return the tensors that the method takes rows of at the sources of edges."""
        layer, place = self.layer, 0 if edge_index.kind == "edges" else 1
        if layer.decomposed_layers > 1:  # it takes rows of parts of these
            return []
        forward = layer.flow == "source_to_target"
        taken = []
        for name in self.at_j if forward == (place == 0) else self.at_i:
            one = values.get(name)
            if isinstance(one, tuple | list):
                one = one[place]
            if isinstance(one, torch.Tensor) and not isinstance(one, PartitionedIndex):
                taken.append(one)
        return taken


def _depending(
    out: torch.Tensor, given: Sequence[Any], exchanged: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return `out`, whose backward contains these exchanges even if no value of theirs is used.

    Backward is collective: a rank whose edges ignore the rows would leave the others waiting.
    """
    if not (out.is_floating_point() or out.is_complex()) or not torch.is_grad_enabled():
        return out
    if given:
        out = sum(_nothing_of(given), out)
    if not exchanged:
        return out
    if transforms_active():
        return sum(_nothing_of(exchanged), out)
    return _Depending.apply(out, *exchanged)  # type: ignore[no-any-return, no-untyped-call]


def _with_first(out: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a result of a layer with its first floating tensor changed."""
    if isinstance(out, torch.Tensor):
        return change(out)
    if type(out) in (tuple, list):
        for place, one in enumerate(out):
            if isinstance(one, torch.Tensor) and (one.is_floating_point() or one.is_complex()):
                return type(out)([*out[:place], change(one), *out[place + 1 :]])
    return out


class _Depending(torch.autograd.Function):
    """The identity of its first tensor; the others get an undefined gradient, which costs nothing.

    The version counter is shared, so that changes in place are checked as those of the tensor.
    """

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *exchanged: torch.Tensor) -> torch.Tensor:
        ctx.others = len(exchanged)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient, *[None] * ctx.others

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: torch.Tensor | None) -> torch.Tensor:
        return tangent


def _nothing_of(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield a zero that depends on each tensor among these, and in pairs of them."""
    for value in values:
        if isinstance(value, dict):
            yield from _nothing_of(value.values())
        elif isinstance(value, tuple | list):
            yield from _nothing_of(value)
        elif isinstance(value, torch.Tensor) and value.requires_grad:
            rows = value.reshape(-1)[:0]
            yield (rows.real if rows.is_complex() else rows).sum()  # keeps the dtype of a sum
