"""Rules of ``edge_index``: sources fetch the halo, sums at sources return to the owners.

The edges are those of an :class:`EdgeShard`, which holds the data and makes the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.functional import pad

from varcomm._torch_private import transforms_active, version_of
from varcomm.errors import ArgumentError
from varcomm.graph.index.node_groups import (
    STARTS_FROM_ZERO,
    Extreme,
    end_of,
    extreme_of_parts,
)
from varcomm.graph.index.partitioned_index import How, Kind, Numbering, PartitionedIndex, ordinary
from varcomm.graph.node_shard import NodeShard
from varcomm.graph.on_device import require
from varcomm.ops.all_to_all_v import all_to_all_v
from varcomm.ops.checks import checking
from varcomm.ops.compilation import count_in, extent_of, kept_from_compilation
from varcomm.ops.graph_operator import in_graph
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.transport.group import Group, OfGroup

T = TypeVar("T")


class SplitEdges(NamedTuple):
    """Edges between owned nodes, and edges whose source is in the halo.

    Each part has the rows of sources, among the owned rows or those of the halo, the ids of
    targets, and the positions among all edges.
    """

    interior: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    boundary: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    order: torch.Tensor  # positions of all edges, part by part
    inverse: torch.Tensor  # of that order


# functions that select or make rows
_SELECT = frozenset((
    "__getitem__", "narrow", "split", "split_with_sizes", "tensor_split", "vsplit", "chunk",
    "index_select", "masked_select", "select", "unbind", "gather", "take", "take_along_dim",
    "unique", "repeat_interleave", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros",
))  # fmt: skip


class _WithHalo(torch.Tensor):
    """Owned rows followed by the rows of the halo, and results of row-wise operations on them.

    The type marks the rows, because their number does not: a rank may have no halo, and a table of
    the full graph may have equally many rows. Slices and selected rows are ordinary tensors.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as an ordinary tensor; select as one."""
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented  # a PartitionedIndex selects rows
        out = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        selects = getattr(func, "__name__", "") in _SELECT
        return ordinary(out, cls) if selects else out


@dataclass(eq=False)
class EdgeRules(Numbering, OfGroup):
    """Rules of the index vectors of one :class:`EdgeShard`, which has the same attributes.

    The graph sets `sources`, the nodes of the source's type, and `has_loops`, whether the nodes of
    the target's type are the same.
    """

    group: Group
    local_ids: torch.Tensor
    halo_ids: torch.Tensor
    plan: ExchangePlan
    num_targets: int
    counts: tuple[int, int]
    hops: int
    sources: NodeShard | None = None
    has_loops: bool = True

    # whether each layer fetches the halo; else one exchange of several hops serves all
    exchanges: bool = field(init=False)
    # the numbers of targets, interior edges and self loops, as sizes that compiled code reads
    extent: torch.Tensor = field(init=False)
    # rows of each differentiable exchange in a propagate; None outside, and in compiled code
    exchanged: list[torch.Tensor] | None = field(init=False, default=None)
    # what layers make of the edges alone, as PyG keeps with cached=True
    _kept: dict[Any, Any] = field(init=False, default_factory=dict)
    # owned nodes up to the last one that has an edge: at the last call, and for all edges
    _up_to_last_edge: int | None = field(init=False, default=None)
    _up_to_last_edge_of_all: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.exchanges = self.hops == 1
        self.extent = extent_of(self.num_targets, *self.counts, device=self.local_ids.device)

    def check_exchanges(self, where: str = "") -> None:
        """Raise ArgumentError unless each layer fetches the halo."""
        if not self.exchanges:
            raise ArgumentError(
                f"{where}the graph has halos of {self.hops} hops. Partition it with hops=1."
            )

    def kept(self, edge_index: PartitionedIndex, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """Return ``make()``, called once if these are the edges of the graph."""
        is_own = edge_index.plain is self.local_ids and edge_index.kind == "edges"
        if not is_own or torch.compiler.is_compiling() or transforms_active() or in_graph(None):
            return make()
        key = (*key, version_of(self.local_ids))
        if key not in self._kept:
            with torch.inference_mode(False), torch.no_grad():
                self._kept[key] = make()
        return self._kept[key]  # type: ignore[no-any-return]

    def layer_counts(self) -> tuple[int, int, int]:
        """Return the numbers of sources, halo nodes and targets in a layer.

        With halos of several hops, a layer does not exchange: owned nodes and halo are its sources
        and its targets. In compiled code the numbers are symbolic, so the same code serves other
        partitions.
        """
        if torch.compiler.is_compiling():
            halo, sources = self.plan.rows()
            targets = count_in(self.extent, 0)
        else:
            halo, sources, targets = self.plan.num_received, self.plan.num_rows, self.num_targets
        return (sources, halo, targets) if self.exchanges else (sources + halo, 0, sources + halo)

    def with_halo(self, x: Any, dim: int = 0) -> Any:
        """Append the halo rows; see :meth:`EdgeShard.with_halo`."""
        one = isinstance(x, torch.Tensor)
        self.plan.compare_first(*([x] if one else x), dim=dim)
        rows = self.rows_and_halos([x] if one else x, dim)
        rows = [out if in_graph(out) else out.as_subclass(_WithHalo) for out in rows]
        return rows[0] if one else tuple(rows)

    def rows_and_halo(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return the rows of :meth:`with_halo` as an ordinary tensor."""
        return joined(x, self.plan(x, dim=dim), dim)

    def rows_and_halos(self, xs: Sequence[torch.Tensor], dim: int = 0) -> list[torch.Tensor]:
        """Return rows of several tensors with the halo's, from one exchange."""
        if len(xs) < 2:
            return [self.rows_and_halo(x, dim) for x in xs]
        halos = self.plan(*xs, dim=dim)
        return [joined(x, halo, dim) for x, halo in zip(xs, halos, strict=True)]

    def selected_from(self, kind: Kind, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return `x`, with the halo's rows appended if sources select."""
        counts = self.layer_counts()
        sources, halo, targets = counts
        if x.shape[dim] < targets and self.is_up_to_last(x.shape[dim]):
            missing = x.new_zeros(*x.shape[:dim], targets - x.shape[dim], *x.shape[dim + 1 :])
            x = torch.cat([x, missing], dim=dim)
        given = x.shape[dim]
        if kind == "target":
            has_halo = given == targets or self._has_halo(kind, x, given, counts)
        else:
            is_owned = kind == "source" and given == sources and halo
            has_halo = not is_owned and self._has_halo(kind, x, given, counts)
        if has_halo:
            return ordinary(x, _WithHalo) if type(x) is _WithHalo else x
        if self.group.size == 1:
            return x
        x = self.rows_and_halo(x, dim)
        if self.exchanged is not None and x.requires_grad:
            self.exchanged.append(x)
        return x

    def fetched(
        self, edge_index: PartitionedIndex, read: Sequence[torch.Tensor], dim: int, least: int = 2
    ) -> PartitionedIndex:
        """Return edges with the rows of these tensors at their sources, from one exchange.

        A tensor that a layer reads twice occurs twice. Fewer than `least` tensors are not fetched.
        """
        if len(read) < least:  # compiled code then depends on no size
            return edge_index
        owned = self.layer_counts()[0]
        known = {id(x) for x, _ in edge_index.known}
        new = [
            x
            for x in read
            if id(x) not in known
            and not isinstance(x, _WithHalo)
            and -x.dim() <= dim < x.dim()
            and x.shape[dim] == owned
        ]
        if len(new) < least:
            return edge_index
        distinct = [*{id(x): x for x in new}.values()]
        alone = self.group.size == 1  # without a halo
        rows = self.rows_and_halos(distinct, dim) if self.exchanges and not alone else distinct
        return edge_index.knowing((*edge_index.known, *zip(distinct, rows, strict=True)))

    def _has_halo(
        self, kind: Kind, x: torch.Tensor, given: int, counts: tuple[int, int, int]
    ) -> bool:
        """Return whether rows have the halo's behind the owned ones; raise unless they fit."""
        sources, halo, targets = counts
        with checking("edge_index", self.group) as where:
            if kind in ("edges", "reversed") and not self.has_loops:
                raise ArgumentError(
                    f"{where}edges between two types of nodes select from two tensors: take rows "
                    "at edge_index[0] from one and at edge_index[1] from the other."
                )
            if kind != "target" or self.has_loops:
                known = not self.exchanges or isinstance(x, _WithHalo)
                if in_graph(x):  # where the number of rows has to show it
                    known = known or bool(halo)
                if given == sources + halo and known:
                    return True
                if given == sources and kind != "target":
                    return False
            owned = targets if kind == "target" else sources
            raise ArgumentError(
                f"{where}edges select from {given} rows, but this rank owns {owned} nodes. Call "
                "the model with the local part, graph.x, graph.edge_index, ...; propagate, "
                "x[edge_index[0]] and graph.with_halo(x) fetch the halo."
            )

    def start_at_targets(self, x: torch.Tensor, dim: int, src: torch.Tensor) -> torch.Tensor:
        """Return the initial values of a reduction at targets: `x`, if it has a row per target."""
        targets = self.layer_counts()[2]
        if x.shape[dim] == targets or self.is_up_to_last(x.shape[dim]):
            return x
        if x.shape[dim] == 0 and src.shape[dim] == 0:  # PyG counts up to the last target
            return x.new_zeros(*x.shape[:dim], targets, *x.shape[dim + 1 :])
        with checking("edge_index", self.group) as where:
            raise ArgumentError(
                f"{where}a reduction at the targets has {x.shape[dim]} rows, but this rank owns "
                f"{targets} nodes. Pass the number of owned nodes: x.size(0), or graph.num_owned."
            )

    def at_targets(self, out: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
        """Return the result of a local reduction at targets."""
        if self.exchanges or self.exchanged is not None:
            return out
        if src.dim() == 1:
            # Outside of a propagate, degrees are counted: nodes of the halo lack edges here, and
            # their owners send the degree.
            return self.rows_and_halo(out[: self.plan.num_rows])
        if torch.compiler.is_compiling():
            return out
        raise ArgumentError(
            "messages that are summed outside a layer of PyG need halos of one hop: partition "
            "the graph with hops=1."
        )

    def reduced(
        self, index: PartitionedIndex, how: How, src: torch.Tensor, start: torch.Tensor
    ) -> torch.Tensor:
        """Reduce rows of edges, (E, *F), at their sources, over all ranks: (n, *F)."""
        if not self.exchanges:
            raise ArgumentError(
                "edges are counted where they leave a node, and halos of several hops lack these. "
                "Partition the graph with hops=1."
            )
        ids = index.line
        assert ids is not None
        if how == "sum":
            return self._sum_at_sources(ids, src)
        if how == "prod":
            raise _unknown_at_sources()
        require(src.detach().isfinite().all(), _unknown_at_sources, self, "finite values")
        return self._extreme_at_sources(how, ids, src, start)

    def _sum_at_sources(self, index: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
        sources, halo, _ = self.layer_counts()
        local = src.new_zeros(sources + halo, *src.shape[1:]).index_add(0, index, src)
        return local[:sources] + self.plan.adjoint(local[sources:])

    def _extreme_at_sources(
        self, how: Extreme, index: torch.Tensor, src: torch.Tensor, start: torch.Tensor
    ) -> torch.Tensor:
        """Return extremes whose gradient the edges that have them share evenly."""
        plan, pg, owned = self.plan, self.group.process_group, self.plan.num_rows
        ones = torch.ones_like(src, dtype=torch.int32)
        rows = owned + plan.num_received
        received = []
        for part in extreme_of_parts(how, src, ones, index, rows):
            of_halos = all_to_all_v(part[owned:], plan.recv_counts, plan.send_counts, group=pg)
            received.append(joined(part[:owned], of_halos, 0))
        owners = torch.cat([torch.arange(owned, device=index.device), plan.send_index])
        tops, times = received
        out, times = extreme_of_parts(how, tops, times, owners, owned, STARTS_FROM_ZERO)
        if len(start) != owned:  # PyG counts up to the last node that has an edge
            start = pad(start, [0, 0] * (start.dim() - 1) + [0, owned - len(start)])
        return torch.where(times == 0, start, out)

    def count(self, kind: Kind, index: torch.Tensor, whole: bool) -> int:
        """Return the number of owned nodes; for edges, up to the last node that has an edge.

        Communication: for edges, 8 bytes per rank; for all of them, at the first call only.
        """
        if kind in ("source", "target") or not self.exchanges:
            sources, _, targets = self.layer_counts()
            return sources if kind == "source" else targets
        if self.sources is None or not self.has_loops:
            raise ArgumentError(
                "the largest number in edges of two types of nodes says nothing about either. Give "
                "num_nodes=x.size(0)."
            )
        return self._up_to_last(index, whole)

    @kept_from_compilation
    def _up_to_last(self, index: torch.Tensor, whole: bool) -> int:
        assert self.sources is not None
        count = self._up_to_last_edge_of_all if whole else None
        if count is None:
            owned = self.sources.owned_ids
            ids = torch.cat([owned, self.halo_ids])[index]
            count = int((owned < end_of(ids, self.group)).sum())
            if whole:
                self._up_to_last_edge_of_all = count
        self._up_to_last_edge = count
        return count

    def is_up_to_last(self, count: int) -> bool:
        """Return whether a number of nodes counts owned nodes up to the last one with an edge."""
        return not torch.compiler.is_compiling() and self._up_to_last_edge == count

    def check_has_loops(self) -> None:
        """Raise ArgumentError if sources and targets are of two types of nodes."""
        if not self.has_loops:
            raise ArgumentError(
                "edges between two types of nodes have no self loops: build the layer with "
                "add_self_loops=False."
            )

    def positions_of_loops(self, loops: bool, mask: torch.Tensor) -> torch.Tensor | slice:
        """Return a selector of all self loops, or of all other edges, in place of a mask."""
        count = count_in(self.extent, 2)
        if not loops and count == 0:
            return slice(None)
        if torch.compiler.is_compiling():
            return _positions(mask, count if loops else mask.shape[0] - count)
        return self._loops[0 if loops else 1]

    def with_loops(self, edge_index: PartitionedIndex, nodes: int) -> PartitionedIndex:
        """Return all edges with one self loop at each node, in the order of PyG's functions."""
        self.check_has_loops()
        ids = edge_index.plain
        others = self.positions_of_loops(False, ids[0] != ids[1])
        loops = torch.arange(nodes, device=ids.device).expand(2, -1)
        return PartitionedIndex.make(torch.cat([ids[:, others], loops], 1), self, "edges")

    @cached_property
    def _loops(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of self loops, and of other edges; kept for the next layer and step."""
        source, target = self.local_ids
        return (source == target).nonzero().view(-1), (source != target).nonzero().view(-1)

    @cached_property
    @torch.inference_mode(False)
    def split_edges(self) -> SplitEdges:
        """The edges in two parts, kept for the next layer and step."""
        source, target = self.local_ids
        owned = self.plan.num_rows
        order = torch.argsort(source >= owned, stable=True)
        interior, boundary = order.split([self.counts[0], len(order) - self.counts[0]])
        return SplitEdges(
            (source[interior], target[interior], interior),
            (source[boundary] - owned, target[boundary], boundary),
            order,
            torch.argsort(order),
        )

    def check_loops(self, edges: torch.Tensor) -> torch.Tensor:
        """Return appended edges if they are self loops of owned nodes."""
        targets = self.layer_counts()[2]
        self.check_has_loops()
        if in_graph(edges):
            return torch.ops.varcomm.self_loops(edges, targets)  # type: ignore[no-any-return]
        return _self_loops(edges, targets, self)


@torch.library.custom_op("varcomm::self_loops", mutates_args=())
def _checked_self_loops(edges: torch.Tensor, targets: int) -> torch.Tensor:
    return _self_loops(edges, targets, None).clone()


@_checked_self_loops.register_fake
def _(edges: torch.Tensor, targets: int) -> torch.Tensor:
    return torch.empty_like(edges)


def _self_loops(edges: torch.Tensor, targets: int, owner: EdgeRules | None) -> torch.Tensor:
    """Return edges, if each is a self loop of one of this number of nodes."""
    source, target = edges

    def error() -> ArgumentError:
        return ArgumentError(
            "edges that are appended to those of a partitioned graph must be self loops of owned "
            f"nodes, of which this rank has {targets}. Add other edges before the graph is "
            "partitioned."
        )

    are_loops = (source == target) & (source >= 0) & (source < targets)
    require(are_loops.all(), error, owner, ("self loops", len(source)))
    return edges


def _unknown_at_sources() -> ArgumentError:
    return ArgumentError(
        "products, and extremes of infinite values, at the sources of edges are not known across "
        "ranks."
    )


def joined(x: torch.Tensor, halo: torch.Tensor, dim: int) -> torch.Tensor:
    """Return rows followed by others, all of them in the graph of autograd."""
    if x.dim() == 1:
        # torch.cat drops an empty tensor of one dimension from the autograd graph
        return torch.cat([x.unsqueeze(1), halo.unsqueeze(1)]).squeeze(1)
    return torch.cat([x, halo], dim=dim)


def _positions(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` positions of a mask; in compiled code no shape may depend on data."""
    return torch.nonzero_static(mask, size=count).view(-1)
