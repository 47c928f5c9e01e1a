"""Attention whose heads are sharded: each rank has some groups of heads, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod, sqrt
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from varcomm.errors import ArgumentError
from varcomm.ops.checks import checked_flag, checked_tensor, checking
from varcomm.ops.reduction import accumulation_dtype
from varcomm.sizes import ShardSizes, at_least, checked_sizes, exact_int
from varcomm.tensor_parallel.derivatives import in_transform, recorded_gradients
from varcomm.tensor_parallel.heads import Heads, from_owner
from varcomm.tensor_parallel.layout import agreed
from varcomm.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from varcomm.transport.group import GroupLike, resolve

Rotary: TypeAlias = Callable[[Tensor], Tensor]


def attention(query: Tensor, key: Tensor, value: Tensor, causal: bool = True) -> Tensor:
    """Return scaled dot-product attention with the sequence first; no communication.

    Parameters
    ----------
    query : torch.Tensor
        Floats ``(S, *F, heads, D)``.
    key : torch.Tensor
        Floats ``(T, *F, kv_heads, D)``. Each head of keys serves ``heads / kv_heads`` consecutive
        heads of queries; both numbers may be 0.
    value : torch.Tensor
        Floats ``(T, *F, kv_heads, E)``.
    causal : bool
        Whether a query attends only to keys up to its own position; S must equal T.

    Returns
    -------
    torch.Tensor
        ``(S, *F, heads, E)``.

    Raises
    ------
    ArgumentError
        If shapes or dtypes do not match.

    See Also
    --------
    ParallelAttention, split_heads

    Notes
    -----
    Computed by :func:`torch.nn.functional.scaled_dot_product_attention`; with
    ``create_graph=True``, ``torch.func`` and in forward mode by products of S x T numbers per head.
    For another scale of the scores than ``1 / sqrt(D)``, scale the queries.

    Examples
    --------
    >>> import torch
    >>> from varcomm.tensor_parallel import attention
    >>> one = torch.ones(3, 1, 1)  # three places, one head
    >>> attention(one, one, torch.tensor([1.0, 3.0, 5.0]).view(3, 1, 1)).flatten()
    tensor([1., 2., 3.])
    """
    _check(query, key, value, causal)
    q, k, v = (_heads_before_places(x) for x in (query, key, value))
    if q.numel() == 0 or v.numel() == 0 or in_transform():
        out = _by_products(q, k, v, causal)
    else:
        shared = q.shape[-3] != k.shape[-3]
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared)
        if not torch.compiler.is_compiling():  # whose derivatives have none themselves
            out = _Differentiable.apply(out, q, k, v, causal)  # type: ignore[no-untyped-call]
    return out.permute(2, 0, 1, 3).reshape(*query.shape[:-1], value.shape[-1])


class _Differentiable(torch.autograd.Function):
    """Passes a fused kernel's output on; its recorded derivatives use products of the inputs."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        ctx.causal = causal
        ctx.save_for_backward(q, k, v)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return gradient, None, None, None, None
        plain, needed = partial(_by_products, causal=ctx.causal), ctx.needs_input_grad[1:4]
        return None, *recorded_gradients(plain, ctx.saved_tensors, needed, gradient), None


