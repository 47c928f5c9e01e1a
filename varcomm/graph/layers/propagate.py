"""``propagate`` and ``edge_updater`` of a layer on a partitioned graph: checks, one exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import Aggregation

from varcomm._torch_private import transforms_active
from varcomm.errors import ArgumentError
from varcomm.graph.index.edges import EdgeRules
from varcomm.graph.index.partitioned_index import Numbering, PartitionedIndex
from varcomm.graph.layers.overlap import is_per_edge, overlaps, propagate_overlapped
from varcomm.graph.layers.refused import OF_ALL_EDGES, OTHER_IDS, TARGET_IDS
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.ops.checks import checking
from varcomm.transport.call_log import Layer

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
    overlap: bool = False  # whether layers compute messages while the halo travels
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


_MESSAGE_FUNCTIONS = ("message", "aggregate", "update")

# Hooks of PyG that see edges or values before a layer's functions do.
_HOOKS = [
    f"_{function}_forward_{hook}"
    for function in ("propagate", *_MESSAGE_FUNCTIONS[:2], "edge_update")
    for hook in ("pre_hooks", "hooks")
]


def attach(layer: MessagePassing, running: Running, name: str) -> None:
    """Let a layer check the edges that it propagates along, and exchange once to propagate.

    Ranks compare the `name` that it has in the model at their next sum.

    The instance's methods are replaced, because torch.compile skips PyG's hooks.
    """
    layer.propagate = _adapted(layer, "propagate", running, name, _MESSAGE_FUNCTIONS)
    if layer.inspector.implements("edge_update"):
        layer.edge_updater = _adapted(layer, "edge_updater", running, name, ("edge_update",))


def _adapted(
    layer: MessagePassing, method: str, running: Running, name: str, functions: Sequence[str]
) -> _Adapted:
    names = dict.fromkeys(
        name
        for function in functions
        for name in layer.inspector.get_param_names(function)
        if name not in OF_ALL_EDGES
    )
    at_j, at_i = ([name[:-2] for name in names if name.endswith(end)] for end in ("_j", "_i"))
    reads_all_rows = not names.keys().isdisjoint((*at_j, *at_i))
    shows_ids = any(_shows_ids(layer, function) for function in functions)
    hides_ids = _is_of_pyg(layer, method) and not shows_ids and not reads_all_rows
    call = f"{method} of {name or 'the model'} ({type(layer).__name__})"
    per_edge = method == "propagate" and _is_of_pyg(layer, method) and is_per_edge(layer)
    return _Adapted(layer, method, running, at_j, at_i, hides_ids, per_edge, Layer(call))


def _is_of_pyg(layer: MessagePassing, method: str) -> bool:
    """Return whether PyG wrote a method, or generated it for a class."""
    return all(
        kind.__module__.startswith("torch_geometric.")
        or vars(kind)[method].__module__.startswith(f"{kind.__module__}_{kind.__name__}_")
        for kind in type(layer).__mro__
        if method in vars(kind)
    )


def _shows_ids(layer: MessagePassing, function: str) -> bool:
    """Return whether one of a layer's functions passes ids to code that may look at all nodes."""
    names = {*layer.inspector.get_param_names(function)}
    if not names.isdisjoint(OTHER_IDS):
        return True
    parts = layer.aggr_module.modules() if layer.aggr_module is not None else ()
    readers = [type(part) for part in parts if isinstance(part, Aggregation)]
    if getattr(type(layer), function) is not getattr(MessagePassing, function):
        readers.append(type(layer))
    is_of_pyg = all(reader.__module__.startswith("torch_geometric.") for reader in readers)
    return not names.isdisjoint(TARGET_IDS) and not is_of_pyg


def is_attached(layer: MessagePassing) -> bool:
    """Return whether a layer checks its edges; PyG replaces its methods to explain a model."""
    return isinstance(vars(layer).get("propagate"), _Adapted)


