"""Forms of ``edge_index`` in compiled code: exact, or refused in the words of eager code."""

import pytest
import torch
from torch_geometric.utils import degree, scatter

from tests.graph.against_one import data_of, graph_of, two_types
from tests.worlds import on_ranks
from varcomm import ArgumentError, all_reduce
from varcomm.graph import partition

slow = pytest.mark.slow


def sent(x, row, col):
    """Return sums of rows that edges send."""
    return torch.zeros_like(x).index_add(0, col, x[row])


def helper(edge_index):
    row, col = edge_index
    return col, row


def loop(edge_index):
    for each in (edge_index,):
        row, col = each
    return row, col


def appended(edge_index):
    rows = []
    for one in edge_index:
        rows.append(one)
    return rows


def starred(edge_index):
    first, *others = edge_index
    return first, *others


def masked(edge_index):
    row, col = edge_index[:, edge_index[0] != edge_index[1]]
    return row, col


FORMS = {
    "unpacked": lambda edge_index: helper(edge_index)[::-1],
    "unbind": lambda edge_index: edge_index.unbind(),
    "appended": appended,
    "flip": lambda edge_index: helper(edge_index.flip(0)),
    "torch.unbind": lambda edge_index: torch.unbind(input=edge_index, dim=0),
    "loop": loop,
    "enumerate": lambda edge_index: [each for _, each in enumerate(edge_index)],
    "list": list,
    "map": lambda edge_index: tuple(map(torch.clone, edge_index)),
    "starred": starred,
    "[[1, 0]]": lambda edge_index: helper(edge_index[[1, 0]]),
    "masked": masked,
    "clone": lambda edge_index: helper(edge_index.clone())[::-1],
    "stack": lambda edge_index: helper(torch.stack([*edge_index])[[1, 0]]),
    "data": lambda edge_index: helper(edge_index.data.flip(0)),
}


def summed(x, edge_index, names):
    """Pass messages by forms."""
    return sum((n + 1) * sent(x, *FORMS[name](edge_index)) for n, name in enumerate(names))


def reduced(x, edge_index):
    """Reduce at the sources of edges."""
    row, col = edge_index
    mean = torch.ones_like(x).index_reduce(0, row, x[col], "mean")
    return mean * torch.bincount(row, minlength=len(x))[:, None]


def of_graphs(x, batch):
    mean = x.new_zeros(3, x.shape[1]).index_reduce(0, batch, x, "mean")
    return mean * torch.bincount(batch, minlength=3)[:, None]


def of_types(x_dict, edge_index_dict):
    """Pass messages over all types of edges by hand."""
    out = {}
    for (source, _, target), edge_index in edge_index_dict.items():
        row, col = edge_index
        x = x_dict[source][row][:, :3] * x_dict[target][col][:, :3]
        received = scatter(x, col, 0, x_dict[target].shape[0], "mean")
        leaving = degree(row, x_dict[source].shape[0], dtype=received.dtype)
        out[target] = received + out.get(target, 0)
        out[source] = out.get(source, 0) + leaving[:, None].expand(-1, 3)
    return out


def compare(call, given, expected, backend, fullgraph=True):
    """Compare compiled code with eager code, with what one process has, and gradients of both."""
    torch._dynamo.reset()
    fast = torch.compile(call, backend=backend, fullgraph=fullgraph)
    outcomes = []
    for run in (call, fast):
        x = [one.clone().requires_grad_() for one in given[0]]
        out = run(x, *given[1:])
        outcomes.append((out, torch.autograd.grad(sum(one.square().sum() for one in out), x)))
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(*outcomes, **close)
    torch.testing.assert_close(outcomes[1][0], expected, **close)


def by_hand(rank, backend, *names):
    data = data_of()
    graph = graph_of(data)
    expected = [summed(data.x, data.edge_index, names)[graph.owned_ids]]

    def call(x, edge_index):
        return [summed(*x, edge_index, names)]

    compare(call, ([graph.x], graph.edge_index), expected, backend)


def test_rows_of_edge_index(worlds):
    worlds.run(3, by_hand, "eager", "unpacked", "unbind", timeout=300)


@slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_each_form(worlds, backend):
    for name in FORMS:
        worlds.run(2, by_hand, backend, name, timeout=300)


@slow
@on_ranks(3, timeout=300)
def test_reductions(rank):
    """A rule that uses another rule: compiled code would not dispatch a second time."""
    data = data_of()
    graph = graph_of(data)
    for fn, ids, owned, how in (
        (reduced, "edge_index", graph.owned_ids, {}),
        (of_graphs, "batch", slice(None), {"fullgraph": False}),
    ):
        expected = [fn(data.x, data[ids])[owned]]
        given = [graph.x], getattr(graph, ids)
        compare(lambda x, *given, fn=fn: [fn(*x, *given)], given, expected, "aot_eager", **how)


@slow
@on_ranks(3, timeout=300)
def test_types(rank):
    data = two_types()
    graph = graph_of(data)

    def call(x, edge_index_dict):
        out = of_types(dict(zip(("a", "b"), x, strict=True)), edge_index_dict)
        return [out["a"], out["b"]]

    whole = of_types(data.x_dict, data.edge_index_dict)
    expected = [whole[kind][graph[kind].owned_ids] for kind in ("a", "b")]
    compare(call, ([graph["a"].x, graph["b"].x], graph.edge_index_dict), expected, "aot_eager")


def columns(x, edge_index):
    pairs = edge_index.t()
    return sent(x, pairs[:, 0], pairs[:, 1])


def attribute(x, edge_index):
    row, col = edge_index.T.T
    return sent(x, row, col)


def chunks(x, edge_index):
    row, col = edge_index.chunk(2)
    return sent(x, row.view(-1), col.view(-1))


def python_of_torch(x, edge_index):
    row, col = edge_index.split(1)
    return sent(x, row.view(-1), col.view(-1))


@slow
@on_ranks(3, timeout=300)
def test_refused_in_the_words_of_eager(rank):
    """The error names ``edge_index[0]``, the form that runs."""
    graph = graph_of(data_of())
    for call in (columns, attribute, chunks, python_of_torch):
        for full in (False, True) if call is attribute else (False,):
            torch._dynamo.reset()
            fast = torch.compile(call, backend="aot_eager", fullgraph=full)
            kind = torch._dynamo.exc.Unsupported if full else ArgumentError
            with pytest.raises(kind, match=r"x\[edge_index\[0\]\]"):
                fast(graph.x, graph.edge_index)


@on_ranks(3)
def test_integers_of_nodes_at_sources(rank):
    """An attribute of integers fetches the halo in compiled code, as in eager code."""
    data = data_of()
    data.kind = torch.arange(data.num_nodes) * 7 % 11
    part = partition(data, method="block")
    table = torch.arange(11.0)

    def unpacked(kind, edge_index):
        row, _ = edge_index
        return table[kind[row]]

    def selected(kind, edge_index):
        return table[kind.index_select(0, edge_index[0])]

    for function in (unpacked, selected):
        found = torch.compile(function, backend="eager")(part.kind, part.edge_index)
        assert torch.equal(found, function(part.kind, part.edge_index))
        total = all_reduce(found.sum())
        assert total == table[data.kind[data.edge_index[0]]].sum()
