"""Normalisation over the nodes of all ranks: as in one process, through two derivatives."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

import varcomm
from tests.graph.against_one import compare
from tests.graph.batches import FIRST, GRAPHS, SECOND, no_edges, partitions, plain, rows_of, whole
from tests.graph.graphs import wild
from tests.ops.comparing import Failures
from tests.worlds import WORLDS, on_ranks
from varcomm import ArgumentError
from varcomm.graph import global_norm, partition

C = 4


@dataclass(frozen=True)
class Norm:
    """How to make a module, what it takes besides x, and the features of a node."""

    make: Callable[[], nn.Module]
    takes: str = "nothing"
    features: tuple[int, ...] = (C,)

    def arguments(self, given):
        return {
            "nothing": (),
            "batch": (plain(given.batch),),
            "batch and size": (plain(given.batch), GRAPHS),
            "kinds": (given.kinds,),
        }[self.takes]


NORMS = {}


def norm(name, make, *takes, features=(C,)):
    for what in takes or ("nothing",):
        suffix = f", {what}" if takes else ""
        NORMS[name + suffix] = Norm(make, what, features)


def batch_norm_without_bias():
    """Return ``BatchNorm1d(C, bias=False)``, which torch has from 2.12 on."""
    module = nn.BatchNorm1d(C)
    module.register_parameter("bias", None)
    return module


BATCHES = ("nothing", "batch", "batch and size")

norm("BatchNorm1d", lambda: nn.BatchNorm1d(C))
norm("BatchNorm1d sequences", lambda: nn.BatchNorm1d(C), features=(C, 3))
norm("BatchNorm1d plain", lambda: nn.BatchNorm1d(C, affine=False, eps=0.1))
norm("BatchNorm1d without bias", batch_norm_without_bias)
norm("BatchNorm1d untracked", lambda: nn.BatchNorm1d(C, track_running_stats=False))
norm("BatchNorm1d cumulative", lambda: nn.BatchNorm1d(C, momentum=None))
norm("BatchNorm", lambda: pyg.BatchNorm(C, momentum=0.3))
norm("BatchNorm single", lambda: pyg.BatchNorm(C, allow_single_element=True))
norm("DiffGroupNorm", lambda: pyg.DiffGroupNorm(C, groups=3, lamda=0.5))
norm("DiffGroupNorm untracked", lambda: pyg.DiffGroupNorm(C, 2, track_running_stats=False))
norm("HeteroBatchNorm", lambda: pyg.HeteroBatchNorm(C, 4), "kinds")
norm("HeteroBatchNorm cumulative", lambda: pyg.HeteroBatchNorm(C, 3, momentum=None), "kinds")
norm(
    "HeteroBatchNorm plain",
    lambda: pyg.HeteroBatchNorm(C, 3, affine=False, track_running_stats=False),
    "kinds",
)
norm("InstanceNorm", lambda: pyg.InstanceNorm(C), *BATCHES)
norm(
    "InstanceNorm tracked",
    lambda: pyg.InstanceNorm(C, affine=True, track_running_stats=True),
    *BATCHES,
)
norm("GraphNorm", lambda: pyg.GraphNorm(C), *BATCHES)
norm("GraphNorm heads", lambda: pyg.GraphNorm(C), *BATCHES, features=(2, C))
norm("LayerNorm", lambda: pyg.LayerNorm(C), *BATCHES)
norm("LayerNorm plain", lambda: pyg.LayerNorm(C, affine=False), *BATCHES)
norm("PairNorm", lambda: pyg.PairNorm(), *BATCHES)
norm("PairNorm scaled", lambda: pyg.PairNorm(2.5, eps=0.1), *BATCHES)
norm("PairNorm individually", lambda: pyg.PairNorm(2.5, scale_individually=True), *BATCHES)
norm("MeanSubtractionNorm", lambda: pyg.MeanSubtractionNorm(), *BATCHES)
norm("MeanSubtractionNorm heads", pyg.MeanSubtractionNorm, *BATCHES, features=(2, C))
norm("GraphSizeNorm", lambda: pyg.GraphSizeNorm(), *BATCHES)


def made(name, training=True):
    """A module whose parameters are not what they start from."""
    torch.manual_seed(0)
    module = NORMS[name].make().double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += torch.rand_like(parameter)
    return module.train(training)


def on(module, graph):
    module.forward = global_norm(module, graph)
    return module


def buffers(module):
    # PyG assigns those of InstanceNorm with their graph
    return {key: value.detach().clone() for key, value in module.named_buffers()}


@on_ranks(*WORLDS)
def test_as_in_one_process(rank):
    wrong, graphs = [], {}
    for name, norm in NORMS.items():
        if norm.features not in graphs:
            data = whole(*norm.features)
            graphs[norm.features] = data, partitions(data)[1]

        def call(module, g, norm=norm):
            # twice, so that running statistics move twice
            module(1 + g.x.detach() / 2, *norm.arguments(g))
            return module(g.x, *norm.arguments(g))

        # without running statistics both modes are the same
        for training in (True, False) if buffers(made(name)) else (True,):
            make = partial(made, name, training)
            given = graphs[norm.features]
            found = compare(make, call, *given, put=on, second=True, close=SECOND)
            wrong += [f"{name}, {training}: {one}" for one in found]
    return wrong


def check_halo(failures, graph, name):
    """Copies in the halo are normalised as their originals, and count in no statistic."""
    given = whole(*NORMS[name].features)
    ids = torch.cat([graph.owned_ids, graph.halo_ids])
    # in one process, a node counts in the loss as often as it is on any rank
    times = varcomm.all_reduce(torch.bincount(ids, minlength=len(given.x)))
    times = times.view(-1, *[1] * (given.x.dim() - 1))
    alone, module = made(name), on(made(name), graph)
    x = given.x.clone().requires_grad_()
    out = alone(x, *NORMS[name].arguments(given))
    (out.sin() * given.weight * times).sum().backward()
    own, rows = given.x[graph.owned_ids].requires_grad_(), rows_of(given, ids)
    got = module(graph.with_halo(own), *NORMS[name].arguments(rows))
    (got.sin() * rows.weight).sum().backward()
    varcomm.data_parallel.sum_gradients(module)
    with failures.named(name, "halo"):
        torch.testing.assert_close(got, out[ids], **FIRST)
        torch.testing.assert_close(own.grad, x.grad[graph.owned_ids], **FIRST)
        torch.testing.assert_close(buffers(module), buffers(alone), **FIRST)
        for mine, theirs in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, **FIRST)


def check_narrow(failures, graph, name, dtype, close, parameters, shift=0):
    """Against fp64; dtypes and running statistics as PyG's."""
    given = whole(*NORMS[name].features)
    given.x = (given.x + shift).to(dtype)
    rows, alone = rows_of(given, graph.owned_ids), made(name)
    expected = alone(given.x.double(), *NORMS[name].arguments(given))[graph.owned_ids]
    theirs = made(name).to(parameters)(given.x, *NORMS[name].arguments(given))
    module = on(made(name).to(parameters), graph)
    got = module(rows.x, *NORMS[name].arguments(rows))
    with failures.named(name, dtype, parameters, shift):
        assert got.dtype == theirs.dtype
        torch.testing.assert_close(got.double(), expected, rtol=close, atol=close)
        for key, value in buffers(alone).items():
            moved = module.get_buffer(key).to(value.dtype)
            torch.testing.assert_close(moved, value, rtol=close, atol=close)


