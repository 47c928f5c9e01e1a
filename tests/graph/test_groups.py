"""Groups of nodes that a user names, such as cells of a coarser mesh: as ``graph.batch`` is."""

import operator
from functools import partial

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GraphConv, GraphNorm, InstanceNorm, LayerNorm, SAGEConv, aggr
from torch_geometric.utils import scatter, softmax, to_dense_batch

import varcomm as vc
from tests.graph.against_one import compare, graph_of
from tests.graph.batches import SECOND
from tests.graph.parts import refusing
from tests.worlds import WORLDS, on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import from_edges, global_norm, partition, replicated
from varcomm.testing import same_as_one_process

NODES, CELLS = 31, 8  # of which 3 and 7 have no nodes


def cells(features=4):
    """Nodes in cells of a coarser mesh and in a graph of a batch each, neither sorted."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(NODES, features, dtype=torch.float64, generator=generator)
    edge_index = torch.randint(NODES, (2, 120), generator=generator)
    cell = torch.tensor([5, 0, 2, 6, 1, 4, 6, 2])[torch.arange(NODES) * 3 % 8]
    return Data(x=x, edge_index=edge_index, cell=cell, batch=torch.arange(NODES) % 3)


class TwoScales(torch.nn.Module):
    """Average nodes in cells, compute with cells, and read them back at nodes."""

    def __init__(self):
        super().__init__()
        self.fine, self.coarse = GraphConv(4, 6), torch.nn.Linear(6, 6)
        self.of_cell, self.out = torch.nn.Embedding(CELLS, 6), torch.nn.Linear(12, 2)

    def forward(self, x, edge_index, cell):
        h = self.fine(x, edge_index).tanh()
        coarse = self.coarse(scatter(h, cell, 0, CELLS, "mean")).tanh()
        return self.out(torch.cat([h + self.of_cell(cell), coarse[cell]], 1))


def counted(g):
    return scatter(g.x, g.cell, 0) / torch.bincount(g.cell).clamp(min=1)[:, None]


def within(g):
    """Sum along the edges inside a cell, by cell."""
    row, col = g.edge_index
    same = g.cell[row] == g.cell[col]
    return scatter(g.x[row][same], g.cell[row][same], 0, CELLS)


CALLS = {
    "scatter": lambda _, g: scatter(g.x, g.cell, 0, CELLS, "mean"),
    "scatter up to the last": lambda _, g: scatter(g.x, g.cell, 0, reduce="max"),
    "softmax": lambda _, g: softmax(g.x, g.cell),
    "bincount": lambda _, g: counted(g),
    "of a column": lambda _, g: g.x.new_zeros(9, 4).scatter_reduce(
        0, g.cell[:, None].expand(-1, 4), g.x, "mean", include_self=False
    ),
    "of some nodes": lambda _, g: scatter(g.x[g.batch > 0], g.cell[g.batch > 0], 0, CELLS),
    "edges of a cell": lambda _, g: within(g),
    "differences": lambda _, g: g.x - scatter(g.x, g.cell, 0, reduce="mean")[g.cell],
    "gather": lambda _, g: scatter(g.x, g.cell, 0, reduce="mean").gather(
        0, g.cell[:, None].expand(-1, 4)
    ),
    "groups of groups": lambda _, g: scatter(g.x, g.cell // 2, 0, reduce="mean"),
    "by torch.div": lambda _, g: scatter(g.x, torch.div(g.cell, 3, rounding_mode="floor"), 0),
    "every other": lambda _, g: scatter(g.x, g.cell % 2, 0) + scatter(g.x, g.cell * 3 % 3, 0),
    "other numbers": lambda _, g: scatter(g.x, 2 * g.cell + 1, 0, reduce="max")[g.cell],
    "of a column, of groups": lambda _, g: g.x.new_zeros(4, 4).scatter_add(
        0, (g.cell // 2)[:, None].expand(-1, 4), g.x
    ),
    "places": lambda _, g: (
        scatter(g.x, torch.unique(g.cell, return_inverse=True)[1], 0)
        / torch.unique(g.cell, return_counts=True)[1][:, None]
    ),
    "of some nodes by places": lambda _, g: scatter(
        g.x[g.batch > 0], g.cell[g.batch > 0].unique(return_inverse=True)[1], 0
    ),
    "two kinds of groups": lambda _, g: (
        scatter(g.x, g.cell, 0, CELLS) + scatter(g.x, g.batch, 0, CELLS)
    ),
}
MODULES = {
    "model": (TwoScales, lambda m, g: m(g.x, g.edge_index, g.cell)),
    "GraphNorm": (lambda: GraphNorm(4), lambda m, g: m(g.x, g.cell)),
    "InstanceNorm": (lambda: InstanceNorm(4), lambda m, g: m(g.x, g.cell)),
    "LayerNorm": (lambda: LayerNorm(4), lambda m, g: m(g.x, g.cell)),
    "std": (aggr.StdAggregation, lambda m, g: m(g.x, g.cell)),
    "attention": (
        lambda: aggr.AttentionalAggregation(torch.nn.Linear(4, 1)),
        lambda m, g: m(g.x, g.cell),
    ),
}


@on_ranks(*WORLDS)
def test_as_in_one_process(rank):
    """Values, gradients and second derivatives; a rank owns nothing."""
    data, wrong = cells(), []
    graph = graph_of(data, groups=["cell"])
    pairs = {name: (None, call) for name, call in CALLS.items()} | MODULES
    for name, (make, call) in pairs.items():
        found = compare(make, call, data, graph, second=True, close=SECOND)
        wrong += [f"{name}: {one}" for one in found]
    return wrong


@on_ranks(3)
def test_halos_of_several_hops(rank):
    data = cells()
    graph = graph_of(data, groups=["cell"], hops=2)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = GraphConv(4, 4)

        def forward(self, x, edge_index, cell, batch):
            h = self.conv(self.conv(x, edge_index), edge_index)
            total = scatter(h, batch, 0).sum() / 1000  # the sine of large values loses digits
            return h - scatter(h, cell, 0)[cell] * total

    return compare(Model, lambda m, g: m(g.x, g.edge_index, g.cell, g.batch), data, graph)


def residues():
    """Atoms in residues, and residues, a type of nodes, in chains."""
    generator, data = torch.Generator().manual_seed(6), HeteroData()
    for kind, nodes, name, groups in (("atom", 29, "residue", 9), ("residue", 9, "chain", 4)):
        data[kind].x = torch.randn(nodes, 3, generator=generator).double()
        data[kind][name] = torch.arange(nodes) * 5 % groups
    ends = (
        torch.randint(29, (50,), generator=generator),
        torch.randint(9, (50,), generator=generator),
    )
    data["atom", "in", "residue"].edge_index = torch.stack(ends)
    return data


@on_ranks(3)
def test_several_types_of_nodes(rank):
    data = residues()
    graph = graph_of(data, groups=["residue", "chain"])

    def call(model, g):
        h = model((g.x_atom, g.x_residue), g.edge_index)
        pooled = scatter(h, g.chain_residue, 0, 5, "mean")
        atoms = scatter(g.x_atom, g.residue_atom, 0, reduce="max")
        return pooled[g.chain_residue], pooled + atoms[:5]

    by = ("x_atom", "x_residue")
    make = partial(SAGEConv, (3, 3), 3)
    return compare(make, call, data, graph, by=by, second=True, close=SECOND)


def expected_of(data):
    return scatter(data.x, data.cell, 0, CELLS), torch.bincount(data.cell)


def assert_pools(graph, data):
    sums, counts = expected_of(data)
    torch.testing.assert_close(scatter(graph.x, graph.cell, 0, CELLS), sums)
    assert torch.bincount(graph.cell).tolist() == counts.tolist()
    assert int(graph.cell.max()) == len(counts) - 1


@on_ranks(3)
def test_graphs_from_elsewhere(rank):
    """Migrated, on another device's copy, from one rank, from edges; one rank owns nothing."""
    data = cells()
    graph = graph_of(data, groups=["cell"])
    assert_pools(graph, data)
    assert_pools(graph.to("cpu"), data)
    moved = graph.migrate(torch.full((graph.num_owned,), 2 - rank))
    assert_pools(moved, data)
    # other ids than before, of which there are more
    data.cell = data.cell + 3
    changed = moved.migrate(torch.full((moved.num_owned,), 1), {"cell": data.cell[moved.owned_ids]})
    torch.testing.assert_close(scatter(changed.x, changed.cell, 0), scatter(data.x, data.cell, 0))
    given = data if rank == 1 else None
    of_one = partition(given, src=1, groups=["cell"])
    torch.testing.assert_close(scatter(of_one.x, of_one.cell, 0), scatter(data.x, data.cell, 0))
    sizes = [20, 0, 11]
    rows = slice(*[(0, 20), (20, 20), (20, 31)][rank])
    attributes = {"x": data.x[rows], "cell": data.cell[rows], "other": data.cell[rows]}
    edges = data.edge_index if rank == 0 else data.edge_index[:, :0]
    made = from_edges(edges, sizes, node_attrs=attributes, method="block", groups=["cell"])
    torch.testing.assert_close(scatter(made.x, made.cell, 0), scatter(data.x, data.cell, 0))
    named = made.migrate(torch.full((made.num_owned,), rank), groups=["other"])
    torch.testing.assert_close(scatter(named.x, named.other, 0), scatter(data.x, data.cell, 0))


