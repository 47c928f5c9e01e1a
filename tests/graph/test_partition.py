"""``partition``: each part against the full graph; data, types, one source rank, refusals."""

import math
import sys

import numpy as np
import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData

import varcomm
from tests.graph.against_one import graph_of
from tests.graph.batches import plain
from tests.graph.graphs import METHODS, WORLDS, rich, split_by, wild
from tests.graph.parts import (
    by_hand,
    contents,
    differences,
    different,
    refusing,
    same,
)
from tests.graph.typed import WAYS, owners, typed
from tests.worlds import on_ranks
from varcomm import ArgumentError, DisagreementError, GroupError, MissingPackageError
from varcomm.graph import EdgeShard, NodeShard, assign, partition

NO_EDGES = torch.zeros(2, 0, dtype=torch.int64)


def graphs():
    """Small graphs, the same at every call."""
    draws = torch.Generator().manual_seed(4)

    def placed(nodes, edge_index):
        x, pos = torch.rand(nodes, 3, generator=draws).split([1, 2], dim=1)
        return Data(x=x, pos=pos, edge_index=edge_index)

    return {
        "wild": wild(),
        "no edges": placed(7, NO_EDGES),
        "fewer nodes than ranks": placed(2, torch.tensor([[0, 0, 1], [1, 1, 1]])),
        "no nodes": placed(0, NO_EDGES),
        "a star": placed(9, torch.stack([torch.arange(9), torch.full((9,), 4)])),
    }


@on_ranks(*WORLDS)
def test_parts_make_up_the_full_graph(rank, ranks):
    """The parts of all graphs, by all methods, are those found by hand."""
    wrong = []
    cases = [
        (f"{name} by {method}", data, split_by(method, data.num_nodes, ranks))
        for name, data in graphs().items()
        for method in METHODS
    ]
    cases += [(f"types, {way}", typed(), owners(typed(), way, ranks)) for way in WAYS]
    for case, data, method in cases:
        before = data.clone()
        graph = partition(data, method=method)
        owner = assign(data, ranks, method) if isinstance(method, str) else method
        part, found, report = by_hand(data, owner, rank, ranks), contents(graph), graph.report()
        wrong += [(case, *name) for name in different(part, found)]
        wrong += [(case, name) for name in part.keys() - found.keys()]
        assert report == varcomm.simulate.partition(data, ranks, method).report(), case
        for key, nodes in graph.node_shards.items():
            sizes = report.owned if key is None else nodes.sizes
            rows = nodes.gather(nodes.owned_ids, ranks - 1)
            assert rows.tolist() == ([*range(sum(sizes))] if rank == ranks - 1 else []), case
            assert f"{report.owned[rank]} of {sum(report.owned)} nodes" in repr(graph)
        if not isinstance(data, HeteroData):
            assert torch.equal(data.edge_index, before.edge_index), "the full graph has changed"
    graph = graph_of(wild())
    varcomm.testing.dot_test(graph.with_halo, graph.x)
    varcomm.testing.gradgradcheck(lambda x: graph.with_halo(x**2), graph.x[:, :1], fast_mode=True)
    return wrong


def with_attributes_of_the_graph():
    data = rich()
    data.depth, data.back = np.arange(24, dtype=">f4"), np.arange(48.0).reshape(24, 2)[::-1]
    data.depth.flags.writeable = False
    data.color_index, data.part = torch.arange(24.0)[None], torch.arange(18.0).view(9, 2)[4:5]
    data.scalar, data.title, data.nothing_at_all = torch.tensor(2.5), "a graph", None
    data.settings = {"depth": [400], "at": torch.arange(3)}
    return data


