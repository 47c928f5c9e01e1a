"""Neighbours found on ranks: edges of one process, derivatives, skins, refusals, bytes."""

import gc
import weakref

import numpy as np
import torch
from ase.geometry import complete_cell
from ase.neighborlist import primitive_neighbor_list
from torch_geometric.nn import SAGEConv

import varcomm as vc
from tests.graph.parts import refusing
from tests.worlds import WORLDS, on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import PartitionedGraph, knn, radius
from varcomm.testing import gradcheck, gradgradcheck

SKEWED = [[6.0, 0.0, 0.0], [3.5, 5.0, 0.0], [-2.0, 2.5, 4.5]]
ALL, NONE = (True,) * 3, (False,) * 3

# name: atoms, cell, periodic axes, cutoff, spread of positions over cells
CASES = {
    "orthogonal": (40, [[6, 0, 0], [0, 7, 0], [0, 0, 8]], ALL, 2.0, 1.0),
    "skewed, unwrapped": (40, SKEWED, ALL, 2.5, 5.0),
    "thin: several images": (7, [[1.5, 0, 0], [0.5, 1.2, 0], [0, 0, 9]], ALL, 3.1, 1),
    "slab": (40, SKEWED, (True, False, True), 2.0, 2.0),
    "wire, isolated atoms": (30, [[40, 0, 0], [3, 5, 0], [0, 0, 40]], (False, True, False), 3, 1),
    "open": (40, None, None, 0.3, 1.0),
    "plane": (40, None, None, 0.2, 1.0),
    "one atom": (1, [[1, 0, 0], [0, 1, 0], [0, 0, 1]], ALL, 1.5, 1.0),
    "no atom": (0, None, None, 1.0, 1.0),
}


def case(name):
    """Positions and arguments, the same on every rank."""
    atoms, cell, pbc, cutoff, spread = CASES[name]
    cell = None if cell is None else torch.tensor(cell, dtype=torch.float64)
    draws = torch.Generator().manual_seed(0)
    parts = torch.rand(atoms, 3, generator=draws, dtype=torch.float64) * spread - spread / 3
    pos = parts if cell is None else parts @ cell
    pos = pos[:, :2] if name == "plane" else pos
    return pos, {"cutoff": float(cutoff), "cell": cell, "pbc": pbc}


def own_ids(atoms, rank, ranks):
    """Ids of compact and scattered parts; of several ranks, rank 1 owns nothing."""
    owner = torch.arange(atoms) * ranks // max(atoms, 1)
    owner[::5] = ranks - 1
    owner[owner == 1] = 0
    return (owner == rank).nonzero().view(-1)


def by_ase(pos, cutoff, cell=None, pbc=None):
    """Sorted edges: source, target, shift."""
    if not len(pos):
        return []
    vectors = torch.eye(3) if cell is None else cell
    pos = torch.nn.functional.pad(pos, (0, 3 - pos.shape[1]))
    found = primitive_neighbor_list(
        "jiS", pbc or NONE, complete_cell(vectors.numpy()), pos.numpy(), cutoff
    )
    return sorted((i, j, tuple(shift)) for i, j, shift in zip(*map(list, found), strict=True))


def edges_of(graph, cell=None):
    """This rank's edges, by ids of the full graph; checks displacements."""
    full = graph.with_halo(graph.pos)
    number = torch.cat([graph.owned_ids, graph.halo_ids])
    source, target = graph.edges.local_ids
    shift = torch.zeros(len(source), 3) if cell is None else graph.shift
    away = full[source] - full[target]
    if cell is not None:
        away = away + shift.to(cell) @ cell
    torch.testing.assert_close(graph.edge_attr, away, rtol=1e-12, atol=1e-12)
    assert torch.equal(graph.interior, (source < graph.num_owned).nonzero().view(-1))
    ends = number[source].tolist(), number[target].tolist(), map(tuple, shift.int().tolist())
    return list(zip(*ends, strict=True))


def into(graph, edges):
    """Return the edges into this rank's nodes."""
    owned = {*graph.owned_ids.tolist()}
    return [edge for edge in edges if edge[1] in owned]


@on_ranks(*WORLDS)
def test_edges_are_those_of_ase(rank, ranks):
    for name in CASES:
        pos, arguments = case(name)
        ids = own_ids(len(pos), rank, ranks)
        graph = radius(pos[ids], ids=ids, **arguments)
        expected = into(graph, by_ase(pos, **arguments))
        assert sorted(edges_of(graph, arguments["cell"])) == expected, name
        sources = graph.edges.local_ids[0].unique()
        assert int((sources >= len(ids)).sum()) == graph.num_halo, "every halo node has an edge"


def nearest(edges, pos, cell, most):
    """The first edges into each node by (distance, source, shift)."""
    kept = {}
    for source, target, shift in edges:
        away = pos[source] + torch.tensor(shift, dtype=cell.dtype) @ cell - pos[target]
        kept.setdefault(target, []).append((away.square().sum().item(), source, shift))
    return sorted((j, i, s) for i, all_ in kept.items() for _, j, s in sorted(all_)[:most])


