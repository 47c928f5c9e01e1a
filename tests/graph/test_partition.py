"""``partition``: the parts make up the full graph; data, derivatives, one source rank, refusals."""

import math
import sys
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData

import varcomm
from tests.graph.graphs import METHODS, WORLDS, rich, split_by, wild
from tests.graph.parts import differences
from tests.graph.typed import WAYS, owners, typed
from varcomm import ArgumentError, DisagreementError, MissingPackageError
from varcomm.graph import partition

NO_EDGES = torch.zeros(2, 0, dtype=torch.int64)
GRAPHS = {
    "wild": wild(),
    "no edges": Data(x=torch.rand(7, 1), pos=torch.rand(7, 2), edge_index=NO_EDGES),
    "fewer nodes than ranks": Data(
        x=torch.rand(2, 1), pos=torch.rand(2, 2), edge_index=torch.tensor([[0, 0, 1], [1, 1, 1]])
    ),
    "no nodes": Data(x=torch.rand(0, 1), pos=torch.rand(0, 2), edge_index=NO_EDGES),
    "a star": Data(
        x=torch.rand(9, 1),
        pos=torch.rand(9, 2),
        edge_index=torch.stack([torch.arange(9), torch.full((9,), 4)]),
    ),
}


def parts_of(rank, graphs, method, ranks):
    found = {}
    for name, data in graphs.items():
        data.edge_number = torch.arange(data.num_edges) + data.num_nodes  # for sure no node's
        edges = data.edge_number.clone()
        graph = partition(data, method=split_by(method, data.num_nodes, ranks))
        assert torch.equal(data.edge_number, edges), "the full graph has changed"
        found[name] = {
            "owned": graph.owned_ids,
            "halo": graph.halo_ids,
            "edge_index": graph.edge_index,
            "edges": graph.edge_number - data.num_nodes,
            "x": graph.x,
            "with halo": graph.with_halo(graph.x),
            "gathered": [graph.gather(graph.x, dst) for dst in range(len(graph.node_sizes))],
            "sizes": tuple(graph.node_sizes),
            "counts": (graph.num_owned, graph.num_halo),
            "shown": repr(graph),
        }
    varcomm.testing.dot_test(graph.with_halo, graph.x)
    graph = partition(wild(), method=split_by(method, 24, ranks))
    varcomm.testing.gradgradcheck(lambda x: graph.with_halo(x**2), graph.x[:, :1], fast_mode=True)
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", WORLDS)
def test_parts_make_up_the_full_graph(worlds, ranks, method):
    found = worlds.run(ranks, parts_of, GRAPHS, method, ranks)
    for name, data in GRAPHS.items():
        parts = [of_rank[name] for of_rank in found]
        owner = torch.full((data.num_nodes,), -1)
        for rank, part in enumerate(parts):
            assert (owner[part["owned"]] == -1).all(), "a node has two owners"
            owner[part["owned"]] = rank
        assert (owner >= 0).all(), "a node has no owner"
        sizes = tuple(len(part["owned"]) for part in parts)
        for rank, part in enumerate(parts):
            owned, halo = part["owned"], part["halo"]
            assert part["sizes"] == sizes
            assert part["counts"] == (len(owned), len(halo))
            assert f"{len(owned)} of {sum(sizes)} nodes" in part["shown"]
            assert (owned.diff() > 0).all(), "owned nodes are not in the order of the full graph"
            # edges: all into owned nodes, in the order of the full graph, in local ids
            into = torch.nonzero(owner[data.edge_index[1]] == rank).view(-1)
            known = torch.cat([owned, halo])
            assert torch.equal(part["edges"], into)
            assert torch.equal(known[part["edge_index"]], data.edge_index[:, into])
            assert (part["edge_index"][1] < len(owned)).all()
            # the halo: sources of edges, once each, by owner and then in the owner's order
            sources = data.edge_index[0, into]
            assert set(halo.tolist()) == set(sources[owner[sources] != rank].tolist())
            keys = [(int(owner[i]), int(i)) for i in halo]
            assert keys == sorted(set(keys))
            assert torch.equal(part["x"], data.x[owned])
            assert torch.equal(part["with halo"], data.x[known])
            for dst, rows in enumerate(part["gathered"]):
                assert torch.equal(rows, data.x if rank == dst else data.x[:0])


