"""Self-attention whose heads are sharded: each rank has some groups of heads, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from varcomm.errors import ArgumentError
from varcomm.ops.checks import checked_flag
from varcomm.ops.operator import checking
from varcomm.sizes import ShardSizes, at_least, checked_sizes
from varcomm.tensor_parallel.agreement import agree_on_layer
from varcomm.tensor_parallel.attention.functional import attention, split_heads
from varcomm.tensor_parallel.initial import Fill
from varcomm.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from varcomm.transport.group import GroupLike, resolve

__all__ = ["ParallelAttention", "Rotary"]

Rotary: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class ParallelAttention(nn.Module):
    """Self-attention of which each rank has some groups of heads.

    A group is a head of keys and values with the heads of queries that it serves [2]_; in
    multi-head attention [1]_ that is one. Queries, keys and values come of one column-parallel
    layer, and a row-parallel one adds up what heads have read [3]_. Neither the number of heads nor
    that of ranks needs to divide the other.

    Parameters
    ----------
    hidden_size : int
        Features ``H`` of input and output.
    num_heads : int
        Heads of queries.
    num_kv_heads : int, optional
        Heads of keys and values, a divisor of `num_heads`; None is `num_heads`.
    head_dim : int, optional
        Features of a head; None is ``hidden_size / num_heads``, which must be whole.
    sizes : sequence of int, optional
        Heads of keys and values of each rank, one int a rank, zeros allowed; None is balanced.
    bias : bool
        Whether the two layers have biases.
    causal : bool
        Whether each place sees itself and what is before it only.
    sequence_sizes : sequence of int, optional
        Rows of the sequence on each rank: sequence parallelism.
    init, group, device, dtype
        As in :class:`~varcomm.tensor_parallel.ColumnParallelLinear`.

    Attributes
    ----------
    qkv : ColumnParallelLinear
        Three fused blocks, for queries, keys and values.
    out : RowParallelLinear
        From the heads' results to the output.
    sizes : ShardSizes
        Heads of keys and values of each rank.

    Raises
    ------
    ArgumentError
        On every rank, if arguments are wrong on one of them.
    DisagreementError
        On every rank, if they differ.

    Notes
    -----
    Making one is collective. Derivatives are of any order, see :func:`attention`.

    Communication: that of the two layers, none between them: without `sequence_sizes` an all-reduce
    of the output, and in backward one of the gradient of the input.

    In one process: :func:`attention` between two :class:`torch.nn.Linear`.

    References
    ----------
    .. [1] A. Vaswani et al., "Attention is all you need", 2017, https://arxiv.org/abs/1706.03762
    .. [2] J. Ainslie et al., "GQA: Training generalized multi-query transformer models from
       multi-head checkpoints", 2023, https://arxiv.org/abs/2305.13245
    .. [3] M. Shoeybi et al., "Megatron-LM: Training multi-billion parameter language models using
       model parallelism", 2019, https://arxiv.org/abs/1909.08053

    Examples
    --------
    Two heads on one rank, and on three, of which the last has none:

    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel.attention import ParallelAttention
    >>> def fn(rank):
    ...     torch.manual_seed(0)
    ...     layer = ParallelAttention(8, num_heads=2)
    ...     return list(layer.sizes), round(layer(torch.eye(8)).sum().item(), 4)
    >>> one, three = varcomm.launch(fn, 1)[0], varcomm.launch(fn, 3)[2]
    >>> one[0], three[0], one[1] == three[1]
    ([2], [1, 1, 0], True)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        sizes: Sequence[int] | None = None,
        bias: bool = False,
        causal: bool = True,
        sequence_sizes: Sequence[int] | None = None,
        init: Fill | None = None,
        group: GroupLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        ranks = resolve(group)

        def check() -> dict[str, Any]:
            checked_flag(causal, "causal", "")
            hidden = at_least(1, hidden_size, "hidden_size")
            heads = at_least(1, num_heads, "num_heads")
            groups = heads if num_kv_heads is None else at_least(1, num_kv_heads, "num_kv_heads")
            if heads % groups:
                raise ArgumentError(
                    f"num_heads must be a multiple of num_kv_heads; got {heads} and {groups}."
                )
            if head_dim is None and hidden % heads:
                raise ArgumentError(
                    f"hidden_size {hidden} is no multiple of num_heads {heads}; pass head_dim."
                )
            width = hidden // heads if head_dim is None else at_least(1, head_dim, "head_dim")
            own = ShardSizes.balanced(groups, ranks.size) if sizes is None else sizes
            self.sizes = ShardSizes(checked_sizes(own, "sizes", ranks.size))
            if self.sizes.total != groups:
                raise ArgumentError(
                    f"sizes {list(self.sizes)} sum to {self.sizes.total}, but there are {groups} "
                    "heads of keys and values."
                )
            self.head_dim, self.queries_per_key = width, heads // groups
            return {
                "num_heads": heads,
                "num_kv_heads": groups,
                "head_dim": width,
                "sizes": self.sizes,
                "causal": causal,
            }

        # the layers compare the rest
        agree_on_layer("ParallelAttention", check, ranks)
        self.causal = causal
        of_keys = self.sizes * self.head_dim
        of_queries = of_keys * self.queries_per_key
        options: dict[str, Any] = {
            "sequence_sizes": sequence_sizes,
            "init": init,
            "group": group,
            "device": device,
            "dtype": dtype,
        }
        self.qkv = ColumnParallelLinear(
            hidden_size,
            of_queries.total + 2 * of_keys.total,
            bias,
            [of_queries, of_keys, of_keys],
            **options,
        )
        self.out = RowParallelLinear(of_queries.total, hidden_size, bias, of_queries, **options)

    def forward(
        self,
        x: torch.Tensor,
        rotary: Rotary | None = None,
        sequence_sizes: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return what each place has read.

        Parameters
        ----------
        x : torch.Tensor
            ``(S, *F, H)``, the sequence first and any dimensions for a batch, replicated; in
            sequence parallelism this rank's rows of it.
        rotary : callable, optional
            What is done to queries and to keys, ``(S, *F, heads, head_dim)`` of the whole sequence
            and this rank's heads: a rotary embedding of their places.
        sequence_sizes : sequence of int, optional
            In place of what the layer was made with.

        Returns
        -------
        torch.Tensor
            As `x`.

        Raises
        ------
        ArgumentError
            If `x` has no dimension for the sequence, or does not fit the layer.
        """
        with checking("ParallelAttention", self.qkv.group) as where:
            if isinstance(x, torch.Tensor) and x.dim() < 2:
                raise ArgumentError(
                    f"{where}x must be (sequence, ..., {self.qkv.in_features}); got shape "
                    f"{tuple(x.shape)}."
                )
        qkv = self.qkv(x, sequence_sizes=sequence_sizes)
        with checking("ParallelAttention", self.qkv.group):
            query, key, value = split_heads(qkv, self.head_dim, self.queries_per_key)
            if rotary is not None:
                query, key = rotary(query), rotary(key)
            read = attention(query, key, value, self.causal)
        out: torch.Tensor = self.out(read.flatten(-2), sequence_sizes=sequence_sizes)
        return out

    def extra_repr(self) -> str:
        """Tell heads and their sizes."""
        heads = self.sizes.total * self.queries_per_key
        return (
            f"num_heads={heads}, num_kv_heads={self.sizes.total}, head_dim={self.head_dim}, "
            f"sizes={list(self.sizes)}, causal={self.causal}"
        )
