"""``transfer`` and ``remap``: fields from the rows of one partition to those of another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from varcomm._torch_private import group_named
from varcomm.errors import ArgumentError, DisagreementError, VarcommError
from varcomm.graph.directory import Directory
from varcomm.graph.index.partitioned_index import PartitionedIndex, plain
from varcomm.graph.node_shard import Shard, described
from varcomm.graph.partitioned_graph import PartitionedGraph
from varcomm.ops.packing import taken
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.sizes import ShardSizes
from varcomm.transport.agreement import agree, agree_and_share
from varcomm.transport.group import Group, resolve
from varcomm.transport.notes import leave_note, notes

Side = PartitionedGraph | Shard | None


@dataclass(frozen=True, eq=False)
class Transfer:
    """Operator that maps the rows of one partition to another partition.

    :func:`transfer` and :func:`remap` return a :class:`Transfer`.

    ``transfer(x)`` maps the rows of the old partition, (n_old, *F), to the rows of the new
    partition, (n_new, *F). Derivatives of any order are exact.

    Attributes
    ----------
    plan : ExchangePlan
        The plan that fetches each old row that this rank needs, once.
    place : torch.Tensor
        For each new row, the index of its received row, int64 of shape (n_new,). With several
        parents, the shape is (n_new, k), and the index after the last row means no parent.
    weights : torch.Tensor, optional
        Weights of the parents, float64 of shape (n_new, k); None copies rows.

    See Also
    --------
    transfer, varcomm.ExchangePlan

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank):
    ...     ring = Data(x=torch.arange(4.0), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
    ...     old = varcomm.graph.partition(ring, method="block")
    ...     new = varcomm.graph.partition(ring, method=torch.tensor([1, 1, 1, 0]))
    ...     move = varcomm.graph.transfer(old, new)
    ...     return old.x.tolist(), move(old.x).tolist(), move.plan.nbytes(old.x)
    >>> varcomm.launch(fn, 2)
    [([0.0, 1.0], [3.0], 8), ([2.0, 3.0], [0.0, 1.0, 2.0], 4)]
    """

    plan: ExchangePlan
    place: torch.Tensor
    weights: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the new partition's rows, (n_new, *F), of the old one's; one exchange.

        Rows of any dtype are copied; weighted sums are for floats and complex numbers.
        """
        if isinstance(x, PartitionedIndex):
            raise ArgumentError(
                "x holds local ids, or ids of groups, of a partitioned graph. Read them from the "
                "new graph: new.batch, new.edge_index; migrate carries them."
            )
        self.plan.compare_first(x)
        if self.weights is None:
            return taken(self.plan(x), self.place)
        if not (x.is_floating_point() or x.is_complex()):
            raise ArgumentError(
                f"weighted sums are for floats and complex numbers; got {described(x)}. Fetch rows "
                "by their ids: graph.rows(values, ids)."
            )
        if x.dim() == 1:  # torch.cat drops an empty tensor of one dimension from the autograd graph
            return self._weighted(x[:, None], self.weights)[:, 0]
        return self._weighted(x, self.weights)

    def _weighted(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = self.plan(x)
        rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
        wide = torch.float32 if x.element_size() < 4 else x.dtype  # a sum in bf16 would lose digits
        weights = weights.to(wide).view(*weights.shape, *[1] * (x.dim() - 1))
        return (rows[self.place] * weights).sum(1).to(x.dtype)

    def to(self, device: torch.device | str) -> Transfer:
        """Return a copy for rows on another device."""
        weights = None if self.weights is None else self.weights.to(device)
        return replace(
            self, plan=self.plan.to(device), place=self.place.to(device), weights=weights
        )


@dataclass(frozen=True)
class _Sides:
    """Both partitions in the larger of their groups; a rank outside the other has no rows."""

    group: Group
    old: Shard | None
    new: Shard | None
    old_sizes: ShardSizes
    new_sizes: ShardSizes
    device: torch.device

    def ids(self, shard: Shard | None) -> torch.Tensor:
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        return none if shard is None else shard.owned_ids

    def directory(self) -> Directory:
        """Return the owners and places of the old rows; collective."""
        if self.old is not None and self.old.group == self.group:
            return self.old.directory
        return Directory.of(self.ids(self.old), self.old_sizes, self.group)


def transfer(old: Side, new: Side) -> Transfer:
    """Plan the move of rows from one partition of a graph to another.

    Collective on the ranks of the larger partition; an error on one rank is raised on all ranks.
    Use this function for fields, results and optimizer states, which :func:`migrate` does not
    carry, and between different numbers of ranks.

    Parameters
    ----------
    old : PartitionedGraph or NodeShard or EdgeShard
        The present partition: a graph with one type of nodes, the nodes of one type,
        ``graph["paper"]``, or edges, ``graph.edges``. A rank outside this partition passes None.
    new : PartitionedGraph or NodeShard or EdgeShard
        Another partition of the same rows. A rank outside this partition passes None. The group of
        one partition must contain the group of the other partition. If a rank of the larger group
        passes None for both, all ranks of this group raise an error.

    Returns
    -------
    Transfer
        ``transfer(x)`` maps old rows, (n_old, *F), to new rows, (n_new, *F), of any dtype. On ranks
        outside the old partition, `x` has zero rows: ``torch.empty(0, *F)``.

    Raises
    ------
    ArgumentError
        On every rank, if the partitions have different rows, or if neither group contains the
        other.

    See Also
    --------
    remap, Transfer, rebalance

    Notes
    -----
    Communication: 24 bytes per row that changes its rank, and 16 bytes per row for the directory
    that old stores. Each call sends every row that changes its rank once.

    In one process: the identity.

    Examples
    --------
    This example moves the state of Adam for a table with one row per node.

    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank):
    ...     ring = Data(x=torch.arange(4.0), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
    ...     old = varcomm.graph.partition(ring, method="block")
    ...     table = torch.nn.Parameter(old.x[:, None])
    ...     optimizer = torch.optim.Adam([table])
    ...     (table**2).sum().backward()
    ...     optimizer.step()
    ...     new = old.migrate(torch.tensor([[1, 1], [0, 0]][rank]))
    ...     move, state = varcomm.graph.transfer(old, new), optimizer.state[table]
    ...     state |= {name: move(state[name]) for name in ("exp_avg", "exp_avg_sq")}
    ...     table.data = move(table.data)
    ...     return state["exp_avg"].view(-1).tolist()
    >>> [[round(x, 1) for x in rows] for rows in varcomm.launch(fn, 2)]
    [[0.4, 0.6], [0.0, 0.2]]
    """
    what = "graph.transfer"
    sides = _sides(what, old, new)
    if sides.old_sizes.total != sides.new_sizes.total:
        raise ArgumentError(
            f"{what}: old has {sides.old_sizes.total} rows, and new {sides.new_sizes.total}. Both "
            "must be partitions of one graph; for a refined mesh, use graph.remap."
        )
    plan, place = sides.directory().fetching(sides.ids(sides.new))
    return Transfer(plan, place)


def remap(
    old: Side,
    new: Side,
    parents: torch.Tensor | None,
    weights: torch.Tensor | None = None,
    conserve: bool = False,
) -> Transfer:
    """Plan the move of fields from a mesh to its refinement or coarsening.

    Collective, like :func:`transfer`; an error on one rank is raised on all ranks.

    Parameters
    ----------
    old : PartitionedGraph or NodeShard or EdgeShard
        Partition of the old mesh.
    new : PartitionedGraph or NodeShard or EdgeShard
        Partition of the new mesh, on the same ranks or as in :func:`transfer`.
    parents : torch.Tensor
        Ids, in the old mesh, of the parents of each new row of this rank; int64 of shape (n_new,)
        or (n_new, k), -1 for none. Ranks without the new mesh pass None.
    weights : torch.Tensor, optional
        A weight per parent, finite, of the shape of `parents`; None means the same weight for all.
    conserve : bool
        False interpolates: a new row is the weighted sum of its parents, by default their mean,
        and zero without parents. True shares amounts: each old row is divided among its children in
        proportion to their weights, so that the sum over all ranks stays the same. Coarsening then
        sums.

    Returns
    -------
    Transfer
        ``remap(x)`` of old rows, (n_old, *F), returns new rows, (n_new, *F), of floats or complex
        numbers.

    Raises
    ------
    ArgumentError
        On every rank, if parents are out of range or weights not finite; with `conserve`, if a
        weight is negative or an old row has no child.
    DisagreementError
        On every rank, if ranks differ in `conserve`.

    See Also
    --------
    transfer, rebalance

    Notes
    -----
    Communication: 24 bytes per different parent on another rank, and 16 bytes per old row for the
    directory of `old`. Each call sends every distinct parent on another rank once.

    In one process: ``(x[parents] * weights[..., None]).sum(1)``.

    Examples
    --------
    Cell 1 of two cells is refined into cells 1 and 2: an average is copied, an amount is halved.

    >>> import torch, varcomm
    >>> def fn(rank):
    ...     none = torch.empty(2, 0, dtype=torch.int64)
    ...     old = varcomm.graph.from_edges(none, [1, 1])
    ...     new = varcomm.graph.from_edges(none, [2, 1])
    ...     parents = torch.tensor([[0, 1], [1]][rank])
    ...     x = torch.tensor([10.0 + 2 * rank])
    ...     remaps = (varcomm.graph.remap(old, new, parents, conserve=c) for c in (False, True))
    ...     return [remap(x).tolist() for remap in remaps]
    >>> varcomm.launch(fn, 2)
    [[[10.0, 12.0], [10.0, 6.0]], [[12.0], [6.0]]]
    """
    what = "graph.remap"

    sides = _sides(what, old, new)

    def check() -> tuple[torch.Tensor, torch.Tensor]:
        return _checked_parents(parents, weights, conserve, sides.new)

    def outline(checked: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
        ids = checked[0]
        return [int(conserve), *(map(int, ids.aminmax()) if ids.numel() else (-1, -1))]

    (ids, share), outlines = agree_and_share(what, check, outline, sides.group)
    if len({each[0] for each in outlines}) > 1:
        raise DisagreementError(f"{what}: conserve is True on some ranks, and False on others.")
    for rank, (_, low, high) in enumerate(outlines):
        if low < -1 or high >= sides.old_sizes.total:
            raise ArgumentError(
                f"{what}: parents on rank {rank} span {low}...{high}, out of range for "
                f"{sides.old_sizes.total} old rows; -1 is for none."
            )
    ids, share, group = ids.to(sides.device), share.to(sides.device), sides.group
    has = ids >= 0
    plan, of_parent = sides.directory().fetching(ids[has])
    place = torch.full_like(ids, plan.num_received)
    place[has] = of_parent
    share = torch.where(has, share, 0.0)
    if weights is None and not conserve:
        share = share / has.sum(1, keepdim=True).clamp(min=1)
    if conserve:
        sums = share.new_zeros(plan.num_received + 1).index_add(0, place.view(-1), share.view(-1))
        whole = plan.adjoint(sums[:-1])

        def all_have_children() -> None:
            if len(lost := (whole <= 0).nonzero().view(-1)):
                raise ArgumentError(
                    f"old row {int(sides.ids(sides.old)[lost[0]])} has no child with a weight: its "
                    "amount would be lost. Name it among parents."
                )

        agree(what, all_have_children, group)
        share = share / torch.cat([plan(whole), whole.new_ones(1)])[place]
    return Transfer(plan, place, share)


def _checked_parents(
    parents: Any, weights: Any, conserve: bool, shard: Shard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return parents, int64, and weights, float64, both (n_new, k)."""
    if not isinstance(conserve, bool):
        raise ArgumentError(f"conserve must be True or False; got {conserve!r}.")
    rows = 0 if shard is None else shard.num_owned
    if parents is None and shard is None:
        parents = torch.empty(0, dtype=torch.int64)
    if (
        not isinstance(parents, torch.Tensor)
        or parents.dtype not in (torch.int32, torch.int64)
        or parents.dim() not in (1, 2)
        or len(parents) != rows
    ):
        raise ArgumentError(
            f"parents must be int64 of shape (n_new,) or (n_new, k), here n_new = {rows}; got "
            f"{described(parents)}."
        )
    if weights is None:
        weights = torch.ones_like(parents, dtype=torch.float64)
    if (
        not isinstance(weights, torch.Tensor)
        or weights.shape != parents.shape
        or weights.is_complex()
    ):
        raise ArgumentError(
            f"weights must be real and of the shape of parents, {tuple(parents.shape)}; got "
            f"{described(weights)}."
        )
    ids: torch.Tensor = plain(parents.to(torch.int64)).reshape(rows, parents.shape[1:].numel())
    share = weights.detach().to(ids.device, torch.float64).view(ids.shape)
    if not bool(share.isfinite().all()) or (conserve and bool((share < 0).any())):
        raise ArgumentError("weights must be finite, and with conserve=True not negative.")
    return ids, share


def _sides(what: str, old: Side, new: Side) -> _Sides:
    """Return both partitions, or raise on all ranks; collective."""
    groups = [side.group for side in (old, new) if isinstance(side, PartitionedGraph | Shard)]
    group = max(groups, key=lambda each: each.size) if groups else _group_of_others()
    apart = [each for each in groups if not set(each.ranks) <= set(group.ranks)]

    def shards() -> list[Shard | None]:
        for name, side in (("old", old), ("new", new)):
            if not isinstance(side, PartitionedGraph | Shard | None):
                raise ArgumentError(f"{name} must be a graph or a shard; got {described(side)}.")
        if not groups:
            raise ArgumentError("pass a partition of this rank as old or new.")
        if apart:
            raise ArgumentError(
                "neither group of ranks contains the other. Move rows by way of a group of all "
                "ranks."
            )
        return [side.nodes if isinstance(side, PartitionedGraph) else side for side in (old, new)]

    def outline(pair: list[Shard | None]) -> list[Any]:
        return [each and [each.noun, each.num_owned, each.sizes.total] for each in pair]

    for other in apart:  # its ranks wait in it
        with suppress(VarcommError):
            agree(what, shards, other)
    with _noted(group):
        pair, of_ranks = agree_and_share(what, shards, outline, group)
    sizes = []
    for name, column in zip(("old", "new"), zip(*of_ranks, strict=True), strict=True):
        sizes.append(ShardSizes(0 if each is None else each[1] for each in column))
        if {each[2] for each in column if each is not None} != {sizes[-1].total}:
            raise ArgumentError(
                f"{what}: some ranks have not passed their part of {name}, or its ranks are not "
                "among those of the other partition."
            )
    if len(nouns := {each[0] for pair in of_ranks for each in pair if each is not None}) > 1:
        raise ArgumentError(f"{what}: {' and '.join(sorted(nouns))} have no rows in common.")
    device = next(each for each in pair if each is not None).ids.device
    return _Sides(group, pair[0], pair[1], sizes[0], sizes[1], device)


@contextmanager
def _noted(group: Group) -> Iterator[None]:
    """Note in the store that this rank makes a call in a group, and which one."""
    group.auxiliary[_CALLS] = group.auxiliary.get(_CALLS, 0) + 1
    leave_note({_CALLS: [group.name, group.auxiliary[_CALLS]]})
    try:
        yield
    finally:
        leave_note({_CALLS: ""})


_CALLS = "transfers"


def _group_of_others() -> Group:
    """Return the group in which all other ranks wait for this one, so that all raise."""
    world = resolve(None)
    own: list[Any] = [world.name, 0]  # a call without a group
    leave_note({_CALLS: own})
    deadline = time.monotonic() + world.timeout().total_seconds()
    while time.monotonic() < deadline:
        calls = [note.get(_CALLS) for note in notes(world)[0]]
        for call in filter(None, calls):
            process_group = group_named(call[0])
            if process_group is not None:
                group = resolve(process_group)
                is_over = call != own and group.auxiliary.get(_CALLS, 0) >= call[1]
                if not is_over and all(calls[rank] in (call, own) for rank in group.ranks):
                    return group
        time.sleep(0.05)
    return world
