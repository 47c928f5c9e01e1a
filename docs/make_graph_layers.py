"""Write ``reference/graph_layers.md``: the tables of PyG layers and functions that are exact.

After a change of PyG, of the lists in ``varcomm.graph.layers.refused`` or of the tables below, run
``python docs/make_graph_layers.py`` in the root of the repository. ``tests/graph`` compares the
tables with the library.
"""

from pathlib import Path

from torch_geometric.nn import conv

from varcomm.graph.layers.refused import EXACT_AGGREGATIONS, REFUSED

PAGE = Path(__file__).with_name("reference") / "graph_layers.md"

REMARKS = {
    "FastRGCNConv": "for features; `RGCNConv` accepts node ids",
    "GPSConv": 'for `attn_type="multihead"`: every rank gets the features of all nodes',
    "MessagePassing": "your subclasses, if values reach edges by `propagate` and `edge_updater`",
    "RGCNConv": "pass `x=graph.owned_ids` instead of `x=None`",
    "SuperGATConv": "its loss of attention, which samples edges, is refused",
}

IDS = "local ids have no order and no neighbours beyond this rank"
DENSE = "it pads to sizes of this rank"
DRAWN = "it draws pairs of nodes or orders of this rank"
POOLED = "it would pool this rank's nodes only"
CLUSTERS = "its clusters are local ids of this rank; use `global_*_pool`"
PACKAGE = "it needs a compiled package, and finds this rank's neighbours only"
MAXIMUM = "it divides by the largest value of this rank, unless `norm=False` or `max_value=...`"
NODES = "it uses this rank's nodes as the full graph; transform before `partition`"
DRAWS = "each rank draws its own; transform before `partition`"
DEGREES = "a mean over this rank's edges; use `graph.edges.mean`"

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
    "torch_geometric.transforms": {
        "exact": """AddRemainingSelfLoops AddSelfLoops Constant GCNNorm LinearTransformation
            LocalCartesian LocalDegreeProfile OneHotDegree PointPairFeatures RemoveSelfLoops""",
        "refused": {
            MAXIMUM: "Cartesian Distance Polar Spherical TargetIndegree",
            IDS: """AddLaplacianEigenvectorPE AddRandomWalkPE GDC HalfHop LaplacianLambdaMax
                LargestConnectedComponents LineGraph NodePropertySplit RemoveDuplicatedEdges
                RemoveIsolatedNodes RootedEgoNets ToSparseTensor ToUndirected TwoHop VirtualNode""",
        },
        "local": {
            NODES: """Center Delaunay FixedPoints NormalizeFeatures NormalizeRotation
                NormalizeScale Pad SVDFeatureReduction ToDense""",
            DRAWS: """RandomFlip RandomJitter RandomNodeSplit RandomRotate RandomScale
                RandomShear""",
        },
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
# Exact layers of PyTorch Geometric

`varcomm.graph.distribute(model, graph)` accepts the layers marked exact: outputs, gradients and
second derivatives equal those of one process, on any number of ranks. The tests run each layer in
fp64 on three ranks, one of which owns no nodes. `distribute` refuses the other layers.

`docs/make_graph_layers.py` writes this page.

| layer | | remarks |
| --- | --- | --- |
"""

TAIL = """
These options of layers are refused on all ranks:

- **`add_self_loops=True`** with edges between two types of nodes: the default of `GATConv`,
  `GATv2Conv`, `PointNetConv`, `PointTransformerConv` and `PPFConv`. PyG would join a
  source and a target with the same id, although they are different nodes. In one process,
  `HeteroConv` and `to_hetero` refuse this option. Build the layer with `add_self_loops=False`.
- **`decomposed_layers` above 1** exchanges once for each part of the features. The default of 1
  computes the same values.
- **`explain`**, `Explainer` and `to_captum_model` mask all edges of the graph, but each rank
  has only a part of the edges. Load the `state_dict` into the model in one process, and explain it
  on the full graph.

In the first call of a lazy `HGTConv` or `HANConv`, all ranks must pass the same types of nodes.
Pass `graph.x_dict`, which also has the types of which this rank owns no nodes.

A subclass of an exact layer is accepted. The subclass is exact if values reach edges only by
`propagate` and `edge_updater`. Check the subclass with `same_as_one_process`.

## Models

The same rules hold for PyG's models and yours. Methods that average over the edges or nodes of this
rank, such as `GAE.recon_loss` and `VGAE.kl_loss`, raise `ArgumentError`: compute one value per
edge or node, and use `graph.edges.mean` or `graph.mean`. An embedding of all nodes (`LightGCN`,
`LINKX`) does not match this rank's rows: look rows up by `graph.owned_ids`. These models are
refused:

{models}

## Functions of edges and graphs

`graph.edge_index` and `graph.batch` still refer to nodes and graphs of all ranks after you copy,
slice or mask them, or add self loops. With halos of one hop, the operations of this table are exact
inside and outside a distributed model:

| code, with `row, col = graph.edge_index` | on a partitioned graph |
| --- | --- |
| `x[row]`, `x.index_select(0, row)` | fetches the rows of other ranks' nodes |
| `scatter`, `index_add`, ... by `col` | local: a rank has all edges into its nodes |
| sum, mean, maximum, minimum by `row` | partial results are sent to the owners of the nodes |
| `scatter`, `softmax`, `bincount`, pools by `graph.batch` | over the nodes of all ranks |
| `values[graph.batch]`, `torch.nn.Embedding` | local: every rank has the values of all graphs |

Other ids of groups, such as `graph.cell`, work as `graph.batch` does, if
[`partition(data, groups=["cell"])`](../graphs.md#pool-over-cells-superpixels-or-residues) names
the attribute. A reduction by another integer attribute of nodes raises `ArgumentError`.

Operations without a meaning for the full graph raise `ArgumentError`: arithmetic on ids,
comparisons of sources with targets by size, `tolist`, `numpy` and pickling. `graph.edges.local_ids`
returns local ids.

varcomm does not check the following kinds of code. Use `varcomm.testing.same_as_one_process` to
find them:

- **No index vector.** A reduction without an index vector of the graph, such as `graph.batch`,
  covers only the rows of this rank. If the data have no `batch`, `graph.batch` is a tensor of
  zeros.

  | of this rank | of all ranks |
  | --- | --- |
  | `x.mean()`, `x.sum()`, `x.max()` | `graph.mean(x)`, `graph.sum(x)`, `graph.max(x)` |
  | `x.mean(0)`, `x.amax(0)` | `global_mean_pool(x, graph.batch)`, `global_max_pool(...)` |
  | `lengths.max()` of edges | `graph.edges.max(lengths)` |
  | `torch.softmax(x, 0)` | `torch_geometric.utils.softmax(x, graph.batch)` |
  | `F.layer_norm(x, x.shape)` | `torch_geometric.nn.LayerNorm(C, affine=False)(x, graph.batch)` |
  | `F.batch_norm(x, ...)` | `torch.nn.BatchNorm1d` in the distributed model |
  | `global_mean_pool(x, None)` | `global_mean_pool(x, graph.batch)` |
  | `T.Distance()` in a model | `T.Distance(norm=False)`, divided by `graph.edges.max(lengths)` |

- **New tensors.** `zeros_like(graph.batch)`, `edge_index.new_zeros(len(x))` and masks are ordinary
  tensors: `x[graph.batch == b].mean(0)` is the mean over this rank's rows.
- **Copies of ids.** `torch.tensor`, `torch.sparse_coo_tensor` and TorchScript copy local ids.
- **Copied code.** `DeepGraphInfomax` and `GAE.recon_loss` raise an error. A copy of their code in
  your file computes means over this rank's rows. A copy of `LabelPropagation` has one column per
  class of this rank, and the exchange fails: use `one_hot(y, num_classes=...)`.
- **No edges.** A model that returns early if `edge_index.size(1) == 0` skips an exchange, and the
  other ranks wait until the timeout.
- **Offsets** such as `batch.bincount().cumsum(0)` count the rows of all ranks, and are out of range
  for `segment` on one rank. A readout of a distributed model refuses such offsets.

{functions}- **BatchNorm and DiffGroupNorm** in a distributed model normalise over the nodes of all
  ranks. Inside a layer, these norms normalise over the edges of all ranks. After a pool, these
  norms work as in one process. They also accept a subset of nodes or edges, such as the rows that a
  mask selects, and one sample of shape `(1, C, n)`.
- **BatchNorm outside a distributed model** normalises this rank's rows. If you add a `BatchNorm`
  after `distribute`, the model refuses it.
- **The other norms** need `graph.batch` outside a distributed model.
- **Aggregations** of nodes need `graph.batch`.
- **`to_hetero_with_bases`** is refused: it adds offsets to local ids.

## Aggregations

These aggregations and your subclasses of `Aggregation` are exact in a layer, as `aggr=`, and in
readouts with `graph.batch`. `Set2Set` is exact as a readout.

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
        tables += f"| function of `{module}` | with vectors of a partitioned graph | |\n"
        tables += "| --- | --- | --- |\n"
        tables += "".join(f"| `{n}` | {' | '.join(states[n])} |\n" for n in sorted(listed)) + "\n"
    aggregations = "\n".join(f"- `{name}`" for name in sorted(EXACT_AGGREGATIONS))
    models = "\n".join(f"- `{n}`: {why}" for n, why in REFUSED.items() if n not in conv.__all__)
    tail = TAIL.format(aggregations=aggregations, functions=tables, models=models)
    return HEAD + "".join(rows) + tail


if __name__ == "__main__":
    PAGE.write_text(page())