@on_ranks(3)
def test_attributes_of_nodes_edges_and_the_graph(rank):
    data = with_attributes_of_the_graph()
    of_graph = {"scalar", "part", "title", "settings", "color_index"}
    of_edge = {name for name, _ in data if name.startswith("edge_")} - {"edge_index"}
    of_node = set(data.keys()) - of_graph - of_edge - {"edge_index", "num_nodes", "nothing_at_all"}
    data.learned = data.x.clone().requires_grad_() * 2
    graph = graph_of(data)
    assert isinstance(graph.data, Data)
    assert not graph.learned.requires_grad
    assert ("x" in graph, "z" in graph, "num_edges" in graph) == (True, False, False)
    counts = graph.num_nodes, graph.num_edges, graph.num_node_features, graph.num_edge_features
    assert counts == (data.num_nodes, data.num_edges, 4, 3)
    part = {name: plain(value) for name, value in graph.data.to_dict().items()}
    assert set(part) == {*of_node, *of_edge, *of_graph, "learned", "edge_index", "num_nodes"}
    into = torch.isin(data.edge_index[1], graph.owned_ids).nonzero().view(-1)
    for keys, ids in ((of_node, graph.owned_ids), (of_edge, into)):
        for key in keys:
            assert part[key].tolist() == data[key][ids.numpy()].tolist(), key
            assert isinstance(data[key], np.ndarray) or same(part[key], data[key][ids]), key
    assert all(same(part[key], data[key]) for key in of_graph)


class OwnData(Data):
    def __cat_dim__(self, key, value, *args, **kwargs):
        dims = {"settings": None, "columns": 1}
        return dims[key] if key in dims else super().__cat_dim__(key, value, *args, **kwargs)


@on_ranks(2)
def test_rows_are_those_of_pyg(rank):
    """Names with index, dtypes, NaN equal to itself; classes of users decide too.

    With as many edges as nodes, ``edge`` in the name decides.
    """
    values = torch.arange(4.0)
    edges = torch.tensor([[3, 0, 1, 2], [1, 2, 3, 0]])
    ring = OwnData(edge_index=EdgeIndex(edges, sparse_size=(4, 4)), x=values, weight=values)
    ring.edge_attr, ring.settings, ring.scale = values, torch.ones(4), math.nan
    ring.leaf_area_index, ring.index_name, ring.is_index = torch.ones(4), "WIND", values > 0
    for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.int8):
        x = torch.ones(7, 3, dtype=dtype)[::2, :1]  # odd strides
        ring[f"of_{str(dtype)[6:]}"], ring[f"flipped_{str(dtype)[6:]}"] = x, x.T[:1].expand(1, 4).T
    graph = partition(ring, method=np.array([0, 1, 0, 1], dtype=np.uint16))
    assert math.isnan(graph.scale)
    assert [hasattr(graph, name) for name in ("x", "__z__", "z")] == [True, False, False]
    ring.columns = torch.rand(2, 4)
    with pytest.raises(ArgumentError, match=r"data\.columns"):
        partition(ring)
    own, others = torch.arange(4.0).view(2, 2).T[[rank, 1 - rank]]  # edge i is not into node i
    for key, rows in (("x", own), ("weight", own), ("edge_attr", others)):
        assert torch.equal(graph[key], rows)
    assert (graph.settings.shape, graph.leaf_area_index.tolist()) == ((4,), [1.0, 1.0])


def in_a_subgroup(rank):
    group = torch.distributed.new_group([2, 1])
    if rank == 0:
        return None
    graph = partition(wild(), group, "block")
    with varcomm.debug(), pytest.raises(DisagreementError):
        graph.gather(graph.x if group.rank() == 0 else graph.x[1:])
    ids, rows, mean = graph.owned_ids, graph.gather(graph.x, dst=0), graph.mean(graph.x)
    # a view of much, and a tensor that requires a gradient, from the first rank alone
    data = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    data.part = torch.arange(1e6).view(-1, 4)[7:8]
    data.weight = torch.ones(1, 2, requires_grad=True) * 2
    given = (data, group, "block") if group.rank() == 0 else (None, group, None)
    with varcomm.debug(), varcomm.trace() as calls:
        graph = partition(*given, src=0)
    assert max(call.received for call in calls) < 10_000
    assert graph.part.tolist() == [[28.0, 29.0, 30.0, 31.0]]
    assert graph.weight.requires_grad
    return ids.tolist(), len(rows), float(mean)


def test_in_a_subgroup(worlds):
    outside, *parts = worlds.run(3, in_a_subgroup)
    assert outside is None
    assert sorted(parts[0][0] + parts[1][0]) == list(range(24))
    assert sorted(part[1] for part in parts) == [0, 24]
    assert parts[0][2] == parts[1][2] == pytest.approx(float(wild().x.mean()), rel=1e-14)


