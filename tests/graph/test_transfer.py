"""``transfer`` and ``remap``: exact, differentiable, between any partitions; refusals."""

import pytest
import torch
import torch.distributed as dist

import varcomm
from tests.graph.graphs import WORLDS, rich, split_by, wild
from tests.graph.parts import same
from tests.graph.typed import WAYS, owners, typed
from tests.worlds import on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import from_edges, partition, remap, transfer
from varcomm.testing import dot_test, gradcheck, gradgradcheck

NODES = 24


@on_ranks(*WORLDS)
def test_rows_of_any_kind(rank, ranks):
    """Attributes of every kind, of nodes and edges, move as one process selects them."""
    data, wrong = rich(), []
    data.serial = torch.arange(NODES).to(torch.uint16)
    ways = [split_by(way, NODES, ranks) for way in ("block", "random", "a rank owns nothing")]
    parts = [partition(data, method=way) for way in ways]
    for i, old in enumerate(parts):
        for j, new in enumerate(parts):
            move, of_edges = transfer(old, new), transfer(old.edges, new.edges)
            for shard, call in ((new.nodes, move), (new.edges, of_edges)):
                rows = old.nodes if call is move else old.edges
                for name, value in rows.attributes.items():
                    right = same(call(value), shard.attributes[name])
                    wrong += [] if right else [f"{i} to {j}: {name}"]
    dot_test(move, old.x)
    gradcheck(lambda x: move(x**2), old.x[:, :2], fast_mode=True)
    gradgradcheck(lambda x: move(x**2), old.x[:, :2], fast_mode=True)
    data = typed()
    old, new = (partition(data, method=owners(data, way, ranks)) for way in WAYS[:2])
    for kind in ("author", "paper", "editor"):
        moved = transfer(old[kind], new[kind])(old[kind].x)
        wrong += [] if same(moved, new[kind].x) else [kind]
    return wrong


@pytest.mark.parametrize("some", [[1], [2, 0]])
@on_ranks(3)
def test_to_fewer_ranks_and_back(rank, some):
    """From all ranks to some, and back, while gradients flow."""
    data, group = wild(), dist.new_group(some)
    here = rank in some
    large = partition(data, method="random")
    small = partition(data, group, method="block") if here else None
    shrink, grow = transfer(large, small), transfer(small, large)
    x = large.x.clone().requires_grad_()
    there = shrink(x)
    expected = data.x[small.owned_ids] if here else data.x[:0]
    assert same(there.detach(), expected)
    back = grow(there)
    assert same(back.detach(), large.x)
    (back * large.y[:, :1]).sum().backward()
    assert same(x.grad, large.y[:, :1].expand(-1, 4).contiguous())
    dist.barrier()


