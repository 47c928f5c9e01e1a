"""Poisson's equation on a mesh: its finite elements, and derivatives of its residual on ranks."""

from functools import cache

import numpy as np
import pytest
import torch
from scipy.spatial import Delaunay

import varcomm as vc
from tests.examples.loading import example
from tests.graph.graphs import WORLDS, split_by
from tests.ops.comparing import Failures, assert_none

mesh = example("poisson", "mesh")
physics = example("poisson", "physics")
METHODS = ("random", "a rank owns nothing")
SPACING = 0.08


@cache
def plate():
    return mesh.load(SPACING)


def total(values):
    return values.sum(dim=0)


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
    data, draws = plate(), torch.Generator().manual_seed(0)
    u, load = torch.randn(2, data.num_nodes, 1, generator=draws, dtype=torch.float64)
    u.requires_grad_()
    matrix = mesh.stiffness(data.pos.numpy(), mesh.triangles(data.pos.numpy()))
    energy = physics.Energy()(u, load, data.edge_index, data.weight).sum()
    product = torch.from_numpy(matrix @ u.detach().numpy())
    expected = (u * product).sum() / 2 - (load * u).sum()
    torch.testing.assert_close(energy, expected)
    (residual,) = torch.autograd.grad(energy, u)
    torch.testing.assert_close(residual, product - load)


def new_solver():
    torch.manual_seed(0)
    solver = physics.Solver(8, 2).double()
    torch.nn.init.normal_(solver.network.decoder[-1].weight)  # which begins at 0
    return solver


def derivatives(part, add, complete_gradients, distribute):
    """Loss, its gradients of parameters and inputs, and a derivative of their square."""
    solver = distribute(new_solver())
    f = physics.right_hand_side(part.pos, 7).requires_grad_()
    loss = physics.relative_residual(solver, part, f, add)
    (by_f,) = torch.autograd.grad(loss, f, create_graph=True)
    add(by_f.square()).sum().backward(retain_graph=True)
    complete_gradients(solver)
    third = [parameter.grad.clone() for parameter in solver.parameters()]
    again = f.grad.clone()
    solver.zero_grad()
    loss.backward()
    complete_gradients(solver)
    return loss, by_f, again, [p.grad for p in solver.parameters()], third


def check_on_ranks(rank, methods):
    failures, data = Failures(), mesh.load(SPACING)
    alone = derivatives(data, total, lambda solver: None, lambda solver: solver)
    for method in methods:
        graph = vc.graph.partition(data, method=method)
        together = derivatives(
            graph,
            lambda values, graph=graph: vc.graph.replicated(
                vc.all_reduce(values.sum(dim=0)), graph
            ),
            vc.data_parallel.sum_gradients,
            lambda solver, graph=graph: vc.graph.distribute(solver, graph),
        )
        own = [alone[0], alone[1][graph.owned_ids], alone[2][graph.owned_ids], *alone[3:]]
        names = ("loss", "by f", "its square by f", "parameters", "its square by parameters")
        for name, got, want in zip(names, together, own, strict=True):
            with failures.named(graph.method, name):
                torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    return failures


@pytest.mark.parametrize("ranks", WORLDS)
def test_derivatives_on_ranks_as_alone(worlds, ranks):
    nodes = plate().num_nodes
    methods = [split_by(method, nodes, ranks) for method in METHODS]
    assert_none(worlds.run(ranks, check_on_ranks, methods))
