"""GraphTransformer: attention over the edges into each node, and wide layers.

Attention over edges with features, as Y. Shi, Z. Huang, S. Feng, H. Zhong, W. Wang and Y. Sun,
"Masked label prediction: Unified message passing model for semi-supervised classification",
International Joint Conference on Artificial Intelligence, 2021; in blocks of the transformer.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

from varcomm.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from varcomm.tensor_parallel.attention import split_heads
from varcomm.transport.group import GroupLike

from .sizes import agreed_sizes, check_heads, check_sizes


class GraphAttention(MessagePassing):
    """Attention of each node over the sources of its edges.

    For an edge from ``j`` to ``i``, a head computes ``q_i . (k_j + e) / sqrt(d)``. The softmax of
    these numbers over the edges into ``i`` weights ``v_j + e``. A node without edges gets zeros.

    Parameters
    ----------
    hidden_channels : int
        Features ``H`` of a node, a multiple of `num_heads`.
    edge_channels : int
        Features of an edge.
    num_heads : int
        Heads, a divisor of `hidden_channels`.
    """

    def __init__(self, hidden_channels: int, edge_channels: int, num_heads: int) -> None:
        super().__init__(aggr="sum", node_dim=0)
        self.head_dim = hidden_channels // num_heads
        self.qkv = nn.Linear(hidden_channels, 3 * hidden_channels, bias=False)
        self.edge = nn.Linear(edge_channels, hidden_channels, bias=False)
        self.out = nn.Linear(hidden_channels, hidden_channels)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Return the attention of each node, (N, *F, H), with edge features (E, edge_channels)."""
        query, key, value = split_heads(self.qkv(x), self.head_dim)
        edge = self.edge(edge_attr)
        shape = (len(edge), *[1] * (x.dim() - 2), *key.shape[-2:])  # the same for all of *F
        # Keys and values are both read at the source, so one message carries both.
        source = torch.cat([key, value], dim=-1)
        read = self.propagate(edge_index, query=query, source=source, edge=edge.view(shape))
        return cast(Tensor, self.out(read.flatten(-2)))

    def message(
        self, query_i: Tensor, source_j: Tensor, edge: Tensor, index: Tensor, dim_size: int
    ) -> Tensor:
        """Return the message along each edge, (E, *F, heads, head_dim)."""
        key, value = source_j.chunk(2, dim=-1)
        score = (query_i * (key + edge)).sum(-1) / self.head_dim**0.5
        weight: Tensor = softmax(score, index, num_nodes=dim_size)
        return (value + edge) * weight.unsqueeze(-1)