def names_of_methods(rank):
    data, owner = wild(), torch.arange(24) % 2
    ring = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    methods = ("metis", "rcb", "random", None, owner, owner.to(torch.uint8), owner.int().numpy())
    names = [partition(data, method=method).report().method for method in methods]
    return names + [partition(ring, method=method).method for method in ("metis", None, "random")]


def test_the_report_names_the_method(worlds):
    given = ["the ranks given"] * 3
    # METIS has nothing to cut in a graph with fewer nodes than ranks
    expected = ["metis", "rcb", "random", "metis", *given, "block", "block", "random"]
    assert worlds.run(3, names_of_methods) == [expected] * 3


def with_attributes_of_the_graph():
    data = rich()
    data.depth, data.back = np.arange(24, dtype=">f4"), np.arange(48.0).reshape(24, 2)[::-1]
    data.depth.flags.writeable = False
    data.leaf_area_index, data.color_index = torch.rand(24), torch.rand(1, 24)
    data.scalar, data.level, data.part = torch.tensor(2.5), torch.ones(1, 3), torch.rand(9, 2)[4:5]
    data.title, data.year, data.nothing_at_all = "a graph", 1998, None
    data.settings = {"depth": [400], "at": torch.arange(3)}
    return data


def local_attributes(rank, data, method):
    data.learned = data.x.clone().requires_grad_() * 2
    graph = partition(data, method=method)
    assert isinstance(graph.data, Data)
    assert not graph.learned.requires_grad
    assert ("x" in graph, "z" in graph, "num_edges" in graph) == (True, False, False)
    counts = graph.num_nodes, graph.num_edges, graph.num_node_features, graph.num_edge_features
    part = graph.data.to_dict()
    del part["learned"]
    return graph.owned_ids, counts, part


@pytest.mark.parametrize("ranks", WORLDS)
def test_attributes_of_nodes_edges_and_the_graph(worlds, ranks):
    data = with_attributes_of_the_graph()
    nodes, edges = data.num_nodes, data.num_edges
    data.names, data.pair = [f"node {i}" for i in range(nodes)], tuple(range(nodes))
    data.days = np.arange(nodes).astype("datetime64[D]")
    data.kinds = [f"edge {i}" for i in range(edges)]
    of_node = "x pos y train_mask names pair days half kind wave strided nothing depth back"
    of_node = {*of_node.split(), "leaf_area_index"}
    of_edge = {
        *[
            "edge_attr",
            "edge_weight",
            "edge_type",
            "edge_mask",
            "edge_tensor",
            "edge_number",
            "kinds",
        ]
    }
    of_graph = {*["scalar", "level", "part", "title", "year", "settings", "color_index"]}
    method = split_by("a rank owns nothing", nodes, ranks)
    for owned, counts, part in worlds.run(ranks, local_attributes, data, method):
        into = torch.isin(data.edge_index[1], owned).nonzero().view(-1)
        assert counts == (len(owned), len(into), 4, 3)
        assert set(part) == of_node | of_edge | of_graph | {"edge_index", "num_nodes"}
        for keys, ids in ((of_node, owned), (of_edge, into)):
            for key in keys:
                value = data[key]
                if isinstance(value, torch.Tensor):
                    assert torch.equal(part[key], value[ids]), key
                else:
                    rows = np.asarray(value)[ids.numpy()]
                    assert np.asarray(part[key]).tolist() == rows.tolist(), key
        for key in of_graph:
            same = (
                torch.equal
                if isinstance(data[key], torch.Tensor)
                else lambda a, b: str(a) == str(b)
            )
            assert same(part[key], data[key]), key


class OwnData(Data):
    def __cat_dim__(self, key, value, *args, **kwargs):
        dims = {"settings": None, "columns": 1}
        return dims[key] if key in dims else super().__cat_dim__(key, value, *args, **kwargs)


