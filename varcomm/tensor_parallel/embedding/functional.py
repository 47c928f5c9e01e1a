"""Embeddings whose table is sharded, by ids or by features: functions of the weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.autograd import apply
from varcomm.ops.checks import checked_shard, checked_whole
from varcomm.ops.digest import digest
from varcomm.ops.operator import checking
from varcomm.ops.replicated import ReplicatedGather
from varcomm.sizes import checked_dim
from varcomm.tensor_parallel.embedding.checks import (
    METHODS,
    checked_ids,
    checked_method,
    checked_padding,
    checked_range,
    checked_table,
)
from varcomm.tensor_parallel.embedding.in_graph import (
    RowsOfIds,
    RowsOfParts,
    RowsOfTable,
    as_padding,
)
from varcomm.tensor_parallel.embedding.lookup import Lookup, looked_up
from varcomm.tensor_parallel.embedding.methods import Table
from varcomm.tensor_parallel.mappings.sizes import sizes_of_shard
from varcomm.transport.agreement import compare, debugging
from varcomm.transport.group import GroupLike, resolve

__all__ = ["feature_parallel_embedding", "vocab_parallel_embedding"]


def vocab_parallel_embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    sizes: Sequence[int] | None = None,
    padding_idx: int | None = None,
    sequence_sizes: Sequence[int] | None = None,
    method: str = "auto",
    input_is_parallel: bool = False,
    group: GroupLike = None,
) -> torch.Tensor:
    """Look up embeddings in a table of which each rank has the rows of some ids.

    Parameters
    ----------
    ids : torch.Tensor
        Of int64 or int32, any shape, the sequence first; the same on all ranks. With
        `input_is_parallel`, those of this rank's part of the sequence.
    weight : torch.Tensor
        ``(sizes[rank], H)``: this rank's rows of the table.
    sizes : sequence of int, optional
        Ids that each rank has rows of, one int a rank, zeros allowed: rank 0 has those of the first
        ``sizes[0]`` ids, and so on. None asks the ranks, which costs a round of messages.
    padding_idx : int, optional
        An id, of all ids, whose row gets no gradient.
    sequence_sizes : sequence of int, optional
        Rows of the sequence, the first dimension of all ids, that are to be on each rank, zeros
        allowed. None gives all rows to all ranks, or, with `input_is_parallel`, to each the rows
        that it brings.
    method : {"auto", "masked", "indexed"}
        *masked*: each rank looks up its own ids and puts zeros for others, and these are summed
        over ranks. *indexed*: the row of each distinct id travels once from its owner to each rank
        that needs it. *auto*: the one for which the busiest rank sends or receives fewer bytes,
        masked if they are equal. That is indexed on two ranks or more, but where the whole result
        goes to three ranks or more and one of them owns nearly all distinct ids.
    input_is_parallel : bool
        Whether each rank brings the ids of its own part of the sequence only.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.

    Returns
    -------
    torch.Tensor
        ``(*ids.shape, H)``, replicated: its gradient must be the same on all ranks. With
        `sequence_sizes` or `input_is_parallel` this rank's rows of it.

    Raises
    ------
    ArgumentError
        If an id is out of range, or sizes, ids and weight do not fit: on every rank if ids are
        whole and wrong, and if with `input_is_parallel` an id is out of range on one of them.
    DisagreementError
        Inside :func:`varcomm.debug`, on every rank, if ids that should be whole differ.

    Notes
    -----
    Adjoint: gradients of the same id are summed at its owner, in a fixed order, the same at every
    run bit for bit; floats narrower than 4 bytes are summed in fp32.

    Communication: in rows of H elements, for T ids on P ranks, *masked* is an all-reduce of T rows
    and nothing in backward; or a reduce-scatter of T rows, and an all-gather in backward. *indexed*
    brings each rank the rows of the distinct ids that it needs and does not own, and nothing in
    backward; or, for parts of the sequence, the same rows' gradients go back. Ids are not sent
    where they are whole; with `input_is_parallel`, distinct ids are (indexed), or all (masked).

    Memory beside the result: *masked*, for parts of the sequence, the T rows that are summed;
    *indexed*, the distinct rows that are sent and received. Backward keeps ids only, no rows.

    In one process: :func:`torch.nn.functional.embedding` in the whole table.

    References
    ----------
    Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
    Parallelism", arXiv 1909.08053, for *masked*.

    Examples
    --------
    Ids 0, 1, 2 are on rank 0, and 3, 4 on rank 1:

    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel.embedding import vocab_parallel_embedding
    >>> def fn(rank):
    ...     weight = torch.arange(5.0).view(5, 1)[[slice(0, 3), slice(3, 5)][rank]]
    ...     whole = vocab_parallel_embedding(torch.tensor([4, 0, 4]), weight, [3, 2])
    ...     part = vocab_parallel_embedding(
    ...         torch.tensor([4, 0, 4]), weight, [3, 2], sequence_sizes=[2, 1]
    ...     )
    ...     return whole.view(-1).tolist(), part.view(-1).tolist()
    >>> varcomm.launch(fn, 2)
    [([4.0, 0.0, 4.0], [4.0, 0.0]), ([4.0, 0.0, 4.0], [4.0])]
    """
    name, ranks = "vocab_parallel_embedding", resolve(group)
    owned = sizes_of_shard(name, weight, sizes, 0, ranks)
    with checking(name, ranks, input_is_parallel=input_is_parallel) as where:
        table_sizes = checked_table(weight, owned, 0, ranks, where)
        checked_ids(ids, weight, where)
        checked_method(method, where)
        padding = checked_padding(padding_idx, table_sizes.total, where)
        if input_is_parallel:
            checked_dim(0, ids.shape, where)
            if sequence_sizes is not None:
                checked_shard(ids, sequence_sizes, 0, ranks, where, "sequence_sizes")
    table, width = Table(weight, table_sizes, padding, ranks), weight.shape[1]
    recorded = torch.compiler.is_compiling()  # in a graph that knows all shapes, but no ids
    if input_is_parallel and (method == "masked" or recorded):
        sequence_sizes = sizes_of_shard(name, ids, sequence_sizes, 0, ranks, "sequence_sizes")
        ids = all_gather_v(ids, sequence_sizes, group=group)
    elif input_is_parallel:
        return table.of_own(ids.reshape(-1).to(torch.int64)).view(*ids.shape, width)

    parts: tuple[int, ...] | None = None
    with checking(name, ranks):
        if sequence_sizes is not None:
            parts, _ = checked_whole(ids, sequence_sizes, 0, ranks, where, "sequence_sizes")
        flat = ids.reshape(-1).to(torch.int64)
        if not recorded:
            checked_range(flat, table_sizes.total, where)
    each = ids.shape[1:].numel()
    of_parts = None if parts is None else tuple(part * each for part in parts)
    if recorded:
        known = ranks, flat, table_sizes, as_padding(padding), METHODS.index(method)
        if of_parts is None:
            rows = apply(RowsOfIds(*known), weight)
        else:
            rows = apply(RowsOfParts(*known, of_parts), weight)
    else:
        if debugging():
            call = {"ids": digest(ids), "sizes": list(table_sizes), "padding_idx": padding}
            compare(ranks, {"operation": name, **call, "sequence_sizes": parts, "method": method})
        if of_parts is None:
            rows = table.replicated(flat, method)
        else:
            rows = table.of_part(flat, of_parts, method)
    length = ids.shape[:1] if parts is None else (parts[ranks.rank],)
    return rows.view(*length, *ids.shape[1:], width)


def feature_parallel_embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    sizes: Sequence[int] | None = None,
    padding_idx: int | None = None,
    gather_output: bool = True,
    group: GroupLike = None,
) -> torch.Tensor:
    """Look up embeddings in a table of which each rank has some columns, for all ids.

    Parameters
    ----------
    ids : torch.Tensor
        Of int64 or int32, any shape; the same on all ranks.
    weight : torch.Tensor
        ``(V, sizes[rank])``: this rank's columns of the table.
    sizes : sequence of int, optional
        Columns of each rank, one int a rank, zeros allowed. None asks the ranks, which costs a
        round of messages.
    padding_idx : int, optional
        The id whose row gets no gradient.
    gather_output : bool
        Whether the result has all columns, replicated, or this rank's only.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.

    Returns
    -------
    torch.Tensor
        ``(*ids.shape, sum(sizes))``, whose gradient must be the same on all ranks; or
        ``(*ids.shape, sizes[rank])``.

    Raises
    ------
    ArgumentError
        If an id is out of range, or sizes, ids and weight do not fit.
    DisagreementError
        Inside :func:`varcomm.debug`, on every rank, if ids differ.

    Notes
    -----
    Adjoint: this rank's columns of the gradients of one id are summed, the same at every run bit
    for bit.

    Communication: with `gather_output` each rank sends its columns of the result to every other;
    nothing in backward, and nothing else.

    In one process: ``torch.nn.functional.embedding(ids, weight)``.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel.embedding import feature_parallel_embedding
    >>> def fn(rank):
    ...     weight = torch.arange(6).view(2, 3)[:, [slice(0, 1), slice(1, 3)][rank]].float()
    ...     return feature_parallel_embedding(torch.tensor([1]), weight, [1, 2])
    >>> varcomm.launch(fn, 2)
    [tensor([[3., 4., 5.]]), tensor([[3., 4., 5.]])]
    """
    name, ranks = "feature_parallel_embedding", resolve(group)
    columns = sizes_of_shard(name, weight, sizes, 1, ranks)
    with checking(name, ranks, gather_output=gather_output) as where:
        plain = checked_table(weight, columns, 1, ranks, where)
        checked_ids(ids, weight, where)
        padding = checked_padding(padding_idx, len(weight), where)
        flat = ids.reshape(-1).to(torch.int64)
        if not torch.compiler.is_compiling():
            checked_range(flat, len(weight), where)
    if torch.compiler.is_compiling():
        rows = apply(RowsOfTable(ranks, flat, len(weight), as_padding(padding)), weight)
    else:
        if debugging():
            call = {"ids": digest(ids), "sizes": list(plain), "padding_idx": padding}
            compare(ranks, {"operation": name, **call, "gather_output": gather_output})
        constant = None if padding is None else flat == padding
        rows = looked_up(weight, Lookup(flat, None, len(weight), len(flat), constant))
    if gather_output:
        rows = apply(ReplicatedGather(ranks, plain, 1, use_fp32=True), rows)
    return rows.view(*ids.shape, rows.shape[1])