class Block(nn.Module):
    """Attention and two wide layers with residual connections, each after a norm."""

    def __init__(
        self, hidden_channels: int, edge_channels: int, num_heads: int, mlp_channels: int
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden_channels)
        self.attention = GraphAttention(hidden_channels, edge_channels, num_heads)
        self.mlp_norm = nn.LayerNorm(hidden_channels)
        self.up = nn.Linear(hidden_channels, mlp_channels)
        self.down = nn.Linear(mlp_channels, hidden_channels)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Update node features, (N, *F, H)."""
        x = x + self.attention(self.attention_norm(x), edge_index, edge_attr)
        wide = nn.functional.gelu(self.up(self.mlp_norm(x)))
        return x + cast(Tensor, self.down(wide))


class GraphTransformer(nn.Module):
    """Predict values at each node of a graph from features of its nodes and edges.

    The model has an encoder, blocks of attention over edges [1]_ and two wide layers, and a
    decoder. Nodes are the first dimension: features are ``(N, *F, in_channels)``, with any number
    of dimensions ``*F`` for samples on the same graph. ``varcomm.graph.distribute`` shards the
    nodes, ``parallelize`` shards the heads and the wide layers, and a model may use both.

    Parameters
    ----------
    in_channels : int
        Features of a node.
    edge_channels : int
        Features of an edge.
    out_channels : int
        Values to predict at a node.
    hidden_channels : int
        Features ``H`` of a node in the blocks.
    num_blocks : int
        Number of blocks: the number of edges that a message can cross.
    num_heads : int
        Heads of attention, a divisor of `hidden_channels`.
    mlp_channels : int, optional
        Features between the two wide layers of a block; None means ``4 * hidden_channels``.

    Raises
    ------
    ArgumentError
        If `num_heads` does not divide `hidden_channels`, or a size is not positive; `num_blocks`
        may be 0.

    See Also
    --------
    MeshGraphNet, varcomm.graph.distribute

    References
    ----------
    .. [1] Y. Shi et al., "Masked label prediction: Unified message passing model for
       semi-supervised classification", IJCAI 2021, https://arxiv.org/abs/2009.03509

    Examples
    --------
    A ring of 6 nodes. On two ranks, rank 0 has two heads and rank 1 has one.

    >>> import torch, varcomm
    >>> from varcomm.models import GraphTransformer
    >>> from varcomm.tensor_parallel import parallelize
    >>> def fn(rank):
    ...     torch.manual_seed(0)
    ...     model = GraphTransformer(2, 1, 1, hidden_channels=12, num_blocks=2, num_heads=3)
    ...     nodes = torch.arange(6)
    ...     ring = torch.rand(6, 2), torch.stack([nodes, nodes.roll(-1)]), torch.rand(6, 1)
    ...     alone = model(*ring)
    ...     parallelize(model, model.tensor_parallel_plan())
    ...     return torch.allclose(model(*ring), alone, atol=1e-5)
    >>> varcomm.launch(fn, 2)
    [True, True]
    """

    def __init__(
        self,
        in_channels: int,
        edge_channels: int,
        out_channels: int,
        *,
        hidden_channels: int,
        num_blocks: int,
        num_heads: int,
        mlp_channels: int | None = None,
    ) -> None:
        super().__init__()
        self.mlp_channels = 4 * hidden_channels if mlp_channels is None else mlp_channels
        check_sizes(
            "GraphTransformer",
            in_channels=in_channels,
            edge_channels=edge_channels,
            out_channels=out_channels,
            hidden_channels=hidden_channels,
            num_heads=num_heads,
            mlp_channels=self.mlp_channels,
        )
        check_sizes("GraphTransformer", least=0, num_blocks=num_blocks)
        check_heads("GraphTransformer", hidden_channels, num_heads)
        self.num_heads, self.head_dim = num_heads, hidden_channels // num_heads
        self.encoder = nn.Linear(in_channels, hidden_channels)
        self.blocks = nn.ModuleList(
            Block(hidden_channels, edge_channels, num_heads, self.mlp_channels)
            for _ in range(num_blocks)
        )
        self.norm = nn.LayerNorm(hidden_channels)
        self.decoder = nn.Linear(hidden_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Predict at each node.

        Parameters
        ----------
        x : Tensor
            Node features, (N, *F, in_channels).
        edge_index : Tensor
            Sources above targets, (2, E).
        edge_attr : Tensor
            Edge features, (E, edge_channels), the same for all samples.

        Returns
        -------
        Tensor
            Predictions, (N, *F, out_channels).
        """
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x, edge_index, edge_attr)
        return cast(Tensor, self.decoder(self.norm(x)))

    def tensor_parallel_plan(
        self,
        group: GroupLike = None,
        *,
        head_sizes: Sequence[int] | None = None,
        mlp_sizes: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Return the sharding plan for ``parallelize(model, plan, group=group)``; collective.

        Sizes have one int per rank; zeros are allowed. None means balanced sizes.

        Parameters
        ----------
        group : ProcessGroup or DeviceMesh, optional
            The ranks that share the model, all with the same nodes; None means the whole world.
        head_sizes : sequence of int, optional
            Heads per rank.
        mlp_sizes : sequence of int, optional
            Features between the two wide layers of a block.

        Returns
        -------
        dict
            For :func:`varcomm.tensor_parallel.parallelize`.

        Raises
        ------
        ArgumentError
            On every rank, if the sizes of one rank do not match the model.
        """
        wholes = {
            "head_sizes": (head_sizes, self.num_heads),
            "mlp_sizes": (mlp_sizes, self.mlp_channels),
        }
        heads, wide = agreed_sizes("GraphTransformer.tensor_parallel_plan", wholes, group)
        features = heads * self.head_dim
        column = partial(ColumnParallelLinear.from_linear, group=group)
        row = partial(RowParallelLinear.from_linear, group=group)
        return {
            "blocks.*.attention.qkv": partial(column, sizes=[features, features, features]),
            "blocks.*.attention.edge": partial(column, sizes=features),
            "blocks.*.attention.out": partial(row, sizes=features),
            "blocks.*.up": partial(column, sizes=wide),
            "blocks.*.down": partial(row, sizes=wide),
        }
