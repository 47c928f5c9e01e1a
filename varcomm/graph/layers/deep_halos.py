"""One halo exchange for all layers of a model, on a graph with halos of several hops.

The layers then run on owned nodes and halo, without communication. Each layer is right for one hop
less than the layer before, and the last one for owned nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch_geometric.nn.conv import ChebConv, DirGNNConv, GPSConv

from varcomm.errors import ArgumentError
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.index.node_groups import NodeGroups
from varcomm.graph.index.node_integers import NodeIntegers
from varcomm.graph.index.partitioned_index import PartitionedIndex, plain
from varcomm.graph.layers.propagate import Running
from varcomm.graph.layers.refused import refusal
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.ops.checks import checking
from varcomm.ops.compilation import kept_from_compilation
from varcomm.ops.nested import leaves, rebuilt
from varcomm.transport.agreement import share

# They count edges that leave a node, reverse edges, or look at all nodes.
_NOT_DEEP = (ChebConv, DirGNNConv, GPSConv)


def check_deep(name: str, module: torch.nn.Module, graph: PartitionedGraph) -> None:
    """Raise ArgumentError if a module needs other edges than those of halos of several hops."""
    if graph.hops > 1 and isinstance(module, _NOT_DEEP):
        reason = (
            "it needs more than the edges that lead to a node, and halos of several hops have no "
            "others. Partition the graph with hops=1"
        )
        raise refusal(name, module, reason)


def exchange_once(model: torch.nn.Module, running: Running) -> None:
    """Let a model exchange halos when it is called, if the graph's halos are of several hops."""
    for module in model.modules():  # a part may have been distributed before
        if module is not model:
            _unwrap_forward(module)
    own = _unwrap_forward(model)
    if running.graph.hops > 1:
        rows = NodeRows("a block of layers", running.graph.edges)
        vars(model)["forward"] = _Block(model, running, own, rows)


@dataclass(frozen=True, eq=False)
class NodeRows:
    """Which tensors of a call, `what`, have a row for each node; kept by structure and dtypes.

    All ranks agree: on a single rank a tensor may have as many rows by chance.
    """

    what: str
    edges: EdgeShard
    known: dict[tuple[Any, ...], tuple[bool, ...]] = field(default_factory=dict)

    def among(self, values: Sequence[Any], key: tuple[Any, ...], rows: int) -> tuple[bool, ...]:
        """Return whether each value has `rows` rows on all ranks; ranks agree once per `key`."""
        kinds = [(x.dtype, x.dim()) if isinstance(x, torch.Tensor) else type(x) for x in values]
        key = (*key, *kinds)
        if key not in self.known:
            fits = [isinstance(x, torch.Tensor) and x.shape[:1] == (rows,) for x in values]
            shared = share(self.what, lambda: fits, self.edges.group)
            self.known[key] = tuple(map(all, zip(*shared, strict=True)))
        return self.known[key]

    @kept_from_compilation
    def owned(self, out: Any, key: tuple[Any, ...] = ()) -> Any:
        """Return results without their halo rows."""
        owned = self.edges.num_sources
        values = leaves(out)
        rows = owned + self.edges.num_halo
        of_nodes = self.among([*values.values()], (*key, "out", *values), rows)
        pairs = zip(values.items(), of_nodes, strict=True)
        return rebuilt(out, {place: x[:owned] if flag else x for (place, x), flag in pairs})


@dataclass(frozen=True, eq=False)
class _Block:
    """A ``forward`` from owned rows to owned rows; `own` is the instance's former one."""

    model: torch.nn.Module
    running: Running
    own: Callable[..., Any] | None
    rows: NodeRows

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._with_halos((args, kwargs))
        with self._counting():
            if self.own is not None:
                out = self.own(*args, **kwargs)
            else:
                out = type(self.model).forward(self.model, *args, **kwargs)
        return self.rows.owned(out)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Count how often layers propagate; raise ArgumentError if the halo does not reach."""
        graph, before, steps = self.running.graph, self.running.step, 0

        def step(name: str) -> None:
            nonlocal steps
            steps += 1
            if steps > graph.hops:
                with checking(name, graph.group) as where:
                    raise ArgumentError(
                        f"{where}the model propagates more than {graph.hops} times, for which the "
                        f"halos of {graph.hops} hops do not suffice; parallel layers count one by "
                        "one. Partition the graph with more hops, or distribute parts of the "
                        "model, each with at most this number of layers, instead of the model."
                    )

        self.running.step = step
        try:
            yield
        finally:
            self.running.step = before

    @kept_from_compilation
    def _with_halos(self, given: Any) -> Any:
        edges = self.rows.edges
        values = leaves(given)
        of_rows = [
            None if isinstance(x, PartitionedIndex) and x.kind != "group" else x
            for x in values.values()
        ]
        of_nodes = self.rows.among(of_rows, ("in", *values), edges.num_sources)
        places = [place for place, flag in zip(values, of_nodes, strict=True) if flag]
        with checking(self.rows.what, edges.group) as where:
            for x in (values[place] for place in places):
                if x.shape[0] != edges.num_sources:
                    raise ArgumentError(
                        f"{where}a tensor of shape {tuple(x.shape)} stands where one with a row "
                        f"for each of the {edges.num_sources} owned nodes stood before."
                    )
        rows = edges.rules.rows_and_halos([plain(values[place]) for place in places])
        for place, x in zip(places, rows, strict=True):
            own = values[place]
            if isinstance(own, PartitionedIndex):  # halo rows do not count in readouts
                assert isinstance(own.of, NodeGroups)
                of = replace(own.of, num_owned=edges.num_sources)
                x = PartitionedIndex.make(x, of, own.kind, whole=True)
            elif isinstance(own, NodeIntegers):
                x = NodeIntegers.make(x, own.attribute)
            values[place] = x
        return rebuilt(given, values)


def _unwrap_forward(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Remove a block from ``module.forward``; return the instance's own forward."""
    own = vars(module).get("forward")
    if isinstance(own, _Block):
        own = vars(module).pop("forward").own
        if own is not None:
            vars(module)["forward"] = own
    return own
