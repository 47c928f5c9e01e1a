"""What is read of a graph of PyG before anything is split: what is a row, and what is refused."""

import numpy as np
import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData

from varcomm import ArgumentError
from varcomm.graph.building.attribute import check_name
from varcomm.graph.building.tables import read

EDGES = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0], [0, 0, 1, 1]])[:2, :3]  # 4 nodes, 3 edges


def graph(**attributes):
    return Data(edge_index=EDGES, num_nodes=4, **attributes)


def papers(**attributes):
    """3 authors write 2 papers, in 4 edges."""
    data = HeteroData()
    data["author"].num_nodes = 3
    data["paper"].x = torch.ones(2, 5)
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1, 2, 2], [0, 1, 1, 1]])
    for name, value in attributes.items():
        data["author"][name] = value
    return data


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "array",
    [
        np.arange(8, dtype=">i4").reshape(4, 2),
        np.arange(8.0).reshape(4, 2)[::-1],
        read_only(np.arange(8, dtype=np.float32).reshape(4, 2)),
        np.array([True, False, True, True]),
        np.arange(4, dtype=np.uint16),
        np.arange(4) * 1j,
    ],
)
def test_arrays_of_numbers_become_tensors(array):
    table = read(graph(depth=array)).nodes[None]
    depth = table.attributes["depth"].value
    assert isinstance(depth, torch.Tensor)
    assert depth.numpy().dtype == array.dtype.newbyteorder("=")
    assert np.array_equal(depth.numpy(), array)
    assert np.array_equal(table.attributes["depth"].rows(torch.tensor([2, 0])), array[[2, 0]])


def test_lists_and_arrays_of_texts_stay_what_they_are():
    names, days = ["a", "b", "c", "d"], np.array(["2020-01-01"] * 4, dtype="datetime64[D]")
    rows = read(graph(names=names, pair=tuple(names), days=days, kinds=[7, 8, 9]))
    index = torch.tensor([3, 1])
    of_nodes, of_edges = rows.nodes[None].attributes, rows.edges[None].attributes
    assert of_nodes["names"].rows(index) == of_nodes["pair"].rows(index) == ["d", "b"]
    assert of_nodes["days"].rows(index).tolist() == days[[3, 1]].tolist()
    assert of_edges["kinds"].rows(index[1:]) == [8]


def test_rows_are_data_and_have_no_gradient():
    table = read(graph(x=torch.nn.Parameter(torch.ones(4, 2)) * 2)).nodes[None]
    assert not table.attributes["x"].value.requires_grad


def test_names_with_index_that_are_rows():
    """PyG takes the last dimension for rows; of one dimension it is the first."""
    tables = read(graph(leaf_area_index=torch.rand(4), color_index=torch.rand(1, 4)))
    assert [*tables.nodes[None].attributes] == ["leaf_area_index"]
    assert [*tables.attributes] == ["color_index"], "with a first dimension of one it is no rows'"
    for value in (torch.rand(4, 12), torch.rand(12, 4), np.zeros((4, 3))):
        with pytest.raises(ArgumentError, match="has its rows along dimension -1: so PyG reads"):
            read(graph(leaf_area_index=value))


class OwnData(Data):
    def __cat_dim__(self, key, value, *args, **kwargs):
        dims = {"settings": None, "columns": 1}
        return dims[key] if key in dims else super().__cat_dim__(key, value, *args, **kwargs)


def test_what_a_class_of_the_users_says_of_rows():
    own = OwnData(edge_index=EDGES, num_nodes=4, settings=torch.ones(4))
    assert [*read(own).attributes] == ["settings"]
    own.columns = torch.rand(2, 4)
    with pytest.raises(ArgumentError, match=r"data\.columns has its rows along dimension 1: "):
        read(own)


def test_edges_that_know_that_they_are_edges():
    edges = EdgeIndex(EDGES, sparse_size=(4, 4))
    table = read(Data(edge_index=edges, num_nodes=4)).edges[None]
    assert type(table.edge_index) is torch.Tensor
    assert torch.equal(table.edge_index, EDGES)


