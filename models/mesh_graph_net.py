"""MeshGraphNet: encode, process, decode.

T. Pfaff, M. Fortunato, A. Sanchez-Gonzalez and P. W. Battaglia, "Learning Mesh-Based Simulation
with Graph Networks", International Conference on Learning Representations, 2021.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from .sizes import check_sizes


def mlp(in_channels: int, channels: int) -> nn.Sequential:
    """Return two linear layers and a norm."""
    return nn.Sequential(
        nn.Linear(in_channels, channels),
        nn.SiLU(),
        nn.Linear(channels, channels),
        nn.LayerNorm(channels),
    )


class GraphNetBlock(MessagePassing):
    """One step of the processor: edges read their two nodes, then nodes read their edges.

    The MLP of edges reads target, source and edge side by side. Its first layer is linear, so its
    products with node features are computed once per node and added at the edges.

    Parameters
    ----------
    channels : int
        Width ``F`` of the features of nodes and edges.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(aggr="sum")
        self.from_source = nn.Linear(channels, channels, bias=False)
        self.from_target = nn.Linear(channels, channels, bias=False)
        self.from_edge = nn.Linear(channels, channels)
        self.edge_mlp = nn.Sequential(
            nn.SiLU(), nn.Linear(channels, channels), nn.LayerNorm(channels)
        )
        self.node_mlp = mlp(2 * channels, channels)

    def forward(
        self, x: Tensor | tuple[Tensor, Tensor], edge_index: Tensor, edge_attr: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Update the features of nodes and edges.

        Parameters
        ----------
        x : Tensor or tuple of Tensor
            Node features, (N, F); or a pair, for sources and for targets of another type.
        edge_index : Tensor
            Sources above targets, (2, E).
        edge_attr : Tensor
            Edge features, (E, F).

        Returns
        -------
        tuple of Tensor
            The new features of nodes, or of targets, (N, F), and of edges, (E, F).
        """
        source, target = (x, x) if isinstance(x, Tensor) else x
        # A pair, because other ranks need only the products of sources.
        ends = (self.from_source(source), self.from_target(target))
        edge_attr, received = self.propagate(edge_index, ends=ends, edge_attr=edge_attr)
        return target + self.node_mlp(torch.cat([target, received], dim=1)), edge_attr

    def message(self, ends_i: Tensor, ends_j: Tensor, edge_attr: Tensor) -> Tensor:
        """Update the edges, (E, F); ``i`` is the target, ``j`` the source."""
        mixed = ends_i + ends_j + self.from_edge(edge_attr)
        return edge_attr + cast(Tensor, self.edge_mlp(mixed))

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> tuple[Tensor, Tensor]:
        """Keep the edges, (E, F), for the next block, and sum them at their targets, (N, F)."""
        return inputs, super().aggregate(inputs, index, dim_size=dim_size)


class MeshGraphNet(nn.Module):
    """Predict a value at each node of a graph from features of its nodes and edges.

    Two encoders bring nodes and edges to one width, blocks pass messages with residual updates of
    both, and a decoder predicts from the nodes. [1]_ All nodes share weights, and so do all edges,
    so the model fits any graph.

    Parameters
    ----------
    in_channels : int
        Features of a node.
    edge_channels : int
        Features of an edge.
    out_channels : int
        Values to predict at a node.
    hidden_channels : int
        Width of the latent features of nodes and edges.
    num_blocks : int
        Steps of message passing: the number of edges that a message can cross.

    Raises
    ------
    ArgumentError
        If a size is not positive; `num_blocks` may be 0.

    See Also
    --------
    EncodeProcessDecode, varcomm.graph.distribute

    References
    ----------
    .. [1] T. Pfaff et al., "Learning Mesh-Based Simulation with Graph Networks", ICLR 2021.

    Examples
    --------
    A ring of 4 nodes, with an edge from each to the next.

    >>> import torch
    >>> model = MeshGraphNet(2, 3, 1, hidden_channels=8, num_blocks=2)
    >>> edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    >>> model(torch.rand(4, 2), edge_index, torch.rand(4, 3)).shape
    torch.Size([4, 1])
    """

    def __init__(
        self,
        in_channels: int,
        edge_channels: int,
        out_channels: int,
        *,
        hidden_channels: int,
        num_blocks: int,
    ) -> None:
        super().__init__()
        check_sizes(
            "MeshGraphNet",
            in_channels=in_channels,
            edge_channels=edge_channels,
            out_channels=out_channels,
            hidden_channels=hidden_channels,
        )
        check_sizes("MeshGraphNet", least=0, num_blocks=num_blocks)
        self.node_encoder = mlp(in_channels, hidden_channels)
        self.edge_encoder = mlp(edge_channels, hidden_channels)
        self.blocks = nn.ModuleList(GraphNetBlock(hidden_channels) for _ in range(num_blocks))
        self.decoder = nn.Sequential(
            nn.Linear(hidden_channels, hidden_channels),
            nn.SiLU(),
            nn.Linear(hidden_channels, out_channels),
        )

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Predict at each node.

        Parameters
        ----------
        x : Tensor
            Node features, (N, in_channels).
        edge_index : Tensor
            Sources above targets, (2, E).
        edge_attr : Tensor
            Edge features, (E, edge_channels).

        Returns
        -------
        Tensor
            Predictions, (N, out_channels).
        """
        x = self.node_encoder(x)
        edge_attr = self.edge_encoder(edge_attr)
        for block in self.blocks:
            x, edge_attr = block(x, edge_index, edge_attr)
        return cast(Tensor, self.decoder(x))