def read_as_pyg_does(rank):
    values = torch.arange(4.0)
    edges = torch.tensor([[3, 0, 1, 2], [1, 2, 3, 0]])  # edge i is not into node i
    ring = Data(edge_index=EdgeIndex(edges, sparse_size=(4, 4)), x=values, weight=values)
    ring.edge_attr = ring.edge_weight = values
    graph = partition(ring, method=torch.tensor([0, 1, 0, 1]))
    own = OwnData(edge_index=edges, num_nodes=4, settings=torch.ones(4))
    settings = partition(own, method="block").settings.shape
    own.columns = torch.rand(2, 4)
    with pytest.raises(ArgumentError, match=r"data\.columns has its rows along dimension 1"):
        partition(own)
    rows = [graph[key].tolist() for key in ("x", "weight", "edge_attr", "edge_weight")]
    return isinstance(graph.edge_index, torch.Tensor), rows, settings


def test_rows_are_those_of_pyg(worlds):
    """With as many edges as nodes, ``edge`` in the name decides; classes of users decide too."""
    first, second = worlds.run(2, read_as_pyg_does)
    assert first == (True, [[0.0, 2.0]] * 2 + [[1.0, 3.0]] * 2, (4,))
    assert second == (True, [[1.0, 3.0]] * 2 + [[0.0, 2.0]] * 2, (4,))


def in_a_subgroup(rank):
    group = torch.distributed.new_group([2, 1])
    if rank == 0:
        return None
    data = wild()
    graph = partition(data, group, "block")
    with varcomm.debug(), pytest.raises(DisagreementError):
        graph.gather(graph.x if group.rank() == 0 else graph.x[1:])
    ids, rows, mean = graph.owned_ids, graph.gather(graph.x, dst=0), graph.mean(graph.x)
    # a view of much, and something that requires a gradient, from the first rank alone
    data = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    data.part = torch.arange(1e6).view(-1, 4)[7:8]
    data.weight = torch.ones(1, 2, requires_grad=True) * 2
    here = group.rank() == 0  # rank 2 of the world
    with varcomm.debug(), varcomm.trace() as calls:
        graph = partition(data if here else None, group, "block" if here else None, src=0)
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


def from_one(rank, data, method, src, hops):
    here = rank == src
    graph = partition(data if here else None, method=method if here else None, src=src, hops=hops)
    expected = partition(data, method=method, hops=hops)
    return differences(graph, expected), graph.method == expected.method


@pytest.mark.parametrize("ranks", WORLDS)
def test_from_any_rank(worlds, ranks):
    data = with_attributes_of_the_graph()
    idle = split_by("a rank owns nothing", data.num_nodes, ranks)
    ways = ["metis", "rcb", "random", None, idle, idle.to(torch.uint8)]
    for src, method in enumerate((ways * 2)[ranks:][:ranks]):
        hops = 1 + src % 2
        assert worlds.run(ranks, from_one, data, method, src, hops) == [([], True)] * ranks
        types = typed()
        method = owners(types, WAYS[src % 3], ranks)
        assert worlds.run(ranks, from_one, types, method, src, 1) == [([], True)] * ranks
    for small in (GRAPHS["no nodes"], GRAPHS["no edges"], GRAPHS["fewer nodes than ranks"]):
        assert worlds.run(ranks, from_one, small, "block", 0, 1) == [([], True)] * ranks


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


WRITES, LIKES = ("author", "writes", "paper"), ("author", "likes", "paper")
META = torch.ones(3, device="meta")
# the data and the method of one rank, and the word that the message has
WRONG = [
    ([EDGES], None, "data"),
    (HeteroData(), None, "data"),
    *(
        (data, None, "edge_index")
        for data in (
            Data(num_nodes=3),
            ring(edge_index=EDGES.int()),
            ring(edge_index=EDGES.T.contiguous()),
            ring(edge_index=EDGES[0]),
            ring(edge_index=EDGES + 1),
            ring(edge_index=EDGES - 1),
            papers(WRITES, edge_index=torch.tensor([[0, 1], [0, 2]])),
            papers(LIKES, when=X),
        )
    ),
    *((ring(num_nodes=nodes), None, "num_nodes") for nodes in (-4, 2.5)),
    *((papers("place", **store), None, "num_nodes") for store in ({"num_nodes": None}, {"a": 2})),
    *(
        (ring(**{name: value}), None, f"data.{name}")
        for name, value in (
            ("face", EDGES),
            ("ptr", torch.tensor([0, 3])),
            ("edge_label_index", EDGES),
            ("train_idx", torch.tensor([0, 1])),
            ("my_index", np.arange(2)),
            ("index", [0, 2]),
            ("adj", torch.ones(3, 3)),
            ("my_adj", torch.eye(3).to_sparse()),
            ("mean", torch.zeros(3)),
            ("method", "euler"),
            ("leaf_area_index", torch.rand(3, 12)),
            ("leaf_area_index", np.zeros((3, 4))),
            ("y", torch.eye(3).to_sparse()),
            ("y", META),
            ("y", torch.ones(5)),
            ("y", np.ones(2)),
        )
    ),
    *(
        (papers(age=age), None, r"data['author'].age")
        for age in (torch.ones(2), torch.tensor(1.0), ["young"], "old", META)
    ),
    (papers(group=torch.ones(3)), None, "data['author'].group"),
    (papers(WRITES, when=torch.ones(3)), None, "when"),
    (papers(("author", "knows", "editor"), edge_index=EDGES), None, "'editor'"),
    *(
        (ring(), method, "method")
        for method in (
            "scotch",
            np.zeros(3),
            np.array([None] * 3),
            torch.tensor([0, 1]),
            torch.tensor([0.0, 1.0, 0.0]),
            torch.tensor([True, False, True]),
            torch.tensor([0, 1, 3]),
            torch.tensor([0, -1, 0]),
            {"a": torch.zeros(3).long()},
        )
    ),
    (papers(), torch.zeros(3, dtype=torch.int64), "method"),
]


