"""Each layer along both dimensions of a mesh, against the same over plain groups."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

import varcomm as vc
import varcomm.tensor_parallel as tp
from tests.ops.comparing import Failures, assert_none
from tests.ops.primitives import PRIMITIVES, case, random
from varcomm import ExchangePlan, GroupError, ShardSizes
from varcomm.sharding import ShardSpec, to_dtensor

SIZES = (3, 1)


def drawn(*shape):
    return random(shape, torch.float64, torch.Generator().manual_seed(4))


def made(kind, *args, **options):
    torch.manual_seed(6)
    return kind(*args, **options).double()


def gradients_of(module):
    return [parameter.grad for parameter in module.parameters()]


def primitives(group, place, folder):
    for name in PRIMITIVES:
        c = case(name, "off by one", 2, 1)
        x = c.draw(torch.float64)[place]
        x = drawn(3) if x is None else x
        y = c.bind(group)(x.requires_grad_())
        yield y
        yield from torch.autograd.grad(y.square().sum(), x, materialize_grads=True)


def sizes(group, place, folder):
    found = ShardSizes.from_local(place + 2, group)
    yield torch.tensor(found)
    yield ShardSpec.of(found, group=group).gather(torch.full((place + 2,), place))


def plans(group, place, folder):
    x = vc.shard_v(drawn(4, 2), SIZES, group=group).clone().requires_grad_()
    plan = ExchangePlan.from_needed(torch.tensor([0, 2, 3]), SIZES, group)
    again = ExchangePlan.from_state_dict(plan.state_dict(), group)
    rows = [torch.arange(SIZES[place]), torch.tensor([0])]
    for made_plan in (plan, again, ExchangePlan.from_indices(rows, SIZES[place], group=group)):
        y = made_plan(x)
        yield y
        yield from torch.autograd.grad(y.square().sum(), x)


def graphs(group, place, folder):
    edges = torch.tensor([[0, 1, 2, 3, 4, 4], [1, 2, 3, 4, 0, 2]])
    graph = vc.graph.partition(Data(x=drawn(5, 3), edge_index=edges), group)
    model = vc.graph.distribute(made(SAGEConv, 3, 2), graph)
    loss = graph.mean(model(graph.x, graph.edge_index).square())
    loss.backward()
    yield loss
    yield from gradients_of(model)
    graph.save(folder / "graph")
    yield vc.graph.PartitionedGraph.load(folder / "graph", group).x
    yield vc.graph.replicated(loss.detach(), group)
    yield vc.graph.assign_sharded(drawn(3, 2) + place, 3, group=group)


def layers(group, place, folder):
    column = made(tp.ColumnParallelLinear, 4, 5, sizes=[2, 3], group=group)
    row = made(tp.RowParallelLinear, 5, 4, sizes=[2, 3], group=group)
    table = made(tp.VocabParallelEmbedding, 4, 4, sizes=SIZES, group=group)
    ids = torch.tensor([0, 3, 1])
    logits = column(table(ids))
    y = row(logits)
    losses = tp.vocab_parallel_cross_entropy(logits, ids, sizes=[2, 3], group=group)
    (y.square().sum() + losses.sum()).backward()
    yield from (y, losses)
    yield tp.clip_grad_norm_([*column.parameters(), *row.parameters()], 0.1, group=group)
    yield from gradients_of(nn.ModuleList([column, row, table]))


def data_parallel(group, place, folder):
    x = drawn(2, 3) + place
    summed = made(nn.Linear, 3, 2)
    summed(x).square().sum().backward()
    vc.data_parallel.sum_gradients(summed, group)
    yield from gradients_of(summed)
    model = made(nn.Linear, 3, 2)
    adam = partial(torch.optim.AdamW, lr=0.1)
    own = vc.data_parallel.ShardedGradients(model, adam, sizes=[5, 3], group=group)
    for _ in range(2):
        model(x).square().sum().backward()
        own.step()
        own.zero_grad()
    yield from (parameter.detach() for parameter in model.parameters())


def checkpoints(group, place, folder):
    """Saved by the ranks of one group, and loaded the other way round."""
    whole, ids = torch.arange(8.0).view(4, 2), torch.arange(4).split(SIZES)
    state = {"rows": vc.checkpoint.Rows(whole[ids[place]], ids[place], 4)}
    vc.checkpoint.save(state, folder / "saved", group=group)
    into = {"rows": vc.checkpoint.Rows(torch.zeros(SIZES[1 - place], 2), ids[1 - place], 4)}
    vc.checkpoint.load(into, folder / "saved", group)
    yield into["rows"].tensor


def proofs(group, place, folder):
    x = vc.shard_v(drawn(4, 2), SIZES, group=group)
    gather = partial(vc.all_gather_v, sizes=SIZES, group=group)
    vc.testing.dot_test(gather, x, group=group)
    vc.testing.gradgradcheck(lambda x: gather(x).sin(), x, group=group, fast_mode=True)
    yield to_dtensor(gather(x).split(2)[place], [2, 2], 0, group).full_tensor()


LAYERS = (primitives, sizes, plans, graphs, layers, data_parallel, checkpoints, proofs)


def in_each_layer(rank, folder):
    """Along one dimension and the other in turn, so that their groups may not be mixed."""
    failures = Failures()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    # of a mesh of more dimensions, by way of another slice
    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "one", "b"))["a", "b"]
    for layer in LAYERS:
        found = {}
        for kind in ("mesh", "slice", "group"):
            for name, place in (("a", rank // 2), ("b", rank % 2)):
                group = {"mesh": mesh, "slice": cube, "group": mesh}[kind][name]
                group = group.get_group() if kind == "group" else group
                other = rank % 2 if name == "a" else rank // 2  # which group of that dimension
                own = folder / f"{layer.__name__} {kind} {name} {other}"
                found[kind, name] = list(layer(group, place, own))
        for name in ("a", "b"):
            with failures.named(layer.__name__, name):
                assert found["group", name]
                for kind in ("mesh", "slice"):
                    pairs = zip(found[kind, name], found["group", name], strict=True)
                    assert all(torch.equal(got, want) for got, want in pairs)
    return failures


@pytest.mark.slow
def test_in_each_layer(worlds, tmp_path):
    assert_none(worlds.run(4, in_each_layer, tmp_path))


def refused(rank):
    """A mesh of two dimensions, and one without this rank: an error before any message."""
    x, count = torch.zeros(2, 2), 0
    grid = init_device_mesh("cpu", (1, 3), mesh_dim_names=("a", "b"))
    elsewhere = DeviceMesh("cpu", [[1, 2]], mesh_dim_names=("a", "b"))["b"]
    refusals = [(grid, r"one dimension of a DeviceMesh; .* Pick one: mesh\['a'\]")]
    if rank == 0:
        refusals += [(elsewhere, "rank 0 of the world is not in the mesh")]
    for mesh, message in refusals:
        for call in (
            lambda group: vc.all_reduce(x, group=group),
            lambda group: ShardSizes.from_local(2, group),
            lambda group: ExchangePlan.from_needed(torch.tensor([0]), [2, 2], group),
            lambda group: vc.graph.partition(Data(x=x, edge_index=x.long()), group=group),
            lambda group: vc.data_parallel.sum_gradients(nn.Linear(2, 2), group),
            lambda group: vc.data_parallel.ShardedGradients(
                nn.Linear(2, 2), torch.optim.SGD, group=group
            ),
            lambda group: tp.ColumnParallelLinear(2, 2, group=group),
            lambda group: vc.checkpoint.save({"x": x}, "nowhere", group=group),
            lambda group: vc.testing.dot_test(lambda x: x, x, group=group),
            lambda group: to_dtensor(x, [2, 2], 0, group),
        ):
            with pytest.raises(GroupError, match=message):
                call(mesh)
            count += 1
    return count, vc.all_reduce(torch.tensor(1)).item()


def test_a_mesh_that_is_no_group_is_refused_in_each_layer(worlds):
    assert worlds.run(3, refused) == [(20, 3), (10, 3), (10, 3)]
