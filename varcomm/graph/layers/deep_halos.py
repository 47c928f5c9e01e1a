"""One halo exchange for all layers of a model, on a graph with halos of several hops.

The layers then run on owned nodes and halo, without communication. Each layer is right for one hop
less than the layer before, and the last one for owned nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from varcomm.errors import ArgumentError
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.index.batch import Graphs
from varcomm.graph.index.partitioned_index import PartitionedIndex, plain
from varcomm.graph.layers.propagate import Running
from varcomm.ops.compilation import kept_from_compilation
from varcomm.ops.operator import checking
from varcomm.transport.agreement import share

__all__ = ["NodeRows", "exchange_once"]


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

    def among(self, leaves: Sequence[Any], key: tuple[Any, ...], rows: int) -> tuple[bool, ...]:
        """Return, per leaf, whether it has `rows` rows on all ranks; ranks agree once per `key`."""
        kinds = [
            (leaf.dtype, leaf.dim()) if isinstance(leaf, torch.Tensor) else type(leaf)
            for leaf in leaves
        ]
        key = (*key, *kinds)
        if key not in self.known:
            fits = [isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (rows,) for leaf in leaves]
            shared = share(self.what, lambda: fits, self.edges.group)
            self.known[key] = tuple(map(all, zip(*shared, strict=True)))
        return self.known[key]

    @kept_from_compilation
    def owned(self, out: Any, key: tuple[Any, ...] = ()) -> Any:
        """Return results without their halo rows."""
        owned = self.edges.num_sources
        leaves, spec = tree_flatten(out)
        of_nodes = self.among(leaves, (*key, "out", str(spec)), owned + self.edges.num_halo)
        pairs = zip(leaves, of_nodes, strict=True)
        return tree_unflatten([x[:owned] if flag else x for x, flag in pairs], spec)


@dataclass(frozen=True, eq=False)
class _Block:
    """A ``forward`` from owned rows to owned rows; `own` is the instance's former one."""

    model: torch.nn.Module
    running: Running
    own: Callable[..., Any] | None
    rows: NodeRows

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._with_halos((args, kwargs))
        with self.running.counting():
            if self.own is not None:
                out = self.own(*args, **kwargs)
            else:
                out = type(self.model).forward(self.model, *args, **kwargs)
        return self.rows.owned(out)

    @kept_from_compilation
    def _with_halos(self, given: Any) -> Any:
        edges = self.rows.edges
        leaves, spec = tree_flatten(given)
        values = [
            None if isinstance(x, PartitionedIndex) and x.kind != "graph" else x for x in leaves
        ]
        of_nodes = self.rows.among(values, ("in", str(spec)), edges.num_sources)
        with checking(self.rows.what, edges.group) as where:
            for leaf, flag in zip(leaves, of_nodes, strict=True):
                if flag and leaf.shape[0] != edges.num_sources:
                    raise ArgumentError(
                        f"{where}a tensor of shape {tuple(leaf.shape)} stands where one with a row "
                        f"for each of the {edges.num_sources} owned nodes stood before."
                    )
        places = [at for at, flag in enumerate(of_nodes) if flag]
        rows = edges.rows_and_halos([plain(leaves[at]) for at in places])
        graphs = Graphs(edges.group, num_owned=edges.num_sources)
        for at, x in zip(places, rows, strict=True):
            own = leaves[at]
            if isinstance(own, PartitionedIndex):  # halo rows do not count in readouts
                x = PartitionedIndex.make(x, graphs, own.kind, whole=True)
            leaves[at] = x
        return tree_unflatten(leaves, spec)


def _unwrap_forward(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Remove a block from ``module.forward``; return the instance's own forward."""
    own = vars(module).get("forward")
    if isinstance(own, _Block):
        own = vars(module).pop("forward").own
        if own is not None:
            vars(module)["forward"] = own
    return own