@dataclass(frozen=True, eq=False)
class _Adapted:
    """A method of a layer after a check of the edges and one exchange for all that it reads."""

    layer: MessagePassing
    method: str
    running: Running
    # values of which the layer's functions take rows at one end of the edges, or at the other
    at_j: list[str]
    at_i: list[str]
    # whether only code of PyG sees ids, and those of targets alone: its results are local
    hides_ids: bool
    is_per_edge: bool  # whether messages may be computed in two parts
    in_log: Layer  # of the group

    def __call__(self, edge_index: PartitionedIndex, size: Any = None, **values: Any) -> Any:
        self.running.check(edge_index, self.method)
        if self.method == "propagate" and self.running.step is not None:
            self.running.step(self.method)
        edges = edge_index.of
        assert isinstance(edges, EdgeRules)
        hides_ids = self.hides_ids and self._may_hide_ids(edge_index)
        read = self.at_sources(edge_index, values)
        in_parts = self._overlaps(edge_index, size, values)
        if not in_parts:
            edge_index = edges.fetched(edge_index, read, self.layer.node_dim, 1 if hides_ids else 2)
        ids: torch.Tensor = edge_index
        unread = [*values.values()]
        if in_parts:
            ids = edge_index.plain if hides_ids else edge_index
        elif hides_ids and (rows := self._rows_at_ends(edge_index, size, values)) is not None:
            ids, size, values = edge_index.plain, (None, edges.layer_counts()[2]), values | rows
        own, group = getattr(type(self.layer), self.method), self.running.graph.group
        if torch.compiler.is_compiling():
            self.in_log.is_compiled = group.compiles = True
            return own(self.layer, ids, size=size, **values)
        before, edges.exchanged = edges.exchanged, []
        exchanged = edges.exchanged
        try:
            if in_parts:
                out, halos = propagate_overlapped(
                    self.layer, edges, ids[1], values, self.in_log.name
                )
                exchanged += [halo for halo in halos if halo.requires_grad]
            else:
                out = own(self.layer, ids, size=size, **values)
        finally:
            edges.exchanged = before
        if group.log is not None:
            group.log.add_layer(self.in_log)
        exchanged += [rows for x, rows in edge_index.known if rows is not x and rows.requires_grad]
        # backward is collective: without edges, it must contain all tensors that a message reads
        unread = unread if edge_index.plain.shape[1] == 0 else []
        if not unread and not exchanged:
            return out
        return keep_exchanges_in_graph(out, unread, exchanged)

    def _overlaps(self, edge_index: PartitionedIndex, size: Any, values: dict[str, Any]) -> bool:
        """Return whether messages are computed in two parts; the same on all ranks."""
        if not self.running.overlap:
            return False
        layer = self.layer
        ends = [values.get(name) for name in {*self.at_j, *self.at_i}]
        each = [x for end in ends for x in (end if isinstance(end, tuple | list) else [end])]
        tensors = [x for x in each if isinstance(x, torch.Tensor)]
        return (
            len(self.at_sources(edge_index, values)) > 0
            and self.is_per_edge
            and edge_index.kind == "edges"
            and not edge_index.known
            and overlaps(edge_index.of, edge_index.plain)
            and layer.flow == "source_to_target"
            and not any(map(vars(layer).get, _HOOKS))
            and size is None
            and all(type(x) is torch.Tensor and layer.node_dim in (0, -x.dim()) for x in tensors)
        )

    def _may_hide_ids(self, edge_index: PartitionedIndex) -> bool:
        """Return whether messages go to targets, at least one, and no hook of the layer runs."""
        return (
            not torch.compiler.is_compiling()  # the rules need fewer recompilations
            and edge_index.kind == "edges"
            and self.layer.flow == "source_to_target"
            and edge_index.plain.shape[1] > 0
            and not any(map(vars(self.layer).get, _HOOKS))
        )

    def at_sources(
        self, edge_index: PartitionedIndex, values: dict[str, Any]
    ) -> list[torch.Tensor]:
        """Return the tensors that the method takes rows of at the sources of edges."""
        place = 0 if edge_index.kind == "edges" else 1
        forward = self.layer.flow == "source_to_target"
        read = []
        for name in self.at_j if forward == (place == 0) else self.at_i:
            value = values.get(name)
            if isinstance(value, tuple | list):
                value = value[place]
            if isinstance(value, torch.Tensor) and not isinstance(value, PartitionedIndex):
                read.append(value)
        return read

    def _rows_at_ends(
        self, edge_index: PartitionedIndex, size: Any, values: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Return pairs of rows with the halo and rows of targets, by names of the layer's values.

        None if the shapes do not fit: the rules of the vector then raise, or complete the rows.
        """
        assert isinstance(edge_index.of, EdgeRules)
        sources, _, targets = edge_index.of.layer_counts()
        num_sources, num_targets = (None, None) if size is None else size
        counts = set() if num_targets is None else {num_targets}
        rows_of = {id(x): rows for x, rows in edge_index.known}
        pairs: dict[str, Any] = {}
        for name in {*self.at_j, *self.at_i}:
            value = values.get(name)
            if value is None:
                continue
            is_pair = isinstance(value, tuple | list)
            source, target = value if is_pair else (value, value if name in self.at_i else None)
            if name not in self.at_j or source is None:
                rows = None
            elif (rows := rows_of.get(id(source))) is None:
                return None
            if isinstance(target, torch.Tensor):
                counts.add(target.size(self.layer.node_dim))
            pairs[name] = rows, target
        fits = num_sources in (None, sources) and (counts or {sources}) == {targets}
        return pairs if fits else None


def keep_exchanges_in_graph(
    out: Any, unread: Sequence[Any], exchanged: Sequence[torch.Tensor]
) -> Any:
    """Return a result of a layer whose first floating tensor depends on values and exchanges.

    Backward is collective: a rank whose edges ignore the rows would leave the others waiting.
    """
    if type(out) in (tuple, list):
        for place, one in enumerate(out):
            if isinstance(one, torch.Tensor) and (one.is_floating_point() or one.is_complex()):
                first = keep_exchanges_in_graph(one, unread, exchanged)
                return type(out)([*out[:place], first, *out[place + 1 :]])
    if not isinstance(out, torch.Tensor) or not torch.is_grad_enabled():
        return out
    if not (out.is_floating_point() or out.is_complex()):
        return out
    if unread:
        out = sum(_nothing_of(unread), out)
    if not exchanged:
        return out
    if transforms_active():
        return sum(_nothing_of(exchanged), out)
    return _Depending.apply(out, *exchanged)  # type: ignore[no-untyped-call]


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
