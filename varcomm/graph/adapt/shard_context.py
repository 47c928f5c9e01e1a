"""The graph that a model is distributed on, and the edges that a layer is called with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric.nn import HeteroConv, MessagePassing

from varcomm.errors import ArgumentError
from varcomm.graph.adapt.rebind import Rebinding
from varcomm.graph.edge_shard import LocalEdges
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.ops.compilation import UNCOMPILED, ByNumber, kept_from_compilation
from varcomm.ops.operator import checking, fake_mode, in_graph, is_traced, refuse_linearize
from varcomm.sizes import holds_integers
from varcomm.transport.group import Group

__all__ = ["ShardContext", "add_edge_type_context", "untransformed", "unwrap_forward"]

_AGAIN = "If the model is to run on another graph, call distribute(model, graph) again."


@dataclass(eq=False)
class ShardContext:
    """The graph that a model is distributed on, and the edges that its layers run on.

    A layer is called with a tensor of edges. Either this tensor is known: as the ``edge_index`` of
    a type of the graph, or as claimed. Or it was made by the layer around the call, by adding self
    loops or by leaving out edges, and belongs to the edges of that layer.

    Copies of a model share the context.
    """

    graph: PartitionedGraph
    #: edges of several types that layers have joined, and keep
    joined: dict[Any, Any] = field(default_factory=dict)
    #: the exchanged functions of the model, and its modules
    rebinding: Rebinding | None = None
    modules: WeakSet[torch.nn.Module] = field(default_factory=WeakSet)
    #: whether there are copies of the model
    is_shared: bool = False
    #: handle for compiled code
    number: torch.Tensor = field(init=False)
    _claims: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    _running: list[LocalEdges] = field(default_factory=list)
    # None outside of a call that exchanges once for several layers
    _steps: int | None = None

    def __post_init__(self) -> None:
        self.number = _CONTEXTS.give(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardContext:
        self.is_shared = True
        return self

    def move(self, graph: PartitionedGraph) -> None:
        """Run on another graph; compiled code of the model stays valid."""
        self.graph, self.joined = graph, {}
        self._claims = WeakTensorKeyDictionary()

    @property
    def group(self) -> Group:
        """The ranks that the graph is sharded over."""
        return self.graph.group

    @property
    def edge_shards(self) -> Mapping[Any, LocalEdges]:
        """The edges of the graph by their types."""
        return self.graph.edge_shards

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count how often layers propagate after one exchange for several of them."""
        before, self._steps = self._steps, 0
        try:
            yield
        finally:
            self._steps = before

    def step(self, where: str) -> None:
        """Count one propagation; raise ArgumentError if the halo does not reach that far."""
        if self._steps is None:
            return
        self._steps += 1
        if self._steps > self.graph.hops:
            raise ArgumentError(
                f"{where}the model propagates more than {self.graph.hops} times, for which the "
                f"halos of {self.graph.hops} hops do not suffice; parallel layers count one by "
                "one. Partition the graph with more hops, or distribute parts of the model, each "
                "with at most so many layers, instead of the model."
            )

    @contextmanager
    def running_on(self, edges: LocalEdges) -> Iterator[None]:
        """Let tensors of edges that are not known belong to these edges."""
        self._running.append(edges)
        try:
            yield
        finally:
            self._running.pop()

    @kept_from_compilation
    def claim(self, edge_index: torch.Tensor, edges: LocalEdges) -> None:
        """Let a tensor belong to these edges, as long as it lives."""
        self._claims[edge_index] = edges

    def known(self, edge_index: torch.Tensor) -> LocalEdges | None:
        """Return the edges that a tensor is known to belong to, or None."""
        if torch.compiler.is_compiling() and len(self.edge_shards) == 1:
            # compiled code guards on the identity of tensors, and cannot look them up
            (edges,) = self.edge_shards.values()
            return edges if edge_index is edges.edge_index else None
        return self._looked_up(edge_index)

    @kept_from_compilation
    def _looked_up(self, edge_index: torch.Tensor) -> LocalEdges | None:
        claimed: LocalEdges | None = self._claims.get(edge_index)
        if claimed is not None:
            return claimed
        plan = LocalEdges.plan_of(edge_index)
        found = (edges for edges in self.edge_shards.values() if edges.plan is plan)
        return next(found, None)

    def edges_of(self, edge_index: Any, where: str) -> LocalEdges:
        """Return the edges that a tensor belongs to, without a look at its values."""
        plain = type(edge_index) is torch.Tensor or is_traced(edge_index)
        if not plain or not _are_edges(edge_index):
            raise ArgumentError(
                f"{where}edges must be given as graph.edge_index, of shape (2, E); got "
                f"{type(edge_index).__name__}."
            )
        edges = self.known(edge_index)
        if edges is None and self._running:
            edges = self._running[-1]
        if edges is None and len(self.edge_shards) == 1:
            (edges,) = self.edge_shards.values()
        if edges is None:
            raise ArgumentError(
                f"{where}the type of these edges is unknown. Call the layer with "
                "graph.edge_index_dict, or with the edges of one type, graph[edge_type].edge_index."
            )
        if not torch.compiler.is_compiling():
            self._check_plan(edge_index, edges, where)
        return edges

    def _check_plan(self, edge_index: torch.Tensor, edges: LocalEdges, where: str) -> None:
        if LocalEdges.plan_of(edge_index) not in (None, edges.plan):
            raise ArgumentError(
                f"{where}these are the edges of another graph than the one that the model is "
                f"distributed on. {_AGAIN}"
            )

    def checked(self, edge_index: Any, where: str) -> LocalEdges:
        """Return the edges that a tensor belongs to; raise unless it has only these and loops."""
        if torch.compiler.is_dynamo_compiling():
            if torch.compiler.is_exporting():  # which fails on its own guards, torch 2.13
                raise ArgumentError(f"{where}{UNCOMPILED}")
        else:
            _refuse_tracers(edge_index, where)
        edges = self.edges_of(edge_index, where)
        if edge_index is edges.edge_index:
            return edges
        if in_graph(edge_index):
            which = [known is edges for known in self.edge_shards.values()].index(True)
            torch.ops.varcomm.check_edges(edge_index, self.number, which)
        else:
            self._check(edge_index, edges, where)
        return edges

    def checked_in(self, name: str, edge_index: Any) -> LocalEdges:
        """Return the edges that a tensor belongs to, for a call of that name."""
        with checking(name, self.group) as where:
            return self.checked(edge_index, where)

    def check_compiled(self, edge_index: torch.Tensor, which: int) -> None:
        """Make the check of :meth:`checked` when compiled code runs."""
        edges = [*self.edge_shards.values()][which]
        with checking("propagate", self.group) as where:
            self._check_plan(edge_index, edges, where)
            self._check(edge_index, edges, where)

    def _check(self, edge_index: torch.Tensor, edges: LocalEdges, where: str) -> None:
        sources, halo, targets = edges.layer_counts()
        kinds = [kind for kind, known in self.edge_shards.items() if known is edges]
        bipartite = bool(kinds) and kinds[0] is not None and kinds[0][0] != kinds[0][-1]

        def check(edge_index: torch.Tensor) -> None:
            if edge_index.numel() and not (
                int(edge_index.min()) >= 0
                and int(edge_index[0].max()) < sources + halo
                and int(edge_index[1].max()) < targets
            ):
                raise ArgumentError(
                    f"{where}edges reach beyond the {sources + halo} local sources and {targets} "
                    "owned targets: call the model with graph.edge_index, not with that of the "
                    f"whole graph. {_AGAIN}"
                )
            if not edges.includes(edge_index, self_loops=not bipartite):
                raise ArgumentError(
                    f"{where}some edges are not in the graph that the model is distributed on. "
                    "Edges of graph.edge_index may be left out, and self loops added, but no "
                    f"others. {_AGAIN}"
                )

        untransformed(edge_index, check)


