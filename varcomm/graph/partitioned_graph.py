"""``PartitionedGraph``: the part of a graph that one rank owns, and how it reaches the others."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch_geometric.data import Data

from varcomm.errors import ArgumentError
from varcomm.graph.local_edges import LocalEdges, remember
from varcomm.graph.reductions import replicated_sum
from varcomm.graph.report import Report
from varcomm.layout import ShardSizes
from varcomm.ops.gather_v import gather_v
from varcomm.ops.operator import checking
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.transport.agree import compare, debugging, share
from varcomm.transport.group import Group

__all__ = ["PartitionedGraph"]

# What Data counts, which is unambiguous for its local part.
_COUNTS = ("num_edges", "num_edge_features", "num_features", "num_node_features")


@dataclass(frozen=True, eq=False)
class PartitionedGraph:
    """The part of a graph that this rank owns: nodes, all edges into them, and their attributes.

    Made by :func:`partition`. Attributes of nodes and edges are those of the whole graph, cut to
    what this rank owns: ``graph.x``, ``graph.edge_attr``, ``graph.y``, ... They keep the order that
    they have there. ``graph.num_nodes`` and ``graph.num_edges`` count what this rank owns, and
    ``"y" in graph`` tells whether there is such an attribute. The graph cannot be changed.

    Nodes have local numbers: ``0 ... n - 1`` are owned, ``n ... n + h - 1`` are the halo, copies of
    other ranks' nodes from which edges come, owner by owner. ``graph.edge_index`` is in local
    numbers.

    Attributes
    ----------
    data : torch_geometric.data.Data
        The local part.
    node_sizes : ShardSizes
        Nodes that each rank owns.
    owned_ids, halo_ids : torch.Tensor
        Numbers that the local nodes have in the whole graph; int64, shapes (n,) and (h,).
    plan : ExchangePlan
        Fills the halo: ``plan(x)`` of the owned rows gives the halo's rows.
    method : str
        How the ranks of nodes were decided.
    """

    data: Data = field(repr=False)
    node_sizes: ShardSizes
    owned_ids: torch.Tensor = field(repr=False)
    halo_ids: torch.Tensor = field(repr=False)
    plan: ExchangePlan = field(repr=False)
    method: str

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the local part, such as ``x`` or ``edge_index``."""
        # not during unpickling or copying, when there is no data yet
        if name.startswith("__") or "data" not in self.__dict__:
            raise AttributeError(name)
        if name in _COUNTS:
            return getattr(self.data, name)
        if name not in self.data:
            raise AttributeError(
                f"the graph has no attribute {name!r}; its data have {', '.join(self.data.keys())}."
            )
        return self.data[name]

    def __post_init__(self) -> None:
        remember(self.edge_index, self.plan)

    def __contains__(self, name: str) -> bool:
        return name in self.data

    def __deepcopy__(self, memo: dict[int, Any]) -> PartitionedGraph:
        """Return the graph itself, which is not changed: copies of a model run on the same."""
        return self

    @property
    def group(self) -> Group:
        """The ranks that the graph is split over."""
        return self.plan.group

    @property
    def num_owned(self) -> int:
        """Nodes that this rank owns, n."""
        return self.plan.num_rows

    @property
    def num_halo(self) -> int:
        """Nodes of other ranks that this one has copies of, h."""
        return len(self.halo_ids)

    @cached_property
    def local_edges(self) -> LocalEdges:
        """The edges, prepared to compare with them what a layer is given."""
        return LocalEdges(self.edge_index, self.num_owned + self.num_halo)

    def with_halo(self, x: torch.Tensor) -> torch.Tensor:
        """Append the halo's rows to the owned ones.

        Parameters
        ----------
        x : torch.Tensor
            Owned rows, (n, *F).

        Returns
        -------
        torch.Tensor
            Owned rows and the halo's, (n + h, *F). Its adjoint adds what arrives at copies to the
            rows that they are copies of.
        """
        return torch.cat([x, self.plan(x)])

    def gather(self, x: torch.Tensor, dst: int = 0) -> torch.Tensor:
        """Collect a value of each node on one rank, in the order of the whole graph.

        Parameters
        ----------
        x : torch.Tensor
            Owned rows, (n, *F).
        dst : int
            The rank, within the group, that gets them.

        Returns
        -------
        torch.Tensor
            On `dst` (N, *F), elsewhere zero rows. Differentiable: the adjoint sends rows back.

        Raises
        ------
        ArgumentError
            Before any communication, if `x` or `dst` do not fit on this rank.

        Notes
        -----
        Communication: each rank sends its rows, and their numbers at 8 bytes each, to `dst`.
        """
        with checking("graph.gather", self.group) as where:
            if not isinstance(x, torch.Tensor) or x.shape[:1] != (self.num_owned,):
                raise ArgumentError(
                    f"{where}x must be a tensor with one row for each of the {self.num_owned} "
                    f"owned nodes; got {_described(x)}."
                )
        pg = self.group.process_group
        ids = gather_v(self.owned_ids, self.node_sizes, dst=dst, group=pg)
        rows = gather_v(x, self.node_sizes, dst=dst, group=pg)
        return rows.index_select(0, ids.argsort())

    def sum(self, values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Sum over the nodes of all ranks.

        The gradient is counted once, under the assumption that every rank uses the result alike.

        Parameters
        ----------
        values : torch.Tensor
            A value, or several, of each owned node, (n, *F); or, with a mask, of each node that
            counts, in their order. Real floats; the same ``*F`` on every rank.
        mask : torch.Tensor, optional
            Which owned nodes count, bool of shape (n,).

        Returns
        -------
        torch.Tensor
            A scalar, the same on all ranks bit for bit, in the dtype of `values`.

        Raises
        ------
        ArgumentError
            Before any communication, if `values` or `mask` do not fit on this rank.

        Notes
        -----
        Summed in fp64, locally and over ranks: 16 bytes a rank.

        Where something outside the mask is NaN, give the rows that count alone,
        ``loss(prediction[mask], y[mask])`` beside `mask`. A loss of all rows is NaN there, and so
        is its derivative: it stays NaN times the zero that arrives, as in one process.
        """
        return self._sum_and_count("graph.sum", values, mask)[0].to(values.dtype)

    def mean(self, values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Average over the nodes of all ranks, and over their features.

        The gradient is counted once, under the assumption that every rank uses the result alike: as
        for a loss, whose ``backward()`` every rank calls. Then each rank has its part of the
        gradients of replicated parameters, and :func:`varcomm.data_parallel.sum_gradients`
        completes them.

        Parameters
        ----------
        values, mask
            As in :meth:`sum`; where `y` is NaN outside the mask,
            ``graph.mean(loss(prediction[mask], y[mask]), mask)``.

        Returns
        -------
        torch.Tensor
            A scalar, the same on all ranks bit for bit, in the dtype of `values`; NaN if no node of
            any rank counts.
        """
        total, count = self._sum_and_count("graph.mean", values, mask)
        return (total / count).to(values.dtype)

    def report(self) -> Report:
        """Tell how even the parts are and what an exchange costs; collective."""
        source = self.edge_index[0]
        own = (
            self.num_owned,
            self.num_halo,
            int(source.numel()),
            int((source >= self.num_owned).sum()),
            sum(self.plan.send_counts),
        )
        columns = zip(*share("graph.report", lambda: own, self.group), strict=True)
        return Report(self.method, *columns)

    def _sum_and_count(
        self, what: str, values: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with checking(what, self.group) as where:
            _check_values(values, mask, self.num_owned, where)
        if debugging():
            row = {"dtype": str(values.dtype), "shape of a row": list(values.shape[1:])}
            compare(self.group, {"operation": what} | row)
        if mask is not None and len(values) == self.num_owned:
            values = values[mask]
        part = values.sum(dtype=torch.float64)
        count = torch.full_like(part, values.numel())
        total = replicated_sum(torch.stack([part, count]), self.group)
        return total[0], total[1]


def _check_values(values: Any, mask: Any, owned: int, where: str) -> None:
    if mask is not None and not (
        isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.shape == (owned,)
    ):
        raise ArgumentError(
            f"{where}mask must be of torch.bool and shape ({owned},); got {_described(mask)}."
        )
    if not isinstance(values, torch.Tensor) or not values.is_floating_point() or values.dim() == 0:
        rows: tuple[int, ...] = ()
    else:
        # counting what a mask lets through waits for the device
        rows = (owned,) if mask is None or len(values) == owned else (owned, int(mask.sum()))
    if not rows or len(values) not in rows:
        among = "" if mask is None else ", or for each of those that the mask lets through"
        raise ArgumentError(
            f"{where}values must be floats, one row for each of the {owned} owned nodes{among}; "
            f'got {_described(values)}. For a loss: reduction="none".'
        )


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return type(value).__name__


def _refuse_change(graph: PartitionedGraph, name: str, value: object = None) -> None:
    raise FrozenInstanceError(
        f"cannot change {name!r}: a partitioned graph stays as it is. Keep what you compute in a "
        "variable of your own; or put it into the whole graph, before partition."
    )


# The dataclass's own say no more than that it is frozen.
type.__setattr__(PartitionedGraph, "__setattr__", _refuse_change)
type.__setattr__(PartitionedGraph, "__delattr__", _refuse_change)
