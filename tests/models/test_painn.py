"""PaiNN alone, and on ranks: symmetries, forces, and the gradients of a loss of forces."""

import copy

import pytest
import torch
from torch_geometric.data import Data

import varcomm
from tests.graph.graphs import WORLDS, split_by
from tests.ops.comparing import Failures, assert_none
from varcomm.graph import distribute, partition
from varcomm.models import PaiNN
from varcomm.models.painn import PaiNNMessage, PaiNNUpdate, RadialBasis

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
CUTOFF, SIDE = 1.4, 3.0
METHODS = ("rcb", "random", "a rank owns nothing")


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
        forces=torch.randn(27, 3, generator=draws, dtype=torch.float64),
    )


def energy_and_forces(model, data, pos=None, create_graph=False):
    pos = data.pos.clone().requires_grad_() if pos is None else pos
    energies = model(data.types, pos, data.edge_index, data.shifts)
    (slope,) = torch.autograd.grad(energies.sum(), pos, create_graph=create_graph)
    return energies, -slope


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_energies_are_in_the_dtype_of_the_parameters(dtype, blocks):
    data = atoms()
    energies, forces = energy_and_forces(new_model(blocks).to(dtype), data)
    assert (energies.shape, energies.dtype) == ((27,), dtype)
    assert (forces.shape, forces.dtype) == ((27, 3), torch.float64)


def test_there_are_edges_across_the_border_and_within():
    data = atoms()
    assert 0.1 < (data.shifts != 0).any(1).double().mean() < 0.9
    assert data.num_edges / 27 > 6


def rotation(seed, mirrored):
    torch.manual_seed(seed)
    turn, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    return turn if (torch.det(turn) < 0) == mirrored else -turn


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_turned_moved_or_mirrored_crystal_has_the_same_energies(mirrored):
    model, data = new_model(), atoms()
    energies, forces = energy_and_forces(model, data)
    turn = rotation(3, mirrored)
    moved = data.clone()
    moved.pos, moved.shifts = data.pos @ turn.T + torch.randn(3).double(), data.shifts @ turn.T
    there, forces_there = energy_and_forces(model, moved)
    torch.testing.assert_close(there, energies, **CLOSE)
    torch.testing.assert_close(forces_there, forces @ turn.T, **CLOSE)
    assert forces.abs().max() > 1e-3


def test_numbers_of_atoms_mean_nothing():
    model, data = new_model(), atoms()
    energies, _ = energy_and_forces(model, data)
    order, edges = torch.randperm(27), torch.randperm(data.num_edges)
    permuted = model(
        data.types[order],
        data.pos[order],
        order.argsort()[data.edge_index[:, edges]],
        data.shifts[edges],
    )
    torch.testing.assert_close(permuted, energies[order], **CLOSE)


def test_it_does_not_matter_in_which_cell_an_atom_is_said_to_be():
    model, data = new_model(), atoms()
    energies, forces = energy_and_forces(model, data)
    cell = torch.randint(-2, 3, (27, 3)) * SIDE
    moved, (source, target) = data.clone(), data.edge_index
    moved.pos, moved.shifts = data.pos + cell, data.shifts - cell[source] + cell[target]
    there, forces_there = energy_and_forces(model, moved)
    torch.testing.assert_close(there, energies, **CLOSE)
    torch.testing.assert_close(forces_there, forces, **CLOSE)


def test_forces_are_the_slopes_of_the_energy():
    model, data = new_model(), atoms()
    _, forces = energy_and_forces(model, data)
    torch.manual_seed(5)
    for _ in range(4):
        way, step = torch.randn(27, 3).double(), 2e-5
        ahead, behind = (
            model(data.types, data.pos + sign * step * way, data.edge_index, data.shifts).sum()
            for sign in (1, -1)
        )
        slope = (ahead - behind).item() / (2 * step)
        assert slope == pytest.approx(-(forces * way).sum().item(), rel=1e-6)


def test_forces_add_up_to_none():
    _, forces = energy_and_forces(new_model(), atoms())
    assert forces.sum(0).abs().max() < 1e-12
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


def test_forces_are_smooth_where_vectors_are_zero():
    """At the sites of a cubic crystal, where a length would have a kink, atoms feel springs."""
    model, axis = new_model(), torch.arange(3, dtype=torch.float64)
    sites = torch.cartesian_prod(axis, axis, axis)
    edge_index, shifts = near(sites)
    springs = []
    for off in (1e-6, 1e-4, 1e-2):
        pos = sites.clone()
        pos[0, 0] += off
        data = Data(types=torch.zeros(27).long(), pos=pos, edge_index=edge_index, shifts=shifts)
        springs.append(energy_and_forces(model, data)[1][0, 0].item() / off)
    assert springs == pytest.approx(springs[:1] * 3, rel=2e-2)


