"""Layers that hold this rank's part of a table of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import torch

from varcomm.ops.checks import checked_flag
from varcomm.sizes import ShardSizes, checked_sizes
from varcomm.tensor_parallel.embedding.checks import checked_method
from varcomm.tensor_parallel.embedding.functional import (
    feature_parallel_embedding,
    vocab_parallel_embedding,
)
from varcomm.tensor_parallel.embedding.table import ShardedTable
from varcomm.tensor_parallel.initial import Fill
from varcomm.transport.group import GroupLike

__all__ = ["FeatureParallelEmbedding", "VocabParallelEmbedding"]


class VocabParallelEmbedding(ShardedTable):
    """An embedding of which each rank has the rows of some ids.

    Making one is collective.

    Parameters
    ----------
    num_embeddings, embedding_dim : int
        Of the whole table.
    sizes : sequence of int, optional
        Ids that each rank has rows of, one int a rank, zeros allowed; None is balanced.
    padding_idx : int, optional
        An id, of all ids, whose row is zeros at first and gets no gradient.
    max_norm : None
        Is refused: rows would be overwritten during the forward.
    sequence_sizes : sequence of int, optional
        Rows of the sequence that are to be on each rank; see :func:`vocab_parallel_embedding`.
    method : {"auto", "masked", "indexed"}
        How rows travel; see :func:`vocab_parallel_embedding`.
    input_is_parallel : bool
        Whether each rank brings the ids of its own part of the sequence only.
    init : callable, optional
        ``init(tensor, generator)`` draws each element in place; None draws from the normal
        distribution. The same seed gives the same table on any number of ranks.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.
    device, dtype : optional
        Of the weight.

    Attributes
    ----------
    weight : torch.nn.Parameter
        ``(sizes[rank], embedding_dim)``: this rank's rows.
    spec : ShardSpec
        How the table is sharded.

    Raises
    ------
    ArgumentError, DisagreementError
        On every rank, if arguments are wrong on one of them, or differ.

    Notes
    -----
    Communication: a call, as :func:`vocab_parallel_embedding`; making one, short messages.

    In one process: :class:`torch.nn.Embedding`.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel.embedding import VocabParallelEmbedding
    >>> def fn(rank):
    ...     torch.manual_seed(0)
    ...     layer = VocabParallelEmbedding(5, 4, padding_idx=3, sequence_sizes=[1, 2])
    ...     return layer(torch.tensor([4, 3, 0])).shape, layer.weight.shape
    >>> varcomm.launch(fn, 2)
    [(torch.Size([1, 4]), torch.Size([3, 4])), (torch.Size([2, 4]), torch.Size([2, 4]))]
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        sizes: Sequence[int] | None = None,
        padding_idx: int | None = None,
        max_norm: None = None,
        sequence_sizes: Sequence[int] | None = None,
        method: str = "auto",
        input_is_parallel: bool = False,
        init: Fill | None = None,
        group: GroupLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()

        def options(ranks: int) -> dict[str, Any]:
            parts = None
            if sequence_sizes is not None:
                parts = ShardSizes(checked_sizes(sequence_sizes, "sequence_sizes", ranks))
            checked_method(method, "")
            checked_flag(input_is_parallel, "input_is_parallel", "")
            return {
                "sequence_sizes": parts,
                "method": method,
                "input_is_parallel": input_is_parallel,
            }

        checked = self._set_up(
            0,
            (num_embeddings, embedding_dim),
            sizes,
            padding_idx,
            max_norm,
            init,
            group,
            device,
            dtype,
            options,
        )
        self.sequence_sizes: ShardSizes | None = checked["sequence_sizes"]
        self.method, self.input_is_parallel = method, input_is_parallel

    def forward(
        self, ids: torch.Tensor, sequence_sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Look up `ids`; `sequence_sizes` of this call take the place of the layer's."""
        return vocab_parallel_embedding(
            ids,
            self.weight,
            self.sizes,
            self.padding_idx,
            self.sequence_sizes if sequence_sizes is None else sequence_sizes,
            self.method,
            self.input_is_parallel,
            self.spec.group.process_group,
        )

    @classmethod
    def from_embedding(
        cls,
        embedding: torch.nn.Embedding,
        sizes: Sequence[int] | None = None,
        sequence_sizes: Sequence[int] | None = None,
        method: str = "auto",
        input_is_parallel: bool = False,
        group: GroupLike = None,
    ) -> Self:
        """Shard an embedding that all ranks have alike; collective.

        Raises
        ------
        ArgumentError
            On every rank, if it has options that a sharded table has not.
        DisagreementError
            On every rank, if the ranks' weights differ.
        """
        made = partial(
            cls,
            sizes=sizes,
            sequence_sizes=sequence_sizes,
            method=method,
            input_is_parallel=input_is_parallel,
        )
        return cls._of(embedding, group, made)


class FeatureParallelEmbedding(ShardedTable):
    """An embedding of which each rank has some columns, for all ids.

    Making one is collective.

    Parameters
    ----------
    num_embeddings, embedding_dim : int
        Of the whole table.
    sizes : sequence of int, optional
        Columns that each rank has, one int a rank, zeros allowed; None is balanced.
    padding_idx : int, optional
        An id whose row is zeros at first and gets no gradient.
    max_norm : None
        Is refused: rows would be overwritten during the forward.
    gather_output : bool
        Whether the result has all columns, replicated, or this rank's only.
    init, group, device, dtype
        As for :class:`VocabParallelEmbedding`, which draws the same table from the same seed.

    Attributes
    ----------
    weight : torch.nn.Parameter
        ``(num_embeddings, sizes[rank])``: this rank's columns.
    spec : ShardSpec
        How the table is sharded.

    Raises
    ------
    ArgumentError, DisagreementError
        On every rank, if arguments are wrong on one of them, or differ.

    Notes
    -----
    Communication: with `gather_output` each rank sends its columns of the result to every other;
    nothing in backward. Making one, short messages.

    In one process: :class:`torch.nn.Embedding`.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel.embedding import FeatureParallelEmbedding
    >>> def fn(rank):
    ...     layer = FeatureParallelEmbedding(5, 3)
    ...     return layer(torch.tensor([[4, 3, 0]])).shape, layer.weight.shape
    >>> varcomm.launch(fn, 2)[1]
    (torch.Size([1, 3, 3]), torch.Size([5, 1]))
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        sizes: Sequence[int] | None = None,
        padding_idx: int | None = None,
        max_norm: None = None,
        gather_output: bool = True,
        init: Fill | None = None,
        group: GroupLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()

        def options(_: int) -> dict[str, Any]:
            checked_flag(gather_output, "gather_output", "")
            return {"gather_output": gather_output}

        self._set_up(
            1,
            (num_embeddings, embedding_dim),
            sizes,
            padding_idx,
            max_norm,
            init,
            group,
            device,
            dtype,
            options,
        )
        self.gather_output = gather_output

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up `ids`, which are the same on all ranks."""
        group = self.spec.group.process_group
        return feature_parallel_embedding(
            ids, self.weight, self.sizes, self.padding_idx, self.gather_output, group
        )

    @classmethod
    def from_embedding(
        cls,
        embedding: torch.nn.Embedding,
        sizes: Sequence[int] | None = None,
        gather_output: bool = True,
        group: GroupLike = None,
    ) -> Self:
        """Shard an embedding that all ranks have alike; collective.

        Raises as :meth:`VocabParallelEmbedding.from_embedding` does.
        """
        return cls._of(embedding, group, partial(cls, sizes=sizes, gather_output=gather_output))
