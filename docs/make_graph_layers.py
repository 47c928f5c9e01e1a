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
layers, with the reason, and any layer with `flow="target_to_source"`: reverse the edges before you
partition the graph, `data.edge_index.flip(0)`, and use the default flow.

`docs/make_graph_layers.py` writes this page from the lists that `distribute` uses.

| layer | | remarks |
| --- | --- | --- |
"""

TAIL = """
Own subclasses of these layers, and of `MessagePassing`, are accepted as well. Functions of PyG that
look at degrees, at all nodes or at all edges (`gcn_norm`, `get_laplacian`, `add_self_loops` without
a number of nodes) are replaced wherever the code of a module reaches them. Other code that looks
past `propagate` by itself cannot be checked.

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
