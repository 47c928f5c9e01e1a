"""Embeddings whose table is sharded, by ids or by features, in shards of any sizes.

A lookup by rows is one linear operator, and its adjoint another. How many rows travel depends on
the values of the ids, so both are opaque in compiled graphs, which check the ids when they run.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn import functional

from varcomm.errors import ArgumentError
from varcomm.ops import packing
from varcomm.ops.all_gather_v import AllGatherV, ReduceScatterV
from varcomm.ops.all_reduce import AllReduce
from varcomm.ops.checks import (
    check_on_device,
    checked_shard,
    checked_tensor,
    checked_whole,
    checking,
)
from varcomm.ops.digest import digest
from varcomm.ops.graph_operator import torch_operator
from varcomm.ops.handle import apply
from varcomm.ops.reduction import checked_summable
from varcomm.ops.rule import Operator
from varcomm.plan.routes import Exchange, ExchangeAdjoint, Routes
from varcomm.plan.row_sum import RowSum
from varcomm.sizes import ShardSizes, exact_int
from varcomm.tensor_parallel.layout import Layout, ShardedModule, checked_choice
from varcomm.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    shard_ends,
    shard_sizes,
)
from varcomm.transport.engine import Pending
from varcomm.transport.group import Group, GroupLike, resolve

_EXCHANGES = (None, "rows", "sum")


def vocab_parallel_embedding(
    ids: Tensor,
    weight: Tensor,
    sizes: Sequence[int] | None = None,
    padding_idx: int | None = None,
    sequence_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    *,
    sequence_dim: int = 0,
    exchange: Literal["rows", "sum"] | None = None,
) -> Tensor:
    """Look up embeddings in a table whose rows are sharded by ids.

    Parameters
    ----------
    ids : torch.Tensor
        int64 or int32 of any shape, identical on all ranks. If each rank has a part of the ids,
        gather them first: ``varcomm.all_gather_v(ids, sequence_sizes)``.
    weight : torch.Tensor
        ``(sizes[rank], H)``: this rank's rows of the table.
    sizes : sequence of int, optional
        Ids per rank, rank 0 first; zeros are allowed. If None, ranks exchange their sizes.
    padding_idx : int, optional
        The id, counted over all ranks, whose row gets no gradient.
    sequence_sizes : sequence of int, optional
        Rows of `ids` along `sequence_dim` per rank; zeros are allowed. If None, every rank returns
        all rows.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
    sequence_dim : int
        Dimension of the sequence in `ids`: 0, or 1 for batch-first ids.
    exchange : {"rows", "sum"}, optional
        "rows" sends each distinct row once, and the host waits for the device; "sum" adds the rows
        of all ids, and the host does not wait. None means "rows" on CPUs, otherwise "sum".

    Returns
    -------
    torch.Tensor
        ``(*ids.shape, H)``, replicated, with identical gradients on all ranks; with
        `sequence_sizes` this rank's rows.

    Raises
    ------
    ArgumentError
        If an id is out of range (on every rank), or sizes, ids and weight do not match. On a GPU,
        a kernel fails for such an id, as in torch: the next call that waits for the GPU raises.

    See Also
    --------
    VocabParallelEmbedding, feature_parallel_embedding

    Notes
    -----
    Adjoint: gradients of the same id are summed at its owner in a fixed order, fp16 and bf16 in
    fp32. Both exchanges return the same bits, except for the sign of zeros.

    Communication: with "rows", each distinct row once to each rank that needs it, and in backward
    its gradient if `sequence_sizes` are given. With "sum", an all-reduce; with `sequence_sizes` a
    reduce-scatter, and in backward an all-gather. :doc:`/tensor_parallel` has the bytes.

    In one process: :func:`torch.nn.functional.embedding` in the full table.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import vocab_parallel_embedding
    >>> def fn(rank):
    ...     weight = torch.arange(5.0).view(5, 1)[[slice(0, 3), slice(3, 5)][rank]]
    ...     return vocab_parallel_embedding(torch.tensor([4, 0, 4]), weight, [3, 2]).view(-1)
    >>> varcomm.launch(fn, 2)
    [tensor([4., 0., 4.]), tensor([4., 0., 4.])]
    """
    name, word, ranks = "vocab_parallel_embedding", "sequence_sizes", resolve(group)
    owned = shard_sizes(name, weight, sizes, 0, ranks)
    parts: tuple[int, ...] = ()
    with checking(name, ranks) as where:
        _check_operands(ids, weight, owned, 0, ranks, where)
        checked_choice(exchange, "exchange", where, _EXCHANGES)
        padding = _checked_padding(padding_idx, sum(owned), where)
        own = flat = ids
        if sequence_sizes is not None:
            rows, dim = checked_whole(ids, sequence_sizes, sequence_dim, ranks, where, word)
            per_row = prod((*ids.shape[:dim], *ids.shape[dim + 1 :]))
            parts = tuple(n * per_row for n in rows)
            first = sum(rows[: ranks.rank])  # no range: rows are symbols in a compiled graph
            own = ids.narrow(dim, first, rows[ranks.rank])
            if dim:  # the ids of each rank one after the other
                flat = torch.cat([part.reshape(-1) for part in ids.split(rows, dim)])
    flat = flat.reshape(-1).to(torch.int64)
    if exchange is None:
        exchange = "rows" if weight.device.type == "cpu" else "sum"
    kind = _RowLookup if exchange == "rows" and ranks.size > 1 else _SumLookup
    return _looked_up(kind(ranks, flat, tuple(owned), padding, parts, False), weight, own)


def feature_parallel_embedding(
    ids: Tensor,
    weight: Tensor,
    sizes: Sequence[int] | None = None,
    padding_idx: int | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Look up embeddings in a table whose columns are sharded.

    Parameters
    ----------
    ids : torch.Tensor
        int64 or int32 of any shape, identical on all ranks.
    weight : torch.Tensor
        ``(V, sizes[rank])``: this rank's columns of the table.
    sizes : sequence of int, optional
        Columns per rank; zeros are allowed. If None, ranks exchange their sizes.
    padding_idx, group
        As in :func:`vocab_parallel_embedding`.

    Returns
    -------
    torch.Tensor
        ``(*ids.shape, sum(sizes))``, whose gradient must be identical on all ranks.

    Raises
    ------
    ArgumentError
        If an argument is wrong: on this rank, before any message. For an id out of range on a GPU,
        a kernel fails, as in torch.

    See Also
    --------
    FeatureParallelEmbedding, vocab_parallel_embedding

    Notes
    -----
    Communication: an all-gather of the result; nothing in backward.

    In one process: ``torch.nn.functional.embedding(ids, weight)``. Gradients narrower than 4 bytes
    are summed in fp32.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import feature_parallel_embedding
    >>> def fn(rank):
    ...     weight = torch.arange(6).view(2, 3)[:, [slice(0, 1), slice(1, 3)][rank]].float()
    ...     return feature_parallel_embedding(torch.tensor([1]), weight, [1, 2])
    >>> varcomm.launch(fn, 2)
    [tensor([[3., 4., 5.]]), tensor([[3., 4., 5.]])]
    """
    name, ranks = "feature_parallel_embedding", resolve(group)
    columns = shard_sizes(name, weight, sizes, 1, ranks)
    with checking(name, ranks) as where:
        _check_operands(ids, weight, columns, 1, ranks, where)
        padding = _checked_padding(padding_idx, len(weight), where)
    flat = ids.reshape(-1).to(torch.int64)
    operator = _SumLookup(ranks, flat, (len(weight),), padding, (), False)
    rows = _looked_up(operator, weight, ids)
    return gather_from_tensor_model_parallel_region(rows, columns, -1, group)


