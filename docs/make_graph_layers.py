"""Write ``graph_layers.md``, the table of PyG's layers: ``python docs/make_graph_layers.py``."""

from pathlib import Path

from torch_geometric.nn import conv

from varcomm.graph.running.layers import EXACT, EXACT_AGGREGATIONS, REFUSED

PAGE = Path(__file__).parent / "graph_layers.md"

TEXT = """\
# Which layers are exact

What `varcomm.graph.distribute` does with each name in `torch_geometric.nn.conv.__all__`. *Exact*
layers are tested against one process: outputs, gradients of inputs and of parameters in fp64, on a
directed graph with self loops, multi-edges and isolated nodes, and on ranks that own nothing. The
others are refused when `distribute` is called.

{exact} are exact, {refused} are refused. This page is made by `python docs/make_graph_layers.py`.

| layer | | |
| --- | --- | --- |
{rows}

Aggregations (`aggr=`) that are exact over the edges into a node: {aggregations}.
"""


def page():
    """The page, from the lists that the library itself goes by."""
    rows = []
    for name in conv.__all__:
        note = REFUSED.get(name, EXACT.get(name))
        rows.append(f"| `{name}` | {'refused' if name in REFUSED else 'exact'} | {note} |")
    return TEXT.format(
        exact=sum(name in EXACT for name in conv.__all__),
        refused=sum(name in REFUSED for name in conv.__all__),
        rows="\n".join(rows),
        aggregations=", ".join(f"`{name}`" for name in sorted(EXACT_AGGREGATIONS)),
    )


if __name__ == "__main__":
    PAGE.write_text(page())
