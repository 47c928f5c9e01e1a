"""PaiNN: energies of atoms from equivariant messages with scalars and vectors.

K. Schuett, O. Unke and M. Gastegger, "Equivariant message passing for the prediction of tensorial
properties and molecular spectra", International Conference on Machine Learning, 2021.
"""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from varcomm.errors import ArgumentError

from .sizes import check_sizes


class Displacements(MessagePassing):
    """Vectors from the target of each edge to its source, also across cells of a crystal."""

    def forward(self, pos: Tensor, edge_index: Tensor, shifts: Tensor) -> Tensor:
        """Return the vectors, (E, 3), of positions (N, 3) and shifts (E, 3)."""
        # Not pos[edge_index]: edge_updater reads the positions of other ranks' atoms.
        return cast(Tensor, self.edge_updater(edge_index, pos=pos, shifts=shifts))

    def edge_update(self, pos_i: Tensor, pos_j: Tensor, shifts: Tensor) -> Tensor:
        """Subtract the target ``i`` from the source ``j``."""
        return pos_j + shifts - pos_i


class RadialBasis(nn.Module):
    """Waves ``sin(n pi d / cutoff) / d`` with a smooth end at the cutoff.

    Each wave is multiplied by ``(1 + cos(pi d / cutoff)) / 2``. The product falls to zero with the
    third power of the distance to the cutoff, so it has continuous first and second derivatives.

    Parameters
    ----------
    size : int
        Number of waves ``R``.
    cutoff : float
        Distance at which the waves end, in the length unit of the positions.
    """

    numbers: Tensor

    def __init__(self, size: int, cutoff: float) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.register_buffer("numbers", torch.arange(1.0, size + 1), persistent=False)

    def forward(self, distance: Tensor) -> Tensor:
        """Return the waves, (E, R), at distances (E,); zeros beyond the cutoff."""
        phase = distance * (math.pi / self.cutoff)
        envelope = torch.where(distance < self.cutoff, (1 + phase.cos()) / (2 * distance), 0)
        return torch.sin(phase[:, None] * self.numbers) * envelope[:, None]