@dataclass(frozen=True, eq=False)
class _Lookup(Operator):
    """From this rank's rows of the table to the rows of ids; back to sums if `transposed`."""

    holds_tensors = True
    group: Group
    ids: torch.Tensor  # all ids, flat, identical on all ranks
    sizes: tuple[int, ...]  # rows of the table per rank; one size if each rank has all rows
    padding: int  # an id whose rows the caller makes constants, or -1
    parts: tuple[int, ...]  # ids whose rows are for each rank; empty if all ranks get all rows
    transposed: bool

    def describe(self, x: Tensor) -> dict[str, Any]:
        return {"ids": digest(self.ids), **self.in_log(x)}

    def in_log(self, x: Tensor) -> dict[str, Any]:
        return {
            "transposed": self.transposed,
            "sizes": list(self.sizes),
            "padding_idx": self.padding,
            "sequence_sizes": list(self.parts),
            "shape of a row": packing.rest(x.shape, 0) if self.sizes[1:] else [],
        }

    @torch.no_grad()
    def send(self, x: Tensor) -> Pending:
        if self.transposed:
            return self._sum(x)
        self._check_ids()
        return self._look_up(x)

    @abstractmethod
    def _look_up(self, table: Tensor) -> Pending:
        """Return the rows of the ids for this rank."""

    @abstractmethod
    def _sum(self, gradients: Tensor) -> Pending:
        """Sum the gradients of each row, in the order of the ids."""

    def result(self, x: Tensor) -> Tensor:
        ids = self.parts[self.group.rank] if self.parts else self.ids.shape[0]
        return x.new_empty(len(self._rows) if self.transposed else ids, *x.shape[1:])

    @property
    def adjoint(self) -> Self:
        return replace(self, transposed=not self.transposed)

    @property
    def _rows(self) -> range:
        """The ids of this rank's rows."""
        return ShardSizes(self.sizes).range(self.group.rank % len(self.sizes))

    def _check_ids(self) -> None:
        total = sum(self.sizes)

        def message() -> str:
            low, high = torch.stack(self.ids.aminmax()).tolist()
            return (
                f"parallel_embedding on {self.group}: ids span {low}...{high}, out of range for "
                f"{total} embeddings."
            )

        check_on_device(self.ids, total, message)


