"""Transolver: attention between slices of points that are spread over ranks.

H. Wu, H. Luo, H. Wang, J. Wang and M. Long, "Transolver: A fast transformer solver for PDEs on
general geometries", International Conference on Machine Learning, 2024.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from varcomm.errors import ArgumentError
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.all_reduce import all_reduce
from varcomm.ops.all_to_all_v import all_to_all_v
from varcomm.ops.checks import checked_shard, checking
from varcomm.ops.reduction import accumulation_dtype
from varcomm.transport.group import GroupLike, resolve

from .sizes import check_heads, check_sizes

Sizes = Sequence[int] | None


class SliceAttention(nn.Module):
    """Attention between slices, which are weighted means of points.

    Each head weights every point for each slice by a softmax. The token of a slice is the mean of
    the points' features with these weights. Slices attend to each other, and each point reads the
    slices with the same weights. On ranks, one all-reduce of ``heads * slices * (head_dim + 1)``
    numbers per sample sums features and weights of all slices.

    Parameters
    ----------
    hidden_channels : int
        Features ``H`` of a point, a multiple of `num_heads`.
    num_heads : int
        Heads, a divisor of `hidden_channels`.
    num_slices : int
        Slices per head.
    """

    def __init__(self, hidden_channels: int, num_heads: int, num_slices: int) -> None:
        super().__init__()
        self.num_heads, head_dim = num_heads, hidden_channels // num_heads
        self.features = nn.Linear(hidden_channels, hidden_channels)
        self.places = nn.Linear(hidden_channels, hidden_channels)
        self.assign = nn.Linear(head_dim, num_slices)
        nn.init.orthogonal_(self.assign.weight)
        self.temperature = nn.Parameter(torch.full((num_heads, 1), 0.5))
        self.qkv = nn.Linear(head_dim, 3 * head_dim, bias=False)
        self.out = nn.Linear(hidden_channels, hidden_channels)

    def forward(self, x: Tensor, sizes: Sizes = None, group: GroupLike = None) -> Tensor:
        """Return the attention of each point, (n, *F, H), from features of the same shape."""
        heads = self.num_heads, -1
        features = self.features(x).unflatten(-1, heads)
        scores = self.assign(self.places(x).unflatten(-1, heads))
        # The temperature is at least 0.1, because a sharper softmax has tiny gradients. Sums over
        # points need fp32.
        wide = accumulation_dtype(x.dtype, True)
        scores = (scores / self.temperature.clamp(min=0.1)).to(wide)
        weights = scores.softmax(-1)
        counted = torch.cat([features.to(scores.dtype), scores.new_ones(*scores.shape[:-1], 1)], -1)
        sums = torch.einsum("n...m,n...d->...md", weights, counted)
        if sizes is not None:
            sums = all_reduce(sums, group=group)
        # A slice without points is zeros with finite derivatives.
        tokens = (sums[..., :-1] / (sums[..., -1:] + 1e-5)).to(x.dtype)
        query, key, value = self.qkv(tokens).chunk(3, -1)
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        read = torch.einsum("n...m,...md->n...d", weights.to(x.dtype), scores.softmax(-1) @ value)
        return cast(Tensor, self.out(read.flatten(-2)))


class Block(nn.Module):
    """Slice attention and two wide layers with residual connections, each after a norm."""

    def __init__(
        self, hidden_channels: int, num_heads: int, num_slices: int, mlp_channels: int
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden_channels)
        self.attention = SliceAttention(hidden_channels, num_heads, num_slices)
        self.mlp_norm = nn.LayerNorm(hidden_channels)
        self.up = nn.Linear(hidden_channels, mlp_channels)
        self.down = nn.Linear(mlp_channels, hidden_channels)

    def forward(self, x: Tensor, sizes: Sizes = None, group: GroupLike = None) -> Tensor:
        """Update the features of points, (n, *F, H)."""
        x = x + self.attention(self.attention_norm(x), sizes, group)
        return x + cast(Tensor, self.down(nn.functional.gelu(self.up(self.mlp_norm(x)))))


class Transolver(nn.Module):
    """Predict values at points, without edges, from features such as their positions.

    The model has an encoder, blocks of attention between slices [1]_ and two wide layers, and a
    decoder. Each rank may have any points, or none.

    Parameters
    ----------
    in_channels : int
        Features of a point, including its position.
    out_channels : int
        Values to predict at a point.
    hidden_channels : int
        Features ``H`` of a point in the blocks.
    num_blocks : int
        Number of blocks, each with one all-reduce.
    num_heads : int
        Heads of attention, a divisor of `hidden_channels`.
    num_slices : int
        Slices per head.
    mlp_channels : int, optional
        Features between the two wide layers of a block; None means ``4 * hidden_channels``.

    Raises
    ------
    ArgumentError
        If `num_heads` does not divide `hidden_channels`, or a size is not positive; `num_blocks`
        may be 0.

    See Also
    --------
    PointCrossAttention, varcomm.graph.distribute

    References
    ----------
    .. [1] H. Wu et al., "Transolver: A fast transformer solver for PDEs on general geometries",
       ICML 2024, https://arxiv.org/abs/2402.02366

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.models import Transolver
    >>> def fn(rank):
    ...     torch.manual_seed(0)
    ...     sizes = {"hidden_channels": 8, "num_blocks": 2, "num_heads": 2, "num_slices": 3}
    ...     model, points = Transolver(3, 1, **sizes), torch.rand(7, 3)
    ...     own = varcomm.shard_v(model(points), [5, 2])
    ...     together = model(varcomm.shard_v(points, [5, 2]), [5, 2])
    ...     return torch.allclose(together, own, atol=1e-5)
    >>> varcomm.launch(fn, 2)
    [True, True]
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden_channels: int,
        num_blocks: int,
        num_heads: int,
        num_slices: int,
        mlp_channels: int | None = None,
    ) -> None:
        super().__init__()
        wide = 4 * hidden_channels if mlp_channels is None else mlp_channels
        check_sizes(
            "Transolver",
            in_channels=in_channels,
            out_channels=out_channels,
            hidden_channels=hidden_channels,
            num_heads=num_heads,
            num_slices=num_slices,
            mlp_channels=wide,
        )
        check_sizes("Transolver", least=0, num_blocks=num_blocks)
        check_heads("Transolver", hidden_channels, num_heads)
        self.encoder = nn.Sequential(
            nn.Linear(in_channels, wide), nn.GELU(), nn.Linear(wide, hidden_channels)
        )
        self.blocks = nn.ModuleList(
            Block(hidden_channels, num_heads, num_slices, wide) for _ in range(num_blocks)
        )
        self.norm = nn.LayerNorm(hidden_channels)
        self.decoder = nn.Linear(hidden_channels, out_channels)

    def forward(self, x: Tensor, sizes: Sizes = None, group: GroupLike = None) -> Tensor:
        """Predict at each point.

        Parameters
        ----------
        x : Tensor
            Features of this rank's points, (n, *F, in_channels), with any dimensions ``*F`` for
            samples at the same points.
        sizes : sequence of int, optional
            Points per rank, such as ``graph.node_sizes``. If None, x contains all points, and the
            model does not communicate.
        group : ProcessGroup or DeviceMesh, optional
            Ranks over which the points are sharded; None means the whole world.

        Returns
        -------
        Tensor
            Predictions, (n, *F, out_channels), equal to one process to rounding.

        Notes
        -----
        Communication: one all-reduce per block, for any number of points; in backward too. Each
        rank has its part of the gradients of parameters: call
        :func:`varcomm.data_parallel.sum_gradients`.
        """
        if sizes is not None:
            ranks = resolve(group)
            with checking("Transolver", ranks) as where:
                checked_shard(x, sizes, 0, ranks, where)
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x, sizes, group)
        return cast(Tensor, self.decoder(self.norm(x)))


