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
from tests.graph.norms import KINDS, NORMS, C, buffers, made, names, on
from tests.ops.comparing import Failures, assert_none
from varcomm import ArgumentError, DisagreementError
from varcomm.graph import partition
from varcomm.graph.nn.norms import global_norm, is_global_norm


def ids_to_data(nodes):
    return Data(edge_index=torch.zeros(2, 0, dtype=torch.int64), num_nodes=nodes)


def bytes_sent(rank, name, training):
    graph = partition(wild(), method="random")
    x = torch.randn(graph.num_owned, *NORMS[name].features, dtype=torch.float64)
    given = whole(*NORMS[name].features, nodes=24).rows(graph.owned_ids)
    module = on(made(name, training), graph)
    with varcomm.trace() as calls:
        module(x, *NORMS[name].arguments(given))
    return sum(call.received for call in calls)


@pytest.mark.parametrize(
    ("name", "training", "values"),
    [
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
    ],
)
def test_no_more_is_sent_than_is_said(worlds, name, training, values):
    assert worlds.run(3, bytes_sent, name, training) == [2 * 8 * values] * 3


def one_node(rank, kind):
    """Return which norms refuse a single node; other ranks own nothing, and must not go on."""
    failures, refused = Failures(), set()
    graph = partition(ids_to_data(1), method=torch.tensor([1]))
    for name in names(kind):
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
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_of_one_node(worlds, kind):
    results = worlds.run(3, one_node, kind)
    assert_none([failures for failures, _ in results])
    assert [refused for _, refused in results] == [REFUSE_ONE & set(names(kind))] * 3


def no_nodes(rank, kind):
    graph = partition(ids_to_data(0), method="block")
    for name in names(kind):
        given, module = whole(*NORMS[name].features, nodes=0), on(made(name), graph)
        before = buffers(module)
        out = module(given.x, *NORMS[name].arguments(given))
        assert out.shape == given.x.shape
        after = buffers(module)
        for key in before:
            assert torch.equal(after[key], before[key]) or key.endswith("num_batches_tracked")
    return len(names(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_without_nodes(worlds, kind):
    assert worlds.run(2, no_nodes, kind) == [len(names(kind))] * 2


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
    assert worlds.run(2, copies) == [True] * 2


def compiled(rank):
    graph, given = partition(wild(), method="random"), whole(C, nodes=24)
    model = nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C), nn.Tanh()).double()
    for parameter in model.parameters():
        nn.init.uniform_(parameter, generator=torch.Generator().manual_seed(1))
    alone = copy.deepcopy(model)
    on(model[1], graph)
    x, own = given.x.clone().requires_grad_(), given.x[graph.owned_ids].requires_grad_()
    out, got = alone(x), torch.compile(model, backend="aot_eager")(own)
    torch.testing.assert_close(got, out[graph.owned_ids], **FIRST)
    out.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(own.grad, x.grad[graph.owned_ids], **FIRST)


def test_compiled(worlds):
    assert worlds.run(2, compiled) == [None] * 2


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
    assert is_global_norm(module) == known
    if not known:
        name = type(module).__name__
        with pytest.raises(ArgumentError, match=f"^{name} is not known .* Known are BatchNorm1d,"):
            global_norm(module, None)


def refuse(rank, make, given, message):
    graph = partition(three_nodes_each(2), method="block")
    module = on(make(), graph)
    name = type(module).__name__.replace("DiffGroupNorm", "BatchNorm1d")
    # which rows they are, ranks find out together; the rest each sees by itself
    where = f"({name} on rank {rank}|{type(module).__name__}: refused on rank 0) of 2"
    with pytest.raises(ArgumentError, match=f"^{where}.*: .*{message}"):
        module(*given)


def three_nodes_each(ranks):
    return ids_to_data(3 * ranks)


X = torch.ones(3, C)
ZEROS = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (
            lambda: nn.BatchNorm1d(C),
            (X[:2],),
            "one row for each of the 3 owned nodes, or for each of the 0 ",
        ),
        (
            lambda: nn.BatchNorm1d(C),
            (torch.tensor(1.0),),
            r"got shape \(\)\. It runs over nodes or e",
        ),
        (lambda: nn.BatchNorm1d(C), ([1.0],), "x must be a torch.Tensor; got list"),
        (lambda: nn.BatchNorm1d(3), (X,), "x has 4 channels, but weight has 3"),
        (lambda: nn.BatchNorm1d(3, affine=False), (X,), "4 channels, but running_mean has 3"),
        (lambda: nn.BatchNorm1d(C), (X.double(),), "x is of torch.float64, but weight of torch.fl"),
        (lambda: nn.BatchNorm1d(C).double(), (X,), "x is of torch.float32, but weight of torch.fl"),
        (lambda: nn.BatchNorm1d(C), (X.long(),), r"x must be of floats and shape \(rows, C\) or"),
        (lambda: nn.BatchNorm1d(C), (X[:, 0],), r"shape \(rows, C\) or \(rows, C, L\); got"),
        (lambda: pyg.InstanceNorm(C), (X.unsqueeze(-1),), r"and shape \(rows, C\); got"),
        (lambda: pyg.InstanceNorm(3, affine=True), (X,), "x has 4 channels, but weight has 3"),
        (lambda: pyg.InstanceNorm(C), ([1.0],), "x must be a torch.Tensor; got list"),
        (lambda: pyg.GraphNorm(C), (X, ZEROS[:2]), "batch must be of torch.int64, with a number f"),
        (lambda: pyg.GraphNorm(C), (X, ZEROS.int()), "batch must be of .*; got torch.int32"),
        (lambda: pyg.GraphNorm(C), (X, [0]), "batch must be a torch.Tensor; got list"),
        (lambda: pyg.GraphNorm(C), (X, ZEROS - 1), "in batch must be at least 0; got -1 to -1"),
        (lambda: pyg.GraphNorm(C), (X, ZEROS + 2, 2), "at least 0 and below 2; got 2 to 2"),
        (lambda: pyg.GraphNorm(C), (X, ZEROS, 1.0), "number of graphs must be an int .* got 1.0"),
        (lambda: pyg.GraphNorm(C), (X, ZEROS, -1), "an int of at least 0; got -1"),
        (lambda: pyg.GraphNorm(C), (X.long(),), "x must be of floats; got torch.int64"),
        (lambda: pyg.LayerNorm(C), (X[:, 0],), r"x must be of floats and shape \(rows, C\)"),
        (lambda: pyg.HeteroBatchNorm(C, 2), (X, ZEROS + 2), "type_vec must be at least 0 and bel"),
        (lambda: pyg.HeteroBatchNorm(3, 2), (X, ZEROS), "x has 4 channels, but weight has 3"),
    ],
)
def test_refusals(worlds, make, given, message):
    assert worlds.run(2, refuse, make, given, message) == [None] * 2


def one_is_wrong(rank):
    graph = partition(three_nodes_each(3), method="block")
    module = on(nn.BatchNorm1d(C), graph)
    module(X)
    with varcomm.debug(), pytest.raises(DisagreementError) as caught:
        module(X if rank else X[:2])
    return str(caught.value), module(X).shape == X.shape


def test_in_debug_all_ranks_raise_where_one_has_to(worlds):
    for told, after in worlds.run(3, one_is_wrong):
        assert "not called, since on rank 0: BatchNorm1d on rank 0 of 3: x must have" in told
        assert after
