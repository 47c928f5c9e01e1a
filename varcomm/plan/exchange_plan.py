"""``ExchangePlan``: a frozen, checked, reusable description of which rows go to which rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from operator import attrgetter
from typing import Any, Self, overload
from zlib import crc32

import torch

from varcomm._torch_private import let_vary
from varcomm.errors import ArgumentError, DisagreementError, GroupError
from varcomm.ops import packing
from varcomm.ops.checks import TENSORS, checked_tensor, checking
from varcomm.ops.compilation import count_in, extent_of
from varcomm.ops.digest import digest, require_equal
from varcomm.ops.graph_operator import in_graph, is_traced
from varcomm.ops.handle import Handle, collective
from varcomm.ops.reduction import checked_summable
from varcomm.ops.rule import keep
from varcomm.plan.checks import checked_count_matrix, checked_index, checked_indices
from varcomm.plan.packed import exchange_packed
from varcomm.plan.routes import Exchange, ExchangeAdjoint, Routes
from varcomm.plan.row_sum import RowSum
from varcomm.sizes import ShardSizes, checked_dim, checked_sizes
from varcomm.transport.agreement import agree_and_share, debugging, share
from varcomm.transport.engine import Pending, Schedule, is_capturing
from varcomm.transport.failure import explained
from varcomm.transport.group import Calls, Group, GroupLike, OfGroup, resolve

_FIRST = 2  # exchanges of graphs that ranks compare after a plan was made


@dataclass(frozen=True, eq=False)
class ExchangePlan(OfGroup):
    """Plan of an exchange: the rows that each rank sends to each other rank.

    Made by :meth:`from_indices` or :meth:`from_needed`; a linear operator from this rank's rows to
    the received rows.

    Attributes
    ----------
    group : Group
        The ranks that take part.
    send_index : torch.Tensor
        The rows that this rank sends, with the rows for rank 0 first; int64, shape
        (sum(send_counts),).
    send_counts : tuple of int
        Rows for each rank.
    recv_counts : tuple of int
        Rows from each rank.
    num_rows : int
        Rows that this rank owns.
    identity : int
        A digest of the arguments of all ranks, which :func:`varcomm.debug` compares.

    See Also
    --------
    indexed_all_to_all_v, ShardSizes, varcomm.graph.partition

    Notes
    -----
    Adjoint: :meth:`adjoint`, which sends rows back and sums, at each owner, all copies of a row.
    Communication: :meth:`nbytes` per call from this rank, in one message to each neighbour.
    In one process: ``torch.cat(shards)[needed]``.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     sizes = varcomm.ShardSizes([2, 3])
    ...     needed = torch.tensor([4]) if rank == 0 else torch.tensor([1])
    ...     plan = varcomm.ExchangePlan.from_needed(needed, sizes)
    ...     own = torch.tensor(sizes.range(rank), dtype=torch.float32)
    ...     return plan(own).tolist(), plan.adjoint(torch.ones(1)).tolist()
    >>> varcomm.launch(fn, 2)
    [([4.0], [0.0, 1.0]), ([1.0], [0.0, 0.0, 1.0])]
    """

    group: Group = field(repr=False)
    send_index: torch.Tensor = field(repr=False)
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    num_rows: int
    identity: int = field(default=0, repr=False)
    calls: Calls = field(default_factory=dict, init=False, repr=False)

    _instead_of_pickle = "Keep state_dict()."

    def __post_init__(self) -> None:
        _ = self.routes, self.extent  # compiled code would make them in every call
        self.group.exchanges_to_compare = _FIRST

    @cached_property
    def routes(self) -> Routes:
        """The plan as data, for operators and graphs, which must not keep the plan in a cycle."""
        # the bags now, so that the first backward can be captured in a CUDA graph
        places, bounds = RowSum(self.send_index, self.num_rows).bags
        bags = let_vary(places, 0), let_vary(bounds, 0)
        counts = self.send_counts, self.recv_counts
        index = let_vary(self.send_index.detach(), 0)
        return Routes.of(self.group, index, *counts, self.num_rows, self.identity, bags)

    @cached_property
    def num_received(self) -> int:
        """Rows that this rank receives."""
        return sum(self.recv_counts)

    @cached_property
    def extent(self) -> torch.Tensor:
        """The numbers of received and own rows, for compiled code."""
        return extent_of(self.num_received, self.num_rows, device=self.send_index.device)

    def rows(self) -> tuple[int, int]:
        """Return the numbers of rows that this rank receives and owns."""
        if torch.compiler.is_compiling():
            return count_in(self.extent, 0), count_in(self.extent, 1)
        return self.num_received, self.num_rows

    @classmethod
    def from_indices(
        cls,
        indices: Sequence[torch.Tensor],
        num_rows: int,
        sizes: Sequence[Sequence[int]] | None = None,
        group: GroupLike = None,
    ) -> Self:
        """Make a plan from the rows that this rank sends to each rank; collective.

        Parameters
        ----------
        indices : sequence of torch.Tensor
            ``indices[r]``: own rows for rank r, in the order in which they arrive there; one
            dimension, int32 or int64. Rows may repeat.
        num_rows : int
            Rows that this rank owns.
        sizes : sequence of sequence of int, optional
            ``sizes[i][j]``: rows that rank i sends to rank j; identical on all ranks. By default,
            ranks exchange the counts.
        group : ProcessGroup or DeviceMesh, optional
            Ranks that take part; None means the whole world.

        Raises
        ------
        ArgumentError, DisagreementError
            On every rank, if the arguments of one rank are wrong, or `sizes` differ.
        """
        ranks, what = resolve(group), "ExchangePlan.from_indices"

        def check() -> tuple[Any, ...]:
            (rows,) = checked_sizes([num_rows], "num_rows")
            index, counts = checked_indices(indices, rows, ranks)
            matrix = None if sizes is None else checked_count_matrix(sizes, counts, ranks)
            digests = _digest_of(matrix), _digest_of(digest(index), rows, counts)
            return digests, rows, index, counts, matrix

        (_, rows, index, send_counts, matrix), identity = _agreed(what, check, ranks)
        if matrix is None:
            recv_counts = _exchanged_counts(send_counts, index.device, ranks)
        else:
            recv_counts = tuple(row[ranks.rank] for row in matrix)
        return cls(ranks, index, send_counts, recv_counts, rows, identity)

    @classmethod
    def from_needed(
        cls, needed: torch.Tensor, sizes: Sequence[int], group: GroupLike = None
    ) -> Self:
        """Make a plan from the global rows that this rank needs; collective.

        Parameters
        ----------
        needed : torch.Tensor
            Global rows, grouped by owner in rank order, such as ascending rows; one dimension,
            int32 or int64. Rows may repeat, and may be this rank's own rows.
        sizes : sequence of int
            Rows that each rank owns: rank 0 owns the first ``sizes[0]`` global rows, and so on.
        group : ProcessGroup or DeviceMesh, optional
            Ranks that take part; None means the whole world.

        Raises
        ------
        ArgumentError, DisagreementError
            On every rank, if the arguments of one rank are wrong, or `sizes` differ.
        """
        ranks, what = resolve(group), "ExchangePlan.from_needed"

        def check() -> tuple[Any, ...]:
            owned = ShardSizes(checked_sizes(sizes, "sizes", ranks.size))
            ids = checked_index(needed, owned.total, "needed", "global rows")
            owner = owned.owner(ids)
            if bool((owner.diff() < 0).any()):
                k = int((owner.diff() < 0).nonzero()[0])
                raise ArgumentError(
                    f"needed must come owner by owner; row {int(ids[k])} of rank {int(owner[k])} "
                    f"is before row {int(ids[k + 1])} of rank {int(owner[k + 1])}. Sort it."
                )
            digests = _digest_of(owned), _digest_of(digest(needed), owned)
            return digests, owned, owner

        (_, owned, owner), identity = _agreed(what, check, ranks)
        recv_counts = tuple(torch.bincount(owner, minlength=ranks.size).tolist())
        send_counts = _exchanged_counts(recv_counts, needed.device, ranks)
        offsets = torch.tensor(owned.offsets, device=needed.device)
        ids = needed.to(torch.int64) - offsets[owner]
        send_index = _exchanged(what, ids, recv_counts, send_counts, ranks)
        return cls(ranks, send_index, send_counts, recv_counts, owned[ranks.rank], identity)

    @overload
    def __call__(
        self, tensor: torch.Tensor, dim: int = 0, use_fp32: bool = True
    ) -> torch.Tensor: ...

    @overload
    def __call__(
        self,
        tensor: torch.Tensor,
        second: torch.Tensor,
        /,
        *more: torch.Tensor,
        dim: int = 0,
        use_fp32: bool = True,
    ) -> tuple[torch.Tensor, ...]: ...

    def __call__(
        self, tensor: torch.Tensor, *more: Any, dim: int = 0, use_fp32: bool = True
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Send own rows to the ranks that need them, and return the received rows.

        Parameters
        ----------
        tensor : torch.Tensor
            `num_rows` rows along `dim`; any dtype. The other dimensions are the same on all ranks.
        *more : torch.Tensor
            Further tensors, of any row shapes. Tensors of one dtype are sent in one message per
            neighbour.
        dim, use_fp32
            As in :func:`all_gather_v`; with a single tensor also by position.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            ``sum(recv_counts)`` rows along `dim`, rank by rank, in the order of the sender; one
            tensor for each given. For ``dim != 0`` a transposed view of contiguous memory; of
            several tensors, views of the memory that they arrive in.
        """
        if more and not isinstance(more[0], torch.Tensor):
            if len(more) > 2:
                raise ArgumentError(
                    f"a plan takes tensors, dim and use_fp32; got {len(more) - 2} more arguments."
                )
            return self(tensor, dim=more[0], use_fp32=more[1] if len(more) == 2 else use_fp32)
        if not more:
            return collective(_forward, self, tensor, (), (dim, use_fp32), False)
        tensors = tensor, *more
        return exchange_packed(self, tensors, self._dims(tensors, dim, use_fp32), use_fp32)

    def _dims(self, tensors: Sequence[torch.Tensor], dim: int, use_fp32: bool) -> list[int]:
        """Check several tensors, and return the dimension of each that rows lie along."""
        if (
            torch.compiler.is_compiling()
            or not TENSORS.issuperset(map(type, tensors))
            or any(map(attrgetter("is_nested"), tensors))
            or (type(dim), type(use_fp32)) != (int, bool)
            or debugging()
        ):
            return [_forward(self, x, (), dim, use_fp32).dim for x in tensors]
        key = dim, use_fp32, *[(x.shape, x.dtype, x.device, x.layout) for x in tensors]
        dims: list[int] | None = self.calls.get(key)
        if dims is None:
            dims = [_forward(self, x, (), dim, use_fp32).dim for x in tensors]
            keep(self.calls, key, dims)
        return dims

    def compare_first(self, *tensors: torch.Tensor, dim: int = 0) -> None:
        """Compare the tensors of all ranks before the first exchanges of a graph; collective.

        The group counts them, after its last plan was made: ranks that exchange by other plans
        compare, too.
        A rank with another dtype or row shape is an error before rows are sent. Later calls, calls
        in recorded graphs, and groups that only have NCCL compare nothing here.
        """
        group = self.group
        if torch.compiler.is_compiling():
            group.compares_exchanges = False  # other ranks may run the same call eagerly, later
            return
        if not group.exchanges_to_compare or not group.compares_exchanges or debugging():
            return
        if group.size == 1 or group.device().type != "cpu":  # a GPU would be waited for
            group.exchanges_to_compare = 0
            return
        dims = [_forward(self, x, (), dim, True).dim for x in tensors]
        if any(map(is_traced, tensors)) or is_capturing():
            return
        group.exchanges_to_compare -= 1
        rows = [list(packing.rest(x.shape, at)) for x, at in zip(tensors, dims, strict=True)]
        words = {
            "plan": f"{self.identity:08x}",
            "dtype": ", ".join(str(x.dtype).removeprefix("torch.") for x in tensors),
            "shape of a row": ", ".join(map(str, rows)),
            "dim": dims,
        }
        require_equal("exchange", share("exchange", lambda: words, self.group))

    def start(self, tensor: torch.Tensor, dim: int = 0, use_fp32: bool = True) -> Handle:
        """Begin a call of the plan; :meth:`Handle.wait` returns the received rows."""
        return collective(_forward, self, tensor, (), (dim, use_fp32), True)

    def adjoint(self, tensor: torch.Tensor, dim: int = 0, use_fp32: bool = True) -> torch.Tensor:
        """Send received rows back, and sum at each owner the copies of each row.

        Parameters
        ----------
        tensor : torch.Tensor
            ``sum(recv_counts)`` rows along `dim`; bool is refused.
        dim, use_fp32
            As in :func:`reduce_scatter_v`.

        Returns
        -------
        torch.Tensor
            `num_rows` rows along `dim`, zeros for rows without a copy; the same bits in every run.
        """
        return collective(_adjoint, self, tensor, (), (dim, use_fp32), False)

    def nbytes(self, tensor: torch.Tensor, dim: int = 0) -> int:
        """Return the bytes that this rank sends to other ranks in a call with ``tensor``."""
        row = prod(packing.rest(tensor.shape, checked_dim(dim, tensor.shape)))
        others = sum(self.send_counts) - self.send_counts[self.group.rank]
        return others * row * tensor.element_size()

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Other ranks that send rows to this rank or receive rows from this rank."""
        pairs = enumerate(zip(self.send_counts, self.recv_counts, strict=True))
        return tuple(rank for rank, pair in pairs if any(pair) and rank != self.group.rank)

    def to(self, device: torch.device | str) -> Self:
        """Return the plan for tensors on another device."""
        moved = self.send_index.to(device)
        return self if moved is self.send_index else replace(self, send_index=moved)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part for :func:`torch.save`, loadable without pickle."""
        return {
            "rank": self.group.rank,
            "identity": self.identity,
            "send_index": self.send_index,
            "send_counts": list(self.send_counts),
            "num_rows": self.num_rows,
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], group: GroupLike = None) -> Self:
        """Restore the plan from each rank's :meth:`state_dict`; collective.

        All ranks raise if the states belong to other ranks or to different plans.
        """
        ranks, what = resolve(group), "ExchangePlan.from_state_dict"
        expected = {"rank", "identity", "send_index", "send_counts", "num_rows"}

        def check() -> tuple[torch.Tensor, ...]:
            if not isinstance(state, dict) or not expected <= state.keys():
                raise ArgumentError("this is not what ExchangePlan.state_dict returns.")
            counts: list[int] = state["send_counts"]
            if (state["rank"], len(counts)) != (ranks.rank, ranks.size):
                raise ArgumentError(f"this state is of rank {state['rank']} of {len(counts)}.")
            return state["send_index"].split(counts)  # type: ignore[no-any-return]

        indices, plans = agree_and_share(what, check, lambda _: state["identity"], ranks)
        if len(set(plans)) > 1:
            raise DisagreementError(f"{what}: ranks have states of different plans.")
        return cls.from_indices(indices, state["num_rows"], group=group)