@on_ranks(*WORLDS)
def test_from_any_rank(rank, ranks):
    """Graphs that each rank in turn has alone."""
    wrong, data, all_graphs = [], with_attributes_of_the_graph(), graphs()
    idle = split_by("a rank owns nothing", data.num_nodes, ranks)
    ways = ["metis", "rcb", "random", None, idle, idle.to(torch.uint8)]
    cases = [(data, method, 1 + at % 2) for at, method in enumerate(ways)]
    cases += [(typed(), owners(typed(), way, ranks), 1) for way in WAYS]
    small = ("no nodes", "no edges", "fewer nodes than ranks")
    cases += [(all_graphs[name], "block", 1) for name in small]
    for at, (data, method, hops) in enumerate(cases):
        src = at % ranks
        mine = (data, None, method) if rank == src else (None, None, None)
        graph = partition(*mine, src=src, hops=hops)
        wrong += differences(graph, partition(data, method=method, hops=hops))
    return wrong


WRITES, LIKES = ("author", "writes", "paper"), ("author", "likes", "paper")
# questions to a graph with types, the error, and a word of the message
UNKNOWN = [
    (lambda graph: graph["author", "paper"], KeyError, "('author', 'paper')"),
    (lambda graph: graph.nodes, ArgumentError, "graph['author'], graph['paper']"),
    (lambda graph: graph.edge_index, ArgumentError, "graph[('author', 'writes', 'paper')]"),
    (lambda graph: graph.x, AttributeError, "graph['author'].x, graph['"),
    (lambda graph: graph.has_self_loops(), AttributeError, "methods of PyG's Data before"),
    (lambda graph: graph.z_dict, AttributeError, "'z'"),
    (lambda graph: graph[WRITES].x, AttributeError, "'x'"),
    (lambda graph: graph["venue"].x, AttributeError, "no attributes"),
]


@on_ranks(3)
def test_graphs_with_types(rank):
    """Members of a graph with types; a mean, a maximum and a halo of one type."""
    data = typed()
    graph = partition(data, method=owners(data, "a rank owns nothing", 3))
    x, edge_index = graph.x_dict, graph.edge_index_dict
    assert x.keys() == {"author", "paper", "editor", "reader"}
    assert all(x[key] is graph[key].x for key in x)
    assert all(edge_index[key].plain is graph[key].local_ids for key in data.edge_types)
    assert graph.weight_dict.keys() == edge_index.keys() == set(data.edge_types)
    assert (graph.num_nodes, graph.num_edges) == (data.num_nodes, data.num_edges)
    assert all(graph[key].num_nodes == data[key].num_nodes for key in graph.node_types)
    assert isinstance(graph.data, HeteroData)
    assert (type(graph["paper"]), type(graph[WRITES])) == (NodeShard, EdgeShard)
    assert all(key in graph for key in ("year", "paper", WRITES))
    assert not any(key in graph for key in ("x", "z"))
    for ask, kind, word in UNKNOWN:
        with pytest.raises(kind) as caught:
            ask(graph)
        assert word in str(caught.value)
    paper = graph["paper"]
    x = paper.x.requires_grad_()
    loss = paper.mean(x**2, paper.mask) + paper.max(x)
    (gradient,) = torch.autograd.grad(loss, x)
    varcomm.testing.dot_test(graph[WRITES].with_halo, graph["author"].x)
    rows = graph["author"].scatter(data["author"].x if rank == 1 else None, src=1)
    assert torch.equal(rows, graph["author"].x)
    whole = data["paper"].x.clone().requires_grad_()
    expected = (whole**2)[data["paper"].mask].mean() + whole.max()
    expected.backward()
    assert (graph.year, loss.item()) == (1998, pytest.approx(expected.item(), rel=1e-14))
    torch.testing.assert_close(gradient, whole.grad[paper.owned_ids], rtol=1e-13, atol=0)


