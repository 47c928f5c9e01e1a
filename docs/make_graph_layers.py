"""Write ``reference/graph_layers.md``: the tables of PyG layers and functions that are exact.

Run it from the root of the repository, after PyG, the lists in ``varcomm.graph.adapt.checks`` or
the tables below have changed: ``python docs/make_graph_layers.py``. ``tests/graph`` compares the
tables with what the library does.
"""

from pathlib import Path

from torch_geometric.nn import conv

from varcomm.graph.adapt.checks import EXACT_AGGREGATIONS, REFUSED

PAGE = Path(__file__).with_name("reference") / "graph_layers.md"

REMARKS = {
    "FastRGCNConv": "for features; `RGCNConv` takes ids of nodes",
    "GPSConv": 'for `attn_type="multihead"`: every rank gets the features of all nodes',
    "MessagePassing": "own subclasses: values reach edges by `propagate` and `edge_updater`",
    "RGCNConv": "in place of `x=None`, give `x=graph.owned_ids`",
    "SuperGATConv": "its loss of attention, which samples edges, is refused",
}

IDS = "local ids have no order and no neighbours beyond this rank"
DENSE = "it pads to sizes of this rank"
DRAWN = "it draws pairs of nodes or orders of this rank"
POOLED = "it would pool this rank's nodes only"
CLUSTERS = "its clusters are numbers of this rank, which no vector shows; use `global_*_pool`"
PACKAGE = "it needs a compiled package, and finds this rank's neighbours only"
DEGREES = "a mean over this rank's edges, which no vector shows; use `graph.edges.mean`"

# Functions by their state; `local` ones return this rank's value.
FUNCTIONS = {
    "torch_geometric.utils": {
        "exact": """scatter degree softmax remove_self_loops segregate_self_loops add_self_loops
            add_remaining_self_loops get_self_loop_attr subgraph bipartite_subgraph dropout_node
            dropout_edge normalize_edge_index get_laplacian index_to_mask normalized_cut""",
        "refused": {
            IDS: """sort_edge_index coalesce is_undirected to_undirected contains_self_loops
                contains_isolated_nodes remove_isolated_nodes k_hop_subgraph to_torch_coo_tensor
                to_torch_csr_tensor to_torch_csc_tensor to_torch_sparse_tensor add_random_edge
                unbatch_edge_index one_hot""",
            DENSE: "to_dense_batch to_dense_adj to_nested_tensor unbatch group_argsort segment",
            DRAWN: """negative_sampling batched_negative_sampling structured_negative_sampling
                structured_negative_sampling_feasible shuffle_node""",
        },
        "local": {DEGREES: "homophily assortativity", IDS: "to_scipy_sparse_matrix"},
    },
    "torch_geometric.nn.pool": {
        "exact": """global_add_pool global_mean_pool global_max_pool max_pool_neighbor_x
            avg_pool_neighbor_x""",
        "refused": {
            POOLED: """TopKPooling SAGPooling EdgePooling ClusterPooling ASAPooling PANPooling
                MemPooling""",
        },
        "local": {
            CLUSTERS: "max_pool avg_pool max_pool_x avg_pool_x",
            PACKAGE: """graclus voxel_grid fps knn knn_graph approx_knn approx_knn_graph radius
                radius_graph nearest""",
        },
    },
    "torch_geometric.nn.norm": {
        "exact": """BatchNorm HeteroBatchNorm InstanceNorm LayerNorm HeteroLayerNorm GraphNorm
            GraphSizeNorm PairNorm MeanSubtractionNorm MessageNorm DiffGroupNorm""",
    },
}

HEAD = """\
# Layers of PyTorch Geometric on a partitioned graph

`varcomm.graph.distribute(model, graph)` accepts the layers marked exact. Their outputs, gradients
of inputs and parameters, and second derivatives equal one process, on any number of ranks. Each
layer is tested in fp64, on a directed graph with self loops, multi-edges and isolated nodes, on
three ranks of which one owns nothing. `cached=True` is exact too. `distribute` refuses the other
layers, with the reason.

`docs/make_graph_layers.py` writes this page from the lists that `distribute` uses.

| layer | | remarks |
| --- | --- | --- |
"""