_CONTEXTS: ByNumber[ShardContext] = ByNumber()


# Compiled code cannot read edges while it is compiled. The context's number counts as written to,
# so that compilers keep the operator, which returns nothing.
@torch.library.custom_op("varcomm::check_edges", mutates_args=("number",))
def _check_edges(edge_index: torch.Tensor, number: torch.Tensor, which: int) -> None:
    context = _CONTEXTS.find(number, "the model of a compiled graph")
    context.check_compiled(edge_index, which)


def _are_edges(edge_index: torch.Tensor) -> bool:
    dense = edge_index.layout == torch.strided
    return dense and holds_integers(edge_index) and edge_index.shape[:-1] == (2,)


def _refuse_tracers(edge_index: Any, where: str) -> None:
    refuse_linearize(where, "aggregations")
    mode: Any = fake_mode()
    if mode is not None and not mode.allow_non_fake_inputs and not is_traced(edge_index):
        raise ArgumentError(
            f"{where}the graph's own tensors are no fakes. Use "
            "FakeTensorMode(allow_non_fake_inputs=True)."
        )


def untransformed(edge_index: torch.Tensor, fn: Callable[[torch.Tensor], None]) -> None:
    """Call `fn`, which may keep tensors, with a plain tensor, outside of torch.func's transforms.

    Inside of ``torch.func.jvp`` and the like every new tensor belongs to the transform, and cannot
    be kept beyond it. The forward of an autograd.Function runs below all transforms.
    """
    _Untransformed.apply(edge_index, fn)  # type: ignore[no-untyped-call]


