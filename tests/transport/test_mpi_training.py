"""What PyTorch builds on its backends, on the one that mpi4py serves."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import varcomm
from varcomm.checkpoint import Rows, load, save

# torch 2.13 gave them these names
_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_reduce_scatter = (
    getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
)

ROWS = 12  # of a batch, which all worlds divide but 5


def network(dtype):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(7, 120), nn.Tanh(), nn.Linear(120, 120), nn.Tanh(), nn.Linear(120, 1)
    ).to(dtype)


def trained(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in batches:
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def batches(dtype):
    generator = torch.Generator().manual_seed(2)
    shapes = ((ROWS, 7), (ROWS, 1))
    return [
        [torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(4)
    ]


def parallel(rank, dtype, kind):
    size = dist.get_world_size()
    options = {"static_graph": True} if kind == "static graph" else {}
    # 0.02 MB: several buckets, the largest reduced in two rounds
    model = DistributedDataParallel(network(dtype), bucket_cap_mb=0.02, **options)
    if kind == "hook":
        model.register_comm_hook(None, fp16_compress_hook)
    rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    return trained(model, [(x[rows], y[rows]) for x, y in batches(dtype)])


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.float64, "plain"),
        (torch.float64, "static graph"),
        (torch.bfloat16, "plain"),
        (torch.float32, "hook"),
    ],
)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_data_parallel_is_one_process(mpi_worlds, world, dtype, kind):
    want = trained(network(dtype), batches(dtype))
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-3, torch.bfloat16: 3e-2}[dtype]
    for got in mpi_worlds.run(world, parallel, dtype, kind):
        for mine, one in zip(got, want, strict=True):
            torch.testing.assert_close(mine, one, atol=tolerance, rtol=tolerance)


def functions(rank, compiled):
    size, world = dist.get_world_size(), dist.group.WORLD

    def step(x):
        a = functional.all_reduce(x, "sum", world)
        b = _all_gather(x, 0, world)
        c = _reduce_scatter(b, "sum", 0, world)
        d = functional.all_to_all_single(b, [len(x)] * size, [len(x)] * size, world)
        return [functional.wait_tensor(y) for y in (a, b, c, d)]

    if compiled:
        step = torch.compile(step, backend="aot_eager", fullgraph=True)
    x = torch.arange(30_000) + rank
    a, b, c, d = step(x)
    each = [torch.arange(30_000) + r for r in range(size)]
    coalesced = functional.all_reduce_coalesced([x, x[:3]], "max", world)
    return [
        torch.equal(a, sum(each)),
        torch.equal(b, torch.cat(each)),
        torch.equal(c, size * each[rank]),
        torch.equal(d, torch.cat([each[rank]] * size)),
        torch.equal(functional.wait_tensor(coalesced[1]), each[-1][:3]),
        torch.equal(functional.broadcast(x, size - 1, world), each[-1]),
    ]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_functional_collectives(mpi_worlds, world, compiled):
    assert mpi_worlds.run(world, functions, compiled) == [[True] * 6] * world


def sharded(rank, folder):
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(7.0 * 3).reshape(7, 3).bfloat16()
    state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "step": 3}
    dcp.save(state, checkpoint_id=folder)
    loaded = {"w": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)]), "step": 0}
    dcp.load(loaded, checkpoint_id=folder)
    assert isinstance(loaded["w"], DTensor)
    return torch.equal(loaded["w"].full_tensor(), whole), loaded["step"]


def test_torch_checkpoint(mpi_worlds, tmp_path):
    assert mpi_worlds.run(3, sharded, str(tmp_path)) == [(True, 3)] * 3


def rows(rank, folder):
    """Varcomm's own, with sizes that differ between ranks."""
    size = dist.get_world_size()
    ids = torch.arange(rank, 11, size)
    whole = torch.arange(22.0).reshape(11, 2).bfloat16()
    save({"rows": Rows(whole[ids], ids, 11)}, folder)
    ids = ids.flip(0)
    state = {"rows": Rows(torch.zeros(len(ids), 2).bfloat16(), ids, 11)}
    load(state, folder)
    return torch.equal(state["rows"].tensor, whole[ids])


def test_own_checkpoint(mpi_worlds, tmp_path):
    assert mpi_worlds.run(3, rows, str(tmp_path)) == [True] * 3


def reversed_mean(rank):
    """A gradient of varcomm's operators through a model that torch.distributed replicates."""
    size = dist.get_world_size()
    sizes = [r + 1 for r in range(size)]
    model = DistributedDataParallel(nn.Linear(3, 2).double())
    with torch.no_grad():
        model.module.weight.fill_(1.0)
    x = torch.full((rank + 1, 3), float(rank), dtype=torch.float64)
    varcomm.all_gather_v(model(x), sizes).sum().backward()
    return model.module.weight.grad[0, 0].item()


def test_operators_within_a_replicated_model(mpi_worlds):
    # every rank sums over all rows, and DDP takes the mean
    got = mpi_worlds.run(3, reversed_mean)
    assert got == [float(sum(r * (r + 1) for r in range(3)))] * 3