def _forward(plan: ExchangePlan, x: torch.Tensor, _: object, dim: int, use_fp32: bool) -> Exchange:
    with checking("exchange", plan.group, use_fp32=use_fp32) as where:
        checked_tensor(x, where)
        dim = _checked_rows(plan, x, dim, plan.rows()[1], "own", where)
    return Exchange(_routes(plan, x), dim, use_fp32)


def _adjoint(
    plan: ExchangePlan, x: torch.Tensor, _: object, dim: int, use_fp32: bool
) -> ExchangeAdjoint:
    with checking("exchange_adjoint", plan.group, use_fp32=use_fp32) as where:
        checked_summable(x, where, use_fp32)
        dim = _checked_rows(plan, x, dim, plan.rows()[0], "received", where)
    return ExchangeAdjoint(_routes(plan, x), dim, use_fp32)


def _routes(plan: ExchangePlan, x: torch.Tensor) -> Routes:
    """Return the routes, with numbers of rows that vary if `x` is in a graph."""
    routes = plan.routes
    if not in_graph(x):
        return routes
    return Routes(plan.group, routes.send_index, routes.table, *plan.rows(), routes.bags)


def _checked_rows(
    plan: ExchangePlan, x: torch.Tensor, dim: int, rows: int, which: str, where: str
) -> int:
    dim = checked_dim(dim, x.shape, where)
    if x.shape[dim] != rows:
        raise ArgumentError(
            f"{where}the tensor of shape {tuple(x.shape)} has {x.shape[dim]} rows along dim "
            f"{dim}, but the plan is for {rows} {which} rows."
        )
    if x.device != plan.extent.device:
        raise ArgumentError(
            f"{where}the tensor is on {x.device}, the plan on {plan.extent.device}. "
            f"Move one of them: plan.to({str(x.device)!r})."
        )
    return dim


