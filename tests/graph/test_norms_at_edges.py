"""Normalisation of one node and of none, what it sends, what it refuses, and copies of modules."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data

import varcomm
from tests.graph.batches import FIRST, GRAPHS, SECOND, whole
from tests.graph.graphs import wild
from tests.graph.norms import NORMS, C, buffers, made, on
from tests.ops.comparing import Failures, assert_none
from varcomm import ArgumentError
from varcomm.graph import global_norm, partition


def ids_to_data(nodes):
    return Data(edge_index=torch.zeros(2, 0, dtype=torch.int64), num_nodes=nodes)


def bytes_sent(rank):
    graph = partition(wild(), method="random")
    return [bytes_of(graph, name, training) for name, training, _ in SENT]


def bytes_of(graph, name, training):
    x = torch.randn(graph.num_owned, *NORMS[name].features, dtype=torch.float64)
    given = whole(*NORMS[name].features, nodes=24).rows(graph.owned_ids)
    module = on(made(name, training), graph)
    with varcomm.trace() as calls:
        module(x, *NORMS[name].arguments(given))
    return sum(call.received for call in calls)


# values that each rank sends to each other rank
SENT = [
    ("BatchNorm1d", True, 2 * C),
    ("BatchNorm1d", False, 0),
    ("BatchNorm1d untracked", False, 2 * C),
    ("BatchNorm1d sequences", True, 2 * C),
    ("BatchNorm", True, 2 * C),
    ("DiffGroupNorm", True, 2 * 3 * C),
    ("HeteroBatchNorm, kinds", True, (2 * C + 1) * 4),
    ("HeteroBatchNorm, kinds", False, 0),
    ("InstanceNorm, nothing", True, 2 * C),
    ("InstanceNorm, batch", True, 1 + (2 * C + 1) * 5),
    ("InstanceNorm, batch and size", True, (2 * C + 1) * GRAPHS),
    ("InstanceNorm tracked, batch", False, 0),
    ("GraphNorm, nothing", True, 2 * C),
    ("GraphNorm, batch and size", True, (2 * C + 1) * GRAPHS),
    ("LayerNorm, nothing", True, 2),
    ("LayerNorm, batch and size", True, 3 * GRAPHS),
    ("PairNorm, nothing", True, C + 1),
    ("PairNorm individually, batch and size", True, (C + 1) * GRAPHS),
    ("MeanSubtractionNorm, nothing", True, C),
    ("GraphSizeNorm, nothing", True, 0),
    ("GraphSizeNorm, batch and size", True, GRAPHS),
]


def test_no_more_is_sent_than_is_said(worlds):
    expected = [2 * 8 * values for _, _, values in SENT]
    assert worlds.run(3, bytes_sent) == [expected] * 3


def one_node(rank):
    """Return which norms refuse a single node; other ranks own nothing, and must not go on."""
    failures, refused = Failures(), set()
    graph = partition(ids_to_data(1), method=torch.tensor([1]))
    for name in NORMS:
        given = whole(*NORMS[name].features, nodes=1)
        rows = given.rows(graph.owned_ids)
        module, alone = on(made(name), graph), made(name)
        try:
            expected = alone(given.x, *NORMS[name].arguments(given))
        except ValueError:
            refused.add(name)
            with pytest.raises(ArgumentError, match="expected more than 1 value per channel"):
                module(rows.x, *NORMS[name].arguments(rows))
            continue
        got = module(rows.x, *NORMS[name].arguments(rows))
        with failures.named(name):
            torch.testing.assert_close(got, expected[graph.owned_ids], **FIRST)
            torch.testing.assert_close(buffers(module), buffers(alone), **FIRST)
    return failures, refused


REFUSE_ONE = {
    "BatchNorm1d",
    "BatchNorm1d plain",
    "BatchNorm1d without bias",
    "BatchNorm1d untracked",
    "BatchNorm1d cumulative",
    "BatchNorm",
    "DiffGroupNorm",
    "DiffGroupNorm untracked",
    "InstanceNorm, nothing",
    "InstanceNorm tracked, nothing",
}


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")
def test_a_graph_of_one_node(worlds):
    results = worlds.run(3, one_node)
    assert_none([failures for failures, _ in results])
    assert [refused for _, refused in results] == [REFUSE_ONE] * 3


def no_nodes(rank):
    graph = partition(ids_to_data(0), method="block")
    for name in NORMS:
        given, module = whole(*NORMS[name].features, nodes=0), on(made(name), graph)
        before = buffers(module)
        out = module(given.x, *NORMS[name].arguments(given))
        assert out.shape == given.x.shape
        after = buffers(module)
        for key in before:
            assert torch.equal(after[key], before[key]) or key.endswith("num_batches_tracked")


def test_a_graph_without_nodes(worlds):
    assert worlds.run(3, no_nodes) == [None] * 3


def constant(rank):
    """The derivative of a deviation of 0 is 0 to torch."""
    x, graph = torch.full((24, C), 3.0, dtype=torch.float64), partition(wild(), method="random")

    def twice(module, rows):
        rows.requires_grad_()
        first = torch.autograd.grad(module(rows)[:, 0].sum(), rows, create_graph=True)[0]
        return first.detach(), torch.autograd.grad((first**2).sum(), rows)[0]

    expected = twice(pyg.LayerNorm(C).double(), x.clone())
    got = twice(on(pyg.LayerNorm(C).double(), graph), x[graph.owned_ids])
    torch.testing.assert_close(got[0], expected[0][graph.owned_ids], **SECOND)
    return got[1].isfinite().all().item()  # which torch's is not


def test_layer_norm_of_what_does_not_vary(worlds):
    assert worlds.run(3, constant) == [True] * 3


def lazy(rank):
    graph = partition(wild(), method="random")
    x = wild().x.float()
    alone, module = nn.LazyBatchNorm1d(), on(nn.LazyBatchNorm1d(), graph)
    out = alone(x)
    torch.testing.assert_close(module(x[graph.owned_ids]), out[graph.owned_ids])
    torch.testing.assert_close(module.state_dict(), alone.state_dict())
    return type(module).__name__


def test_a_lazy_norm_takes_its_channels_from_the_rows(worlds):
    assert worlds.run(3, lazy) == ["BatchNorm1d"] * 3


def copies(rank):
    """A copy has statistics of its own."""
    graph, given = partition(wild(), method="random"), whole(C, nodes=24)
    module = on(made("BatchNorm"), graph)
    twin = copy.deepcopy(module)
    twin(given.x[graph.owned_ids])
    untouched = torch.equal(module.module.running_mean, torch.zeros(C).double())
    return untouched and twin.module.running_mean.count_nonzero().item() == C


def test_copies_are_independent(worlds):
    assert worlds.run(3, copies) == [True] * 3


class OwnForward(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) + 1


class OwnName(pyg.GraphNorm):
    pass


def synchronised():
    return nn.SyncBatchNorm.convert_sync_batchnorm(pyg.BatchNorm(C))


@pytest.mark.parametrize(
    ("make", "known"),
    [
        (OwnName, True),
        (OwnForward, False),
        (nn.SyncBatchNorm, False),
        (nn.BatchNorm2d, False),
        (nn.LayerNorm, False),
        (nn.InstanceNorm1d, False),
        (lambda c: pyg.LayerNorm(c, mode="node"), False),
        (lambda c: synchronised(), False),
        (lambda c: pyg.MessageNorm(), False),
    ],
)
def test_which_modules_are_known(make, known):
    module = make(C)
    if known:
        global_norm(module, None)
    else:
        name = type(module).__name__
        with pytest.raises(ArgumentError, match=f"^{name} is not known .* Known are BatchNorm1d,"):
            global_norm(module, None)


def three_nodes_each(ranks):
    return ids_to_data(3 * ranks)


X = torch.ones(3, C)
ZEROS = torch.zeros(3, dtype=torch.int64)

# a module, its arguments, and the name of the wrong one
REFUSED = [
    (lambda: nn.BatchNorm1d(C), (X[:2],), "x must have one row"),
    (lambda: nn.BatchNorm1d(C), (torch.tensor(1.0),), "x must have one row"),
    (lambda: nn.BatchNorm1d(C), ([1.0],), "x must be a torch.Tensor"),
    (lambda: nn.BatchNorm1d(3), (X,), "x has 4 channels, but weight"),
    (lambda: nn.BatchNorm1d(3, affine=False), (X,), "but running_mean"),
    (lambda: nn.BatchNorm1d(C), (X.double(),), "but weight of"),
    (lambda: nn.BatchNorm1d(C), (X.long(),), "x must be of floats"),
    (lambda: nn.BatchNorm1d(C), (X[:, 0],), "x must be of floats"),
    (lambda: pyg.InstanceNorm(C), (X.unsqueeze(-1),), "x must be of floats"),
    (lambda: pyg.InstanceNorm(3, affine=True), (X,), "but weight"),
    (lambda: pyg.GraphNorm(C), (X, ZEROS[:2]), "batch must be"),
    (lambda: pyg.GraphNorm(C), (X, ZEROS.int()), "batch must be"),
    (lambda: pyg.GraphNorm(C), (X, [0]), "batch must be a torch.Tensor"),
    (lambda: pyg.GraphNorm(C), (X, ZEROS - 1), "numbers in batch"),
    (lambda: pyg.GraphNorm(C), (X, ZEROS + 2, 2), "numbers in batch"),
    (lambda: pyg.GraphNorm(C), (X, ZEROS, 1.0), "number of graphs"),
    (lambda: pyg.GraphNorm(C), (X, ZEROS, -1), "number of graphs"),
    (lambda: pyg.GraphNorm(C), (X.long(),), "x must be of floats"),
    (lambda: pyg.LayerNorm(C), (X[:, 0],), "x must be of floats"),
    (lambda: pyg.HeteroBatchNorm(C, 2), (X, ZEROS + 2), "type_vec"),
    (lambda: pyg.HeteroBatchNorm(3, 2), (X, ZEROS), "but weight"),
]


def refused(rank):
    graph = partition(three_nodes_each(3), method="block")
    for make, given, message in REFUSED:
        torch.manual_seed(0)
        with pytest.raises(ArgumentError, match=f"rank .* of 3.*: .*{message}"):
            on(make(), graph)(*given)


def test_refusals(worlds):
    assert worlds.run(3, refused) == [None] * 3
