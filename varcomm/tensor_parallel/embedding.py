"""Embeddings whose table is sharded, by ids or by features, in shards of any sizes.

A lookup by rows is one linear operator, and its adjoint another. How many rows travel depends on
the values of the ids, so both are opaque in compiled graphs, which check the ids when they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from varcomm.errors import ArgumentError
from varcomm.ops import packing
from varcomm.ops.checks import checked_shard, checked_tensor, checked_whole
from varcomm.ops.digest import digest
from varcomm.ops.operator import Operator, apply, checking, torch_operator
from varcomm.ops.reduction import checked_summable
from varcomm.plan.exchange_plan import ExchangePlan
from varcomm.plan.row_sum import RowSum
from varcomm.sizes import ShardSizes, exact_int
from varcomm.tensor_parallel.layout import ShardedModule, agreed, random_seed
from varcomm.tensor_parallel.mappings import gather_from_tensor_model_parallel_region, shard_sizes
from varcomm.transport.agreement import agree
from varcomm.transport.engine import Pending
from varcomm.transport.group import Group, GroupLike, resolve

__all__ = [
    "FeatureParallelEmbedding",
    "VocabParallelEmbedding",
    "feature_parallel_embedding",
    "vocab_parallel_embedding",
]


def vocab_parallel_embedding(
    ids: Tensor,
    weight: Tensor,
    sizes: Sequence[int] | None = None,
    padding_idx: int | None = None,
    sequence_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    *,
    sequence_dim: int = 0,
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

    Returns
    -------
    torch.Tensor
        ``(*ids.shape, H)``, replicated, with identical gradients on all ranks; with
        `sequence_sizes` this rank's rows.

    Raises
    ------
    ArgumentError
        If an id is out of range (on every rank), or sizes, ids and weight do not match.

    See Also
    --------
    VocabParallelEmbedding, feature_parallel_embedding

    Notes
    -----
    Adjoint: gradients of the same id are summed at its owner in a fixed order; floats narrower than
    4 bytes are summed in fp32.

    Communication: the row of each distinct id, once from its owner to each rank that needs it. In
    backward nothing, or with `sequence_sizes` gradients of these rows.

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
    operator = _LookUp(ranks, flat.reshape(-1).to(torch.int64), tuple(owned), padding, parts)
    found = apply(operator, weight).view(*own.shape, weight.shape[1])
    return _without_padding(found, own, padding)


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
        If an argument is wrong: on this rank, before any message.

    See Also
    --------
    FeatureParallelEmbedding, vocab_parallel_embedding

    Notes
    -----
    Communication: an all-gather of the result; nothing in backward.

    In one process: ``torch.nn.functional.embedding(ids, weight)``. Gradients narrower than 4 bytes
    are summed in fp32, and an id out of range is an ArgumentError on every rank.

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
    operator = _LookUp(ranks, ids.reshape(-1).to(torch.int64), (len(weight),), padding, ())
    rows = apply(operator, weight).view(*ids.shape, weight.shape[1])
    found = _without_padding(rows, ids, padding)
    return gather_from_tensor_model_parallel_region(found, columns, -1, group)


@dataclass(frozen=True, eq=False)
class _Lookup(Operator):
    """Fields of a lookup and of its adjoint.

    `ids` are all ids, flat, identical on all ranks. `sizes` are rows of the table per rank, one
    size if each rank has all rows. `parts` is the number of ids whose rows are for each rank, empty
    if all ranks get all rows. The caller makes constants of the rows of `padding`, an id or -1.
    """

    group: Group
    ids: torch.Tensor
    sizes: tuple[int, ...]
    padding: int
    parts: tuple[int, ...]

    def describe(self, x: Tensor) -> dict[str, Any]:
        return {
            "ids": digest(self.ids),
            "sizes": list(self.sizes),
            "padding_idx": self.padding,
            "sequence_sizes": list(self.parts),
            "shape of a row": packing.rest(x.shape, 0) if self.sizes[1:] else [],
        }

    def _transposed(self, kind: Any) -> Any:
        made = kind(self.group, self.ids, self.sizes, self.padding, self.parts)
        if "exchange" in vars(self):  # planned once for both
            vars(made)["exchange"] = self.exchange
        return made

    @property
    def _rows(self) -> range:
        """The ids of this rank's rows."""
        return ShardSizes(self.sizes).range(self.group.rank % len(self.sizes))

    @cached_property
    def exchange(self) -> tuple[ExchangePlan, Tensor]:
        """The plan by which rows travel to their part, and the row of each of that part's ids."""
        tokens, rank, ranks = ShardSizes(self.parts), self.group.rank, self.group.size
        table, mine = ShardSizes(self.sizes), self._rows
        own = self.ids[tokens.offsets[rank] :][: tokens[rank]]
        needed, places = own.unique(return_inverse=True)
        # the rows that others need of this rank's, requester by requester, each once per requester
        asked = torch.nonzero((self.ids >= mine.start) & (self.ids < mine.stop)).view(-1)
        width = max(table.total, 1)
        wanted = (tokens.owner(asked) * width + self.ids[asked]).unique()
        send = torch.bincount(wanted // width, minlength=ranks)
        recv = torch.bincount(table.owner(needed), minlength=ranks)
        sends, receives = (tuple(row) for row in torch.stack([send, recv]).tolist())
        plan = ExchangePlan(self.group, wanted % width - mine.start, sends, receives, len(mine))
        return plan, places


@torch_operator
class _LookUp(_Lookup):
    """From this rank's rows of the table to the rows of ids."""

    name = "parallel_embedding"

    @torch.no_grad()
    def start(self, x: Tensor) -> Pending:
        """Look up all rows at once; the engine's rounds depend on the ids."""
        total = sum(self.sizes)
        if self.ids.numel():
            low, high = torch.stack(self.ids.aminmax()).tolist()
            if low < 0 or high >= total:
                raise ArgumentError(
                    f"{self.name} on {self.group}: ids span {low}...{high}, out of range for "
                    f"{total} embeddings."
                )
        if self.parts:
            plan, places = self.exchange
            found = plan(x).index_select(0, places)
            return Pending([], lambda: found)
        if len(self.sizes) == 1:
            return Pending([], lambda: x.index_select(0, self.ids))
        # gather each distinct row once; the only copy repeats it at all its places
        distinct, places = self.ids.unique(return_inverse=True)
        owners, rank, row = ShardSizes(self.sizes).owner(distinct), self.group.rank, x.shape[1:]
        counts = torch.bincount(owners, minlength=self.group.size).tolist()
        first = sum(counts[:rank])
        own = distinct[first : first + counts[rank]] - self._rows.start
        values = packing.flat(x.index_select(0, own))
        lengths = [count * row.numel() for count in counts]
        works, received = packing.all_gather(self.name, self.group, values, lengths)
        return Pending(works, lambda: received.view(len(distinct), *row).index_select(0, places))

    def result(self, x: Tensor) -> Tensor:
        rows = self.parts[self.group.rank] if self.parts else self.ids.shape[0]
        return x.new_empty(rows, *x.shape[1:])

    @property
    def adjoint(self) -> _SumUp:
        return self._transposed(_SumUp)  # type: ignore[no-any-return]


@torch_operator
class _SumUp(_Lookup):
    """From gradients of looked-up rows, complete on every rank, to those of this rank's rows."""

    name = "parallel_embedding_adjoint"

    @torch.no_grad()
    def start(self, x: Tensor) -> Pending:
        """Sum the gradients of each row, in the order of the ids."""
        if self.parts:
            plan, places = self.exchange
            total = plan.adjoint(RowSum(places, sum(plan.recv_counts))(x))
        else:
            mine = self._rows
            places = torch.nonzero((self.ids >= mine.start) & (self.ids < mine.stop)).view(-1)
            total = RowSum(self.ids[places] - mine.start, len(mine))(x.index_select(0, places))
        return Pending([], lambda: total)

    def result(self, x: Tensor) -> Tensor:
        return x.new_empty(len(self._rows), *x.shape[1:])

    @property
    def adjoint(self) -> _LookUp:
        return self._transposed(_LookUp)  # type: ignore[no-any-return]


def _without_padding(rows: Tensor, ids: Tensor, padding: int) -> Tensor:
    """Return `rows`, of which those of the padding id are constants in derivatives."""
    if padding < 0:
        return rows
    return torch.where((ids == padding).unsqueeze(-1), rows.detach(), rows)


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


def _normal(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.normal_(generator=generator)


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
        super().__init__()

        def more() -> dict[str, Any]:
            if len(self.spec.blocks) != 1:
                raise ArgumentError(f"sizes must be one int per rank; got {sizes!r}.")
            padding = _checked_padding(padding_idx, num_embeddings, "")
            self.padding_idx = None if padding < 0 else padding
            return {"padding_idx": self.padding_idx}

        shape = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}
        seed = self._agree(shape, sizes, group, options, more)
        # a device may be missing or full on one rank, and `init` is the caller's
        self.weight = agree(type(self).__name__, lambda: self._drawn(seed), self.group)

    @property
    def sizes(self) -> ShardSizes:
        """Ids or columns per rank."""
        return self.spec.blocks[0]

    def _drawn(self, seed: int) -> torch.nn.Parameter:
        parameter = self._draw("weight", (self.num_embeddings, self.embedding_dim), _normal, seed)
        by_ids = self.spec.dim == 0
        own = self.sizes.range(self.group.rank) if by_ids else range(self.num_embeddings)
        if self.padding_idx is not None and self.padding_idx in own:
            with torch.no_grad():
                parameter[own.index(self.padding_idx)] = 0
        return parameter

    def reset_parameters(self) -> None:
        """Draw the weight again, with a seed that the ranks agree on; collective."""
        seed = agreed("reset_parameters", dict, self.group, random_seed)[1]
        self._how_drawn = self._how_drawn[0], self.weight.device, self.weight.dtype
        with torch.no_grad():
            self.weight.copy_(self._drawn(seed))

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
        `sequence_sizes` and `sequence_dim` as in :func:`vocab_parallel_embedding`; `device` and
        `dtype` of the weight. ``init(tensor, generator)`` fills pieces of the table in place. By
        default, elements are drawn from the normal distribution.

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

    See Also
    --------
    VocabParallelEmbedding, feature_parallel_embedding

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