def _digest_of(*values: object) -> int:
    return crc32(repr(values).encode())


def _agreed(
    what: str, check: Callable[[], tuple[Any, ...]], group: Group
) -> tuple[tuple[Any, ...], int]:
    """Return this rank's checked arguments, and the identity of the plan; collective.

    First come digests: of the sizes, which are equal on all ranks, and of all arguments.
    """
    own, digests = agree_and_share(what, check, lambda checked: checked[0], group)
    if others := [rank for rank, given in enumerate(digests) if given[0] != digests[0][0]]:
        raise DisagreementError(f"{what}: ranks {others} have other sizes than rank 0.")
    return own, _digest_of(digests)


def _exchanged_counts(counts: Sequence[int], device: torch.device, group: Group) -> tuple[int, ...]:
    """Send each rank one count, and return the count from each; collective."""
    if group.size > 1 and group.simulated:
        raise GroupError(
            f"on {group}: in a simulated world no other rank says which rows it needs. Use the "
            "plan of varcomm.simulate.partition, or pass sizes to ExchangePlan.from_indices."
        )
    ones, mine = [1] * group.size, torch.tensor(counts, dtype=torch.int64, device=device)
    return tuple(_exchanged("ExchangePlan", mine, ones, ones, group, "all").tolist())


def _exchanged(
    what: str,
    values: torch.Tensor,
    send: Sequence[int],
    recv: Sequence[int],
    group: Group,
    schedule: Schedule = "neighbours",
) -> torch.Tensor:
    with explained(what, group):
        works, received = packing.exchange(what, group, values, send, recv, schedule)
        return Pending(works, lambda: received).wait()
