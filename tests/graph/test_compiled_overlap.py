"""In compiled code, messages of interior edges are computed while the halo travels."""

import re

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.utils import run_and_get_code

from tests.graph.graphs import wild
from varcomm.graph import message_passing, partition

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


class Model(torch.nn.Module):
    def __init__(self, graph):
        super().__init__()
        self.graph = graph
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(11, 8), torch.nn.SiLU(), torch.nn.Linear(8, 4)
        )

    def forward(self, x, edge_attr):
        for _ in range(2):
            x = x + message_passing(self.graph, self.message, x.sin(), edge_attr, aggr="mean")
        return x

    def message(self, x_i, x_j, edge_attr):
        return self.mlp(torch.cat([x_i, x_j, edge_attr], dim=1))


def outcome(model, call, graph):
    x = graph.x.clone().requires_grad_()
    out = call(x, graph.edge_attr)
    return out, torch.autograd.grad(out.square().sum(), [x, *model.parameters()])


def begun(rank):
    torch._dynamo.reset()
    torch.manual_seed(0)
    graph = partition(wild(), method="random")
    return Model(graph).double(), graph


def between(names, start, wait):
    """Return what stands between each start and its wait."""
    starts = [k for k, name in enumerate(names) if start in name]
    waits = [k for k, name in enumerate(names) if wait in name]
    return [names[a + 1 : b] for a, b in zip(starts, waits, strict=True)]


def order(rank, dynamic):
    """Return the operators between starts and waits, in the graphs and outcomes."""
    model, graph = begun(rank)
    graphs = []

    def keep(module, inputs):
        # effects stand in the graph as with_effects(token, operator, ...)
        calls = [node for node in module.graph.nodes if node.op == "call_function"]
        effect = torch.ops.higher_order.with_effects
        graphs.append([str(n.args[1] if n.target is effect else n.target) for n in calls])
        return make_boxed_func(module.forward)

    fast = torch.compile(
        model, backend=aot_autograd(fw_compiler=keep), fullgraph=True, dynamic=dynamic
    )
    got = outcome(model, fast, graph)
    torch.testing.assert_close(got, outcome(model, model, graph), **CLOSE)
    return graphs


@pytest.mark.parametrize("dynamic", [False, True])
def test_in_graphs(worlds, dynamic):
    for forward, backward in worlds.run(2, order, dynamic, timeout=300):
        ahead = between(forward, "exchange_start", "exchange_wait")
        back = between(backward, "exchange_adjoint_start", "exchange_adjoint_wait")
        assert [sum("addmm" in name for name in part) for part in ahead] == [2, 2]
        assert [any(name.startswith("aten.mm") for name in part) for part in back] == [True, True]


def code(rank):
    """Return the calls in the code that Inductor writes."""
    model, graph = begun(rank)
    fast = torch.compile(model, fullgraph=True)
    got, written = run_and_get_code(lambda: outcome(model, fast, graph))
    torch.testing.assert_close(got, outcome(model, model, graph), **CLOSE)
    calls = r"torch\.ops\.varcomm\.\w+|extern_kernels\.\w+|cpp_fused\w+\("
    return [re.findall(calls, one[one.index("def call(") :]) for one in written]


def test_in_the_code_of_inductor(worlds):
    for forward, backward in worlds.run(2, code, timeout=300):
        ahead = between(forward, "exchange_start", "exchange_wait")
        back = between(backward, "exchange_adjoint_start", "exchange_adjoint_wait")
        for part in (*ahead, *back):
            assert any("extern_kernels" in call for call in part), (forward, backward)
        assert len(ahead) == len(back) == 2
