"""What stands before ``forward`` of layers on a graph with several types of edges.

Which type a layer propagates along is told by the tensor of edges that it is called with. Inside,
it may add self loops, and hand on a tensor that tells nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch_geometric.nn import HeteroConv, MessagePassing

from varcomm.graph.running.edges import EdgeSet
from varcomm.graph.running.place import Place

__all__ = ["listen"]


def listen(module: torch.nn.Module, place: Place) -> None:
    """Let a layer note which edges it is called with, if the graph has several types of them."""
    own = vars(module).get("forward")
    if isinstance(own, _Told):
        del vars(module)["forward"]
        own = own.own
    if len(place.edge_sets) > 1 and isinstance(module, MessagePassing | HeteroConv):
        own = _Told(module, place, own)
    if own is not None:
        vars(module)["forward"] = own


@dataclass(frozen=True, eq=False)
class _Told:
    """Stands before ``forward``; `own` is what the instance had in place of its class's."""

    module: torch.nn.Module
    place: Place
    own: Callable[..., Any] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        for value in given:
            if isinstance(value, dict):
                self._claim(value)
        edges = next(self._known(given), None)
        with nullcontext() if edges is None else self.place.running_on(edges):
            if self.own is not None:
                return self.own(*args, **kwargs)
            return type(self.module).forward(self.module, *args, **kwargs)

    def _known(self, values: list[Any]) -> Iterator[EdgeSet]:
        for value in values:
            if isinstance(value, torch.Tensor) and (edges := self.place.known(value)) is not None:
                yield edges

    def _claim(self, by_type: dict[Any, Any]) -> None:
        """Let edges that stand under a type be of this type."""
        for key, value in by_type.items():
            edges = self.place.edge_sets.get(key)
            if edges is not None and isinstance(value, torch.Tensor) and value.shape[:-1] == (2,):
                self.place.claim(value, edges)