def refusals(rank, culprit, given, kind, right):
    """Return the errors of all cases, where `culprit` passes them and the other ranks `right`."""
    told = []
    for data, method, *options in given:
        data, method = (data, method) if rank == culprit else right
        with pytest.raises(kind) as caught:
            partition(data, method=method, **(options[0] if options else {}))
        told.append(str(caught.value))
    return told, partition(ring(), method="block").x.tolist()


@pytest.mark.parametrize("culprit", [0, 2])
def test_refused_on_all_ranks(worlds, culprit):
    given = [(data, method) for data, method, _ in WRONG]
    told = worlds.run(3, refusals, culprit, given, ArgumentError, (ring(), "block"))
    assert [x for _, x in told] == [[0.0], [1.0], [2.0]]
    assert told[0][0] == told[1][0] == told[2][0]
    for (_, _, word), message in zip(WRONG, told[0][0], strict=True):
        assert message.startswith(f"graph.partition: refused on rank {culprit} of 3: ")
        assert word in message


def refused_before_or_in_assign(rank):
    for group in ("metis", torch.zeros(3)):
        with pytest.raises(ArgumentError, match="group"):
            partition(ring(), group)
    for data in (ring(), ring(pos=torch.zeros(2, 2))):
        with pytest.raises(ArgumentError, match=r"data\.pos"):
            partition(data, method="rcb")
    kept = {name: module for name, module in sys.modules.items() if name.startswith("pymetis")}
    if rank == 0:  # the first rank assigns
        sys.modules.update(dict.fromkeys(kept, None), pymetis=None)
    try:
        with pytest.raises(MissingPackageError, match="refused on rank 0 of 2"):
            partition(wild(), method="metis")
    finally:
        if rank == 0:
            del sys.modules["pymetis"]
            sys.modules.update(kept)


def test_refused_by_methods(worlds):
    worlds.run(2, refused_before_or_in_assign)
    one = worlds.run(1, refusals, 0, [(ring(), torch.tensor([0, 1, 0]))], ArgumentError, None)
    assert "method" in one[0][0][0]


KNOWN = {"x": X, "scale": 1.0, "table": np.ones((1, 5))}
# what rank 1 changes, and the names in the message
DIFFERENT = [
    *(({"edge_index": edges}, "data.edge_index") for edges in (EDGES.flip(0), EDGES[:, :2])),
    ({"num_nodes": 4, "x": None}, "data.num_nodes"),
    *(({"x": x}, "data.x") for x in (X + 1, X.double(), X.T, None)),
    ({"name": "other", "pos": X}, "data.name, data.pos"),
    ({"scale": 2.0, "table": np.zeros((1, 5))}, "data.scale, data.table"),
]