@pytest.mark.slow
@on_ranks(3)
def test_rows_of_the_halo_and_narrow_floats(rank):
    failures, graph = Failures(), partitions()[0]
    for name in NORMS:
        check_halo(failures, graph, name)
        for dtype, close in {torch.float32: 1e-5, torch.bfloat16: 0.05}.items():
            # a Linear takes its own dtype alone
            for parameters in {dtype} if name.startswith("Diff") else (dtype, torch.float32):
                check_narrow(failures, graph, name, dtype, close, parameters)
        # a mean of squares less the square of the mean would lose all digits of fp32
        if name.startswith(("BatchNorm1d", "InstanceNorm", "LayerNorm", "PairNorm")):
            check_narrow(failures, graph, name, torch.float32, 1e-2, torch.float32, shift=4096)
    return failures


@on_ranks(3)
def test_no_more_is_sent_than_is_said(rank):
    graph = partition(wild(), method="random")
    for name, training, values in SENT:
        given = rows_of(whole(*NORMS[name].features, nodes=24), graph.owned_ids)
        module = on(made(name, training), graph)
        with varcomm.trace() as calls:
            module(given.x, *NORMS[name].arguments(given))
        compared = sum(call.name == "all_reduce" for call in calls)  # by two numbers in each sum
        assert sum(call.received for call in calls) == 2 * 8 * (values + 2 * compared), name


