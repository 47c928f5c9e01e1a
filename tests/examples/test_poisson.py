"""Poisson's equation on a mesh: its finite elements, and the energy that a network minimises."""

import numpy as np
import torch
from scipy.spatial import Delaunay

from tests.examples.loading import example

mesh = example("poisson", "mesh")
physics = example("poisson", "physics")


def test_finite_elements_converge():
    """A product of sines is the solution on the unit square; errors fall with the square."""
    errors = []
    for count in (8, 16):
        line = np.linspace(0, 1, count + 1)
        pos = np.stack(np.meshgrid(line, line), axis=-1).reshape(-1, 2)
        inside = ((pos > 0) & (pos < 1)).all(axis=1)
        matrix = mesh.stiffness(pos, Delaunay(pos).simplices)[inside][:, inside].toarray()
        true = np.sin(np.pi * pos).prod(axis=1)[inside]
        found = np.linalg.solve(matrix, 2 * np.pi**2 * true / count**2)
        errors.append(np.abs(found - true).max())
    assert errors[1] < 0.3 * errors[0] < 0.01


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