def test_ranks_that_differ(worlds):
    given = [(ring(**(KNOWN | change)), "block") for change, _ in DIFFERENT]
    words = [word for _, word in DIFFERENT]
    for method in ("random", None, torch.tensor([0, 0, 0])):
        given.append((ring(**KNOWN), method))
        words.append("method")
    told = worlds.run(3, refusals, 1, given, DisagreementError, (ring(**KNOWN), "block"))
    assert told[0][0] == told[1][0] == told[2][0]
    for word, message in zip(words, told[0][0], strict=True):
        assert message.startswith("graph.partition: ranks [1] have other arguments than rank 0")
        assert word in message


BY_SRC = {
    "data": (2, (ring(), None, 0)),
    "method": (1, (None, "block", 0)),
    "data must": (0, (None, None, 0)),
    "data.face": (0, (ring(face=EDGES), "block", 0)),
    "'magic'": (0, (ring(), "magic", 0)),
    "data.pos": (0, (ring(), "rcb", 0)),
    "data.names": (0, (ring(names=["a", "b", "c"]), "block", 0)),
    "data.days": (0, (ring(days=np.zeros(3, dtype="datetime64[D]")), "block", 0)),
}


def refusals_with_src(rank):
    told = {}
    for word, (culprit, given) in BY_SRC.items():
        right = (ring(), "block") if rank == 0 else (None, None)
        data, method = given[:2] if rank == culprit else right
        with pytest.raises(ArgumentError) as caught:
            partition(data, method=method, src=0)
        told[word] = str(caught.value)
    for src in (3, -1, 0.5, True):
        with pytest.raises(ArgumentError, match="src"):
            partition(ring(), src=src if rank == 1 else 0)
    for hops in (0, 1.5, True):
        with pytest.raises(ArgumentError, match="hops"):
            partition(ring(), hops=hops if rank == 1 else 1)
    with pytest.raises(ArgumentError, match="hops=2"):
        partition(typed() if rank == 0 else None, src=0, hops=2)
    rule = ring(rule=lambda x: x) if rank == 0 else None
    with pytest.raises(ArgumentError, match=r"refused on rank 0 of 3: data\.rule"):
        partition(rule, method="block" if rank == 0 else None, src=0)
    for options in ({"src": 1}, {"src": None}, {"src": 0, "hops": 2}):
        mine = {"src": 0} if rank != 2 else options
        with pytest.raises(DisagreementError, match="rank 2 has src="):
            partition(ring() if rank == 0 else None, method="block", **mine)
    src, hops = (np.int64(1), np.int32(2)) if rank == 0 else (1, 2)  # integers of any library
    here = rank == 1
    graph = partition(ring() if here else None, None, "block" if here else None, src, hops)
    return told, graph.x.tolist(), graph.hops


def test_refused_with_src(worlds):
    told, x, hops = zip(*worlds.run(3, refusals_with_src), strict=True)
    assert told[0] == told[1] == told[2]
    for word, message in told[0].items():
        assert message.startswith(f"graph.partition: refused on rank {BY_SRC[word][0]} of 3"), word
        assert word in message
    assert list(x) == [[0.0], [1.0], [2.0]]
    assert hops == (2, 2, 2)


def accepted(rank):
    """Values that equal on all ranks but not themselves, names with index, dtypes, no changes."""
    data = ring(scale=math.nan, table=np.full((1, 5), np.nan), refractive_index=1.3)
    data.leaf_area_index, data.index_name, data.is_index = torch.ones(3), "WIND", X[:, 0] > 0
    for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.int8):
        x = torch.ones(5, 3, dtype=dtype)[::2, :1]  # odd strides
        data[f"of_{str(dtype)[6:]}"], data[f"flipped_{str(dtype)[6:]}"] = x, x.T[:1].expand(1, 3).T
    graph = partition(data, method=np.array([0, 1, 0], dtype=np.uint16))
    assert math.isnan(graph.scale)
    for name in ("x", "method", "other"):
        with pytest.raises(FrozenInstanceError):
            setattr(graph, name, 1)
    with pytest.raises(FrozenInstanceError):
        del graph.x
    with pytest.raises(AttributeError, match=r"no attribute 'z'; its data have .*edge_index"):
        graph.z  # noqa: B018
    assert (hasattr(graph, "x"), hasattr(graph, "__z__")) == (True, False)
    return graph.leaf_area_index.tolist(), replace(graph, method="mine").method


def test_accepted_and_immutable(worlds):
    assert worlds.run(2, accepted) == [([1.0, 1.0], "mine"), ([1.0], "mine")]
