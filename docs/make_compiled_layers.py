"""Write ``reference/compiled_layers.md``: the table of layers under torch.compile.

After a change of PyG, PyTorch or ``varcomm/graph/layers``, run ``python
docs/make_compiled_layers.py`` in the root of the repository. The script compiles each layer of the
tests on two ranks, which takes minutes.
"""

import os
from pathlib import Path

import torch

import varcomm
from tests.graph.layers import LAYERS, example

PAGE = Path(__file__).with_name("reference") / "compiled_layers.md"

# A process that has compiled many graphs keeps much memory.
AT_ONCE = 12

RANKS_MEET = "ranks communicate outside the graph"

HEAD = """\
# Layers under torch.compile

This page lists the results of `torch.compile(layer, fullgraph=True)` for distributed layers, with
torch {torch} and the backend `aot_eager`. Each entry names a layer and the options of one test.
Without `fullgraph=True`, a layer that breaks the graph runs in parts.

`docs/make_compiled_layers.py` writes this page.

## Layers in one graph

For each of these entries, torch compiles one graph. Outputs and gradients equal those of the
uncompiled layer, on two ranks in fp64 to 1e-12.

{whole}

## Layers that break the graph

| layer and options of the test | reason |
| --- | --- |
{rows}"""


def outcome(call_layer, model, called, graph):
    """Return the output, and the gradients of features and parameters."""
    torch.manual_seed(0)
    out = call_layer(called, graph)
    by = [graph.x, *model.parameters()]
    return out, torch.autograd.grad(out.square().sum(), by, allow_unused=True)


def compiled(rank, names):
    """Return the verdict on each of these layers."""
    torch.set_num_threads(1)
    graph, verdicts = varcomm.graph.partition(example(), method="random"), []
    graph.x.requires_grad_()
    for name in names:
        torch.manual_seed(0)
        make, call, *_ = LAYERS[name]
        model = varcomm.graph.distribute(make().double(), graph)
        want = outcome(call, model, model, graph)
        torch._dynamo.reset()
        fast = torch.compile(model, backend="aot_eager", fullgraph=True)
        try:
            got = outcome(call, model, fast, graph)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).splitlines()[0]
            verdicts.append("breaks: " + (RANKS_MEET if "disable" in reason else reason))
            continue
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        verdicts.append("one graph")
    return verdicts


def page(found: dict[str, str], version: str) -> str:
    """Return the page of these verdicts."""
    classes: dict[str, list[str]] = {}
    for name, verdict in found.items():
        if verdict == "one graph":
            classes.setdefault(name.replace(",", "").split()[0], []).append(f"`{name}`")
    whole = "\n".join(f"- {', '.join(names)}" for names in classes.values())
    rows = "".join(
        f"| {name} | {verdict.removeprefix('breaks: ')} |\n"
        for name, verdict in found.items()
        if verdict != "one graph"
    )
    return HEAD.format(torch=version, whole=whole, rows=rows)


def main() -> None:
    """Write the page."""
    names, verdicts = [*LAYERS], []
    for first in range(0, len(names), AT_ONCE):
        some, others = varcomm.launch(compiled, 2, names[first : first + AT_ONCE])
        pairs = zip(some, others, strict=True)
        verdicts += [max(pair, key=lambda verdict: verdict != "one graph") for pair in pairs]
    found = dict(zip(names, verdicts, strict=True))
    PAGE.write_text(page(found, torch.__version__.partition("+")[0]))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
