"""Encode, process, decode: forecasts on a grid, with messages on a mesh of several scales.

R. Keisler, "Forecasting Global Weather with Graph Neural Networks", 2022,
https://arxiv.org/abs/2202.07575; R. Lam et al., "Learning skillful medium-range global weather
forecasting", Science 382 (2023), 1416-1421, whose model is GraphCast.
"""

from collections.abc import Mapping
from typing import cast

from torch import Tensor, nn

from varcomm.errors import ArgumentError

from .mesh_graph_net import GraphNetBlock, mlp
from .sizes import check_sizes

ENCODER = ("grid", "to", "mesh")
PROCESSOR = ("mesh", "to", "mesh")
DECODER = ("mesh", "to", "grid")
EdgeType = tuple[str, str, str]


class EncodeProcessDecode(nn.Module):
    """Predict values at the points of a grid, with messages on a mesh.

    The encoder sends features of the grid to the mesh, the processor passes messages on the mesh,
    and the decoder sends the result back to the grid. [1]_ All updates of nodes and edges are
    residual. On a mesh that has edges of several lengths, a message crosses the mesh in a few
    steps. [2]_ Nodes and edges of a type share weights, so the model fits any grid and mesh.

    A graph has nodes of the types ``"grid"`` and ``"mesh"``, and edges of the types ``("grid",
    "to", "mesh")``, ``("mesh", "to", "mesh")`` and ``("mesh", "to", "grid")``: a PyG ``HeteroData``
    or a partitioned one.

    Parameters
    ----------
    grid_channels : int
        Features of a point of the grid.
    mesh_channels : int
        Features of a node of the mesh, such as its position.
    edge_channels : int
        Features of an edge, the same for all types.
    out_channels : int
        Values to predict at a point of the grid.
    hidden_channels : int
        Width of the latent features of nodes and edges.
    num_blocks : int
        Steps of the processor: the number of mesh edges that a message can cross.

    Raises
    ------
    ArgumentError
        If a size is not positive; `num_blocks` may be 0.

    See Also
    --------
    MeshGraphNet, varcomm.graph.distribute

    References
    ----------
    .. [1] R. Keisler, "Forecasting Global Weather with Graph Neural Networks", 2022.
    .. [2] R. Lam et al., "Learning skillful medium-range global weather forecasting", Science 2023.

    Examples
    --------
    A grid of 6 points around a ring of 3 mesh nodes.

    >>> import torch
    >>> from varcomm.models import EncodeProcessDecode
    >>> points, nodes = torch.arange(6), torch.arange(6) // 2
    >>> edges = {
    ...     ("grid", "to", "mesh"): torch.stack([points, nodes]),
    ...     ("mesh", "to", "mesh"): torch.tensor([[0, 1, 2], [1, 2, 0]]),
    ...     ("mesh", "to", "grid"): torch.stack([nodes, points]),
    ... }
    >>> model = EncodeProcessDecode(5, 3, 4, 1, hidden_channels=8, num_blocks=2)
    >>> lengths = {kind: torch.rand(ends.shape[1], 4) for kind, ends in edges.items()}
    >>> model({"grid": torch.rand(6, 5), "mesh": torch.rand(3, 3)}, edges, lengths).shape
    torch.Size([6, 1])
    """

    def __init__(
        self,
        grid_channels: int,
        mesh_channels: int,
        edge_channels: int,
        out_channels: int,
        *,
        hidden_channels: int,
        num_blocks: int,
    ) -> None:
        super().__init__()
        check_sizes(
            "EncodeProcessDecode",
            grid_channels=grid_channels,
            mesh_channels=mesh_channels,
            edge_channels=edge_channels,
            out_channels=out_channels,
            hidden_channels=hidden_channels,
        )
        check_sizes("EncodeProcessDecode", least=0, num_blocks=num_blocks)
        self.embed_grid = mlp(grid_channels, hidden_channels)
        self.embed_mesh = mlp(mesh_channels, hidden_channels)
        self.embed_edges = nn.ModuleList(mlp(edge_channels, hidden_channels) for _ in range(3))
        self.encoder = GraphNetBlock(hidden_channels)
        self.grid_mlp = mlp(hidden_channels, hidden_channels)
        self.processor = nn.ModuleList(GraphNetBlock(hidden_channels) for _ in range(num_blocks))
        self.decoder = GraphNetBlock(hidden_channels)
        self.predict = nn.Sequential(
            nn.Linear(hidden_channels, hidden_channels),
            nn.SiLU(),
            nn.Linear(hidden_channels, out_channels),
        )

    def forward(
        self,
        x: Mapping[str, Tensor],
        edge_index: Mapping[EdgeType, Tensor],
        edge_attr: Mapping[EdgeType, Tensor],
    ) -> Tensor:
        """Predict at each point of the grid.

        Parameters
        ----------
        x : mapping of str to Tensor
            Features of the nodes of each type: (G, grid_channels) and (M, mesh_channels).
        edge_index : mapping of tuple of str to Tensor
            Sources above targets, (2, E), of each type of edges.
        edge_attr : mapping of tuple of str to Tensor
            Features of the edges of each type, (E, edge_channels).

        Returns
        -------
        Tensor
            Predictions, (G, out_channels).

        Raises
        ------
        ArgumentError
            If nodes or edges of a type are missing.
        """
        for name, given, needed in (
            ("x", x, ("grid", "mesh")),
            ("edge_index", edge_index, (ENCODER, PROCESSOR, DECODER)),
            ("edge_attr", edge_attr, (ENCODER, PROCESSOR, DECODER)),
        ):
            if missing := [kind for kind in needed if kind not in given]:
                raise ArgumentError(
                    f"EncodeProcessDecode: {name} needs {', '.join(map(str, needed))}; "
                    f"{', '.join(map(str, missing))} is missing among {list(given)}."
                )
        grid, mesh = self.embed_grid(x["grid"]), self.embed_mesh(x["mesh"])
        kinds = (ENCODER, PROCESSOR, DECODER)
        embedded = zip(self.embed_edges, kinds, strict=True)
        inward, along, outward = (embed(edge_attr[kind]) for embed, kind in embedded)

        mesh, _ = self.encoder((grid, mesh), edge_index[ENCODER], inward)
        grid = grid + self.grid_mlp(grid)
        for block in self.processor:
            mesh, along = block(mesh, edge_index[PROCESSOR], along)
        grid, _ = self.decoder((mesh, grid), edge_index[DECODER], outward)
        return cast(Tensor, self.predict(grid))