class _Untransformed(torch.autograd.Function):
    @staticmethod
    def forward(edge_index: torch.Tensor, fn: Callable[[torch.Tensor], None]) -> torch.Tensor:
        fn(edge_index)
        return edge_index.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        pass


def unwrap_forward(module: torch.nn.Module, kind: type) -> Callable[..., Any] | None:
    """Remove a wrapper of this kind from ``module.forward``; return the instance's own forward."""
    own = vars(module).get("forward")
    if isinstance(own, kind):
        own = vars(module).pop("forward").own
        if own is not None:
            vars(module)["forward"] = own
    return own


def add_edge_type_context(module: torch.nn.Module, context: ShardContext) -> None:
    """Let a layer note the edges that it is called with, if the graph has several types of edges.

    Inside of its forward the layer may add self loops, and propagate along a tensor that is not
    known.
    """
    own = unwrap_forward(module, _EdgeTypeContext)
    if len(context.edge_shards) > 1 and isinstance(module, MessagePassing | HeteroConv):
        vars(module)["forward"] = _EdgeTypeContext(module, context, own)


@dataclass(frozen=True, eq=False)
class _EdgeTypeContext:
    """A ``forward`` that enters the context of its edges; `own` is the instance's former one."""

    module: torch.nn.Module
    context: ShardContext
    own: Callable[..., Any] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        for value in given:
            if isinstance(value, dict):
                self._claim(value)
        known = (self.context.known(value) for value in given if isinstance(value, torch.Tensor))
        edges = next((edges for edges in known if edges is not None), None)
        with nullcontext() if edges is None else self.context.running_on(edges):
            if self.own is not None:
                return self.own(*args, **kwargs)
            return type(self.module).forward(self.module, *args, **kwargs)

    def _claim(self, by_type: dict[Any, Any]) -> None:
        """Let edges that stand under a type belong to this type."""
        for key, value in by_type.items():
            edges = self.context.edge_shards.get(key)
            if edges is not None and isinstance(value, torch.Tensor) and value.shape[:-1] == (2,):
                self.context.claim(value, edges)