@torch_operator
class _SumLookup(_Lookup):
    """Each rank looks up its own rows among those of all ids, and ranks add their results.

    The shapes do not depend on the ids, so the host reads none of them. Local if each rank has all
    rows.
    """

    name = "parallel_embedding_by_sums"

    def _look_up(self, table: Tensor) -> Pending:
        if len(self.sizes) == 1:
            return Pending([], lambda: table.index_select(0, self.ids))
        local, is_other = self._places()
        table = table if len(table) else table.new_zeros(1, *table.shape[1:])
        rows = table.index_select(0, local.masked_fill(is_other, 0))
        _set_zero(rows, is_other)
        if self.parts:
            return ReduceScatterV(self.group, self.parts, 0, use_fp32=True).send(rows)
        return AllReduce(self.group, use_fp32=True).send(rows)

    def _sum(self, gradients: Tensor) -> Pending:
        index = self.ids
        if len(self.sizes) > 1:
            if self.parts:
                gather = AllGatherV(self.group, self.parts, 0, use_fp32=True)
                gradients = gather.send(gradients).wait()
            else:
                gradients = gradients.clone()
            if not self._rows:
                return Pending([], lambda: self.result(gradients))
            local, is_other = self._places()
            _set_zero(gradients, is_other)
            # zeros change no sum; spread over all rows, they make no sum long
            spread = torch.arange(len(local), device=local.device) % len(self._rows)
            index = torch.where(is_other, spread, local)
        total = RowSum(index, len(self._rows))(gradients)
        return Pending([], lambda: total)

    def _places(self) -> tuple[Tensor, Tensor]:
        """Return the rows of ids in this rank's part of the table, and where an id is not of it."""
        local = self.ids - self._rows.start
        return local, (local < 0) | (local >= len(self._rows))


def _set_zero(rows: Tensor, where: Tensor) -> None:
    """Set some rows to zero, in place."""
    if rows.dtype.itemsize == 1:  # torch fills no floats of one byte
        rows = rows.view(torch.int8)
    rows.masked_fill_(where.unsqueeze(1), 0)


