"""Calls of PyG's functions that have an index argument, of pools and of norms, by their names."""

from functools import partial

import torch
import torch_geometric.nn as pyg
from torch_geometric import transforms, utils
from torch_geometric.data import Data

from tests.graph.layers import NODE


def at_targets(g, edges, weight=None):
    """Sum the sources of edges at their targets."""
    rows = g.x[edges[0]]
    rows = rows if weight is None else rows * weight.view(-1, 1)
    return torch.zeros_like(g.x).index_add(0, edges[1], rows)


def weighted(function, *args, **settings):
    """Return a call of a function of edges and weights, and what messages make of its result."""

    def call(g):
        found = function(g.edge_index, g.weight, *args, **settings)
        return at_targets(g, *found[:2])

    return call


def of_edges(function, *args, **settings):
    def call(g):
        found = function(g.edge_index, *args, num_nodes=len(g.x), **settings)
        return at_targets(g, found[0] if isinstance(found, tuple) else found)

    return call


def as_matrix(kind):
    convert = getattr(utils, f"to_torch_{kind}_tensor")
    return lambda g: convert(g.edge_index, g.weight, len(g.x)) @ g.x


def as_data(g):
    return Data(x=g.x, edge_index=g.edge_index, batch=g.batch)


def number(value):
    return torch.as_tensor(float(value), dtype=torch.float64)


UTILS = {
    "scatter": lambda g: utils.scatter(g.x, g.batch, 0, reduce="mean"),
    "group_argsort": lambda g: utils.group_argsort(g.x[:, 0], g.batch).double(),
    "segment": lambda g: utils.segment(g.x, torch.cumsum(g.batch, 0)),
    "degree": lambda g: g.x * utils.degree(g.edge_index[0], len(g.x)).view(-1, 1),
    "softmax": lambda g: utils.softmax(g.x, g.batch),
    "sort_edge_index": of_edges(utils.sort_edge_index),
    "coalesce": of_edges(utils.coalesce),
    "is_undirected": lambda g: number(utils.is_undirected(g.edge_index)),
    "to_undirected": of_edges(utils.to_undirected),
    "contains_self_loops": lambda g: number(utils.contains_self_loops(g.edge_index)),
    "remove_self_loops": weighted(utils.remove_self_loops),
    "segregate_self_loops": lambda g: at_targets(g, utils.segregate_self_loops(g.edge_index)[2]),
    "add_self_loops": lambda g: at_targets(
        g, *utils.add_self_loops(g.edge_index, g.weight, 2.0, len(g.x))
    ),
    "add_remaining_self_loops": lambda g: at_targets(
        g, *utils.add_remaining_self_loops(g.edge_index, g.weight, 2.0, len(g.x))
    ),
    "get_self_loop_attr": lambda g: (
        g.x * utils.get_self_loop_attr(g.edge_index, g.weight, len(g.x)).view(-1, 1)
    ),
    "contains_isolated_nodes": lambda g: number(utils.contains_isolated_nodes(g.edge_index)),
    "remove_isolated_nodes": of_edges(utils.remove_isolated_nodes),
    "subgraph": lambda g: at_targets(
        g, *utils.subgraph(g.good, g.edge_index, g.weight, num_nodes=len(g.x))
    ),
    "bipartite_subgraph": lambda g: at_targets(
        g, *utils.bipartite_subgraph((g.good, ~g.good), g.edge_index, g.weight)
    ),
    "k_hop_subgraph": lambda g: at_targets(g, utils.k_hop_subgraph(1, 2, g.edge_index)[1]),
    "dropout_node": of_edges(utils.dropout_node, 0.0),
    "dropout_edge": lambda g: at_targets(g, utils.dropout_edge(g.edge_index, 1e-9)[0]),
    "homophily": lambda g: number(utils.homophily(g.edge_index, g.label)),
    "normalize_edge_index": lambda g: at_targets(
        g, *utils.normalize_edge_index(g.edge_index, len(g.x))
    ),
    "get_laplacian": lambda g: at_targets(
        g, *utils.get_laplacian(g.edge_index, g.weight, "rw", num_nodes=len(g.x))
    ),
    "index_to_mask": lambda g: g.x * utils.index_to_mask(g.edge_index[1], len(g.x)).view(-1, 1),
    "to_dense_batch": lambda g: utils.to_dense_batch(g.x, g.batch)[0],
    "to_dense_adj": lambda g: utils.to_dense_adj(g.edge_index),
    "to_nested_tensor": lambda g: utils.to_nested_tensor(g.x, g.batch)[0],
    **{f"to_torch_{kind}_tensor": as_matrix(kind) for kind in ("coo", "csr", "csc", "sparse")},
    "unbatch": lambda g: utils.unbatch(g.x, g.batch)[0].sum(0),
    "one_hot": lambda g: utils.one_hot(g.batch, dtype=torch.float64),
    "normalized_cut": lambda g: at_targets(
        g, g.edge_index, utils.normalized_cut(g.edge_index, g.weight, len(g.x))
    ),
    "to_scipy_sparse_matrix": lambda g: number(utils.to_scipy_sparse_matrix(g.edge_index).shape[0]),
    "negative_sampling": of_edges(utils.negative_sampling),
    "shuffle_node": lambda g: utils.shuffle_node(g.x, g.batch)[0],
    "add_random_edge": lambda g: at_targets(g, utils.add_random_edge(g.edge_index, 0.5)[0]),
}
POOLS = {
    "global_add_pool": lambda g: pyg.global_add_pool(g.x, g.batch),
    "global_mean_pool": lambda g: pyg.global_mean_pool(g.x, g.batch),
    "global_max_pool": lambda g: pyg.global_max_pool(g.x, g.batch),
    "max_pool_neighbor_x": lambda g: pyg.max_pool_neighbor_x(as_data(g)).x,
    "avg_pool_neighbor_x": lambda g: pyg.avg_pool_neighbor_x(as_data(g)).x,
    "max_pool": lambda g: pyg.max_pool(g.label, as_data(g)).x,
    "avg_pool": lambda g: pyg.avg_pool(g.label, as_data(g)).x,
    "max_pool_x": lambda g: pyg.max_pool_x(g.label, g.x, g.batch)[0],
    "avg_pool_x": lambda g: pyg.avg_pool_x(g.label, g.x, g.batch)[0],
}


