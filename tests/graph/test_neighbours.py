"""Neighbours found on ranks: edges of one process, derivatives, skins, refusals, bytes."""

import pytest
import torch
from ase.geometry import complete_cell
from ase.neighborlist import primitive_neighbor_list

import varcomm as vc
from tests.worlds import WORLDS
from varcomm.graph import radius

SKEWED = [[6.0, 0.0, 0.0], [3.5, 5.0, 0.0], [-2.0, 2.5, 4.5]]

# name: atoms, cell, periodic axes, cutoff, spread of positions over cells
CASES = {
    "orthogonal": (40, [[6, 0, 0], [0, 7, 0], [0, 0, 8]], (True, True, True), 2.0, 1.0),
    "skewed, unwrapped": (40, SKEWED, (True, True, True), 2.5, 5.0),
    "thin: several images": (
        7,
        [[1.5, 0, 0], [0.5, 1.2, 0], [0, 0, 9]],
        (True, True, True),
        3.1,
        1,
    ),
    "slab": (40, SKEWED, (True, False, True), 2.0, 2.0),
    "wire, isolated atoms": (30, [[40, 0, 0], [3, 5, 0], [0, 0, 40]], (False, True, False), 3, 1),
    "open": (40, None, None, 0.3, 1.0),
    "one atom": (1, [[1, 0, 0], [0, 1, 0], [0, 0, 1]], (True, True, True), 1.5, 1.0),
}


def atoms_of(name, seed=0):
    """Positions, cell and arguments of a case, the same on every rank."""
    atoms, cell, pbc, cutoff, spread = CASES[name]
    vectors = torch.eye(3) if cell is None else torch.tensor(cell, dtype=torch.float64)
    draws = torch.Generator().manual_seed(seed)
    parts = torch.rand(atoms, 3, generator=draws, dtype=torch.float64) * spread - spread / 3
    cell = None if cell is None else vectors
    return parts @ vectors.double(), {"cutoff": float(cutoff), "cell": cell, "pbc": pbc}


def owners(atoms, ranks):
    """Compact and scattered parts; of several ranks, rank 1 owns nothing."""
    owner = torch.arange(atoms) * ranks // max(atoms, 1)
    owner[::5] = ranks - 1
    owner[owner == 1] = 0
    return owner


def expected(pos, cutoff, cell, pbc):
    """Edges by ASE, as sorted (source, target, shift)."""
    vectors = torch.eye(3) if cell is None else cell
    vectors = complete_cell(vectors.numpy())
    found = primitive_neighbor_list("jiS", pbc or (False,) * 3, vectors, pos.numpy(), cutoff)
    return sorted(
        zip(*(each.tolist() for each in found[:2]), map(tuple, found[2].tolist()), strict=True)
    )


def edges_of(graph, ids, dims=3):
    """This rank's edges by ids of the full graph; checks displacements."""
    number = torch.cat([ids, graph.halo_ids])
    source, target = graph.edges.local_ids
    shift = graph.shift if "shift" in graph else torch.zeros(len(source), dims, dtype=torch.int32)
    return list(
        zip(
            number[source].tolist(),
            number[target].tolist(),
            map(tuple, shift.tolist()),
            strict=True,
        )
    )


def found_on_ranks(rank, names):
    out = {}
    for name in names:
        pos, arguments = atoms_of(name)
        ids = (owners(len(pos), vc.init().size) == rank).nonzero().view(-1)
        graph = radius(pos[ids], ids=ids, **arguments)
        out[name] = edges_of(graph, ids)
        source, target = graph.edges.local_ids
        full = graph.with_halo(graph.pos)
        away = full[source] - full[target]
        if "shift" in graph:
            away = away + graph.shift.double() @ arguments["cell"]
        torch.testing.assert_close(graph.edge_attr, away, rtol=1e-12, atol=1e-12)
        used = torch.zeros(len(full), dtype=torch.bool)
        used[source] = True
        assert used[len(ids) :].all()
        assert torch.equal(graph.edges.interior, (source < len(ids)).nonzero().view(-1))
    return out


@pytest.mark.parametrize("ranks", WORLDS)
def test_edges_are_those_of_ase(worlds, ranks):
    parts = worlds.run(ranks, found_on_ranks, [*CASES])
    for name in CASES:
        pos, arguments = atoms_of(name)
        found = sorted(edge for part in parts for edge in part[name])
        assert found == expected(pos, **arguments), name
        assert found or name == "open"
