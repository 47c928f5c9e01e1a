"""Rows of one kind, nodes or edges, that are sharded over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from varcomm.errors import ArgumentError, DisagreementError
from varcomm.graph.directory import Directory
from varcomm.graph.index.partitioned_index import Marked, PartitionedIndex
from varcomm.graph.on_device import require
from varcomm.graph.replicated_values import replicated_sum
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.checks import checking
from varcomm.ops.compilation import count_in, extent_of, kept_from_compilation
from varcomm.ops.gather_v import gather_v, scatter_v
from varcomm.ops.packing import taken
from varcomm.plan.checks import checked_index
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sizes import ShardSizes, checked_rank
from varcomm.transport.agreement import agree_and_share, compare, debugging
from varcomm.transport.group import Group, OfGroup

# the rank of each node
Ranks = torch.Tensor | np.ndarray[Any, Any] | Sequence[int]


@dataclass(frozen=True, eq=False)
class Shard(OfGroup):
    """The owned rows of one kind: their attributes, and their ids in the full graph.

    ``shard.x`` is the attribute ``x`` of the rows that this rank owns. Attributes are documented at
    :class:`NodeShard`.
    """

    group: Group = field(repr=False)
    sizes: ShardSizes
    attributes: Mapping[str, Any] = field(repr=False)
    ids: torch.Tensor = field(repr=False)

    # : name of the rows in messages
    noun: ClassVar[str]

    @cached_property
    def owned_extent(self) -> torch.Tensor:
        """The number of owned rows, as a size that compiled code reads."""
        return extent_of(self.num_owned, device=self.ids.device)

    @property
    def owned_ids(self) -> torch.Tensor:
        """Ids of the owned rows in the full graph, ascending; int64 of shape (n,). A copy."""
        return self.ids.clone()

    @property
    def num_owned(self) -> int:
        """Rows that this rank owns, n."""
        return self.sizes[self.group.rank]

    def counted(self) -> int:
        """Return the number of owned rows; symbolic in compiled code."""
        return count_in(self.owned_extent, 0)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the owned rows."""
        # not during unpickling or copying, when there are no attributes yet
        if name.startswith("__") or "attributes" not in self.__dict__:
            raise AttributeError(name)
        if name not in self.attributes:
            have = ", ".join(self.attributes) or "no attributes"
            raise AttributeError(f"the {self.noun} have no attribute {name!r}; they have {have}.")
        return self.attributes[name]

    def __contains__(self, name: str) -> bool:
        return name in self.attributes

    def gather(self, x: torch.Tensor, dst: int | None = None) -> torch.Tensor:
        """Collect rows of all ranks, in the order of the full graph.

        The adjoint returns gradients to the owners of the rows; if `dst` is None, it sums the
        gradients of all ranks.
        Communication: each rank's rows. The first call for a `dst` also sends their ids, 8 bytes
        per row, which `dst` stores.

        Parameters
        ----------
        x : torch.Tensor
            A value per owned row, (n, *F).
        dst : int, optional
            Group rank of the receiver; None means every rank.

        Returns
        -------
        torch.Tensor
            (N, *F) on `dst`, elsewhere zero rows.

        Raises
        ------
        ArgumentError
            On this rank, before any communication, if `x` or `dst` are invalid.
        """
        with checking("graph.gather", self.group) as where:
            if not isinstance(x, torch.Tensor) or x.shape[:1] != (self.num_owned,):
                raise ArgumentError(
                    f"{where}x must be a tensor with one row for each of the {self.num_owned} "
                    f"owned {self.noun}; got {described(x)}."
                )
            if dst is not None:
                dst = checked_rank(dst, self.group.size, "dst", where)
        _, place = self._order(dst)
        whole = self._gathered(x, dst)
        return taken(whole, place.to(whole.device))

    def _gathered(self, x: torch.Tensor, dst: int | None) -> torch.Tensor:
        pg = self.group.process_group
        if dst is None:
            return all_gather_v(x, self.sizes, group=pg)
        return gather_v(x, self.sizes, dst=dst, group=pg)

    def scatter(self, x: torch.Tensor | None, src: int = 0) -> torch.Tensor:
        """Send each rank its rows of a full tensor on one rank.

        The adjoint is :meth:`gather` to `src`.
        Communication: as in :meth:`gather`.

        Parameters
        ----------
        x : torch.Tensor or None
            On `src`, one value per row in the order of the full graph, (N, *F); elsewhere None.
        src : int
            Group rank of the sender.

        Returns
        -------
        torch.Tensor
            This rank's rows, (n, *F): ``x[owned_ids]``.

        Raises
        ------
        ArgumentError
            On every rank, if `x` is invalid on `src`.
        """
        with checking("graph.scatter", self.group) as where:
            src = checked_rank(src, self.group.size, "src", where)
        order, _ = self._order(src)
        fits = isinstance(x, torch.Tensor) and x.shape[:1] == (self.sizes.total,)
        if x is not None and fits and self.group.rank == src and x.layout == torch.strided:
            # otherwise scatter_v raises on every rank; this rank must not fail alone
            x = taken(x, order.to(x.device))
        return scatter_v(x, self.sizes, src=src, group=self.group.process_group)

    def owner(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rank that owns each row, by its id in the full graph; collective.

        Arguments, errors and communication are as in :meth:`rows`, but no rows are sent.
        """
        ids = self._agreed_ids("graph.owner", ids)
        numbers = self.directory.look_up(ids.reshape(-1))
        return self.sizes.owner(numbers).view(ids.shape)

    def rows(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Fetch rows of any ranks by their ids in the full graph; collective.

        Parameters
        ----------
        values : torch.Tensor
            A value per owned row, (n, *F).
        ids : torch.Tensor
            Ids in the full graph, int64 or int32 of any shape, such as pairs (2, L). Each rank
            passes its own ids; ids may repeat, and a rank may pass none.

        Returns
        -------
        torch.Tensor
            ``(*ids.shape, *F)``. The adjoint sums, at the owner of a row, the gradients of its
            copies.

        Raises
        ------
        ArgumentError
            On every rank, if `values` of one rank do not match its owned rows, or its `ids` are
            local or out of range.
        DisagreementError
            On every rank, if dtypes or shapes of rows differ.

        Notes
        -----
        Ids may differ in each call. Communication per call: 24 bytes per distinct id, and its row;
        in backward the gradient of the row. The first call builds a directory, for which each rank
        sends 16 bytes per owned row and stores N/P entries of 8 bytes.

        Examples
        --------
        >>> import torch, varcomm
        >>> from torch_geometric.data import Data
        >>> def fn(rank):
        ...     edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
        ...     ring = Data(x=torch.arange(4.0) * 10, edge_index=edge_index)
        ...     graph = varcomm.graph.partition(ring, method="block")
        ...     ids = torch.tensor([[3, 0], [3, 1]]) if rank == 0 else torch.tensor([2])
        ...     return graph.rows(graph.x, ids).tolist(), graph.owner(ids).tolist()
        >>> varcomm.launch(fn, 2)
        [([[30.0, 0.0], [30.0, 10.0]], [[1, 0], [1, 0]]), ([20.0], [1])]
        """
        plan, place, shape = self._fetching(values, ids)
        rows = plan(values)
        return rows.index_select(0, place.to(rows.device)).view(shape + rows.shape[1:])

    @kept_from_compilation
    def _fetching(
        self, values: torch.Tensor, ids: torch.Tensor
    ) -> tuple[ExchangePlan, torch.Tensor, torch.Size]:
        ids = self._agreed_ids("graph.rows", ids, values)
        plan, place = self.directory.fetching(ids.reshape(-1))
        return plan.to(values.device), place, ids.shape

    def _agreed_ids(self, what: str, ids: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        """Return ids on the graph's device, once they and the values agree on all ranks."""

        def check() -> torch.Tensor:
            for x in values:
                if not isinstance(x, torch.Tensor) or x.shape[:1] != (self.num_owned,):
                    raise ArgumentError(
                        f"values must have one row for each of the {self.num_owned} owned "
                        f"{self.noun}; got {described(x)}."
                    )
            return self.checked_ids(ids, "ids")

        def kinds(_: object) -> list[str]:
            return [f"{x.dtype} rows of shape {tuple(x.shape[1:])}" for x in values]

        checked, of_ranks = agree_and_share(what, check, kinds, self.group)
        if other := next((rank for rank, own in enumerate(of_ranks) if own != of_ranks[0]), None):
            raise DisagreementError(
                f"{what}: values are {of_ranks[0][0]} on rank 0, and {of_ranks[other][0]} on rank "
                f"{other}. Pass the same dtype and row shape on every rank."
            )
        return checked

    def checked_ids(self, ids: Any, name: str) -> torch.Tensor:
        """Return ids of the full graph on the graph's device, or raise ArgumentError."""
        if isinstance(ids, PartitionedIndex):
            raise ArgumentError(
                f"{name} must be ids of the full graph; got local ids. Select with them: "
                "x[edge_index[0]]."
            )
        flat = ids.reshape(-1) if isinstance(ids, torch.Tensor) else ids
        checked = checked_index(flat, self.sizes.total, name, self.noun)
        return checked.view(ids.shape).to(self.ids.device)

    @cached_property
    def directory(self) -> Directory:
        """Global numbers of rows by their ids: rows of rank 0 first; collective at first."""
        return Directory.of(self.owned_ids, self.sizes, self.group)

    def sum(self, values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Sum over the rows of all ranks, in fp64.

        The gradient is counted once: every rank must use the result identically.
        Communication: each rank sends 16 bytes to every other rank; none in backward.

        Parameters
        ----------
        values : torch.Tensor
            Floats per owned row, (n, *F), or per row that `mask` selects. The same ``*F`` on every
            rank. As in one process, a masked NaN has the derivative NaN: pass only the selected
            rows.
        mask : torch.Tensor, optional
            Selected owned rows, bool of shape (n,).

        Returns
        -------
        torch.Tensor
            A scalar, the same bits on all ranks, in the dtype of `values`.

        Raises
        ------
        ArgumentError
            On this rank, before any communication, if `values` or `mask` are invalid.
        """
        return self._sum_and_count("graph.sum", values, mask)[0].to(values.dtype)

    def mean(self, values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Average over the rows of all ranks, and over their features, as in :meth:`sum`.

        Use this method for a loss; every rank calls ``backward()``. Each rank then has its part of
        the gradients of replicated parameters, and :func:`varcomm.data_parallel.sum_gradients` sums
        the parts. The mean is NaN if no rank has a selected row.
        """
        total = self._sum_and_count("graph.mean", values, mask)
        return (total[0] / total[1]).to(values.dtype)

    def max(self, values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the largest value over the rows of all ranks, and over their features.

        Arguments are as in :meth:`sum`, and the gradient is counted once. Equal largest values, on
        any ranks, share the gradient evenly, as in :func:`torch.amax`; the gradient of NaN is zero.
        The result is minus infinity if no rank has a selected row, and NaN if a selected value is
        NaN.
        Communication: each rank sends 8 bytes to every other rank, then 16.
        """
        values, mask = self._counting("graph.max", values, mask)
        wide, own = values.double(), values.detach().double()
        own = own if mask is None else own.masked_fill(~mask, -torch.inf)
        own = torch.cat([own.reshape(-1), own.new_full((1,), -torch.inf)])
        ranks, pg = [1] * self.group.size, self.group.process_group
        top = all_gather_v(own.amax(0, keepdim=True), ranks, group=pg).amax()
        # The value is `top`; the derivative goes to all values that are equal to it.
        reaching, finite = wide.detach() == top, top.isfinite()
        reaching = reaching if mask is None else reaching & mask
        # zero, so that the value is exact; infinities have no difference and stay
        rise = torch.where(finite, wide - wide.detach(), wide)
        part = torch.where(reaching, rise, 0.0).sum()
        total = replicated_sum(torch.stack([part, reaching.sum().to(part.dtype)]), self.group)
        mean = total[0] / total[1].clamp(min=1)
        # no value is equal to NaN, or to the maximum of no rows
        infinite = torch.where(total[1] > 0, mean, top)
        return torch.where(finite, top + mean, infinite).to(values.dtype)

    def _sum_and_count(
        self, what: str, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        values, mask = self._counting(what, values, mask)
        if mask is None:
            part = values.sum(dtype=torch.float64)
            count = torch.full_like(part, values.numel())
        else:
            part = torch.where(mask, values, 0).sum(dtype=torch.float64)
            count = mask.expand_as(values).sum(dtype=torch.float64)
        return replicated_sum(torch.stack([part, count]), self.group)

    def _counting(
        self, what: str, values: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return checked values; and on a GPU, whose host need not know how many, which count."""
        with checking(what, self.group) as where:
            _check_values(values, mask, self, where)
        if debugging():
            row = {"dtype": str(values.dtype), "shape of a row": list(values.shape[1:])}
            compare(self.group, {"operation": what} | row)
        if mask is None or len(values) != self.counted():
            return values, None
        if values.device.type == "cpu":
            return values[mask], None
        return values, mask.view(-1, *[1] * (values.dim() - 1))

    def _order(self, rank: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids of all rows, rank by rank, and the position of each id among them.

        Zero rows except on `rank`, or on every rank for None. All ranks make the same calls, so all
        or none have kept the order.
        """
        if rank not in self._orders:
            order = self._gathered(self.owned_ids, rank)
            self._orders[rank] = order, order.argsort()
        return self._orders[rank]

    @cached_property
    def _orders(self) -> dict[int | None, tuple[torch.Tensor, torch.Tensor]]:
        return {}


@dataclass(frozen=True, eq=False)
class NodeShard(Shard):
    """The nodes of one type that this rank owns: ``graph.nodes`` or ``graph["paper"]``.

    Attributes
    ----------
    group : Group
        The ranks that the rows are sharded over.
    sizes : ShardSizes
        Rows per rank.
    attributes : mapping of str
        Attributes by name.
    ids : torch.Tensor
        The :attr:`owned_ids`.

    See Also
    --------
    EdgeShard, PartitionedGraph

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank):
    ...     data = Data(x=torch.tensor([1.0, 2.0, 4.0]), edge_index=torch.tensor([[0, 1], [1, 2]]))
    ...     nodes = varcomm.graph.partition(data, method="block").nodes
    ...     return nodes.sizes, nodes.num_owned, nodes.sum(nodes.x).item()
    >>> varcomm.launch(fn, 2)
    [(ShardSizes(2, 1), 2, 7.0), (ShardSizes(2, 1), 1, 7.0)]
    """

    noun = "nodes"

    @property
    def num_nodes(self) -> int:
        """Nodes of this type in the full graph, N, on every rank."""
        return self.sizes.total

    def to(self, device: torch.device | str) -> NodeShard:
        """Return a copy on another device."""
        return replace(self, attributes=moved(self.attributes, device), ids=self.ids.to(device))


def _check_values(values: Any, mask: Any, shard: Shard, where: str) -> None:
    owned = shard.counted()
    if mask is not None and not (
        isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.shape == (owned,)
    ):
        raise ArgumentError(
            f"{where}mask must be of torch.bool and shape ({owned},); got {described(mask)}."
        )

    def error() -> ArgumentError:
        among = "" if mask is None else ", or for each of those that the mask lets through"
        return ArgumentError(
            f"{where}values must be floats, one row for each of the {owned} owned {shard.noun}"
            f'{among}; got {described(values)}. For a loss: reduction="none".'
        )

    if not (
        isinstance(values, torch.Tensor) and values.is_floating_point() and values.dim() > 0
    ) or (mask is None and len(values) != owned):
        raise error()
    if mask is not None and len(values) != owned:
        require(mask.sum() == len(values), error, shard, ("rows of a mask", len(values)))


def as_tensor(numbers: Any) -> Any:
    """Return a list or an array of numbers as a tensor, and any other value as it is."""
    if isinstance(numbers, torch.Tensor):
        return numbers
    try:
        array = np.asarray(numbers)
        if array.size == 0:
            array = array.astype(np.int64)  # of a rank without rows: an empty list has no dtype
        # torch refuses foreign byte orders and read-only memory
        native = np.require(array, array.dtype.newbyteorder("="), requirements=["C", "W"])
        return torch.from_numpy(native)
    except (TypeError, ValueError):  # of a list of lists, or of values that are not numbers
        return numbers


def described(value: Any) -> str:
    """Return the description of a wrong value for a message."""
    if hasattr(value, "dtype"):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return type(value).__name__


def moved(attributes: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    """Return attributes with their tensors on another device."""

    def on(value: Any) -> Any:
        if isinstance(value, Marked):
            return value.on(device)
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return {name: on(value) for name, value in attributes.items()}