def transformed(name, **settings):
    """Return a call of PyG's transform on an object with the graph's edges."""

    def call(g):
        pos, edges = g.x[:, : 2 if name == "Polar" else 3], g.edge_index
        if name == "TwoHop" and type(edges) is torch.Tensor:
            edges = utils.coalesce(
                edges
            )  # a product of MKL, on some CPUs, crashes if one occurs twice
        data = Data(x=g.x, edge_index=edges, pos=pos, norm=pos.cos())
        more = {"walk_length": 3} if name == "AddRandomWalkPE" else {}
        data = getattr(transforms, name)(**settings, **more)(data)
        ends = data.edge_index
        sums = [data.x.double(), data.pos]
        for key in ("edge_weight", "edge_attr"):
            if key in data:
                rows = data[key].double()
                rows = rows.unsqueeze(1) if rows.dim() == 1 else rows
                sums.append(
                    torch.zeros(len(g.x), rows.shape[1]).double().index_add(0, ends[1], rows)
                )
        return torch.cat(sums, 1)

    return call


LARGEST = ("Cartesian", "Distance", "Polar", "Spherical", "TargetIndegree")
LOCAL = ("AddRemainingSelfLoops", "AddSelfLoops", "GCNNorm", "LocalCartesian", "LocalDegreeProfile")
OTHERS = ("PointPairFeatures", "RemoveIsolatedNodes", "RemoveSelfLoops", "ToUndirected")
BY_MATRIX = ("AddRandomWalkPE", "TwoHop", "VirtualNode")
TRANSFORMS = {name: transformed(name) for name in (*LARGEST, *LOCAL, *OTHERS, *BY_MATRIX)}
NORMALISED = {  # exact: by a value that the caller passes, or not at all
    f"{name} with {word}": transformed(name, **{word: value})
    for name in LARGEST
    for word, value in (("norm", False), ("max_value", 2.5))
}


def pooling(kind, *args):
    def call(m, g):
        return m(g.x, g.edge_index, batch=g.batch)[0]

    return (lambda: kind(*args), call)


POOL_MODULES = {
    "TopKPooling": pooling(pyg.TopKPooling, NODE),
    "SAGPooling": pooling(pyg.SAGPooling, NODE),
    "EdgePooling": pooling(pyg.EdgePooling, NODE),
    "MemPooling": (lambda: pyg.MemPooling(NODE, 3, 2, 2), lambda m, g: m(g.x, g.batch)[0]),
}


BY_ROWS = {"BatchNorm", "DiffGroupNorm"}  # no vector shows their nodes
NORMS = {"MessageNorm": (lambda: pyg.MessageNorm(True), lambda m, g: m(g.x, g.x.sin()))}
for name, *args in (
    ("BatchNorm", NODE),
    ("DiffGroupNorm", NODE, 3),
    ("HeteroBatchNorm", NODE, 3),
    ("InstanceNorm", NODE),
    ("LayerNorm", NODE),
    ("HeteroLayerNorm", NODE, 3),
    ("GraphNorm", NODE),
    ("GraphSizeNorm",),
    ("PairNorm",),
    ("MeanSubtractionNorm",),
):
    make = partial(getattr(pyg, name), *args)
    takes_batch = name not in BY_ROWS
    NORMS[name] = make, lambda m, g, b=takes_batch: m(g.x, *([g.batch] if b else []))


def cases():
    """Return all calls: how to make a module, if there is one, and how to call it."""
    functions = {n: (None, lambda m, g, f=f: f(g)) for n, f in (UTILS | POOLS | TRANSFORMS).items()}
    return functions | POOL_MODULES | NORMS


def normalised():
    return {name: (None, lambda m, g, f=f: f(g)) for name, f in NORMALISED.items()}
