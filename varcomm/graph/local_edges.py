"""Whether edges that a layer is given are those of the graph that it runs on.

A layer may add self loops to them, and a user may leave some out. Edges of another partitioned
graph are in local numbers too, and would give numbers that are wrong without a word.
"""

from __future__ import annotations

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from varcomm.graph.running.outside import outside_transforms
from varcomm.plan.exchange_plan import ExchangePlan

__all__ = ["LocalEdges", "interior_and_loops", "plan_of", "positions", "remember"]

# Of the edge_index of each graph there is: so one that belongs to another graph is known for what
# it is, even where all its edges exist in this graph as well.
_plans: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def remember(edge_index: torch.Tensor, plan: ExchangePlan) -> None:
    """Remember to which graph, by its plan, a tensor of edges belongs, as long as it lives."""
    _plans[edge_index] = plan


def plan_of(edge_index: torch.Tensor) -> ExchangePlan | None:
    """Return the plan of the graph whose ``edge_index`` this is, or None."""
    return _plans.get(edge_index)  # type: ignore[no-any-return]


def interior_and_loops(edge_index: torch.Tensor, sources: int) -> tuple[int, int]:
    """Return how many edges come from own sources, and how many are self loops."""
    source, target = edge_index
    return int((source < sources).sum()), int((source == target).sum())


def positions(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Return where a mask of this many edges is true; int64, ascending.

    For compiled code, in which the shape of a result must not depend on data.
    """
    return torch.nonzero_static(mask, size=count).view(-1)


class LocalEdges:
    """The edges of a partitioned graph, prepared to be compared with.

    Parameters
    ----------
    edge_index : torch.Tensor
        In local numbers, int64 of shape (2, E).
    sources : int
        Owned nodes and halo, n + h: numbers of sources are below.
    loops : bool
        Whether equal numbers are the same node: not where sources and targets are of two types.
    """

    def __init__(self, edge_index: torch.Tensor, sources: int, loops: bool = True) -> None:
        self._sources = sources
        self._loops = loops
        self._straight = self._without_loops(edge_index)
        self._keys: torch.Tensor | None = None
        self._passed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    @outside_transforms
    def include(self, edge_index: torch.Tensor) -> bool:
        """Return whether each edge is an edge of the graph or a self loop; local numbers assumed.

        The same tensor is looked at once. Layers that add self loops make a new one at each call,
        in which all other edges stand first, as they are here: that costs one comparison, not a
        search.
        """
        # tensors of inference mode do not tell whether they have been written to
        version = None if edge_index.is_inference() else edge_index._version
        if version is not None and self._passed.get(edge_index) == version:
            return True
        rest, count = edge_index.to(self._straight.dtype), self._straight.shape[1]
        if torch.equal(rest[:, :count], self._straight):
            rest = rest[:, count:]
        rest = self._without_loops(rest)
        found = rest.shape[1] == 0 or self._found(rest)
        if found and version is not None:
            self._passed[edge_index] = version
        return found

    def _without_loops(self, edge_index: torch.Tensor) -> torch.Tensor:
        return edge_index[:, edge_index[0] != edge_index[1]] if self._loops else edge_index

    def _found(self, edges: torch.Tensor) -> bool:
        if self._keys is None:
            self._keys = self._key(self._straight).unique()  # sorted
        if not len(self._keys):
            return False
        key = self._key(edges)
        place = torch.searchsorted(self._keys, key).clamp_(max=len(self._keys) - 1)
        return torch.equal(self._keys[place], key)

    def _key(self, edges: torch.Tensor) -> torch.Tensor:
        return edges[1] * self._sources + edges[0]