TAIL = """
Own subclasses of these layers, and of `MessagePassing`, are accepted as well.

## Models

PyG's models and your own are accepted by the same rules: `GAE`, `SchNet` with edges of the graph,
`SignedGCN`, `NeuralFingerprint`, `PMLP`, `LabelPropagation`, `MaskLabel`, `GroupAddRev`, `RECT_L`,
`MetaLayer` and others are tested and exact. Methods that average over the edges or nodes of this
rank raise `ArgumentError`, such as `GAE.recon_loss` and `VGAE.kl_loss`: compute the values and use
`graph.edges.mean` or `graph.mean`. An embedding of all nodes (`LightGCN`, `LINKX`) does not fit
this rank's rows; look rows up by `graph.owned_ids`. These models are refused:

{models}

## Functions of edges and of graphs

`graph.edge_index` and `graph.batch` know what their numbers stand for, and so does what operations
of torch make of them: copies, slices, masks, `flip`, added self loops. With halos of one hop, these
are exact no matter where a call stands, inside a distributed model or outside:

| code, with `row, col = graph.edge_index` | on a partitioned graph |
| --- | --- |
| `x[row]`, `x.index_select(0, row)` | fetches the rows of other ranks' nodes |
| `scatter`, `index_add`, ... by `col` | local: a rank has all edges into its nodes |
| sum, mean, maximum, minimum by `row` | parts return to the owners of the nodes |
| `scatter`, `softmax`, pools by `graph.batch` | over the nodes of all ranks |
| `values[graph.batch]` | local: every rank has the values of all graphs |

Operations that would use the numbers of one rank raise `ArgumentError`, such as ids computed from
ids, comparing sources with targets by size, `tolist`, `numpy` and pickles. torch itself drops the
meaning of a vector in `torch.tensor`, `torch.sparse_coo_tensor` and TorchScript, without a call of
the vector: these have local ids. `graph.edges.local_ids` is the place to take such ids from.

Code without such a vector cannot be seen: a mean over dimension 0, `F.batch_norm`, or
`global_mean_pool(x, None)`, is that of this rank. Give `graph.batch`, which is zeros if the data
have none, or use `graph.mean`. `zeros_like(graph.batch)` and `edge_index.new_zeros(len(x))` are
ordinary tensors, and so is a mask: `x[graph.batch == b].mean(0)` is that of this rank. The refusals
of `DeepGraphInfomax`, and of losses such as `GAE.recon_loss`, are of PyG's classes; copies of these
in your own file compute means of this rank. `varcomm.testing.same_as_one_process` finds all of it.

A rank may have no edges: a model that returns early if `edge_index.size(1) == 0` skips an
exchange, for which the other ranks wait until the timeout. A copy of `LabelPropagation` in your own
file makes as many columns as this rank has classes, and rows of other widths cannot be exchanged:
pass `one_hot(y, num_classes=...)`. Offsets such as
`batch.bincount().cumsum(0)` are those of all ranks, and are out of range for `segment` on one; a
readout of a distributed model refuses them.

{functions}
In a distributed model, `BatchNorm` and `DiffGroupNorm` normalise over the nodes of all ranks, over
edges (inside a layer also with loops added or edges dropped), or plainly over pooled rows, which
every rank has. The other norms need `graph.batch` outside such a model. A BatchNorm that is
called outside normalises this rank's rows; one that is put into a model after `distribute` is
refused. An aggregation that reads out nodes needs `graph.batch`, or it is refused.
`to_hetero_with_bases` is refused: it adds offsets to local ids.

## Aggregations

These are exact as `aggr=` of a layer and, with `graph.batch`, as readouts, and so are own
subclasses of `Aggregation`; `Set2Set` is exact as a readout:

{aggregations}

Other aggregations are refused: they pad all neighbourhoods to the largest one of the rank, or
depend on the order of edges.
"""


def of_functions() -> dict[str, tuple[str, str]]:
    """Return the state of each function, and the note on it."""
    found = {}
    for states in FUNCTIONS.values():
        for state, names in states.items():
            for note, listed in ({"": names} if isinstance(names, str) else names).items():
                found |= dict.fromkeys(listed.split(), (state, note))
    return found


def page() -> str:
    """Return the page."""
    rows = []
    for name in sorted(conv.__all__, key=str.lower):
        state = "refused" if name in REFUSED else "exact"
        rows.append(f"| `{name}` | {state} | {REFUSED.get(name) or REMARKS.get(name, '')} |\n")
    tables = ""
    states = of_functions()
    for module, names in FUNCTIONS.items():
        listed = " ".join(
            text for part in names.values()
            for text in ([part] if isinstance(part, str) else part.values())
        ).split()  # fmt: skip
        tables += f"| of `{module}` | with a partitioned graph's vectors | |\n| --- | --- | --- |\n"
        tables += "".join(f"| `{n}` | {' | '.join(states[n])} |\n" for n in sorted(listed)) + "\n"
    aggregations = "\n".join(f"- `{name}`" for name in sorted(EXACT_AGGREGATIONS))
    models = "\n".join(f"- `{n}`: {why}" for n, why in REFUSED.items() if n not in conv.__all__)
    tail = TAIL.format(aggregations=aggregations, functions=tables, models=models)
    return HEAD + "".join(rows) + tail


if __name__ == "__main__":
    PAGE.write_text(page())