class PointCrossAttention(nn.Module):
    """Attention from queries to all points; both are sharded across ranks.

    The side with fewer bytes is sent. Either all ranks gather the keys and values of all points. Or
    ranks send queries to the points' ranks, and receive parts of the result.

    Parameters
    ----------
    hidden_channels : int
        Features ``H`` of a query and of a point.
    num_heads : int
        Heads, a divisor of `hidden_channels`.

    See Also
    --------
    Transolver, varcomm.graph.distribute

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.models import PointCrossAttention
    >>> def fn(rank):
    ...     torch.manual_seed(0)
    ...     attention = PointCrossAttention(8, 2)
    ...     queries, points = torch.rand(3, 8), torch.rand(9, 8)
    ...     own = varcomm.shard_v(attention(queries, points), [2, 1])
    ...     shards = varcomm.shard_v(queries, [2, 1]), varcomm.shard_v(points, [0, 9])
    ...     return torch.allclose(attention(*shards, [2, 1], [0, 9]), own, atol=1e-5)
    >>> varcomm.launch(fn, 2)
    [True, True]
    """

    def __init__(self, hidden_channels: int, num_heads: int) -> None:
        super().__init__()
        check_sizes("PointCrossAttention", hidden_channels=hidden_channels, num_heads=num_heads)
        check_heads("PointCrossAttention", hidden_channels, num_heads)
        self.num_heads = num_heads
        self.query = nn.Linear(hidden_channels, hidden_channels, bias=False)
        self.key_value = nn.Linear(hidden_channels, 2 * hidden_channels, bias=False)
        self.out = nn.Linear(hidden_channels, hidden_channels)

    def forward(
        self,
        queries: Tensor,
        points: Tensor,
        query_sizes: Sizes = None,
        point_sizes: Sizes = None,
        group: GroupLike = None,
    ) -> Tensor:
        """Return the attention of each query, (q, H), to all points.

        Without points, the last layer reads zeros.

        Parameters
        ----------
        queries : Tensor
            Features of this rank's queries, (q, H).
        points : Tensor
            Features of this rank's points, (n, H).
        query_sizes : sequence of int, optional
            Queries per rank. If None, this rank has all queries and all points.
        point_sizes : sequence of int, optional
            Points per rank. Pass both sizes or neither.
        group : ProcessGroup or DeviceMesh, optional
            Ranks that take part; None means the whole world.

        Returns
        -------
        Tensor
            (q, H), equal to one process to rounding.

        Notes
        -----
        Communication: one gather of points, or two exchanges of queries.
        """
        if query_sizes is None or point_sizes is None:
            if query_sizes is not None or point_sizes is not None:
                raise ArgumentError("PointCrossAttention: pass sizes of queries and of points.")
            self._check("PointCrossAttention: ", queries=queries, points=points)
            query, key_value = self._projected(queries, points)
            return self._result(self._read(query, key_value)[0])
        ranks = resolve(group)
        with checking("PointCrossAttention", ranks) as where:
            self._check(where, queries=queries, points=points)
            given, _ = checked_shard(queries, query_sizes, 0, ranks, where, "query_sizes")
            owned, _ = checked_shard(points, point_sizes, 0, ranks, where, "point_sizes")
        (query, key_value), hidden = self._projected(queries, points), queries.shape[-1]
        width, wide = queries.element_size(), accumulation_dtype(queries.dtype, True).itemsize
        of_queries = sum(given) * (hidden * width + (hidden + self.num_heads) * wide)
        if sum(owned) == 0 or 2 * hidden * sum(owned) * width <= of_queries:
            everywhere = all_gather_v(key_value, owned, group=group)
            return self._result(self._read(query, everywhere)[0])
        everyone = all_gather_v(query, given, dim=1, group=group)
        read, log_sum = self._read(everyone, key_value)
        part = torch.cat([read.to(log_sum.dtype), log_sum], -1)  # (heads, Q, head_dim + 1)
        own = given[ranks.rank]
        received = all_to_all_v(part, given, [own] * ranks.size, dim=1, group=group)
        parts = received.view(self.num_heads, ranks.size, own, part.shape[-1])
        shares = parts[..., -1:].softmax(1)
        return self._result((parts[..., :-1] * shares).sum(1).to(queries.dtype))

    def _check(self, where: str, **inputs: Tensor) -> None:
        hidden = self.query.in_features
        for name, x in inputs.items():
            if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != hidden:
                got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ArgumentError(
                    f"{where}{name} must be a tensor of shape (rows, {hidden}); got {got}. Call "
                    "the module once per sample."
                )

    def _projected(self, queries: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        query = self.query(queries).unflatten(-1, (self.num_heads, -1)).transpose(0, 1)
        return query, self.key_value(points)

    def _read(self, query: Tensor, key_value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention to these points, and the logarithm of the sum of its weights."""
        key, value = key_value.unflatten(-1, (2, self.num_heads, -1)).unbind(-3)
        wide = accumulation_dtype(query.dtype, True)
        scores = (query @ key.permute(1, 2, 0) / query.shape[-1] ** 0.5).to(wide)
        read = scores.softmax(-1).to(value.dtype) @ value.transpose(0, 1)
        return read, scores.logsumexp(-1, keepdim=True)

    def _result(self, read: Tensor) -> Tensor:
        return cast(Tensor, self.out(read.transpose(0, 1).flatten(1)))