def test_waves():
    distance = torch.tensor([0.3, 0.9, CUTOFF, 2.0], dtype=torch.float64)
    waves = RadialBasis(3, CUTOFF).double()(distance)
    n = torch.arange(1, 4).double()
    for row, d in zip(waves[:2], distance[:2], strict=True):
        end = (1 + torch.cos(torch.pi * d / CUTOFF)) / 2
        torch.testing.assert_close(
            row, torch.sin(n * torch.pi * d / CUTOFF) / d * end, rtol=1e-12, atol=0
        )
    assert not waves[2:].any()


def test_messages_are_those_of_the_paper():
    torch.manual_seed(0)
    layer, channels = PaiNNMessage(4, 5).double(), 4
    s, v = torch.randn(3, 4).double(), torch.randn(3, 3, 4).double()
    edges = [(0, 1), (2, 1), (1, 0)]
    waves, direction = torch.randn(3, 5).double(), torch.randn(3, 3).double()
    new_s, new_v = layer(s, v, torch.tensor(edges).T, waves, direction)
    want_s, want_v = s.clone(), v.clone()
    for edge, (source, target) in enumerate(edges):
        weights = layer.scalar_mlp(s[source]) * (layer.filter.weight @ waves[edge])
        scalar, of_vector, of_edge = weights.split(channels)
        want_s[target] += scalar
        for axis in range(3):
            want_v[target, axis] += v[source, axis] * of_vector + direction[edge, axis] * of_edge
    torch.testing.assert_close(new_s, want_s, **CLOSE)
    torch.testing.assert_close(new_v, want_v, **CLOSE)


def test_updates_are_those_of_the_paper_but_for_lengths():
    torch.manual_seed(0)
    layer = PaiNNUpdate(4).double()
    s, v = torch.randn(3, 4).double(), torch.randn(3, 3, 4).double()
    new_s, new_v = layer(s, v)
    u = torch.einsum("fg,nxg->nxf", layer.mix.weight[:4], v)
    w = torch.einsum("fg,nxg->nxf", layer.mix.weight[4:], v)
    length = (1 + w.norm(dim=1) ** 2) ** 0.5 - 1
    vv, sv, ss = layer.mlp(torch.cat([s, length], dim=1)).split(4, dim=1)
    torch.testing.assert_close(new_s, s + ss + sv * torch.einsum("nxf,nxf->nf", u, w), **CLOSE)
    torch.testing.assert_close(new_v, v + vv[:, None] * u, **CLOSE)


def test_mean_and_scale():
    data, plain = atoms(), new_model()
    energies, forces = energy_and_forces(plain, data)
    more, more_forces = energy_and_forces(new_model(mean=-7.0, scale=0.5), data)
    torch.testing.assert_close(more, -7 + energies / 2, **CLOSE)
    torch.testing.assert_close(more_forces, forces / 2, **CLOSE)
    assert {"mean", "scale"} <= plain.state_dict().keys()


def loss_alone(model, data, pos):
    energies, forces = energy_and_forces(model, data, pos, create_graph=True)
    loss = (forces - data.forces).square().mean() + energies.mean().square()
    loss.backward()
    return energies, forces, loss


def test_gradients_of_a_loss_of_forces_reach_every_parameter():
    model, data = new_model(), atoms()
    loss_alone(model, data, data.pos.clone().requires_grad_())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def check_on_ranks(rank, methods):
    failures, data, model = Failures(), atoms(), new_model()
    alone, pos = copy.deepcopy(model), data.pos.clone().requires_grad_()
    energies, forces, loss = loss_alone(alone, data, pos)
    for method in methods:
        graph = partition(data, method=method)
        together, ids = distribute(copy.deepcopy(model), graph), graph.owned_ids
        own = graph.pos.clone().requires_grad_()
        with varcomm.trace() as calls:
            part = together(graph.types, own, graph.edge_index, graph.shifts)
        (slope,) = torch.autograd.grad(part.sum(), own, create_graph=True)
        value = graph.mean((-slope - graph.forces).square()) + graph.mean(part).square()
        value.backward()
        varcomm.data_parallel.sum_gradients(together)
        with failures.named(graph.method, "bytes"):
            # an exchange of positions, and one a block of 6 F values
            want = graph.report().nbytes(3, 8)[rank] + 2 * graph.report().nbytes(6 * 8, 8)[rank]
            assert sum(call.sent for call in calls) == want
        pairs = [("energies", part, energies[ids]), ("forces", -slope, forces[ids])]
        pairs += [("loss", value, loss), ("pos", own.grad, pos.grad[ids])]
        expected = dict(alone.named_parameters())
        pairs += [(n, p.grad, expected[n].grad) for n, p in together.named_parameters()]
        for name, got, wanted in pairs:
            with failures.named(graph.method, name):
                torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
    return failures


@pytest.mark.parametrize("ranks", WORLDS)
def test_on_ranks_as_alone(worlds, ranks):
    assert_none(worlds.run(ranks, check_on_ranks, [split_by(m, 27, ranks) for m in METHODS]))
