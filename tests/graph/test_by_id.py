"""Rows and owners by ids of the full graph, counts of the full graph, and data with node ids."""

import pytest
import torch
import torch_geometric.transforms as T
from torch_geometric.data import Batch, Data

import varcomm
from tests.graph.against_one import graph_of
from tests.graph.graphs import WORLDS, wild
from tests.graph.parts import refusing
from tests.graph.typed import owners, typed
from tests.worlds import on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import from_edges, partition
from varcomm.testing import dot_test, gradgradcheck

NODES = 24


def ids_of(rank):
    """Ids in any order and of any shape; the second rank asks for none."""
    ids = torch.tensor([[5, 23, 5], [0, 5, 7 + rank]])
    return (ids, torch.empty(0, dtype=torch.int64), ids.flatten().int(), ids[0, 1])[rank % 4]


@on_ranks(*WORLDS)
def test_rows_and_owners(rank, ranks):
    data = wild(NODES)
    for way in ("block", "random", "a rank owns nothing"):
        graph = graph_of(data, way)
        ids = ids_of(rank)
        for values in (data.x, data.train_mask, data.x[:, 0]):
            assert torch.equal(graph.rows(values[graph.owned_ids], ids), values[ids])
        everyone = torch.arange(NODES)
        assert bool((graph.owner(everyone)[graph.owned_ids] == rank).all())
        assert graph.owner(everyone).bincount(minlength=ranks).tolist() == list(graph.node_sizes)
        assert graph.edges.rows(graph.edges.owned_ids, ids).tolist() == ids.tolist()
        dot_test(lambda x, graph=graph, ids=ids: graph.rows(x, ids), graph.x)
    gradgradcheck(lambda x: graph.rows(x**3, ids), graph.x[:, :1], fast_mode=True)


@on_ranks(3)
def test_types_and_pieces(rank):
    """One type of several; nodes that no rank has in full; the directory's size."""
    data = typed()
    papers = partition(data, method=owners(data, "a rank owns nothing", 3))["paper"]
    ids = torch.arange(papers.num_nodes).flip(0)
    assert torch.equal(papers.rows(papers.x, ids), data["paper"].x[ids])
    pieces = from_edges(
        torch.tensor([[3 * rank], [8]]), [3] * 3, node_attrs={"x": torch.arange(3.0) + 3 * rank},
        method=torch.tensor([2, 0, 1]),
    )  # fmt: skip
    assert pieces.rows(pieces.x, torch.tensor([8, 0, 4])).tolist() == [8.0, 0.0, 4.0]
    assert pieces.owner(torch.tensor([8, 0, 4])).tolist() == [1, 2, 0]
    assert (pieces.num_nodes, pieces.num_edges, pieces.data.num_nodes) == (9, 3, 3)


# what one rank passes, and a word of the message on every rank
WRONG = (
    (lambda g: (g.x, torch.tensor([NODES])), "ids"),
    (lambda g: (g.x, torch.tensor([-1])), "ids"),
    (lambda g: (g.x, torch.tensor([0.5])), "ids"),
    (lambda g: (g.x, [0, 1]), "ids"),
    (lambda g: (g.x, g.edge_index[0]), "local ids"),
    (lambda g: (g.x[1:], ids_of(0)), "values"),
    (lambda g: (None, ids_of(0)), "values"),
)


@on_ranks(3)
def test_refusals(rank):
    graph = partition(wild(NODES), method="block")
    refused = refusing(graph.rows, "graph.rows: ")
    for wrong, word in WRONG:
        given = wrong(graph) if rank == 1 else (graph.x, ids_of(0))
        refused(ArgumentError, ("refused on rank 1 of 3", word), *given)
    with pytest.raises(ArgumentError, match=r"graph\.owner: refused on rank 0"):
        graph.owner(torch.tensor([NODES if rank == 0 else 0]))
    x = graph.x.double()
    for values in (x.float() if rank == 1 else x, x[:, :1] if rank == 1 else x):
        refused(DisagreementError, ("rank 1",), values, torch.tensor([3]))
    assert graph.rows(x[:, 0], torch.tensor(3)).shape == ()
    # rows of the full graph, for which no halo is known
    if graph.num_owned:
        with pytest.raises(ArgumentError, match="with_halo"):
            _ = wild(NODES).x[graph.edge_index[0]]
    with varcomm.debug():
        assert torch.equal(graph.rows(graph.x, graph.owned_ids), graph.x)


def splits(data):
    """The same nodes as ids, as OGB and as PyG name them."""
    ids = {name: torch.tensor(at) for name, at in (("train", [7, 2]), ("valid", [0]), ("test", []))}
    ids["test"] = ids["test"].long()
    return (
        Data(**data.to_dict(), **{f"{name}_idx": value for name, value in ids.items()}),
        Data(**data.to_dict(), split_idx=ids),
    )


@on_ranks(3)
def test_ids_of_a_split_become_masks(rank):
    data = Data(x=torch.arange(9.0), edge_index=torch.tensor([[0, 1, 8], [2, 2, 0]]))
    for given in splits(data):
        graph = partition(given if rank == 0 else None, src=0, method=None if rank else "block")
        known = graph.train_mask, graph.valid_mask, graph.test_mask
        found = [graph.owned_ids[mask].tolist() for mask in known]
        expected = ([2, 7], [0], [])
        assert found == [[i for i in ids if i in graph.owned_ids] for ids in expected]
        assert "train_mask" not in given
        assert not {"train_idx", "split_idx"} & set(graph.data.keys())
    batch = Batch.from_data_list([data, data])
    assert partition(batch, method="block").num_nodes == 18


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo], ids=str)
@pytest.mark.parametrize("attr", ["edge_weight", None])
def test_edges_of_adj_t(worlds, layout, attr):
    data = Data(
        x=torch.arange(5.0),
        edge_index=torch.tensor([[3, 0, 1, 2], [0, 1, 2, 0]]),
        edge_weight=torch.tensor([1.5, 2.5, 3.5, 4.5]),
        edge_attr=torch.arange(4.0),
    )
    if attr is None:
        del data.edge_weight
    sparse = T.ToSparseTensor(attr=attr, layout=layout)(data.clone())
    assert sparse.edge_index is None
    graph = worlds.run(1, whole_graph, sparse)[0]
    ends = graph.pop("edge_index")
    at = [data.edge_index.T.tolist().index(pair) for pair in ends.T.tolist()]
    assert sorted(at) == [0, 1, 2, 3]
    assert graph.keys() == {"x", "edge_attr", "num_nodes"} | ({attr} - {None})
    for name in graph.keys() & {"edge_attr", "edge_weight"}:
        assert torch.equal(graph[name], data[name][at])


def whole_graph(rank, data):
    found = partition(data, method="block").data.to_dict()
    return {**found, "edge_index": found["edge_index"].plain}
