"""`same_as_one_process` passes right models, and finds the place and cause of planted mistakes."""

import pickle
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import (
    GCN,
    GATConv,
    GCNConv,
    HeteroConv,
    NNConv,
    SAGEConv,
    Sequential,
    global_max_pool,
    global_mean_pool,
)
from torch_geometric.utils import degree

import varcomm as vc
from tests.testing.mistakes import assert_named
from varcomm import ArgumentError
from varcomm.testing import same_as_one_process

TARGETS = torch.tensor([0, 1, 2])


pytestmark = pytest.mark.usefixtures("launch_on_worlds")


def graph(nodes=30, edges=120):
    torch.manual_seed(0)
    return Data(
        x=torch.randn(nodes, 4),
        edge_index=torch.randint(nodes, (2, edges)),
        edge_attr=torch.randn(edges, 3),
        y=torch.randn(nodes, 2),
        batch=torch.arange(nodes) * 3 // nodes,
    )


def papers():
    data = HeteroData()
    data["paper"].x, data["author"].x = torch.randn(20, 4), torch.randn(9, 6)
    writes = torch.stack([torch.randint(9, (50,)), torch.randint(20, (50,))])
    data["author", "writes", "paper"].edge_index = writes
    data["paper", "by", "author"].edge_index = writes.flip(0)
    data["paper", "cites", "paper"].edge_index = torch.randint(20, (2, 60))
    return data


class Tail(torch.nn.Module):
    """Calls a function of rows and edges."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, edge_index):
        return self.function(x, edge_index)


class Net(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.conv, self.tail = GCNConv(4, 2), Tail(function)

    def forward(self, x, edge_index):
        return self.tail(self.conv(x, edge_index).tanh(), edge_index)


class OfEdges(torch.nn.Module):
    """Takes the data as a whole, has edge attributes, and returns rows of nodes and of edges."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = NNConv(4, 2, torch.nn.Linear(3, 8)), torch.nn.BatchNorm1d(2)

    def forward(self, data):
        x = self.norm(self.conv(data.x, data.edge_index, data.edge_attr))
        return {"nodes": x, "edges": x[data.edge_index[0]] * x[data.edge_index[1]]}


class Classifier(torch.nn.Module):
    def __init__(self, pool=global_mean_pool):
        super().__init__()
        self.conv, self.head, self.pool = GATConv(4, 8), torch.nn.Linear(8, 3), pool

    def forward(self, x, edge_index, batch):
        return self.head(self.pool(self.conv(x, edge_index), batch))


class Pooled(torch.nn.Module):
    """Gets graph.batch by its name, also if the data are one graph."""

    def forward(self, x, edge_index, batch=None):
        return global_mean_pool(x, batch)


@dataclass
class Logits:
    logits: torch.Tensor
    hidden: list[torch.Tensor]


