"""Grids beside data parallelism, on meshes of ranks; files of which a rank reads its block."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import varcomm as vc
from tests.worlds import on_ranks

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
SHAPE = (9, 6)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.SiLU(),
        nn.Conv2d(4, 4, 3, stride=2, padding=1),
        nn.GroupNorm(2, 4),
        nn.ConvTranspose2d(4, 1, 2, stride=2),
    ).double()


def images(count):
    draws = torch.Generator().manual_seed(1)
    return torch.randn(count, 2, *SHAPE, dtype=torch.float64, generator=draws)


def stepped(model, optimizer):
    optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def beside_one_process(found, step):
    """Compare parameters after two steps with those of one process on all images."""
    model = network()
    model.eval()  # running statistics, because groups of ranks have images of their own
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        step(model).backward()
        expected = stepped(model, optimizer)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("way", ["sum_gradients", "sum_hook", "ShardedGradients"])
@on_ranks(4)
def test_two_groups_of_images_on_two_ranks_each(rank, way):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "rows"))
    grid = vc.grid.Grid(SHAPE, mesh["rows"], [[7, 2], None])
    replica, rows = mesh.get_local_rank("data"), grid.ranges[0]
    whole = images(2)
    own = whole[replica : replica + 1, :, rows.start : rows.stop]
    model = network()
    model.eval()
    parameters = [*model.parameters()]
    run, sharded = model, way == "ShardedGradients"
    if way == "sum_hook":
        run = nn.parallel.DistributedDataParallel(model)
        run.register_comm_hook(None, vc.data_parallel.sum_hook)
    optimizer = (
        vc.data_parallel.ShardedGradients(
            parameters, functools.partial(torch.optim.AdamW, lr=1e-2), reduce="sum"
        )
        if sharded
        else torch.optim.AdamW(parameters, lr=1e-2)
    )
    for _ in range(2):
        optimizer.zero_grad()
        loss = grid.mean(run(grid.field(own)).square()) / mesh["data"].size()
        loss.backward()
        if way == "sum_gradients":
            vc.data_parallel.sum_gradients(model)
        found = stepped(model, optimizer)
    beside_one_process(found, lambda model: model(whole).square().mean())


@on_ranks(4)
def test_norms_over_all_groups_of_images(rank):
    """A mesh that splits images too has one BatchNorm over all of them."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = images(3)
    grid = vc.grid.Grid((3, 2, *SHAPE), mesh, [[2, 1], None, [7, 2], None])
    model, alone = network(), network()
    found = model(grid.scatter(whole if rank == 0 else None))
    expected = alone(whole)
    torch.testing.assert_close(found.gather(), expected, **CLOSE)
    for a, b in zip(model.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@on_ranks(3)
def test_low_precision_beside_one_process(rank):
    whole = images(1).float()
    model, alone = network().float(), copy.deepcopy(network().float())
    grid = vc.grid.Grid(SHAPE, sizes=[[8, 0, 1], None])
    found = []
    for net, x, mean in ((model, grid.scatter(whole), grid.mean), (alone, whole, torch.mean)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = mean(net(x).float().square())
        loss.backward()
        found.append(loss.item())
    vc.data_parallel.sum_gradients(model)
    assert abs(found[0] - found[1]) < 2e-2 * found[1]
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        assert (a.grad - b.grad).norm() < 5e-2 * max(b.grad.norm(), 1e-2)


def blocks(rank, folder):
    zarr = pytest.importorskip("zarr")
    grid = vc.grid.Grid(SHAPE, sizes=[[6, 0, 3], None])
    rows, columns = (slice(part.start, part.stop) for part in grid.ranges)
    x = grid.field(torch.from_numpy(zarr.open_array(f"{folder}/x.zarr")[:, rows, columns]))
    y = nn.functional.avg_pool2d(x[None], 3, 1, 1)[0, 0]
    zarr.open_array(f"{folder}/y.zarr", mode="r+")[rows, columns] = y.local.numpy()


def test_a_rank_reads_and_writes_its_block_of_a_zarr_array(worlds, tmp_path):
    zarr = pytest.importorskip("zarr")
    whole = images(1)[0]
    made = {"x": (whole.shape, (2, 3, 6)), "y": (SHAPE, (3, 6))}  # chunks of one rank each
    for name, (shape, chunks) in made.items():
        path = str(tmp_path / f"{name}.zarr")
        array = zarr.create_array(path, shape=shape, dtype="f8", chunks=chunks)
        array[:] = whole.numpy() if name == "x" else 0.0
    worlds.run(3, blocks, str(tmp_path))
    found = torch.from_numpy(zarr.open_array(str(tmp_path / "y.zarr"))[:])
    torch.testing.assert_close(found, nn.functional.avg_pool2d(whole[None], 3, 1, 1)[0, 0])
