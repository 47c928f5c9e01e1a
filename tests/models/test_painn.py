"""PaiNN alone, and on ranks: symmetries, forces, and the gradients of a loss of forces."""

import torch
from torch_geometric.data import Data

import varcomm
from tests.graph.against_one import compare, graph_of
from tests.worlds import WORLDS, on_ranks
from varcomm.graph import distribute
from varcomm.models import PaiNN

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
CUTOFF, SIDE = 1.4, 3.0


def new_model(blocks=2, **more):
    torch.manual_seed(0)
    options = {"hidden_channels": 8, "num_blocks": blocks, "radial_size": 5} | more
    return PaiNN(2, CUTOFF, **options).double()


def near(pos):
    """Pairs within the cutoff in a periodic box, each image looked at."""
    step = torch.arange(-1, 2, dtype=pos.dtype) * SIDE
    images = torch.cartesian_prod(step, step, step)
    vector = pos[:, None, None] + images - pos[:, None]  # (source, target, image, 3)
    distance = vector.norm(dim=3)
    source, target, image = ((distance > 0) & (distance < CUTOFF)).nonzero().T
    return torch.stack([source, target]), images[image]


def atoms(seed=1):
    """27 atoms of two types around the sites of a periodic cubic crystal."""
    draws = torch.Generator().manual_seed(seed)
    axis = torch.arange(3, dtype=torch.float64)
    sites = torch.cartesian_prod(axis, axis, axis)
    pos = sites + 0.15 * torch.randn(27, 3, generator=draws, dtype=torch.float64)
    edge_index, shifts = near(pos)
    return Data(
        types=torch.arange(27) % 2,
        pos=pos,
        edge_index=edge_index,
        shifts=shifts,
    )


def energy_and_forces(model, data, create_graph=False):
    pos = data.pos.requires_grad_()
    energies = model(data.types, pos, data.edge_index, data.shifts)
    (slope,) = torch.autograd.grad(energies.sum(), pos, create_graph=create_graph)
    return energies, -slope


def test_a_turned_moved_or_mirrored_crystal_has_the_same_energies():
    """And one whose atoms are said to be in other cells."""
    model, data = new_model(), atoms()
    energies, forces = energy_and_forces(model, data)
    torch.manual_seed(3)
    turn, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    cell, (source, target) = torch.randint(-2, 3, (27, 3)) * SIDE, data.edge_index
    at, shifts, whole = data.pos, data.shifts, torch.eye(3, dtype=torch.float64)
    for pos, between, axes in (
        (at @ turn.T + torch.randn(3).double(), shifts @ turn.T, turn),
        (-at @ turn.T + torch.randn(3).double(), -shifts @ turn.T, -turn),
        (at + cell, shifts - cell[source] + cell[target], whole),
    ):
        moved = data.clone()
        moved.pos, moved.shifts = pos, between
        there, forces_there = energy_and_forces(model, moved)
        torch.testing.assert_close(there, energies, **CLOSE)
        torch.testing.assert_close(forces_there, forces @ axes.T, **CLOSE)
    assert forces.abs().max() > 1e-3


def derivatives_of_two(model, distance):
    """Energy of two atoms at a distance, beyond that of two alone; its slope; its curvature."""
    at = torch.tensor(distance, dtype=torch.float64, requires_grad=True)
    pos = torch.stack([at.new_zeros(3), torch.stack([at, at.new_zeros(()), at.new_zeros(())])])
    edge_index, types = torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 1])
    alone = model(types, pos.detach(), edge_index[:, :0], pos.new_zeros(0, 3)).sum()
    energy = model(types, pos, edge_index, pos.new_zeros(2, 3)).sum() - alone
    (slope,) = torch.autograd.grad(energy, at, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, at)
    return torch.stack([energy, slope, curvature]).detach().abs()


def test_energies_slopes_and_curvatures_end_at_the_cutoff():
    model = new_model()
    near_by = derivatives_of_two(model, CUTOFF - 0.2)
    assert (near_by > 1e-6).all()
    for left in (1e-2, 1e-3):  # like its third, second and first power
        ratio = left / 0.2
        bound = 20 * near_by * torch.tensor([ratio**3, ratio**2, ratio]).double()
        assert (derivatives_of_two(model, CUTOFF - left) <= bound).all()
    for distance in (CUTOFF, CUTOFF + 1e-6, 2 * CUTOFF):
        assert derivatives_of_two(model, distance).tolist() == [0, 0, 0]


@on_ranks(*WORLDS)
def test_on_ranks_as_alone(rank):
    """Energies and forces, and the derivatives of both."""
    wrong, data = [], atoms()
    for method in ("random", "a rank owns nothing"):
        graph = graph_of(data, method)

        def call(model, g):
            return energy_and_forces(model, g, create_graph=True)

        close = {"rtol": 1e-9, "atol": 1e-11}
        wrong += compare(new_model, call, data, graph, ("pos",), second=True, close=close)
        with varcomm.trace() as calls:
            model = distribute(new_model(), graph)
            model(graph.types, graph.pos, graph.edge_index, graph.shifts)
        # an exchange of positions, and one a block of 6 F values
        want = graph.report().nbytes(3, 8)[rank] + 2 * graph.report().nbytes(6 * 8, 8)[rank]
        assert sum(call.sent for call in calls) == want
    return wrong