@on_ranks(3)
def test_refusals(rank):
    """Groups of which neither contains the other; partitions of other graphs; other rows."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2])]
    data = wild()
    old = partition(data, groups[0], method="block") if rank < 2 else None
    new = partition(data, groups[1], method="block") if rank > 0 else None
    graph, other = partition(data, method="block"), partition(wild(25), method="block")
    here = graph if rank else None
    for word, given in (
        ("neither", (old, new)),
        ("rows", (graph, other)),
        ("in common", (graph, graph.edges)),
        ("new", (graph, graph.x if rank == 1 else graph)),
        ("part of old", (here, graph)),
        ("types", (partition(typed(), method="block"), graph)),
        ("as old or new", (here, here)),
    ):
        with pytest.raises(ArgumentError, match=word):
            transfer(*given)
    parents = torch.zeros(graph.num_owned, dtype=torch.int64)
    wrong = (parents + NODES, parents - 2, parents[1:], parents.double(), parents[:, None, None])
    weights = (parents + torch.nan, parents / 0, parents[1:].double(), parents + 1j)
    for word, given in (
        *(("parents", (each if rank == 2 else parents,)) for each in wrong),
        *(("weights", (parents, each if rank == 2 else parents + 1.0)) for each in weights),
        ("weights", (parents, parents - 1.0, True)),
        ("conserve must", (parents, None, "no")),
        ("no child", (parents, None, True)),  # all but node 0 would be lost
    ):
        with pytest.raises(ArgumentError, match=word):
            remap(graph, graph, *given)
    with pytest.raises(ArgumentError, match=r"new\.edge_index"):
        transfer(graph, graph)(graph.edge_index[0])
    with pytest.raises(DisagreementError, match="conserve"):
        remap(graph, graph, parents, conserve=rank == 1)


@pytest.mark.parametrize("members", [[0, 1, 2], [2, 0]])
@on_ranks(3)
def test_a_rank_of_a_group_that_passes_no_side(rank, members):
    """It finds the group in which the others wait, also after calls in other groups."""
    data, groups = wild(), [dist.new_group(members) for _ in range(2)]
    world = partition(data, method="block")
    if rank in members:
        parts = [partition(data, group, method="block") for group in groups]
        for wrong in (2, 0):
            for part in parts:
                transfer(part, part)
                sides = (None, None) if rank == wrong else (part, part)
                with pytest.raises(ArgumentError, match="as old or new"):
                    transfer(*sides)
                with pytest.raises(ArgumentError, match="as old or new"):
                    remap(*sides, None)
                transfer(part, part)
    transfer(world, world)
    with pytest.raises(ArgumentError, match="as old or new"):
        transfer(None, None)  # on all ranks


@on_ranks(*WORLDS)
def test_remap(rank, ranks):
    """Random parents and weights against a dense matrix; refinement and coarsening back."""
    draw = torch.Generator().manual_seed(0)
    cells, children = 11, 29
    parents = torch.randint(-1, cells, (children, 3), generator=draw)
    parents[:cells, 0] = torch.arange(cells)  # every cell has a child
    weights = torch.rand(children, 3, generator=draw, dtype=torch.float64) + 0.1
    x = torch.randn(cells, 2, 2, generator=draw, dtype=torch.float64)

    def graph(nodes, seed):
        where = torch.Generator().manual_seed(seed)
        owner = torch.randint(ranks, (nodes,), generator=where)
        owner[owner == ranks // 2] = 0
        none, sizes = (
            torch.empty(2, 0, dtype=torch.int64),
            varcomm.ShardSizes.balanced(nodes, ranks),
        )
        mine = sizes.range(rank)
        return from_edges(none, sizes, method=owner[mine.start : mine.stop])

    old, new = graph(cells, 1), graph(children, 2)
    has = (parents >= 0).double()
    cases = {(None, False): has / has.sum(1, keepdim=True).clamp(min=1), (weights, False): weights}
    for given in (None, weights):
        share = has if given is None else weights * has
        whole = torch.zeros(cells).double().index_add(0, parents[has > 0], share[has > 0])
        cases[given, True] = share / whole[parents]
    for (given, conserve), matrix in cases.items():
        own = new.owned_ids
        call = remap(old, new, parents[own], None if given is None else given[own], conserve)
        wanted = (x[parents] * (matrix * has)[..., None, None]).sum(1)
        close = {"rtol": 1e-13, "atol": 1e-13}
        torch.testing.assert_close(call(x[old.owned_ids]), wanted[own], **close)
        half = call(x[old.owned_ids].bfloat16())
        torch.testing.assert_close(half.double(), wanted[own], rtol=0.03, atol=0.03)
        line = call(x[old.owned_ids, 0, 0])
        torch.testing.assert_close(line, wanted[own, 0, 0], **close)
        dot_test(call, x[old.owned_ids])
        gradgradcheck(lambda x, call=call: call(x**3), x[old.owned_ids, 0], fast_mode=True)
        if conserve:
            total = new.sum(call(x[old.owned_ids]))
            torch.testing.assert_close(total, x.sum(), rtol=1e-13, atol=1e-13)
    with pytest.raises(ArgumentError, match="floats"):
        call(torch.zeros(old.num_owned, dtype=torch.int64))