class _Distinct:
    """The distinct values among keys, in ascending order, found without a look at them."""

    def __init__(self, keys: Tensor) -> None:
        self.sorted, self.order = keys.sort(stable=True)
        is_first = torch.ones_like(self.sorted, dtype=torch.bool)
        is_first[1:] = self.sorted[1:] != self.sorted[:-1]
        self.number = is_first.cumsum(0)  # of distinct keys up to each
        of_first = self.number - 1
        # the place of each key among the distinct ones, which fill the front of `keys`
        self.places = torch.empty_like(self.order).scatter_(0, self.order, of_first)
        self.keys = torch.empty_like(self.sorted).scatter_(0, of_first, self.sorted)

    def before(self, bounds: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of keys, and of distinct keys, below each bound."""
        keys = torch.searchsorted(self.sorted, bounds)
        return keys, functional.pad(self.number, (1, 0))[keys]


@torch_operator
class _RowLookup(_Lookup):
    """Each distinct row travels once; the host reads how many there are, once for both passes.

    Gradients are complete on every rank, so those for all ranks are summed without messages.
    """

    name = "parallel_embedding"

    @property
    def adjoint(self) -> Self:
        made = super().adjoint
        plans = vars(self).keys() & {"to_all", "to_parts"}  # made once for both
        vars(made).update({plan: vars(self)[plan] for plan in plans})
        return made

    def _look_up(self, table: Tensor) -> Pending:
        if self.parts:
            routes, places, _ = self.to_parts
            needed = Exchange(routes, 0, use_fp32=True).send(table).wait()
            return Pending([], lambda: needed.index_select(0, places))
        # gather each distinct row once; the only copy repeats it at all its places
        counts, own, places, *_ = self.to_all
        row = table.shape[1:]
        values = packing.flat(table.index_select(0, own))
        lengths = [count * row.numel() for count in counts]
        works, received = packing.all_gather(self.name, self.group, values, lengths)
        return Pending(works, lambda: received.view(sum(counts), *row).index_select(0, places))

    def _sum(self, gradients: Tensor) -> Pending:
        if self.parts:
            routes, _, row_sum = self.to_parts
            return ExchangeAdjoint(routes, 0, use_fp32=True).send(row_sum(gradients))
        *_, mine, row_sum = self.to_all
        total = row_sum(gradients.index_select(0, mine))
        return Pending([], lambda: total)

    @cached_property
    def to_all(self) -> tuple[list[int], Tensor, Tensor, Tensor, RowSum]:
        """Distinct rows per rank, those of this rank, and where each id finds its row.

        Then the ids of this rank's rows, and their sum.
        """
        rank, own, distinct = self.group.rank, self._rows, _Distinct(self.ids)
        ends = shard_ends(self.group, self.sizes, self.ids)
        at, before = torch.stack(distinct.before(ends)).tolist()
        counts = [end - begin for begin, end in pairwise([0, *before])]
        rows = distinct.keys[before[rank] - counts[rank] : before[rank]] - own.start
        mine = slice(at[rank - 1] if rank else 0, at[rank])
        index = distinct.sorted[mine] - own.start
        return counts, rows, distinct.places, distinct.order[mine], RowSum(index, len(own))

    @cached_property
    def to_parts(self) -> tuple[Routes, Tensor, RowSum]:
        """The routes of rows to their part, the row of each of that part's ids, and their sum."""
        group, own, tokens = self.group, self._rows, ShardSizes(self.parts)
        rank, ranks, width = group.rank, group.size, max(sum(self.sizes), 1)
        everyone = torch.arange(len(self.ids), device=self.ids.device)
        part = torch.bucketize(everyone, shard_ends(group, self.parts, self.ids), right=True)
        # pairs of a part and an id that it needs: those of a part, and in it of an owner, together
        distinct = _Distinct(part * width + self.ids)
        firsts = torch.arange(ranks, device=self.ids.device) * width
        owners = functional.pad(shard_ends(group, self.sizes, self.ids), (1, 0)) + rank * width
        bounds = torch.cat([firsts + own.start, firsts + own.stop, owners])
        before = distinct.before(bounds)[1].tolist()
        asked = list(zip(before[:ranks], before[ranks : 2 * ranks], strict=True))
        sends = tuple(end - begin for begin, end in asked)
        receives = tuple(end - begin for begin, end in pairwise(before[2 * ranks :]))
        wanted = torch.cat([distinct.keys[begin:end] for begin, end in asked])
        index = wanted % width - own.start
        places = distinct.places[tokens.offsets[rank] :][: tokens[rank]] - before[2 * ranks]
        routes = Routes.of(group, index, sends, receives, len(own))
        return routes, places, RowSum(places, sum(receives))


def _looked_up(operator: _Lookup, table: Tensor, ids: Tensor) -> Tensor:
    """Return the rows of `ids`, of which those of the padding id are constants in derivatives."""
    rows = apply(operator, table).view(*ids.shape, table.shape[1])
    if operator.padding < 0:
        return rows
    return torch.where((ids == operator.padding).unsqueeze(-1), rows.detach(), rows)


def _check_operands(
    ids: Tensor, weight: Tensor, sizes: Sequence[int], dim: int, group: Group, where: str
) -> None:
    checked_summable(weight, where)
    if weight.dim() != 2:
        raise ArgumentError(f"{where}weight must be (ids, features); got {tuple(weight.shape)}.")
    checked_shard(weight, sizes, dim, group, where)
    checked_tensor(ids, where, "ids")
    if ids.dtype not in (torch.int32, torch.int64) or ids.device != weight.device:
        raise ArgumentError(
            f"{where}ids must be int64 or int32 on {weight.device}; got {ids.dtype} on "
            f"{ids.device}."
        )


def _checked_padding(padding_idx: int | None, total: int, where: str) -> int:
    """Return `padding_idx` counted from the front; -1 is none."""
    if padding_idx is None:
        return -1
    value = exact_int(padding_idx)
    if value is None or not -total <= value < total:
        raise ArgumentError(
            f"{where}padding_idx must be one of all {total} ids, not of this rank's; got "
            f"{padding_idx!r}."
        )
    return value % total


class _ParallelEmbedding(ShardedModule):
    """Parameters of both layers, and conversion from and to ``torch.nn.Embedding``."""

    _plain = torch.nn.Embedding
    _copied = ("num_embeddings", "embedding_dim", "padding_idx")

    weight: torch.nn.Parameter
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        sizes: Sequence[int] | None = None,
        padding_idx: int | None = None,
        *,
        group: GroupLike = None,
        **options: Any,
    ) -> None:
        def more(layout: Layout) -> dict[str, Any]:
            if len(layout.spec.blocks) != 1:
                raise ArgumentError(f"sizes must be one int per rank; got {sizes!r}.")
            padding = _checked_padding(padding_idx, num_embeddings, "")
            self.padding_idx = None if padding < 0 else padding
            return {"padding_idx": self.padding_idx}

        shape = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}
        super().__init__(shape, sizes, group, options, more)

    @property
    def sizes(self) -> ShardSizes:
        """Ids or columns per rank."""
        return self.spec.blocks[0]

    def _drawn(self, seed: int, names: Collection[str]) -> dict[str, Tensor]:
        drawn, by_ids = super()._drawn(seed, names), self.spec.dim == 0
        own = self.sizes.range(self.group.rank) if by_ids else range(self.num_embeddings)
        if self.padding_idx is not None and self.padding_idx in own:
            drawn["weight"][own.index(self.padding_idx)] = 0
        return drawn

    def _fill(self, tile: Tensor, generator: torch.Generator) -> None:
        tile.normal_(generator=generator)

    @classmethod
    def from_embedding(
        cls,
        embedding: torch.nn.Embedding,
        sizes: Sequence[int] | None = None,
        *,
        group: GroupLike = None,
        **options: Any,
    ) -> Self:
        """Shard an embedding that is identical on all ranks; collective.

        `options` are arguments of the constructor beside padding_idx, init, device and dtype. All
        ranks raise an error if the embedding has other options, or if the weights differ.
        """

        def more() -> dict[str, Any]:
            words = ("max_norm", "scale_grad_by_freq", "sparse")
            if refused := [word for word in words if getattr(embedding, word)]:
                raise ArgumentError(f"a sharded table has no {' and no '.join(refused)}.")
            return {"padding_idx": embedding.padding_idx}

        return cls._replacing("embedding", embedding, {**options, "sizes": sizes}, group, more)

    def to_embedding(self) -> torch.nn.Embedding:
        """Return the full table as a torch.nn.Embedding, on every rank; collective."""
        return self._unsharded()  # type: ignore[no-any-return]