@on_ranks(2)
def test_types_of_nodes_alone(rank):
    data = HeteroData()
    data["a"].x, data["b"].num_nodes = torch.arange(5.0), 2
    graph = partition(data, method={"a": torch.tensor([1, 0, 1, 0, 1]), "b": torch.tensor([0, 0])})
    assert (graph.hops, graph.num_edges, graph.edge_types) == (1, 0, [])
    assert graph.report().owned == (4, 3)
    expected = [([1.0, 3.0], 2), ([0.0, 2.0, 4.0], 0)][rank]
    assert (graph["a"].x.tolist(), graph["b"].num_owned) == expected


EDGES = torch.tensor([[0, 1, 2], [1, 2, 0]])
X = torch.zeros(3, 1)


def ring(**attributes):
    return Data(**({"num_nodes": 3, "edge_index": EDGES, "x": torch.arange(3.0)} | attributes))


def papers(key="author", **store):
    """3 authors write 2 papers, in 4 edges."""
    data = HeteroData()
    data["author"].num_nodes = 3
    data["paper"].x = torch.ones(2, 5)
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1, 2, 2], [0, 1, 1, 1]])
    for name, value in store.items():
        data[key][name] = value
    return data


META = torch.ones(3, device="meta")
OWNER = {"author": torch.tensor([0, 1, 2]), "paper": torch.tensor([1, 1])}
# graphs that one rank passes, by a word of the message
DATA = {
    "data": [[EDGES], HeteroData()],
    "edge_index": [
        *(Data(num_nodes=3), ring(edge_index=EDGES.int()), ring(edge_index=EDGES.T.contiguous())),
        *(ring(edge_index=EDGES + 1), ring(edge_index=EDGES - 1), papers(LIKES, when=X)),
        papers(WRITES, edge_index=torch.tensor([[0, 1], [0, 2]])),
    ],
    "num_nodes": [ring(num_nodes=-4), ring(num_nodes=2.5), papers("place", a=2)],
    **{f"data.{name}": [ring(**{name: EDGES})] for name in ("face", "edge_label_index")},
    "data.ptr": [ring(ptr=torch.tensor([0, 3]))],
    "data.train_idx": [ring(train_idx=torch.tensor(ids)) for ids in ([0, 0], [3], [[0]])],
    "train_mask": [ring(train_idx=torch.tensor([0]), train_mask=X[:, 0] == 0)],
    "data['author'].my_idx": [papers(my_idx=torch.tensor([0, 1]))],
    "data.my_index": [ring(my_index=np.arange(2))],
    "data.names": [ring(names=["a", "b", "c"]), ring(names=np.zeros(3, "datetime64[D]"))],
    "data.index": [ring(index=[0, 2])],
    "data.my_adj": [ring(my_adj=torch.eye(3).to_sparse())],
    "data.mean": [ring(mean=torch.zeros(3))],
    "data.leaf_area_index": [ring(leaf_area_index=torch.ones(3, 12))],
    "data.y": [ring(y=y) for y in (torch.eye(3).to_sparse(), META, torch.ones(5), np.ones(2))],
    "data['author'].age": [papers(age=age) for age in (torch.ones(2), torch.tensor(1.0), "old")],
    "data['author'].group": [papers(group=torch.ones(3))],
    "'editor'": [papers(("author", "knows", "editor"), edge_index=EDGES)],
}
OWNERS = [
    *(np.zeros(3), torch.tensor([0, 1]), torch.tensor([True, False, True])),
    *(torch.tensor([0, 1, 3]), torch.tensor([0, -1, 0]), {"a": torch.zeros(3).long()}),
]
OF_TYPES = [
    *(torch.zeros(3).long(), {"author": OWNER["author"]}, OWNER | {"editor": OWNER["paper"]}),
    *(OWNER | {"paper": OWNER["paper"][:1]}, OWNER | {"author": OWNER["author"] + 1}),
]
# the data and the method of one rank, a word of the message, and other arguments
WRONG = [
    *((data, None, word) for word, graphs in DATA.items() for data in graphs),
    *((ring(), method, "method") for method in OWNERS),
    *((papers(), method, "method") for method in OF_TYPES),
    (papers(), OWNER, "hops", {"hops": 2}),
    *((ring(), "block", name, {name: wrong}) for name in ("hops", "src") for wrong in (-1, 0.5)),
]
KNOWN = {"x": X, "scale": 1.0, "table": np.ones((1, 5))}
# data and method of rank 1, and the names in the message
DIFFERENT = [
    (ring(**(KNOWN | {"edge_index": EDGES.flip(0)})), "block", "data.edge_index"),
    (ring(**(KNOWN | {"num_nodes": 4, "x": None})), "block", "data.num_nodes"),
    *((ring(**(KNOWN | {"x": x})), "block", "data.x") for x in (X + 1, X.double(), None)),
    (ring(**KNOWN, name="other", pos=X), "block", "data.name, data.pos"),
    (ring(**(KNOWN | {"table": np.zeros((1, 5))})), "block", "data.table"),
    *((ring(**KNOWN), method, "method") for method in ("random", torch.zeros(3).long())),
]
# by one rank that alone has the graph: its rank, data and method, and a word of the message
BY_SRC = [
    (2, (ring(), None), "data"),
    (1, (None, "block"), "method"),
    (0, (None, None), "data must"),
    (0, (ring(face=EDGES), "block"), "data.face"),
    (0, (ring(), "rcb"), "data.pos"),
    (0, (ring(rule=lambda x: x), "block"), "is not a plain value"),
]