def test_where_rows_are():
    assert read(graph()).device == torch.device("cpu")
    nowhere = HeteroData()
    nowhere["a"].num_nodes = 2
    assert read(nowhere).device == torch.device("cpu")


def unclear(key, **store):
    data = papers()
    for name, value in store.items():
        data[key][name] = value
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (graph(x=torch.eye(4).to_sparse()), r"data\.x must be dense; got torch\.sparse_coo"),
        (graph(my_adj=torch.eye(4).to_sparse()), r"data\.my_adj refers to nodes by their numbers"),
        (
            graph(y=torch.ones(4), x=torch.ones(4, device="meta")),
            r"data\.x is on meta, and data\.edge_index on cpu\. Move them to one device: data\.to",
        ),
        (graph(names=["a", "b"], x=torch.ones(5)), r"data\.x has 5 entries, for neither 4 nodes"),
        (Data(edge_index=EDGES, num_nodes=-4), r"data does not say how many nodes it has: set dat"),
        (Data(edge_index=EDGES, num_nodes=2.5), r"data does not say how many nodes it has"),
        (
            unclear("place", size=torch.tensor(2)),
            r"data\['place'\] does not say how many nodes it has: set data\['place'\]\.num_nodes\.",
        ),
        (unclear("place", num_nodes=None), r"data\['place'\] does not say how many nodes it has"),
        (
            papers(age=torch.ones(2)),
            r"data\['author'\]\.age has no entry for each of the 3 nodes\. Make it one of the "
            r"graph as a whole: data\.my_age = data\['author'\]\.age; del data\['author'\]\.age\.",
        ),
        (papers(age=torch.tensor(1.0)), r"data\['author'\]\.age has no entry for each of the 3"),
        (papers(age=["young"]), r"data\['author'\]\.age has no entry for each of the 3 nodes"),
        (papers(age="old"), r"data\['author'\]\.age has no entry for each of the 3 nodes"),
        (
            unclear(("author", "writes", "paper"), when=torch.ones(3)),
            r"data\[\('author', 'writes', 'paper'\)\]\.when has no entry for each of the 4 edges",
        ),
        (
            unclear(("author", "writes", "paper"), edge_index=torch.tensor([[0, 1], [0, 2]])),
            r"'paper'\)\]\.edge_index\[1\] spans 0\.\.\.2, out of range for 2 nodes\.",
        ),
        (
            unclear(("author", "knows", "editor"), edge_index=EDGES),
            r"data\[\('author', 'knows', 'editor'\)\] has edges of 'editor', of which data have no",
        ),
        (
            unclear(("author", "likes", "paper"), when=torch.ones(3)),
            r"'likes', 'paper'\)\]\.edge_index must be a tensor of torch\.int64; got NoneType\.",
        ),
        (papers(group=torch.ones(3)), r"data\['author'\]\.group could not be reached"),
        (papers(x=torch.ones(3, device="meta")), r"data\['author'\]\.x is on meta, and data\[\('a"),
        (HeteroData(), r"data have no nodes of any type\."),
    ],
)
def test_refusals(data, message):
    with pytest.raises(ArgumentError, match=message):
        read(data)


def test_attributes_of_a_graph_with_types():
    data = papers(age=torch.arange(3), title=["a", "b", "c"])
    data.table, data.year = torch.rand(3, 7), 1998
    data["author", "writes", "paper"].when = torch.arange(4)
    tables = read(data)
    assert [*tables.nodes["author"].attributes] == ["age", "title"]
    assert tables.nodes["author"].count == 3
    assert [*tables.nodes["paper"].attributes] == ["x"]
    assert [*tables.edges["author", "writes", "paper"].attributes] == ["when"]
    assert [*tables.attributes] == ["table", "year"]


def test_names_that_are_none():
    with pytest.raises(ArgumentError, match="attrs: names of attributes must be str; got 7"):
        check_name(7, torch.ones(1), "attrs")
    with pytest.raises(ArgumentError, match=r"attrs\._x could not be reached: graph\._x of a"):
        check_name("_x", torch.ones(1), "attrs")