class VocabParallelEmbedding(_ParallelEmbedding):
    """Embedding whose rows are sharded by ids.

    Parameters
    ----------
    num_embeddings : int
        Rows of the full table.
    embedding_dim : int
        Columns of the full table.
    sizes : sequence of int, optional
        Ids per rank; zeros are allowed. None means balanced sizes.
    padding_idx : int, optional
        The id, counted over all ranks, whose row starts as zeros and gets no gradient.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
    **options
        `sequence_sizes`, `sequence_dim` and `exchange` as in :func:`vocab_parallel_embedding`;
        `device` and `dtype` of the weight. ``init(tensor, generator)`` fills pieces of the table in
        place. By default, elements are drawn from the normal distribution.

    Attributes
    ----------
    weight : torch.nn.Parameter
        This rank's rows of the table, ``(sizes[rank], embedding_dim)``.
    spec : ShardSpec
        The sharding of the table.

    Raises
    ------
    ArgumentError
        On all ranks, if an argument is wrong on one rank.

    See Also
    --------
    FeatureParallelEmbedding, vocab_parallel_embedding, vocab_parallel_cross_entropy

    Notes
    -----
    With one seed, the table is the same on any number of ranks.

    Communication: per call as :func:`vocab_parallel_embedding`; the constructor is collective.

    In one process: :class:`torch.nn.Embedding`.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import VocabParallelEmbedding
    >>> def fn(rank):
    ...     torch.manual_seed(0)
    ...     layer = VocabParallelEmbedding(5, 4, padding_idx=3, sequence_sizes=[1, 2])
    ...     return layer(torch.tensor([4, 3, 0])).shape, layer.weight.shape
    >>> varcomm.launch(fn, 2)
    [(torch.Size([1, 4]), torch.Size([3, 4])), (torch.Size([2, 4]), torch.Size([2, 4]))]
    """

    _options = {"exchange": _EXCHANGES}  # noqa: RUF012

    exchange: Literal["rows", "sum"] | None

    def forward(self, ids: Tensor, sequence_sizes: Sequence[int] | None = None) -> Tensor:
        """Look up `ids`; `sequence_sizes` overrides the layer's sizes in this call."""
        return vocab_parallel_embedding(
            ids,
            self.weight,
            self.sizes,
            self.padding_idx,
            self.sequence_sizes if sequence_sizes is None else sequence_sizes,
            self.group.process_group,
            sequence_dim=self.sequence_dim,
            exchange=self.exchange,
        )