@on_ranks(3)
def test_refused_on_all_ranks(rank):
    def parted(data, method=None, **options):
        return partition(data, None, method, **options)

    refused = refusing(parted)
    for number, (data, method, word, *options) in enumerate(WRONG):
        culprit = number % 2 * 2
        mine = (data, method) if rank == culprit else (ring(), "block")
        more = options[0] if options and rank == culprit else {}
        words = word, f"graph.partition: refused on rank {culprit}"
        refused(ArgumentError, words, *mine, **more)
    for data, method, word in DIFFERENT:
        mine = (data, method) if rank == 1 else (ring(**KNOWN), "block")
        refused(DisagreementError, (word, "graph.partition: ranks [1]"), *mine)
    mine = (papers(), OWNER | {"paper": OWNER["paper"] + (rank == 1)})
    refused(DisagreementError, ("method['paper']", "ranks [1]"), *mine)
    other = HeteroData()
    for name in ("paper", "author")[:: 1 if rank == 1 else -1]:
        other[name].num_nodes = 3
    refused(DisagreementError, ("the order of types", "ranks [1]"), other)
    for culprit, given, word in BY_SRC:
        right = (ring(), "block") if rank == 0 else (None, None)
        mine = given if rank == culprit else right
        refused(ArgumentError, (word, f"refused on rank {culprit} of 3"), *mine, src=0)
    refused(ArgumentError, ("hops",), typed() if rank == 0 else None, src=0, hops=2)
    for options, word in (
        ({"src": 1}, "src"),
        ({"src": None}, "src"),
        ({"src": 0, "hops": 2}, "hops"),
    ):
        mine = {"src": 0} if rank != 2 else options
        refused(DisagreementError, (word, "rank 2"), ring() if rank == 0 else None, **mine)
    for group in ("metis", torch.zeros(3)):
        with pytest.raises(GroupError, match="group"):
            partition(ring(), group)
    for data in (ring(), ring(pos=torch.zeros(2, 2))):
        refused(ArgumentError, ("data.pos",), data, "rcb")
    refused(ArgumentError, ("method must be one of",), ring(), "scotch")
    kept = {name: module for name, module in sys.modules.items() if name.startswith("pymetis")}
    if rank == 0:  # the first rank assigns
        sys.modules.update(dict.fromkeys(kept, None), pymetis=None)
    try:
        refused(MissingPackageError, ("refused on rank 0 of 3",), wild(), "metis")
    finally:
        if rank == 0:
            del sys.modules["pymetis"]
            sys.modules.update(kept)
    # the ranks still work, and take integers of any library
    src, hops = (np.int64(1), np.int32(2)) if rank == 0 else (1, 2)
    here = rank == 1
    graph = partition(ring() if here else None, None, "block" if here else None, src, hops)
    assert (graph.x.tolist(), graph.hops) == ([float(rank)], 2)