# values that each rank sends to each other rank
SENT = [
    ("BatchNorm1d", True, 2 * C),
    ("BatchNorm1d", False, 0),
    ("BatchNorm1d untracked", False, 2 * C),
    ("BatchNorm1d sequences", True, 2 * C + 1),
    ("BatchNorm", True, 2 * C),
    ("DiffGroupNorm", True, 2 * 3 * C),
    ("HeteroBatchNorm, kinds", True, (2 * C + 2) * 4),
    ("HeteroBatchNorm, kinds", False, 0),
    ("InstanceNorm, nothing", True, 2 * C + 1),
    ("InstanceNorm, batch", True, 1 + (2 * C + 1) * 5),
    ("InstanceNorm, batch and size", True, (2 * C + 1) * GRAPHS),
    ("InstanceNorm tracked, batch", False, 0),
    ("GraphNorm, nothing", True, 2 * C + 2),
    ("GraphNorm, batch and size", True, (2 * C + 2) * GRAPHS),
    ("LayerNorm, nothing", True, 4),
    ("LayerNorm, batch and size", True, 4 * GRAPHS),
    ("PairNorm, nothing", True, C + 3),
    ("PairNorm individually, batch and size", True, (C + 1) * GRAPHS),
    ("MeanSubtractionNorm, nothing", True, C + 1),
    ("GraphSizeNorm, nothing", True, 1),
    ("GraphSizeNorm, batch and size", True, GRAPHS),
]


@on_ranks(3)
def test_a_graph_of_one_node(rank):
    """Some norms refuse a single node; other ranks own nothing, and must not go on."""
    failures, refused = Failures(), set()
    graph = partition(no_edges(1), method=torch.tensor([1]))
    for name in NORMS:
        given = whole(*NORMS[name].features, nodes=1)
        rows = rows_of(given, graph.owned_ids)
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
    assert refused == REFUSE_ONE
    return failures


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


@on_ranks(3)
def test_a_graph_without_nodes(rank):
    graph = partition(no_edges(0), method="block")
    for name in NORMS:
        given, module = whole(*NORMS[name].features, nodes=0), on(made(name), graph)
        before = buffers(module)
        assert module(given.x, *NORMS[name].arguments(given)).shape == given.x.shape
        after = buffers(module)
        for key in before:
            assert torch.equal(after[key], before[key]) or key.endswith("num_batches_tracked")


@on_ranks(3)
def test_constant_rows_lazy_norms_and_copies(rank):
    """What does not vary (torch takes 0 as the derivative of std); lazy norms; copies."""
    graph, data = partition(wild(), method="random"), wild()
    ids = graph.owned_ids

    def twice(module, rows):
        rows.requires_grad_()
        first = torch.autograd.grad(module(rows)[:, 0].sum(), rows, create_graph=True)[0]
        return first.detach(), torch.autograd.grad((first**2).sum(), rows)[0]

    x = torch.full((24, C), 3.0, dtype=torch.float64)
    expected = twice(pyg.LayerNorm(C).double(), x.clone())
    got = twice(on(pyg.LayerNorm(C).double(), graph), x[ids])
    torch.testing.assert_close(got[0], expected[0][ids], **SECOND)
    assert got[1].isfinite().all()  # which torch's is not

    alone, module = nn.LazyBatchNorm1d(), on(nn.LazyBatchNorm1d(), graph)
    x = data.x.float()
    torch.testing.assert_close(module(x[ids]), alone(x)[ids])
    torch.testing.assert_close(module.state_dict(), alone.state_dict())
    assert type(module) is nn.BatchNorm1d

    module = on(made("BatchNorm"), graph)
    twin = copy.deepcopy(module)
    twin(graph.x)  # has statistics of its own
    assert torch.equal(module.module.running_mean, torch.zeros(C).double())
    assert twin.module.running_mean.all()