class FeatureParallelEmbedding(_ParallelEmbedding):
    """Embedding whose columns are sharded, for all ids.

    Parameters
    ----------
    num_embeddings, embedding_dim, padding_idx, group
        As for :class:`VocabParallelEmbedding`, which draws the same table from the same seed.
    sizes : sequence of int, optional
        Columns per rank; zeros are allowed. None means balanced sizes.
    **options
        `init`, `device` and `dtype`.

    Attributes
    ----------
    weight : torch.nn.Parameter
        This rank's columns of the table, ``(num_embeddings, sizes[rank])``.
    spec : ShardSpec
        The sharding of the table.

    Raises
    ------
    ArgumentError
        On all ranks, if an argument is wrong on one rank.

    Notes
    -----
    Communication: per call as :func:`feature_parallel_embedding`; the constructor is collective.

    In one process: :class:`torch.nn.Embedding`.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import FeatureParallelEmbedding
    >>> def fn(rank):
    ...     layer = FeatureParallelEmbedding(5, 3)
    ...     return layer(torch.tensor([[4, 3, 0]])).shape, layer.weight.shape
    >>> varcomm.launch(fn, 2)[1]
    (torch.Size([1, 3, 3]), torch.Size([5, 1]))
    """

    _dim = 1

    def forward(self, ids: Tensor) -> Tensor:
        """Look up `ids`, which are identical on all ranks."""
        return feature_parallel_embedding(
            ids, self.weight, self.sizes, self.padding_idx, self.group.process_group
        )