def saved(rank, folder):
    graph_of(cells(), groups=["cell"]).save(folder)


def loaded(rank, folder):
    assert_pools(vc.graph.PartitionedGraph.load(folder), cells())


def test_saved(worlds, tmp_path):
    worlds.run(3, saved, tmp_path / "graph")
    worlds.run(3, loaded, tmp_path / "graph")
    worlds.run(2, loaded, tmp_path / "graph")


@on_ranks(3)
def test_wrong_use(rank):
    """All ranks refuse; ids of groups are checked on the ranks that own them."""
    check = refusing(lambda data, **options: partition(data, method="block", **options))
    data = cells()
    check(ArgumentError, ["no attribute 'celt'", "cell"], data, groups=["celt"])
    check(ArgumentError, ["groups must be a list"], data, groups="cell")
    check(ArgumentError, ["groups must be a list"], data, groups={"node": ["cell"]})
    check(ArgumentError, ["data.x", "integers"], data, groups=["x"])
    names = ["cell"] if rank == 1 else []
    check(DisagreementError, ["groups"], data, groups=names)
    for values, words in (
        (data.cell.double(), ["data.cell", "integers"]),
        (data.cell[:, None], ["data.cell", "integers"]),
        (data.cell - 1, ["data.cell", "count from 0", "-1"]),
    ):
        wrong = data.clone()
        wrong.cell = values
        check(ArgumentError, words, wrong, groups=["cell"])
    rows = {"cell": torch.tensor([0, 1]) - int(rank == 2)}
    none = torch.empty(2, 0, dtype=torch.int64)
    check = refusing(from_edges)
    check(ArgumentError, ["rank 2", "-1"], none, [2, 2, 2], node_attrs=rows, groups=["cell"])
    check(DisagreementError, ["groups"], none, [2, 2, 2], node_attrs=rows, groups=names)
    graph = partition(data, method="block", groups=["cell"])
    check = refusing(graph.migrate)
    owner = torch.full((graph.num_owned,), rank)
    check(ArgumentError, ["no attribute 'part'"], owner, groups=["part"])
    few = {"cell": graph.cell.plain - 9 * (rank == 1)}
    check(ArgumentError, ["rank 1", "count from 0"], owner, few)
    for call in (
        lambda: scatter(graph.x, graph.cell, 0, 3),
        lambda: scatter(graph.x, graph.cell // 2, 0, 3),
        lambda: scatter(graph.x, graph.cell - 1, 0, CELLS),
        lambda: scatter(graph.x, graph.cell // 0.5, 0, CELLS),
        lambda: torch.nn.functional.embedding(graph.cell, graph.x, max_norm=1.0),
        lambda: vc.all_gather_v(graph.cell, graph.node_sizes),
        lambda: graph.gather(graph.cell),
        lambda: vc.graph.transfer(graph, graph)(graph.cell),
    ):
        with pytest.raises(ArgumentError):
            call()


@on_ranks(3)
def test_ids_of_other_dtypes(rank):
    """They become int64; a batch too, and ids that one rank gives to from_edges."""
    data = cells()
    for dtype in (torch.int32, torch.int16, torch.uint8):
        narrow = data.clone()
        narrow.cell, narrow.batch = data.cell.to(dtype), data.batch.to(dtype)
        graph = graph_of(narrow, groups=["cell"])
        assert_pools(graph, data)
        assert graph.cell.dtype == graph.batch.dtype == torch.int64
        moved = graph.migrate(torch.full((graph.num_owned,), 1), {"cell": graph.cell.plain.int()})
        assert_pools(moved, data)


@on_ranks(3)
def test_functions_that_need_all_rows_of_a_group(rank):
    """Their errors name the cure: rows of all ranks."""
    data = cells()
    data.cell = data.cell.sort().values
    graph = graph_of(data, groups=["cell"])
    for call in (lambda x, ids: to_dense_batch(x, ids)[0], aggr.MedianAggregation()):
        with pytest.raises(ArgumentError, match=r"graph\.gather"):
            call(graph.x, graph.cell)
        of_all = call(graph.gather(graph.x), graph.gather(graph.cell.plain))
        torch.testing.assert_close(of_all, call(data.x, data.cell))


@on_ranks(3)
def test_no_further_messages(rank):
    """A pool without a size knows the number of groups since the graph was split."""
    data = cells()
    graph = graph_of(data, groups=["cell"])
    with vc.trace() as calls:
        scatter(graph.x, graph.cell, 0)
    assert [call.name for call in calls] == ["all_reduce"]


@on_ranks(3)
def test_pools_outside_a_distributed_model(rank):
    data = cells()
    graph = graph_of(data, groups=["cell"])
    norm = GraphNorm(4).double()
    expected = norm(data.x, data.cell)
    norm.forward = global_norm(norm, graph)
    torch.testing.assert_close(norm(graph.x, graph.cell), expected[graph.owned_ids])
    loss = replicated(scatter(graph.x, graph.cell, 0).square().sum(), graph)
    torch.testing.assert_close(loss, scatter(data.x, data.cell, 0).square().sum())


@pytest.mark.usefixtures("launch_on_worlds")
def test_same_as_one_process():
    assert same_as_one_process(TwoScales(), cells(), groups=["cell"]).owned[-1] == 0
    with pytest.raises(ArgumentError, match=r'groups=\["cell"\]'):
        same_as_one_process(TwoScales(), cells())


def by_other_words(g):
    column = g.cell.view(-1, 1)
    yield lambda: scatter(g.x, g.cell, 0, CELLS)
    yield lambda: scatter(g.x.t(), g.cell, -1, CELLS)
    yield lambda: softmax(g.x, g.cell)
    yield lambda: g.x.new_zeros(CELLS, 4).scatter_add_(0, column.expand_as(g.x), g.x)
    yield lambda: g.x.new_zeros(CELLS, 4).index_add(dim=0, index=g.cell, source=g.x)
    yield lambda: scatter(g.x[g.good], g.cell[g.good], 0, CELLS)
    yield lambda: scatter(g.x, g.cell // 2, 0, CELLS)
    yield lambda: scatter(g.x, g.cell.unique(return_inverse=True)[1], 0, CELLS)
    yield lambda: scatter(g.edge_attr, g.cell[g.edge_index[0]], 0, CELLS)
    yield lambda: scatter(g.x, torch.cat([g.cell[:1], g.cell[1:]]), 0, CELLS)
    yield lambda: scatter(g.x, torch.cat([g.cell.new_zeros(0), g.cell]), 0, CELLS)
    yield lambda: scatter(g.x, torch.cat(tensors=[column, column], dim=1)[:, 1], 0, CELLS)
    yield lambda: scatter(g.x, torch.stack([g.cell, g.cell])[1], 0, CELLS)
    yield lambda: scatter(g.x, torch.stack([g.cell, g.cell], dim=1)[:, 0], 0, CELLS)
    yield lambda: scatter(g.x, g.cell.unsqueeze(dim=1).squeeze(1), 0, CELLS)
    yield lambda: scatter(g.x[g.cell.sort().indices], g.cell.sort().values, 0, CELLS)
    yield lambda: scatter(g.x, torch.sort(g.cell)[0], 0, CELLS)
    yield lambda: scatter(g.x, torch.searchsorted(torch.arange(3), g.cell), 0, CELLS)
    yield lambda: scatter(g.x, torch.bucketize(g.cell, torch.arange(3)), 0, CELLS)
    yield lambda: scatter(g.x, g.cell.clone().add_(1), 0, CELLS + 1)
    yield lambda: scatter(g.x, operator.iadd(g.cell.clone(), 1), 0, CELLS + 1)
    yield lambda: torch.bincount(g.cell, minlength=CELLS)
    yield lambda: scatter(g.x, g.narrow.long(), 0, CELLS)
    yield lambda: scatter(g.x, g.several[:, 1], 0, CELLS)
    yield lambda: scatter(g.x, g.several[:, :1].squeeze(1), 0, CELLS)
    yield lambda: g.x.new_zeros(CELLS).index_put((g.cell,), g.x[:, 0], accumulate=True)


@on_ranks(3)
def test_integers_that_are_not_named(rank):
    """A reduction by them is refused on all ranks; labels and kinds of nodes are as before."""
    data = cells()
    data.good, data.edge_attr = data.x[:, 0] > 0, torch.arange(480.0).double().view(120, 4)
    data.narrow, data.several = data.cell.int(), data.cell[:, None].repeat(1, 2)
    # ranks with 30, 1 and 0 nodes
    graph = partition(data, method=(torch.arange(NODES) == 4).long())
    for reduce in by_other_words(graph):
        with pytest.raises(ArgumentError, match=r'groups=\["(cell|narrow|several)"\]'):
            reduce()
    ids, cell = graph.owned_ids, graph.cell
    logits = torch.randn(NODES, CELLS, generator=torch.Generator().manual_seed(1))
    pairs = {
        "loss": lambda y, z: torch.nn.functional.cross_entropy(z, y, reduction="none"),
        "accuracy": lambda y, z: z.argmax(1) == y,
        "rows of a table": lambda y, z: logits[y],
        "embedding": lambda y, z: torch.nn.functional.embedding(y, logits),
        "own column": lambda y, z: z.gather(1, y[:, None]),
        "one hot": lambda y, z: torch.zeros_like(z).scatter_(1, y.view(-1, 1), 1.0),
        "one hot, by pairs": lambda y, z: z.index_put(
            (torch.arange(len(y)), y), torch.ones(len(y))
        ),
        "a feature": lambda y, z: torch.cat([z, y[:, None].to(z.dtype)], 1),
    }
    for name, call in pairs.items():
        assert torch.equal(call(cell, logits[ids]), call(data.cell, logits)[ids]), name
    sums = scatter(graph.x, cell.plain, 0, CELLS)
    torch.testing.assert_close(vc.all_reduce(sums), scatter(data.x, data.cell, 0, CELLS))
    assert torch.equal(graph.gather(cell), data.cell)
    assert torch.equal(graph.migrate(torch.zeros_like(cell)).cell, data.cell[: 31 * (rank == 0)])
    move = vc.graph.transfer(graph, graph)
    assert torch.equal(move(cell), cell)
    assert torch.equal(graph.rows(cell, cell), data.cell[data.cell[ids]])
    new = graph.migrate(cell % 3)
    assert torch.equal(new.owned_ids, (data.cell % 3 == rank).nonzero().view(-1))
    none = torch.empty(2, 0, dtype=torch.int64)
    made = from_edges(none, graph.node_sizes, node_attrs={"cell": cell}, method=cell % 3)
    assert torch.equal(made.cell % 3, torch.full_like(made.cell, rank))
    compiled = torch.compile(lambda x, y: x * logits[y].sum(1, keepdim=True), backend="eager")
    torch.testing.assert_close(compiled(graph.x, cell), compiled(data.x, data.cell)[ids])