@on_ranks(3)
def test_batches_without_a_graph(rank):
    """Rows of batches, pixels or voxels: their numbers differ between ranks, and between steps."""
    for kind, shape in (
        (nn.BatchNorm1d, ()),
        (nn.BatchNorm1d, (4,)),
        (nn.BatchNorm2d, (4, 5)),
        (nn.BatchNorm3d, (2, 1, 3)),
    ):
        for batches in (([5, 0, 1], [5, 0, 1]), ([5, 0, 1], [1, 2, 3])):
            where = batches[0] if batches[0] == batches[1] else None
            alone, module = kind(3).double(), kind(3).double()
            module.forward = global_norm(module, where)
            for step, batch in enumerate(batches):
                sizes = varcomm.ShardSizes(batch)
                torch.manual_seed(step)
                whole = torch.randn(6, 3, *shape, dtype=torch.float64).requires_grad_()
                weight = torch.randn_like(whole)
                own = varcomm.shard_v(whole.detach(), sizes)
                if shape and len(own) == 0:
                    own = own[..., :1]  # an empty batch has any size
                own.requires_grad_()
                expected, found = alone(whole), module(own)
                (expected * weight).sum().backward()
                mine = varcomm.shard_v(weight, sizes)
                (found * mine[..., : own.shape[-1]] if shape else found * mine).sum().backward()
                if len(own):
                    rows = slice(sizes.offsets[rank], sizes.offsets[rank] + batch[rank])
                    torch.testing.assert_close(found, expected[rows])
                    torch.testing.assert_close(own.grad, whole.grad[rows])
            torch.testing.assert_close(module.state_dict(), alone.state_dict())
    with pytest.raises(ArgumentError, match="x must have one row"):
        global_norm(nn.BatchNorm2d(3), [2, 2, 2])(torch.ones(1, 3, 4, 4))
    with pytest.raises(ArgumentError, match=r"\(rows, 3, height, width\)"):
        global_norm(nn.BatchNorm2d(3), [1, 1, 1])(torch.ones(1, 3, 4))
    with pytest.raises(ArgumentError, match="sizes must have one entry per rank, 3"):
        global_norm(nn.BatchNorm2d(3), [1, 1])(torch.ones(1, 3, 4, 4))


X = torch.ones(3, C)
ZEROS = torch.zeros(3, dtype=torch.int64)

# a module, its arguments, and the name of the wrong one
REFUSED = [
    (lambda: nn.BatchNorm1d(C), (torch.cat([X, X]),), "x must have one row"),
    (lambda: nn.BatchNorm1d(C), (torch.tensor(1.0),), "x must have one row"),
    (lambda: nn.BatchNorm1d(C), ([1.0],), "x must be a torch.Tensor"),
    (lambda: nn.BatchNorm1d(3), (X,), "x must be of shape"),
    (lambda: nn.BatchNorm1d(C), (X.long(),), "x must be of floats"),
    (lambda: nn.BatchNorm1d(C), (X[:, 0],), "x must be of shape"),
    (lambda: pyg.GraphNorm(C), (X, ZEROS[:2]), "batch must be"),
    (lambda: pyg.GraphNorm(C), (X, ZEROS.int()), "batch must be"),
    (lambda: pyg.GraphNorm(C), (X, [0]), "batch must be a torch.Tensor"),
    (lambda: pyg.GraphNorm(C), (X, ZEROS - 1), "numbers in batch"),
    (lambda: pyg.GraphNorm(C), (X, ZEROS + 2, 2), "numbers in batch"),
    (lambda: pyg.GraphNorm(C), (X.long(),), "x must be of floats"),
    (lambda: pyg.HeteroBatchNorm(C, 2), (X, ZEROS + 2), "type_vec"),
]


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) + 1


class OwnName(pyg.GraphNorm):
    pass


UNKNOWN = [
    lambda: OwnNorm(C),
    lambda: nn.SyncBatchNorm(C),
    lambda: nn.InstanceNorm2d(C),
    lambda: nn.InstanceNorm1d(C),
    lambda: pyg.LayerNorm(C, mode="node"),
    lambda: nn.SyncBatchNorm.convert_sync_batchnorm(pyg.BatchNorm(C)),
    lambda: pyg.MessageNorm(),
]


def test_which_norms_are_known():
    global_norm(OwnName(C), None)
    for make in UNKNOWN:
        with pytest.raises(ArgumentError, match="is not known to be exact over all nodes"):
            global_norm(make(), None)


@on_ranks(3)
def test_refusals(rank):
    graph = partition(no_edges(9), method="block")
    for make, given, message in REFUSED:
        x = given[0] + rank if isinstance(given[0], torch.Tensor) else given[0]
        with pytest.raises(ArgumentError, match=f"rank .* of 3.*: .*{message}"):
            on(make(), graph)(x, *given[1:])
