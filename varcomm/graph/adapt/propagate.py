"""Checks before ``propagate`` and ``edge_updater`` of a layer on a partitioned graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch_geometric.nn import MessagePassing

from varcomm.errors import ArgumentError
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.index import PartitionedIndex
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.ops.operator import checking

__all__ = ["Running", "attach", "is_attached"]


@dataclass(eq=False)
class Running:
    """The graph that a model runs on, and how often layers propagated since the last exchange.

    All modules of a distributed model, `root`, share it.
    """

    graph: PartitionedGraph
    root: torch.nn.Module
    # None outside of a call that exchanges once for several layers
    steps: int | None = None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count how often layers propagate after one exchange for several of them."""
        before, self.steps = self.steps, 0
        try:
            yield
        finally:
            self.steps = before

    def step(self, where: str) -> None:
        """Count one propagation; raise ArgumentError if the halo does not reach that far."""
        if self.steps is None:
            return
        self.steps += 1
        if self.steps > self.graph.hops:
            raise ArgumentError(
                f"{where}the model propagates more than {self.graph.hops} times, for which the "
                f"halos of {self.graph.hops} hops do not suffice; parallel layers count one by "
                "one. Partition the graph with more hops, or distribute parts of the model, each "
                "with at most so many layers, instead of the model."
            )

    def check(self, edge_index: Any, where: str) -> None:
        """Raise ArgumentError unless these are edges of the graph."""
        if not isinstance(edge_index, PartitionedIndex):
            raise ArgumentError(
                f"{where}edges must be given as graph.edge_index, of shape (2, E), or as what "
                f"operations of torch and PyG make of it; got {type(edge_index).__name__}."
            )
        if edge_index.kind not in ("edges", "reversed"):
            raise ArgumentError(
                f"{where}these are numbers of another kind than edges: {edge_index.kind}."
            )
        known = self.graph.edge_shards.values()
        if not torch.compiler.is_compiling() and not any(edge_index.of is one for one in known):
            raise ArgumentError(
                f"{where}these are the edges of another graph than the one that the model is "
                "distributed on. If the model is to run on another graph, call "
                "distribute(model, graph) again."
            )


def attach(layer: MessagePassing, running: Running) -> None:
    """Let a layer check the edges that it propagates along.

    The instance's methods are replaced, because torch.compile skips PyG's hooks.
    """
    layer.propagate = _Checked(layer, "propagate", running)
    if layer.inspector.implements("edge_update"):
        layer.edge_updater = _Checked(layer, "edge_updater", running)


def is_attached(layer: MessagePassing) -> bool:
    """Return whether a layer checks its edges; PyG replaces its methods to explain a model."""
    return isinstance(vars(layer).get("propagate"), _Checked)


@dataclass(frozen=True, eq=False)
class _Checked:
    """A method of a layer after a check of the edges."""

    layer: MessagePassing
    method: str
    running: Running

    def __call__(self, edge_index: PartitionedIndex, size: Any = None, **values: Any) -> Any:
        with checking(self.method, self.running.graph.group) as where:
            self.running.check(edge_index, where)
            if self.method == "propagate":
                self.running.step(where)
        own: Callable[..., Any] = getattr(type(self.layer), self.method)
        if torch.compiler.is_compiling() or not isinstance(edge_index.of, EdgeShard):
            return own(self.layer, edge_index, size=size, **values)
        with edge_index.of.exchanges_for_no_edges() as unused:
            out = own(self.layer, edge_index, size=size, **values)
        if edge_index.plain.shape[1] == 0 and isinstance(out, torch.Tensor):
            # backward is collective: what the values of no edges depend on must be in it
            out = sum([*unused, *_nothing_of(values.values())], out)
        return out


def _nothing_of(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield a zero that depends on each tensor among these, and in pairs of them."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from _nothing_of(value)
        elif isinstance(value, torch.Tensor) and value.requires_grad:
            yield value.reshape(-1)[:0].sum()
