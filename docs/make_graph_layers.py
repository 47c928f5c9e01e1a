"""Write ``graph_layers.md``: what becomes of each layer of PyG on a partitioned graph.

Run it from the root of the repository, after PyG or the lists in
``varcomm/graph/running/layers/exact.py`` have changed: ``python docs/make_graph_layers.py``.
"""

from pathlib import Path

from torch_geometric.nn import conv

from varcomm.graph.adapt.layers import EXACT, EXACT_AGGREGATIONS, REFUSED

PAGE = Path(__file__).with_name("graph_layers.md")

HEAD = """\
# Layers of PyTorch Geometric on a partitioned graph

`varcomm.graph.distribute(model, graph)` takes the layers that are called exact here. Outputs,
gradients of inputs and of parameters, and second derivatives are those of one process, on any
number of ranks: each layer is tested so in fp64, on a directed graph with self loops, multi-edges
and isolated nodes, where one rank owns nothing. So are `flow="target_to_source"` and `cached=True`.
Layers that are refused are refused when `distribute` is called, with the reason.

This page is made by `docs/make_graph_layers.py` from the lists that `distribute` itself goes by.

| layer | | to be known |
| --- | --- | --- |
"""

TAIL = """
Own subclasses of these layers, and of `MessagePassing`, are taken as well: functions of PyG that
look at degrees, at all nodes or at all edges (`gcn_norm`, `get_laplacian`, `add_self_loops` without
a number of nodes) are exchanged wherever the code of a module reaches them. What cannot be seen is
other code that looks past `propagate` by itself.

## Aggregations

Exact as `aggr=` of a layer are

{aggregations}

and own subclasses of `Aggregation`. Others pad all neighbourhoods to the largest one, which is
another one on each rank, or depend on the order of edges; they are refused.
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