class Lazy(torch.nn.Module):
    """Takes its widths from the data, and returns a dataclass."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = SAGEConv(-1, 4), torch.nn.LazyLinear(2)

    def forward(self, x, edge_index):
        hidden = self.conv(x, edge_index)
        return Logits(self.head(hidden), [hidden])


class Typed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = {
            ("author", "writes", "paper"): SAGEConv((6, 4), 8),
            ("paper", "by", "author"): SAGEConv((4, 6), 8),
            ("paper", "cites", "paper"): GATConv(4, 8),
        }
        self.conv = HeteroConv(layers)

    def forward(self, x_dict, edge_index_dict):
        return self.conv(x_dict, edge_index_dict)


def squares(out, data):
    return data.mean((out - data.y) ** 2)


def of_papers(out, data):
    return data["paper"].mean(out["paper"] ** 2)


def cross_entropy(out, data):
    return F.cross_entropy(out, TARGETS)


def counted_once(out, data):
    return vc.graph.replicated(cross_entropy(out, data), data)


def step(model, data, distributed=True, summed=True):
    if distributed:
        model = vc.graph.distribute(model, data)
    loss = squares(model(data.x, data.edge_index), data)
    loss.backward()
    if summed:
        vc.data_parallel.sum_gradients(model)
    return loss


def without_distribute(model, data):
    return step(model, data, distributed=False)


def without_sum(model, data):
    return step(model, data, summed=False)


def gcn(**options):
    return GCN(4, 8, num_layers=2, out_channels=2, **options)


def test_right_models_pass():
    data, with_norm = graph(), gcn(norm="batch_norm", dropout=0.5)
    rows = Data(x=data.x, edge_index=data.edge_index)
    in_order = [(GCNConv(4, 2), "x, edge_index -> x"), torch.nn.ReLU()]
    cases = [
        (with_norm, data, {}),
        (with_norm, data, {"loss": squares, "parts": 2}),
        (with_norm.eval(), data, {"step": step}),
        (OfEdges(), data, {}),
        (Classifier(), data, {}),
        (Classifier(global_max_pool), data, {"loss": counted_once}),
        (Typed(), papers(), {"loss": of_papers}),
        (Sequential("x, edge_index", in_order), rows, {}),
        (Pooled(), rows, {}),
        (Lazy(), rows, {}),
        (Net(lambda x, edges: x * degree(edges[0], len(x), x.dtype)[:, None]), data, {}),
    ]
    for model, given, options in cases:
        before = pickle.dumps(model.state_dict())
        found = same_as_one_process(model, given, **options)
        assert found.first == ""
        assert len(found.owned) == options.get("parts", 3)
        assert (found.owned[-1] == 0) == (len(found.owned) > 2)
        assert max(found.errors.values()) < 1e-12
        assert f"{found}".startswith("the same as one process")
        assert pickle.dumps(model.state_dict()) == before
    assert given.x.dtype == torch.float32


def copied(edge_index):
    return getattr(edge_index, "plain", edge_index).clone()


def by_out_degree(x, edge_index):
    row = copied(edge_index)[0]
    return x * degree(row[row < len(x)], len(x), x.dtype)[:, None]


def without_halo(x, edge_index):
    row, col = copied(edge_index)[:, copied(edge_index)[0] < len(x)]
    return x.index_add(0, col, x[row])


def of_neighbours(x, edge_index):
    near = torch.cdist(x, x).topk(min(3, len(x)), largest=False).indices
    return x[near].sum(1)


def less_mean(x, edge_index):
    return x - x.mean(0)


def over_deviation(x, edge_index):
    return x / x.std(0)


def normalised(x, edge_index):
    return F.batch_norm(x, None, None, training=True)


def by_number(x, edge_index):
    return x / x.size(0)


def noisy(x, edge_index):
    return x + torch.rand_like(x)


def less_largest(x, edge_index):
    return x - F.pad(x, (0, 0, 0, 1)).amax(0)  # a rank may own no rows


def local_mean(out, data):
    return F.mse_loss(out, data.y)


def local_sum(out, data):
    return (out - data.y).square().sum()


# the tail of the model; its wrong line and words of the cause
IN_FORWARD = [
    (less_mean, "x.mean(0)", "the mean of its own rows"),
    (over_deviation, "x.std(0)", "normalises over this rank's rows"),
    (less_largest, "amax(0)", "the amax of its own rows"),
    (normalised, "F.batch_norm(", "normalises over this rank's rows"),
    (by_out_degree, "degree(row[", "edge_index itself"),
    (without_halo, "x.index_add(", "A missing halo"),
    (of_neighbours, "torch.cdist(x, x)", "this rank's nodes with each other"),
    (by_number, "x / x.size(0)", "the number of this rank's rows"),
    (noisy, "torch.rand_like(x)", "other random numbers"),
]


@pytest.mark.filterwarnings("ignore:std")
def test_mistakes_in_forward():
    for function, code, cause in IN_FORWARD:
        with pytest.raises(AssertionError, match=r"outputs .* WRONG") as error:
            same_as_one_process(Net(function), graph(), loss=squares)
        assert_named(error, function, code, cause)


# what is called, the kind of values that is wrong, and words of the cause
OUTSIDE = [
    (gcn, {"loss": local_mean}, "loss", "the mse_loss of its own rows"),
    (gcn, {"loss": local_sum}, "loss", "the sum of its own rows"),
    (Classifier, {"loss": cross_entropy}, "gradients of parameters", "replicated(loss, graph)"),
    (gcn, {"step": without_sum}, "gradients of parameters", "sum_gradients(model)"),
    (lambda: gcn(norm="batch_norm"), {"step": without_distribute}, "loss", "distribute(model"),
]


def test_mistakes_around_the_model():
    for make, options, kind, cause in OUTSIDE:
        with pytest.raises(AssertionError) as error:
            same_as_one_process(make(), graph(), **options)
        table, _, first = str(error.value).partition("\nfirst wrong value")
        assert any(kind in line and "WRONG" in line for line in table.splitlines())
        assert cause in (first or table), table + first
        assert ("sum_gradients" in table + first) == (options.get("step") is without_sum)


class ByTypes(torch.nn.Module):
    """Loops over the types of this rank's edges, with layers or by hand."""

    def __init__(self, make):
        super().__init__()
        self.parts = torch.nn.ModuleList([make() for _ in range(3)])

    def forward(self, x, edge_index, edge_type):
        out = x[:, :2]
        for kind in edge_type.unique().tolist():
            row, col = edges = edge_index[:, edge_type == kind]
            if isinstance(self.parts[kind], SAGEConv):
                out = out + self.parts[kind](x, edges)
            else:
                out = out.index_add(0, col, self.parts[kind](x[row]))
        return out