def crystal():
    """A simple cubic crystal, whose distances are equal exactly."""
    sites = torch.cartesian_prod(*[torch.arange(4.0, dtype=torch.float64)] * 3)
    return sites, {"cutoff": 1.5, "cell": torch.eye(3, dtype=torch.float64) * 4}


def in_order(rows, rank, ranks):
    """This rank's rows in the order of ids, none on rank 1 of several."""
    ends = [len(rows) * r // ranks for r in range(ranks + 1)]
    ends[1:2] = ends[2:3] if ranks > 1 else ends[1:2]
    return rows[ends[rank] : ends[rank + 1]]


@on_ranks(*WORLDS)
def test_the_nearest_by_distance_id_and_shift(rank, ranks):
    sites, arguments = crystal()
    cell, integer = arguments["cell"], int if rank else np.int64
    graph = radius(in_order(sites, rank, ranks), max_neighbours=integer(4), **arguments)
    expected = nearest(by_ase(sites, **arguments, pbc=ALL), sites, cell, 4)
    assert sorted(edges_of(graph, cell)) == into(graph, expected)
    pairs = [(i, j, (0, 0, 0)) for i in range(64) for j in range(64) if i != j]
    apart, rounded = sites.clone(), sites * 0.1 + 5e6  # by more than 1e-9 of a distance
    apart[0, 0] = 1e9
    for pos, k in (*((sites, k) for k in (1, 4, 40, 63)), (rounded, 4), (apart, 4)):
        graph = knn(in_order(pos, rank, ranks), integer(k))
        assert sorted(edges_of(graph)) == into(graph, nearest(pairs, pos, cell, k))


def energies(graph):
    """A smooth function of displacements per node, whatever the order of edges."""
    length = (graph.edge_attr.square().sum(1) + 1).sqrt()
    out = torch.zeros(graph.num_owned, dtype=length.dtype)
    return out.index_add(0, graph.edges.local_ids[1], length**3)


@on_ranks(*WORLDS[:2])
def test_derivatives_by_positions_and_cell(rank):
    pos, arguments = case("skewed, unwrapped")
    ids = own_ids(len(pos), rank, vc.init().size)
    first = radius(pos[ids], ids=ids, skin=0.5, **arguments)

    def fn(pos, strain, **more):
        cell = arguments["cell"] + vc.all_reduce(strain)
        return energies(radius(pos, ids=ids, **(arguments | {"cell": cell} | more)))

    strain = torch.zeros(3, 3, dtype=torch.float64)
    given = pos[ids].clone().requires_grad_(), strain.requires_grad_()
    for more in ({}, {"skin": 0.5, "previous": first}):
        gradcheck(lambda *x, m=more: fn(*x, **m), *given, fast_mode=True)
        gradgradcheck(lambda *x, m=more: fn(*x, **m), *given, fast_mode=True)
    gradcheck(lambda x: energies(knn(x, 3)), given[0], fast_mode=True)


@on_ranks(*WORLDS)
def test_skin_keeps_the_plan_until_a_node_of_any_rank_has_moved(rank, ranks):
    pos, arguments = case("skewed, unwrapped")
    ids, cell = own_ids(len(pos), rank, ranks), arguments["cell"]
    same = {"cutoff": arguments["cutoff"], "pbc": ALL, "skin": 0.6, "ids": ids}
    steps = torch.Generator().manual_seed(1)
    first = graph = radius(pos[ids], cell=cell, **same)
    kept, messages = [], []
    for scale, far in ((1, 0.0), (1.01, 0.0), (1, 0.6), (1, 0.0)):
        move = torch.randn(pos.shape, generator=steps, dtype=torch.float64)
        pos = (pos + 0.05 * move / move.norm(dim=1, keepdim=True)) * scale
        pos[-1, 0] += far  # of the last rank
        cell = cell * scale
        with vc.trace() as calls:
            graph = radius(pos[ids], cell=cell, previous=graph, **same)
        messages.append(set(calls.by_operation()))
        kept.append(graph.plan is first.plan)
        assert sorted(edges_of(graph, cell)) == into(graph, by_ase(pos, 2.5, cell, ALL))
    assert kept == [True, True, False, False]
    assert all(messages[step] <= {"exchange"} for step in (0, 1, 3))


CELL = torch.eye(3, dtype=torch.float64) * 5
NAN = torch.tensor([[0.0, float("nan"), 0.0]])

# On rank 1 alone; a word of the message.
WRONG = [
    *(
        ({"pos": pos}, "pos")
        for pos in (NAN, -NAN.log(), torch.zeros(3), None, torch.ones(2, 3).int())
    ),
    *(({"cutoff": value}, "cutoff") for value in (0, -1.0, 1e200, 1e-200, "far")),
    *(({"skin": value}, "skin") for value in (-0.1, float("nan"), 1e308)),
    *(
        ({"cell": value}, "cell")
        for value in (CELL[:2], CELL * 0, CELL[[0, 0, 1]], CELL / 0, "5", CELL + 1j)
    ),
    *(({"pbc": value}, "pbc") for value in (1, [True, False], "xyz")),
    ({"cell": None}, "pbc"),
    *(({"max_neighbours": value}, "max_neighbours") for value in (0, 2.5)),
    *(({"ids": ids}, "ids") for ids in (torch.tensor([1, 0]), torch.tensor([3]), [2, 3])),
    ({"previous": object()}, "previous"),
    ({"pos": torch.full((2, 3), 1e15, dtype=torch.float64)}, "too large"),
]
DIFFERENT = [
    ({"cutoff": 1.25}, "cutoff"),
    ({"skin": 1.0}, "skin"),
    ({"cell": CELL * 2}, "cell"),
    ({"pbc": [True, True, False]}, "pbc"),
    ({"pos": torch.ones(2, 2, dtype=torch.float64), "cell": CELL[:2, :2]}, "on shape and dtype"),
    ({"max_neighbours": 3}, "max_neighbours"),
    ({"pos": torch.ones(2, 3)}, "dtype"),
    ({"pos": torch.ones(2, 3, dtype=torch.float64).requires_grad_()}, "derivatives"),
    ({"ids": torch.tensor([2, 4])}, "ids"),
    ({"ids": torch.tensor([1, 2])}, "ids"),
]


@on_ranks(3)
def test_refused_on_all_ranks(rank):
    found, nearest = refusing(radius), refusing(knn)
    pos = torch.rand(2, 3, dtype=torch.float64)
    right = {"pos": pos, "cutoff": 1.5, "cell": CELL, "pbc": True, "skin": 0.5}
    right["ids"] = torch.arange(2) + 2 * rank
    old = radius(**right)
    for kind, table in ((ArgumentError, WRONG), (DisagreementError, DIFFERENT)):
        for change, word in table:
            found(kind, (word,), **(right | (change if rank == 1 else {})))
    other = torch.distributed.new_group([0, 1, 2])
    for change in (
        {"cutoff": 1.0},
        {"skin": 1.0},
        {"cell": None, "pbc": None},
        {"group": other},
        {"previous": old.to("meta")},
        {"pos": pos[:1], "ids": right["ids"][:1]} if rank == 2 else {},
    ):
        found(ArgumentError, ("previous",), **(right | {"previous": old} | change))
    mixed = right | {"previous": old if rank else None}
    found(DisagreementError, ("previous",), **mixed)
    for change in ({"k": 0}, {"k": 6}, {"k": 6, "pos": pos[:0]} if rank else {"k": 6}):
        nearest(ArgumentError, ("k",), **({"pos": pos} | change))
    nearest(ArgumentError, ("apart",), pos=pos + (1e200 if rank == 1 else 0), k=1)
    nearest(DisagreementError, ("k",), pos=pos, k=1 + rank)
    again = radius(**right, previous=old)  # the old graph is intact
    assert again.plan is old.plan


def traffic(rank, atoms):
    side = atoms ** (1 / 3)
    pos = torch.quasirandom.SobolEngine(3).draw(atoms, dtype=torch.float64) * side
    owner = vc.graph.assign_sharded(pos[rank::3], 3, "rcb")
    whole = vc.all_gather_v(owner, [len(range(r, atoms, 3)) for r in range(3)])
    own = torch.cat([pos[r::3] for r in range(3)])[whole == rank]
    with vc.trace() as calls:
        graph = radius(own, 1.5, cell=torch.eye(3) * side)
    assert graph.num_owned + graph.num_halo < 0.8 * atoms
    return calls.total.sent


def test_bytes_grow_with_the_surface(worlds):
    few, many = (max(worlds.run(3, traffic, atoms)) for atoms in (2_000, 6_000))
    assert few < many < 2.2 * few


@on_ranks(3)
def test_the_graph_serves_models_means_and_files(rank, tmp_path):
    pos, arguments = case("orthogonal")
    ids = own_ids(len(pos), rank, 3)
    graph, edges = radius(pos[ids], ids=ids, skin=0.3, **arguments), by_ase(pos, **arguments)
    assert sorted(edges_of(graph, arguments["cell"])) == into(graph, edges)
    torch.manual_seed(0)
    layer = SAGEConv(3, 2).double()
    expected = layer(pos, torch.tensor([edge[:2] for edge in edges]).t())
    out = vc.graph.distribute(layer, graph)(graph.pos, graph.edge_index)
    torch.testing.assert_close(out, expected[ids], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(graph.mean(graph.pos), pos.mean(), rtol=1e-12, atol=1e-12)
    graph.save(tmp_path / "graph")
    loaded = PartitionedGraph.load(tmp_path / "graph")
    assert torch.equal(loaded.shift, graph.shift)
    assert torch.equal(loaded.edge_attr, graph.edge_attr)
    assert set(loaded.halo_ids.tolist()) <= set(graph.halo_ids.tolist())
    assert "halo" in str(graph.report())


@on_ranks(1)
def test_memory_is_freed_with_the_last_reference(rank):
    gc.disable()  # which would only run later
    graph = radius(torch.rand(9, 3), 1.0)
    index, edges = graph.edge_index, weakref.ref(graph.edges)
    del graph, index
    gc.enable()
    assert edges() is None
