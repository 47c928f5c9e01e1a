"""Write ``graph_layers.md``: the table of PyG's layers on a partitioned graph.

Run it from the root of the repository, after PyG or the lists in
``varcomm.graph.adapt.exact.py`` have changed: ``python docs/make_graph_layers.py``.
"""

from pathlib import Path

from torch_geometric.nn import conv

from varcomm.graph.adapt.exact import EXACT, EXACT_AGGREGATIONS, REFUSED

PAGE = Path(__file__).with_name("graph_layers.md")

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
| `gcn_norm`, `get_laplacian`, `degree` | exact |
| `add_self_loops`, `remove_self_loops`, `dropout_edge` | exact |

Operations that would use the numbers of one rank raise `ArgumentError`: ids computed from ids,
`coalesce`, `to_undirected`, `to_dense_batch`, `one_hot`, negative sampling, `TopKPooling`, and
comparing sources with targets by size. torch itself drops the meaning of a vector in
`torch.tensor`, `torch.sparse_coo_tensor`, `tolist`, pickles and TorchScript: these have local ids.
Code without such a vector cannot be seen: a mean over dimension 0, or `global_mean_pool(x, None)`,
is that of this rank. Give `graph.batch`, which is
zeros if the data have none, or take `graph.mean`.

## Aggregations

These are exact as `aggr=` of a layer, and so are own subclasses of `Aggregation`:

{aggregations}

Other aggregations are refused: they pad all neighbourhoods to the largest one of the rank, or
depend on the order of edges.
"""


def page() -> str:
    """Return the page."""
    rows = []
    for name in sorted(conv.__all__, key=str.lower):
        state, note = ("exact", EXACT[name]) if name in EXACT else ("refused", REFUSED[name])
        rows.append(f"| `{name}` | {state} | {note} |\n")
    aggregations = "\n".join(f"- `{name}`" for name in sorted(EXACT_AGGREGATIONS))
    return HEAD + "".join(rows) + TAIL.format(aggregations=aggregations)


if __name__ == "__main__":
    PAGE.write_text(page())