def skipped(x, edge_index):
    return x if edge_index.size(1) == 0 else x + x[edge_index[0]].sum() * 0


@pytest.mark.slow
def test_calls_that_depend_on_edges_of_a_rank():
    """The rank that owns nothing makes no call, and the others do not wait for it."""
    data = graph()
    data.edge_type = torch.arange(120) % 3
    for model in (
        ByTypes(lambda: SAGEConv(4, 2)),
        ByTypes(lambda: torch.nn.Linear(4, 2)),
        Net(skipped),
    ):
        with pytest.raises(AssertionError, match="different calls") as error:
            same_as_one_process(model, data)
        assert "loop over all types" in str(error.value)
        assert f"{__file__}:" in str(error.value)


def test_a_number_of_this_rank_has_no_line():
    with pytest.raises(AssertionError, match=r"first wrong value: 1 of the outputs.*num_nodes"):
        same_as_one_process(Net(lambda x, edges: (x, x.size(0))), graph())


def test_refusals():
    data, model = graph(), gcn()
    without_edges = Data(x=data.x)
    for arguments, options, named in [
        (("model", data), {}, "model"),
        ((model, without_edges), {}, "edge_index"),
        ((model, data.x), {}, "data"),
        ((model, data), {"step": step, "loss": squares}, "step"),
        ((model, data), {"parts": 0}, "parts"),
        ((model, data), {"tol": None}, "tol"),
        ((model, data), {"call": model.state_dict()}, "call"),
        ((model, data), {"loss": lambda out, data: out}, "one number; got torch.Size"),
    ]:
        with pytest.raises(ArgumentError, match=named):
            same_as_one_process(*arguments, **options)
    with pytest.raises(ArgumentError, match="function"):
        same_as_one_process(Net(None), data)  # fails in one process


@pytest.mark.slow
def test_five_ranks_and_failures_of_runs():
    data = graph()
    assert len(same_as_one_process(Classifier(), data, parts=5).owned) == 5
    with pytest.raises(ArgumentError, match=r"call="):
        same_as_one_process(WithTime(), data)
    with pytest.raises(ArgumentError, match="cannot distribute"):
        same_as_one_process(
            torch.nn.Sequential(torch.nn.MultiheadAttention(4, 2)), data, call=first
        )
    with pytest.raises(AssertionError, match="with_halo"):
        same_as_one_process(Net(lambda x, edges: x[copied(edges)[0]]), data)


class WithTime(torch.nn.Module):
    def forward(self, x, time, delta):
        return x


def first(model, data):
    return model[0](data.x, data.x, data.x)[0]


def sequential():
    return Sequential("x, edge_index", [(GCNConv(4, 3), "x, edge_index -> x"), torch.nn.ReLU()])


class Odd(torch.nn.Module):
    """Complex, bool and integer results, and a bool buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        own = x * self.scale
        return torch.complex(own, own**2), own > 0, (own * 3).round().int(), self.mask, 7


class Local(torch.nn.Module):
    """A number of this rank."""

    def forward(self, x):
        return x.mean().item()


@pytest.mark.slow
def test_models_of_other_forms():
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(9, (2, 40), generator=generator)
    data = Data(x=torch.randn(9, 4, generator=generator), edge_index=edges)
    assert not same_as_one_process(sequential, data).wrong
    assert not same_as_one_process(Odd(), data).wrong
    with pytest.raises(AssertionError, match="not the same"):
        same_as_one_process(Local(), data)
    star = Data(x=data.x, edge_index=torch.stack([edges[0], torch.zeros_like(edges[0])]))
    star.edge_attr = torch.rand(40, 1, generator=generator)

    def edge_values(model, graph):
        return model(graph.edge_attr)

    assert not same_as_one_process(torch.nn.Linear(1, 2), star, call=edge_values).wrong