class PaiNNMessage(MessagePassing):
    """Sum of scalars and vectors over neighbours, weighted by functions of the distance.

    Parameters
    ----------
    channels : int
        Width ``F`` of the scalars, and of the vectors.
    radial_size : int
        Number ``R`` of functions of the distance.
    """

    def __init__(self, channels: int, radial_size: int) -> None:
        super().__init__(aggr="sum", node_dim=0)
        self.scalar_mlp = nn.Sequential(
            nn.Linear(channels, channels), nn.SiLU(), nn.Linear(channels, 3 * channels)
        )
        # A bias would not fall to zero at the cutoff.
        self.filter = nn.Linear(radial_size, 3 * channels, bias=False)

    def forward(
        self, s: Tensor, v: Tensor, edge_index: Tensor, waves: Tensor, direction: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add the messages of neighbours.

        Parameters
        ----------
        s, v : Tensor
            Scalars of atoms, (N, F), and vectors, (N, 3, F).
        edge_index : Tensor
            Sources above targets, (2, E).
        waves, direction : Tensor
            Functions of the distance, (E, R), and unit vectors from target to source, (E, 3).

        Returns
        -------
        tuple of Tensor
            The new scalars, (N, F), and the new vectors, (N, 3, F).
        """
        # Scalars and vectors side by side are one tensor, which is sent once.
        sent = torch.cat([self.scalar_mlp(s).view(len(s), 3, s.shape[1]), v], dim=1)
        received = self.propagate(edge_index, sent=sent, waves=waves, direction=direction)
        return s + received[:, 0], v + received[:, 1:]

    def message(self, sent_j: Tensor, waves: Tensor, direction: Tensor) -> Tensor:
        """Scale the scalar, the vector and the direction of an edge; (E, 4, F)."""
        filtered = sent_j[:, :3] * self.filter(waves).unflatten(1, (3, -1))
        scalar, along_vector, along_edge = filtered.split(1, dim=1)
        vector = sent_j[:, 3:] * along_vector + direction[:, :, None] * along_edge
        return torch.cat([scalar, vector], dim=1)


class PaiNNUpdate(nn.Module):
    """Mix the scalars and vectors of each atom.

    Vectors are mixed and scaled. Scalars read products of vectors and, in place of lengths,
    ``sqrt(1 + length^2) - 1``.

    Parameters
    ----------
    channels : int
        Width ``F`` of the scalars, and of the vectors.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mix = nn.Linear(channels, 2 * channels, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(2 * channels, channels), nn.SiLU(), nn.Linear(channels, 3 * channels)
        )

    def forward(self, s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new scalars, (N, F), and the new vectors, (N, 3, F)."""
        left, right = self.mix(v).chunk(2, dim=2)
        # A length has a kink if the vector is zero, as on the sites of a crystal; this is smooth.
        length = (1 + right.square().sum(1)).sqrt() - 1
        gates = self.mlp(torch.cat([s, length], dim=1))
        vector_gate, product_gate, scalar = gates.chunk(3, dim=1)
        s = s + scalar + product_gate * (left * right).sum(1)
        return s, v + vector_gate[:, None] * left


class PaiNN(nn.Module):
    """Predict the energy of each atom, invariant to translation, rotation and reflection.

    Each atom has scalars and vectors. Each block passes messages between neighbours within the
    cutoff, and mixes scalars and vectors. A last layer reads the energy from the scalars. [1]_
    ``torch.autograd.grad`` of ``-energy.sum()`` with respect to the positions returns the forces;
    with ``create_graph=True`` a loss on forces can be trained. Energies, forces and derivatives of
    forces are continuous when atoms cross the cutoff. Edges longer than the cutoff have no effect.

    Parameters
    ----------
    num_types : int
        Number of types of atoms; types are ``0 ... num_types - 1``.
    cutoff : float
        Largest distance between neighbours, in the length unit of the positions.
    hidden_channels : int
        Width ``F`` of the scalars, and of the vectors.
    num_blocks : int
        Number of blocks: the number of edges that a message can cross.
    radial_size : int
        Number of radial functions.
    mean : float
        Mean of the energies, in their unit. The energy of an atom is ``mean + scale * output`` of
        the last layer.
    scale : float
        Standard deviation of the energies, in their unit. `mean` and `scale` are buffers of the
        model, in torch's default dtype.

    Raises
    ------
    ArgumentError
        If a size or the cutoff is not positive; the number of blocks may be 0.

    See Also
    --------
    MeshGraphNet, varcomm.graph.distribute

    References
    ----------
    .. [1] K. Schuett et al., "Equivariant message passing for the prediction of tensorial
       properties and molecular spectra", ICML 2021. In this implementation, filters have no bias,
       and lengths are smoothed.

    Examples
    --------
    Two atoms, each the neighbour of the other: their forces are opposite.

    >>> import torch
    >>> model = PaiNN(1, cutoff=2.0, hidden_channels=8, num_blocks=2)
    >>> pos = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]], requires_grad=True)
    >>> edge_index = torch.tensor([[0, 1], [1, 0]])
    >>> energy = model(torch.zeros(2, dtype=torch.long), pos, edge_index, torch.zeros(2, 3))
    >>> (gradient,) = torch.autograd.grad(energy.sum(), pos)
    >>> torch.allclose(gradient[0], -gradient[1])
    True
    """

    mean: Tensor
    scale: Tensor

    def __init__(
        self,
        num_types: int,
        cutoff: float,
        *,
        hidden_channels: int,
        num_blocks: int,
        radial_size: int = 12,
        mean: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        check_sizes(
            "PaiNN",
            num_types=num_types,
            hidden_channels=hidden_channels,
            radial_size=radial_size,
        )
        check_sizes("PaiNN", least=0, num_blocks=num_blocks)
        if not 0 < cutoff < math.inf:
            raise ArgumentError(f"PaiNN: cutoff must be a positive length, got {cutoff}.")
        self.embedding = nn.Embedding(num_types, hidden_channels)
        self.displacements = Displacements()
        self.basis = RadialBasis(radial_size, cutoff)
        self.messages = nn.ModuleList(
            PaiNNMessage(hidden_channels, radial_size) for _ in range(num_blocks)
        )
        self.updates = nn.ModuleList(PaiNNUpdate(hidden_channels) for _ in range(num_blocks))
        self.readout = nn.Sequential(
            nn.Linear(hidden_channels, hidden_channels), nn.SiLU(), nn.Linear(hidden_channels, 1)
        )
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, types: Tensor, pos: Tensor, edge_index: Tensor, shifts: Tensor) -> Tensor:
        """Return the energy of each atom.

        Parameters
        ----------
        types : Tensor
            Types of the atoms, integers of shape (N,).
        pos : Tensor
            Positions, (N, 3), in the length unit of the cutoff. If the dtype of positions is wider
            than the dtype of the parameters, only displacements are rounded.
        edge_index : Tensor
            Sources and targets, (2, E), each pair of neighbours in both directions. An atom may be
            a neighbour of its own images in other cells, but not of itself.
        shifts : Tensor
            Vectors that are added to the position of each edge's source, (E, 3): the displacement
            of its periodic cell, or zeros without a cell.

        Returns
        -------
        Tensor
            Energies, (N,).
        """
        vector = self.displacements(pos, edge_index, shifts).to(self.scale.dtype)
        distance = vector.square().sum(1).sqrt()
        direction, waves = vector / distance[:, None], self.basis(distance)
        s = self.embedding(types)
        v = s.new_zeros(len(s), 3, s.shape[1])
        for message, update in zip(self.messages, self.updates, strict=True):
            s, v = update(*message(s, v, edge_index, waves, direction))
        return cast(Tensor, self.mean + self.scale * self.readout(s)[:, 0])
