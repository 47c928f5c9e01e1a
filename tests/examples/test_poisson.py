"""Poisson's equation on a mesh: the energy that a network minimises."""

import torch

from tests.examples.loading import example

mesh = example("poisson", "mesh")
physics = example("poisson", "physics")


def test_energy_and_residual_are_those_of_the_matrix():
    data, draws = mesh.load(0.08), torch.Generator().manual_seed(0)
    u, load = torch.randn(2, data.num_nodes, 1, generator=draws, dtype=torch.float64)
    u.requires_grad_()
    matrix = mesh.stiffness(data.pos.numpy(), mesh.triangles(data.pos.numpy()))
    energy = physics.Energy()(u, load, data.edge_index, data.weight).sum()
    product = torch.from_numpy(matrix @ u.detach().numpy())
    expected = (u * product).sum() / 2 - (load * u).sum()
    torch.testing.assert_close(energy, expected)
    (residual,) = torch.autograd.grad(energy, u)
    torch.testing.assert_close(residual, product - load)
