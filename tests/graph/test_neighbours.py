"""Neighbours found on ranks: edges of one process, derivatives, skins, refusals, bytes."""

import gc
import weakref

import numpy as np
import pytest
import torch
from ase.geometry import complete_cell
from ase.neighborlist import primitive_neighbor_list
from torch_geometric.nn import SAGEConv

import varcomm as vc
from tests.graph.parts import Refused, assert_told
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


def joined(parts):
    return sorted(edge for part in parts for edge in part)


def edges_of_cases(rank):
    out = {}
    for name in CASES:
        pos, arguments = case(name)
        ids = own_ids(len(pos), rank, vc.init().size)
        graph = radius(pos[ids], ids=ids, **arguments)
        out[name] = edges_of(graph, arguments["cell"])
        sources = graph.edges.local_ids[0].unique()
        assert int((sources >= len(ids)).sum()) == graph.num_halo, "every halo node has an edge"
    return out


@pytest.mark.parametrize("ranks", WORLDS)
def test_edges_are_those_of_ase(worlds, ranks):
    parts = worlds.run(ranks, edges_of_cases)
    for name in CASES:
        pos, arguments = case(name)
        assert joined(part[name] for part in parts) == by_ase(pos, **arguments), name


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


def in_order(rank):
    """This rank's rows of a crystal in the order of ids, none on rank 1 of several."""
    ranks, sites = vc.init().size, crystal()[0]
    ends = [len(sites) * r // ranks for r in range(ranks + 1)]
    ends[1:2] = ends[2:3] if ranks > 1 else ends[1:2]
    return sites[ends[rank] : ends[rank + 1]]


def with_ties(rank):
    arguments = crystal()[1]
    number = int if rank else np.int64
    some = radius(in_order(rank), max_neighbours=number(4), **arguments)
    few = [knn(in_order(rank), number(k)) for k in (1, 4, 40, 63)]
    few += [knn(in_order(rank) * 0.1 + 5e6, 4)]  # rounded by more than 1e-9 of a distance
    far = in_order(rank)
    far[: rank == 0, 0] = 1e9
    few += [knn(far, 4)]
    return [edges_of(some, arguments["cell"]), *map(edges_of, few)]


@pytest.mark.parametrize("ranks", WORLDS)
def test_the_nearest_by_distance_id_and_shift(worlds, ranks):
    sites, arguments = crystal()
    parts = worlds.run(ranks, with_ties)
    found = [joined(each) for each in zip(*parts, strict=True)]
    cell, all_ = arguments["cell"], by_ase(**arguments, pos=sites, pbc=ALL)
    assert found[0] == nearest(all_, sites, cell, 4)
    pairs = [(i, j, (0, 0, 0)) for i in range(64) for j in range(64) if i != j]
    for k, edges in zip((1, 4, 40, 63), found[1:-2], strict=True):
        assert edges == nearest(pairs, sites, cell, k)
    assert found[-2] == nearest(pairs, sites * 0.1 + 5e6, cell, 4)
    sites[0, 0] = 1e9
    assert found[-1] == nearest(pairs, sites, cell, 4)


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


def moving(rank):
    pos, arguments = case("skewed, unwrapped")
    ids, cell = own_ids(len(pos), rank, vc.init().size), arguments["cell"]
    same = {"cutoff": arguments["cutoff"], "pbc": ALL, "skin": 0.6, "ids": ids}
    steps = torch.Generator().manual_seed(1)
    first = graph = radius(pos[ids], cell=cell, **same)
    plans, out, messages = [], [], []
    for scale, far in ((1, 0.0), (1.01, 0.0), (1, 0.6), (1, 0.0)):
        move = torch.randn(pos.shape, generator=steps, dtype=torch.float64)
        pos = (pos + 0.05 * move / move.norm(dim=1, keepdim=True)) * scale
        pos[-1, 0] += far  # of the last rank
        cell = cell * scale
        with vc.trace() as calls:
            graph = radius(pos[ids], cell=cell, previous=graph, **same)
        messages.append(set(calls.by_operation()))
        plans.append(graph.plan is first.plan)
        out.append((pos, cell, edges_of(graph, cell)))
    return plans, messages, out


@pytest.mark.parametrize("ranks", WORLDS)
def test_skin_keeps_the_plan_until_a_node_of_any_rank_has_moved(worlds, ranks):
    parts = worlds.run(ranks, moving)
    assert all(plans == [True, True, False, False] for plans, _, _ in parts)
    kept = [messages[step] for _, messages, _ in parts for step in (0, 1, 3)]
    assert all(calls <= {"exchange"} for calls in kept)
    for step in zip(*(out for _, _, out in parts), strict=True):
        pos, cell, _ = step[0]
        assert joined(edges for _, _, edges in step) == by_ase(pos, 2.5, cell, ALL)


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
    ({"max_neighbours": 3}, "max_neighbours"),
    ({"pos": torch.ones(2, 3)}, "dtype"),
    ({"pos": torch.ones(2, 3, dtype=torch.float64).requires_grad_()}, "derivatives"),
    ({"ids": torch.tensor([2, 4])}, "ids"),
    ({"ids": torch.tensor([1, 2])}, "ids"),
]


def refusals(rank):
    found, nearest = Refused(radius), Refused(knn)
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
    return found.told + nearest.told


def test_refused_on_all_ranks(worlds):
    assert_told(worlds.run(3, refusals))


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


def used(rank, folder):
    pos, arguments = case("orthogonal")
    ids = own_ids(len(pos), rank, 3)
    graph = radius(pos[ids], ids=ids, skin=0.3, **arguments)
    torch.manual_seed(0)
    layer = SAGEConv(3, 2).double()
    out = vc.graph.distribute(layer, graph)(graph.pos, graph.edge_index)
    graph.save(folder)
    loaded = PartitionedGraph.load(folder)
    assert torch.equal(loaded.shift, graph.shift)
    assert torch.equal(loaded.edge_attr, graph.edge_attr)
    assert set(loaded.halo_ids.tolist()) <= set(graph.halo_ids.tolist())
    assert "halo" in str(graph.report())
    return graph.gather(out), graph.mean(graph.pos), sorted(edges_of(graph, arguments["cell"]))


def test_the_graph_serves_models_means_and_files(worlds, tmp_path):
    parts = worlds.run(3, used, str(tmp_path / "graph"))
    pos, arguments = case("orthogonal")
    edges = by_ase(pos, **arguments)
    assert joined(part[2] for part in parts) == edges
    torch.manual_seed(0)
    layer = SAGEConv(3, 2).double()
    out = layer(pos, torch.tensor([edge[:2] for edge in edges]).t())
    for part in parts:
        torch.testing.assert_close(part[0], out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(part[1], pos.mean(), rtol=1e-12, atol=1e-12)


@on_ranks(1)
def test_memory_is_freed_with_the_last_reference(rank):
    gc.disable()  # which would only run later
    graph = radius(torch.rand(9, 3), 1.0)
    index, edges = graph.edge_index, weakref.ref(graph.edges)
    del graph, index
    gc.enable()
    assert edges() is None
