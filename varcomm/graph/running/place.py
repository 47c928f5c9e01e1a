"""``Place``: where a distributed model runs, and which of the graph's edges a layer is about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from varcomm.errors import ArgumentError
from varcomm.graph.local_edges import LocalEdges, plan_of
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.graph.running.edges import DeepEdges, EdgeSet
from varcomm.graph.running.rebind import Rebinding
from varcomm.graph.running.when_run import PLACES, check_when_run
from varcomm.ops.autograd import UNCOMPILED, kept_from_compilation
from varcomm.ops.library import fake_mode, in_graph, is_traced, refuse_linearize
from varcomm.ops.operator import checking
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sizes import holds_integers
from varcomm.transport.group import Group

__all__ = ["Place"]

_AGAIN = "If the model is to run on another graph, call distribute(model, graph) again."


@dataclass(eq=False)
class Place:
    """The graph that a model is distributed on, and the edges that are looked at right now.

    A layer is called with a tensor of edges, which tells which edges they are: a graph has several
    types of them, and some layers turn them round. Where the tensor is a new one, made by adding
    self loops or by leaving out edges, it is about what the layer around it is about.

    Copies of a model run at the same place.
    """

    graph: PartitionedGraph
    _claims: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    _running: list[EdgeSet] = field(default_factory=list)
    _without_loops: dict[EdgeSet, LocalEdges] = field(default_factory=dict)
    #: what layers have made of several types of edges, and keep
    joined: dict[Any, Any] = field(default_factory=dict)
    #: what has exchanged functions in a model, and the modules of this model
    rebind: Rebinding | None = None
    modules: WeakSet[torch.nn.Module] = field(default_factory=WeakSet)
    #: whether there are copies of the model
    is_shared: bool = False
    # None outside of a call that exchanges for several layers
    _steps: int | None = None
    number: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.number = PLACES.give(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Place:
        self.is_shared = True
        return self

    def move(self, graph: PartitionedGraph) -> None:
        """Take another graph, and let all that runs here run on it.

        What has been compiled finds the same place, and need not be compiled anew.
        """
        self.graph = graph
        self._claims, self._without_loops, self.joined = WeakTensorKeyDictionary(), {}, {}
        for name in ("_deep", "_by_plan"):
            vars(self).pop(name, None)

    @property
    def group(self) -> Group:
        """The ranks that the graph is split over."""
        return self.graph.group

    @property
    def edge_sets(self) -> Mapping[Any, EdgeSet]:
        """The edges of the graph by their types."""
        return self._deep if self._deep else self.graph.edge_shards

    @cached_property
    def _deep(self) -> dict[None, EdgeSet]:
        return {None: DeepEdges(self.graph.edges)} if self.graph.hops > 1 else {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count how often layers propagate after an exchange that serves several of them."""
        before, self._steps = self._steps, 0
        try:
            yield
        finally:
            self._steps = before

    def step(self, where: str) -> None:
        """Note that a layer propagates; raise where the halo does not reach so far."""
        if self._steps is None:
            return
        self._steps += 1
        if self._steps > self.graph.hops:
            raise ArgumentError(
                f"{where}the model propagates more than {self.graph.hops} times, for which the "
                f"halos of {self.graph.hops} hops do not suffice; layers side by side count one by "
                "one. Partition the graph with more hops, or distribute parts of the model, each "
                "with at most so many layers, instead of the whole."
            )

    @cached_property
    def _by_plan(self) -> dict[ExchangePlan, EdgeSet]:
        return {edges.plan: edges for edges in self.edge_sets.values()}

    @contextmanager
    def running_on(self, edges: EdgeSet) -> Iterator[None]:
        """Let tensors of edges that are not known by themselves be of these edges."""
        self._running.append(edges)
        try:
            yield
        finally:
            self._running.pop()

    @kept_from_compilation
    def claim(self, edge_index: torch.Tensor, edges: EdgeSet) -> None:
        """Let a tensor be of these edges, as long as it lives."""
        self._claims[edge_index] = edges

    def known(self, edge_index: torch.Tensor) -> EdgeSet | None:
        """Return which edges these are, if the tensor itself tells it."""
        if torch.compiler.is_compiling() and len(self.edge_sets) == 1:
            # which compiled code tells from being the same tensor, and not by looking it up
            (edges,) = self.edge_sets.values()
            return edges if edge_index is edges.edge_index else None
        return self._looked_up(edge_index)

    @kept_from_compilation
    def _looked_up(self, edge_index: torch.Tensor) -> EdgeSet | None:
        claimed: EdgeSet | None = self._claims.get(edge_index)
        plan = plan_of(edge_index)
        return self._by_plan.get(plan) if claimed is None and plan is not None else claimed

    def edges_of(self, edge_index: Any, where: str) -> EdgeSet:
        """Return which edges these are, if they are edges at all."""
        plain = type(edge_index) is torch.Tensor or is_traced(edge_index)
        if not plain or not _are_edges(edge_index):
            raise ArgumentError(
                f"{where}edges must be given as graph.edge_index, of shape (2, E); got "
                f"{type(edge_index).__name__}."
            )
        edges = self.known(edge_index)
        if edges is None and self._running:
            edges = self._running[-1]
        if edges is None and len(self.edge_sets) == 1:
            (edges,) = self.edge_sets.values()
        if edges is None:
            raise ArgumentError(
                f"{where}cannot tell which type these edges are of. Call the layer with "
                "graph.edge_index_dict, or with the edges of one type, graph[edge_type].edge_index."
            )
        if not torch.compiler.is_compiling():
            self._check_plan(edge_index, edges, where)
        return edges

    def _check_plan(self, edge_index: torch.Tensor, edges: EdgeSet, where: str) -> None:
        if plan_of(edge_index) not in (None, edges.plan):
            raise ArgumentError(
                f"{where}these are the edges of another graph than the one that the model is "
                f"distributed on. {_AGAIN}"
            )

    def checked(self, edge_index: Any, where: str) -> EdgeSet:
        """Return which edges these are; raise unless they are in the graph, or self loops."""
        if torch.compiler.is_dynamo_compiling():
            if torch.compiler.is_exporting():  # which fails on its own guards, torch 2.13
                raise ArgumentError(f"{where}{UNCOMPILED}")
        else:
            _refuse_tracers(edge_index, where)
        edges = self.edges_of(edge_index, where)
        if edge_index is edges.edge_index:
            return edges
        if in_graph(edge_index):
            check_when_run(edge_index, self.number, self._which(edges))
            return edges
        self.check(edge_index, edges, where)
        return edges

    def check(self, edge_index: torch.Tensor, edges: EdgeSet, where: str) -> None:
        """Raise unless these edges are among the others, or self loops."""
        sources, targets = edges.num_sources + edges.num_halo, edges.num_targets
        if edge_index.numel() and not (
            int(edge_index.min()) >= 0
            and int(edge_index[0].max()) < sources
            and int(edge_index[1].max()) < targets
        ):
            raise ArgumentError(
                f"{where}edges reach beyond the {sources} local sources and {targets} owned "
                "targets: call the model with graph.edge_index, not with that of the whole graph. "
                f"{_AGAIN}"
            )
        if not self._local_edges(edges).include(edge_index):
            raise ArgumentError(
                f"{where}some edges are not in the graph that the model is distributed on. Edges "
                "of graph.edge_index may be left out, and self loops added, but no others. "
                f"{_AGAIN}"
            )

    def check_one_of(self, edge_index: torch.Tensor, which: int) -> None:
        """Do what :meth:`checked` leaves for when compiled code runs."""
        edges = [*self.edge_sets.values()][which]
        with checking("propagate", self.group) as where:
            self._check_plan(edge_index, edges, where)
            self.check(edge_index, edges, where)

    def _which(self, edges: EdgeSet) -> int:
        return next(k for k, known in enumerate(self.edge_sets.values()) if known is edges)

    def _local_edges(self, edges: EdgeSet) -> LocalEdges:
        kinds = [kind for kind, known in self.edge_sets.items() if known is edges]
        if not kinds or kinds[0] is None or kinds[0][0] == kinds[0][-1]:
            return edges.local_edges
        if edges not in self._without_loops:
            sources = edges.num_sources + edges.num_halo
            self._without_loops[edges] = LocalEdges(edges.edge_index, sources, loops=False)
        return self._without_loops[edges]

    def checked_in(self, name: str, edge_index: Any) -> EdgeSet:
        """Return which edges these are, for a call of that name."""
        with checking(name, self.group) as where:
            return self.checked(edge_index, where)


def _are_edges(edge_index: torch.Tensor) -> bool:
    dense = edge_index.layout == torch.strided
    return dense and holds_integers(edge_index) and edge_index.shape[:-1] == (2,)


def _refuse_tracers(edge_index: Any, where: str) -> None:
    """Raise where what is recorded would be wrong, or cannot be."""
    refuse_linearize(where, "aggregations")
    mode: Any = fake_mode()
    if mode is not None and not mode.allow_non_fake_inputs and not is_traced(edge_index):
        raise ArgumentError(
            f"{where}the graph's own tensors are no fakes. Take "
            "FakeTensorMode(allow_non_fake_inputs=True)."
        )
