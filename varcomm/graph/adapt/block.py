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
from varcomm.graph.adapt.propagate import Running
from varcomm.graph.edge_shard import EdgeShard
from varcomm.graph.index import PartitionedIndex
from varcomm.graph.nn.graphs import Graphs
from varcomm.ops.compilation import kept_from_compilation
from varcomm.ops.operator import checking
from varcomm.transport.agreement import share

__all__ = ["exchange_once"]


def exchange_once(model: torch.nn.Module, running: Running) -> None:
    """Let a model exchange halos when it is called, if the graph's halos are of several hops."""
    for module in model.modules():  # a part may have been distributed before
        if module is not model:
            _unwrap_forward(module)
    own = _unwrap_forward(model)
    if running.graph.hops > 1:
        vars(model)["forward"] = _Block(model, running, own)


@dataclass(frozen=True, eq=False)
class _Block:
    """A ``forward`` from owned rows to owned rows; `own` is the instance's former one."""

    model: torch.nn.Module
    running: Running
    own: Callable[..., Any] | None
    # by the types of a call's tensors, which of these have a row for each node
    _of_nodes: dict[tuple[Any, ...], tuple[bool, ...]] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._with_halos((args, kwargs))
        with self.running.counting():
            if self.own is not None:
                out = self.own(*args, **kwargs)
            else:
                out = type(self.model).forward(self.model, *args, **kwargs)
        return self._owned(out)

    @kept_from_compilation
    def _with_halos(self, given: Any) -> Any:
        edges = self.running.graph.edges
        leaves, spec = tree_flatten(given)
        is_edges = [isinstance(leaf, PartitionedIndex) and leaf.kind != "graph" for leaf in leaves]
        of_nodes = self._agreed(leaves, ("in", str(spec)), edges.num_sources, is_edges)
        with checking("a block of layers", self.running.graph.group) as where:
            for leaf, flag in zip(leaves, of_nodes, strict=True):
                if flag and leaf.shape[0] != edges.num_sources:
                    raise ArgumentError(
                        f"{where}a tensor of shape {tuple(leaf.shape)} stands where one with a row "
                        f"for each of the {edges.num_sources} owned nodes stood before."
                    )
        pairs = zip(leaves, of_nodes, strict=True)
        return tree_unflatten([_with_halo(edges, x) if flag else x for x, flag in pairs], spec)

    @kept_from_compilation
    def _owned(self, out: Any) -> Any:
        edges = self.running.graph.edges
        leaves, spec = tree_flatten(out)
        rows = edges.num_sources + edges.num_halo
        of_nodes = self._agreed(leaves, ("out", str(spec)), rows, [False] * len(leaves))
        pairs = zip(leaves, of_nodes, strict=True)
        return tree_unflatten([x[: edges.num_sources] if flag else x for x, flag in pairs], spec)

    def _agreed(
        self, leaves: Sequence[Any], what: tuple[Any, ...], rows: int, excepted: Sequence[bool]
    ) -> tuple[bool, ...]:
        """Return which of these have a row for each node on all ranks; asked once per signature.

        On a single rank a tensor may have as many rows by chance.
        """
        kinds = tuple(
            (leaf.dtype, leaf.dim()) if isinstance(leaf, torch.Tensor) else type(leaf)
            for leaf in leaves
        )
        key = (*what, kinds)
        if key not in self._of_nodes:
            fits = [
                isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == rows and not no
                for leaf, no in zip(leaves, excepted, strict=True)
            ]
            shared = share("a block of layers", lambda: fits, self.running.graph.group)
            self._of_nodes[key] = tuple(map(all, zip(*shared, strict=True)))
        return self._of_nodes[key]


def _with_halo(edges: EdgeShard, x: torch.Tensor) -> torch.Tensor:
    """Append the halo's rows, which do not count in readouts by a batch vector."""
    if not isinstance(x, PartitionedIndex):
        return edges.rows_and_halo(x)
    graphs = Graphs(edges.group, num_owned=edges.num_sources)
    return PartitionedIndex.make(edges.rows_and_halo(x.plain), graphs, x.kind, whole=True)


def _unwrap_forward(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Remove a block from ``module.forward``; return the instance's own forward."""
    own = vars(module).get("forward")
    if isinstance(own, _Block):
        own = vars(module).pop("forward").own
        if own is not None:
            vars(module)["forward"] = own
    return own