def _by_products(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Return the attention of (batch, heads, places, features) by plain products."""
    wide, served = accumulation_dtype(q.dtype, True), q.shape[-3] // max(k.shape[-3], 1)
    keys, values = (x.to(wide).repeat_interleave(served, -3) for x in (k, v))
    scores = (q.to(wide) / sqrt(max(q.shape[-1], 1))) @ keys.mT
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return (scores.softmax(-1) @ values).to(v.dtype)


def _heads_before_places(x: Tensor) -> Tensor:
    """Return (batch, heads, S, D), as the kernels want it; a view where there can be one."""
    return x.reshape(len(x), prod(x.shape[1:-2]), *x.shape[-2:]).permute(1, 2, 0, 3)


def _check(query: Any, key: Any, value: Any, causal: Any) -> None:
    where = "attention: "
    checked_flag(causal, "causal", where)
    for name, x in (("query", query), ("key", key), ("value", value)):
        checked_tensor(x, where, name)
        if x.dim() < 3 or not x.is_floating_point():
            raise ArgumentError(
                f"{where}{name} must be floats (sequence, ..., heads, features); got {x.dtype} of "
                f"shape {tuple(x.shape)}."
            )
        if (x.dtype, x.device) != (query.dtype, query.device):
            raise ArgumentError(
                f"{where}query, key and value must have one dtype and device; query is "
                f"{query.dtype} on {query.device}, {name} is {x.dtype} on {x.device}."
            )
    heads, kv_heads = query.shape[-2], key.shape[-2]
    if (
        query.shape[1:-2] != key.shape[1:-2]
        or query.shape[-1] != key.shape[-1]
        or key.shape[:-1] != value.shape[:-1]
        or (heads % kv_heads if kv_heads else heads)
        or (causal and len(query) != len(key))
    ):
        raise ArgumentError(
            f"{where}query (S, *F, heads, D) needs key (T, *F, kv_heads, D) and value "
            "(T, *F, kv_heads, E), with heads a multiple of kv_heads. If causal, S must "
            f"equal T. Got {tuple(query.shape)}, {tuple(key.shape)} and "
            f"{tuple(value.shape)}, causal={causal}."
        )


def split_heads(
    qkv: Tensor, head_dim: int, queries_per_key: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the output of three fused blocks into heads of queries, keys and values; views.

    Parameters
    ----------
    qkv : torch.Tensor
        ``(*F, n * (queries_per_key + 2) * head_dim)`` for n heads of keys, zero allowed.
    head_dim : int
        Features per head.
    queries_per_key : int
        Heads of queries per head of keys.

    Returns
    -------
    query, key, value : torch.Tensor
        ``(*F, n * queries_per_key, head_dim)``, and ``(*F, n, head_dim)`` for keys and values.

    Raises
    ------
    ArgumentError
        If a number is not positive, or `qkv` has another last dimension.

    See Also
    --------
    attention, ParallelAttention

    Examples
    --------
    >>> import torch
    >>> from varcomm.tensor_parallel import split_heads
    >>> [x.shape[-2:] for x in split_heads(torch.zeros(7, 40), head_dim=5, queries_per_key=2)]
    [torch.Size([4, 5]), torch.Size([2, 5]), torch.Size([2, 5])]
    """
    checked_tensor(qkv, "split_heads: ", "qkv")
    for name, count in (("head_dim", head_dim), ("queries_per_key", queries_per_key)):
        if (exact_int(count) or 0) < 1:
            raise ArgumentError(f"split_heads: {name} must be a positive integer; got {count!r}.")
    unit = head_dim * (queries_per_key + 2)
    if qkv.dim() == 0 or qkv.shape[-1] % unit:
        raise ArgumentError(
            f"split_heads: the last dimension of qkv, of shape {tuple(qkv.shape)}, must be a "
            f"multiple of {unit}, for {queries_per_key} + 2 heads of {head_dim}."
        )
    n = qkv.shape[-1] // unit
    heads = qkv.unflatten(-1, (n * (queries_per_key + 2), head_dim))
    query, key, value = heads.split([n * queries_per_key, n, n], -2)
    return query, key, value


class ParallelAttention(nn.Module):
    """Self-attention with heads sharded across ranks; the constructor is collective.

    A rank has any number of groups: a head of keys and values, with the heads of queries it serves.

    Parameters
    ----------
    hidden_size : int
        Features ``H`` of input and output.
    num_heads : int
        Heads of queries.
    num_kv_heads : int, optional
        Heads of keys and values, a divisor of `num_heads`. None means `num_heads`.
    head_dim : int, optional
        Features per head; None means ``hidden_size / num_heads``, which must be an integer.
    sizes : sequence of int, optional
        Heads of keys and values per rank, with their heads of queries; zeros are allowed. None
        means balanced sizes.
    causal : bool
        Whether each position attends only to itself and earlier positions.
    bias : bool
        Whether both layers have a bias.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.
    replicate_kv : bool
        If `sizes` is None and the group has more ranks than heads of keys, several ranks read one
        head and split its heads of queries. False leaves these ranks without heads.
    **options
        `sequence_sizes`, `init`, `use_fp32`, `device` and `dtype` of both layers, as in
        :class:`~varcomm.tensor_parallel.ColumnParallelLinear`.

    Attributes
    ----------
    qkv : ColumnParallelLinear
        Layer with three fused blocks, for queries, keys and values.
    out : RowParallelLinear
        Layer that maps the results of the heads to the output.

    Raises
    ------
    ArgumentError
        On all ranks, if an argument is wrong on one rank.

    See Also
    --------
    attention, split_heads, parallelize

    Notes
    -----
    Communication: as the two layers; the constructor is collective. If several ranks read one head,
    the rank that stores it sends its keys and values, and receives their gradients.

    In one process: :func:`attention` between two :class:`torch.nn.Linear`.

    Examples
    --------
    Two heads on one rank, and on three ranks; the third rank has none:

    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel import ParallelAttention
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
        *,
        group: GroupLike = None,
        replicate_kv: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        ranks = resolve(group)

        def check() -> dict[str, Any]:
            checked_flag(causal, "causal", "")
            checked_flag(replicate_kv, "replicate_kv", "")
            if options.get("sequence_dim", 0) != 0:
                raise ArgumentError("the sequence is dimension 0 here. Leave out sequence_dim.")
            hidden = at_least(1, hidden_size, "hidden_size")
            heads = at_least(1, num_heads, "num_heads")
            groups = heads if num_kv_heads is None else at_least(1, num_kv_heads, "num_kv_heads")
            if heads % groups:
                raise ArgumentError(
                    f"num_heads must be a multiple of num_kv_heads; got {heads} and {groups}."
                )
            if head_dim is None and hidden % heads:
                raise ArgumentError(
                    f"hidden_size {hidden} is not a multiple of num_heads {heads}. Pass head_dim."
                )
            width = hidden // heads if head_dim is None else at_least(1, head_dim, "head_dim")
            if sizes is None:
                self.heads = Heads.of(heads, groups, ranks.size, replicate_kv)
            else:
                own = checked_sizes(sizes, "sizes", ranks.size)
                self.heads = Heads.of_groups(own, heads // groups)
            self.head_dim, self.queries_per_key, self.causal = width, heads // groups, causal
            return {"heads": self.heads, "head_dim": width, "causal": causal}

        # the layers compare the rest, and whether sizes sum to the number of heads
        agreed("ParallelAttention", check, ranks)
        width, of_keys = num_heads * self.head_dim, self.sizes * self.head_dim
        of_queries = self.heads.queries * self.head_dim
        self._readers = self.heads.plan(2 * self.head_dim, ranks)
        fused, blocks = width + 2 * width // self.queries_per_key, [of_queries, of_keys, of_keys]
        self.qkv = ColumnParallelLinear(hidden_size, fused, bias, blocks, group=group, **options)
        self.out = RowParallelLinear(width, hidden_size, bias, of_queries, group=group, **options)

    @property
    def sizes(self) -> ShardSizes:
        """Heads of keys and values that each rank stores."""
        return self.heads.keys

    def forward(
        self, x: Tensor, rotary: Rotary | None = None, sequence_sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Return the attention of `x`, ``(S, *F, H)``, for the full sequence or this rank's part.

        ``rotary(heads)`` is applied to this rank's queries and keys, ``(S, *F, heads, head_dim)``
        of the whole sequence. `sequence_sizes` overrides the layer's sizes in this call.
        """
        qkv = self.qkv(x, sequence_sizes=sequence_sizes)
        with checking("ParallelAttention", self.qkv.group):
            query, key, value = self._split(qkv)
            if rotary is not None:
                query, key = rotary(query), rotary(key)
            read = attention(query, key, value, self.causal)
        out: Tensor = self.out(read.flatten(-2), sequence_sizes=sequence_sizes)
        return out

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the heads that this rank reads; keys and values may be of another rank."""
        if self._readers is None:
            return split_heads(qkv, self.head_dim, self.queries_per_key)
        own = self.heads.queries[self.qkv.group.rank] * self.head_dim
        read = from_owner(self, "_readers", qkv[..., own:])
        key, value = read.unflatten(-1, (2, -1, self.head_dim)).unbind(-3)
        return qkv[..., :own].unflatten(-1, (-1, self.head_dim)), key, value

    def extra_repr(self) -> str:
        """Return heads and their sizes."""
        heads = self.sizes.total * self.queries_per_key
        return (
            f"num_heads={heads}, num_kv_heads={self.sizes.total}, head_dim={self.head_dim}, "
            f"sizes={list(self.sizes)}, causal={self.causal}"
        )
