"""U-Net and Fourier operator on split fields, beside one process."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import varcomm as vc
from tests.worlds import on_ranks
from varcomm import ArgumentError
from varcomm.models import FNO, UNet

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
SMALL = {"hidden_channels": 4, "num_groups": 2, "num_levels": 2}
MODELS = {
    "U-Net": (lambda: UNet(2, 3, **SMALL), (21, 13)),
    "U-Net on the globe": (lambda: UNet(2, 1, **SMALL, periodic=True), (13, 16)),
    "U-Net with attention": (lambda: UNet(2, 1, **SMALL, num_heads=2), (10, 9)),
    "U-Net of one level": (lambda: UNet(2, 1, hidden_channels=4, num_levels=0), (5, 4)),
    "FNO": (lambda: FNO(2, 1, hidden_channels=3, num_blocks=2, modes=(3, 4)), (13, 10)),
    "FNO, padded": (
        lambda: FNO(2, 1, hidden_channels=3, num_blocks=2, modes=(2, 2), padding=3),
        (7, 8),
    ),
}


def compare(name, cut, mesh=None):
    """Compare a result, and gradients of the input and of parameters, with one process."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    image = torch.randn(2, 2, *shape, dtype=torch.float64)
    grid = vc.grid.Grid(shape, mesh, [cut(n, d) for d, n in enumerate(shape)] if cut else None)
    rows, columns = (slice(part.start, part.stop) for part in grid.ranges)
    alone, whole = copy.deepcopy(model), image.clone().requires_grad_()
    expected = alone(whole)
    expected.sin().sum().backward()
    own = image[:, :, rows, columns].clone().requires_grad_()
    found = model(grid.field(own))
    grid.sum(found.sin()).backward()
    vc.data_parallel.sum_gradients(model)
    torch.testing.assert_close(found.gather(), expected, **CLOSE)
    torch.testing.assert_close(own.grad, whole.grad[:, :, rows, columns], **CLOSE)
    for (name, a), (_, b) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, **CLOSE, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", MODELS)
@on_ranks(1, 3)
def test_models_on_rows(rank, name, ranks):
    torch.set_num_threads(1)
    compare(name, None)
    if ranks == 3:
        compare(name, lambda n, dim: [n - 2, 0, 2] if dim == 0 else None)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if "attention" not in name])
@on_ranks(4)
def test_models_on_a_mesh(rank, name):
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2))
    compare(name, lambda n, dim: [n - 1, 1] if dim == 0 else [n // 3, n - n // 3], mesh)


@on_ranks(2)
def test_filters_send_only_the_frequencies_that_are_kept(rank):
    shape, channels = (12, 40), 2
    model = FNO(1, 1, hidden_channels=channels, num_blocks=1, modes=(2, 3))
    x = vc.grid.Grid(shape).scatter(torch.randn(1, 1, *shape))
    with torch.no_grad(), vc.trace() as calls:
        out = model(x)
    # four transpositions send half of three columns of complex numbers, and nothing else travels
    assert sum(call.sent for call in calls if call.name != "transpose_v") == 0
    sent = sum(vc.all_gather_v(torch.tensor([sum(call.sent for call in calls)]), [1, 1])).item()
    assert sent == 4 * (channels * shape[0] * 3 * 8) // 2
    assert out.local.shape[2:] == (6, 40)


@on_ranks(4)
def test_attention_on_a_mesh_is_refused_by_name(rank):
    grid = vc.grid.Grid((8, 8), init_device_mesh("cpu", (2, 2)))
    with pytest.raises(ArgumentError, match="joins two split dimensions"):
        UNet(1, 1, **SMALL, num_heads=2)(grid.scatter(torch.randn(1, 1, 8, 8)))


def test_keys_of_checkpoints_name_parts():
    keys = UNet(1, 1, hidden_channels=4, num_levels=1).state_dict()
    parts = ["encoder", "down_blocks", "down", "up", "up_blocks", "middle", "decoder"]
    assert [*dict.fromkeys(key.split(".")[0] for key in keys)] == parts


def test_sizes_are_checked():
    with pytest.raises(ArgumentError, match=r"hidden_channels 6 .* num_groups 4"):
        UNet(1, 1, hidden_channels=6)
    with pytest.raises(ArgumentError, match="num_levels"):
        UNet(1, 1, hidden_channels=4, num_levels=-1)
    for model in (UNet, FNO):
        with pytest.raises(TypeError, match="hidden_channels"):
            model(1, 1)
    with pytest.raises(ArgumentError, match="modes"):
        FNO(1, 1, hidden_channels=2, num_blocks=1, modes=(2,))
    model = FNO(1, 1, hidden_channels=2, num_blocks=1, modes=(3, 3))
    with pytest.raises(ArgumentError, match=r"4 x 9 points has 2 frequencies"):
        model(torch.randn(1, 1, 4, 9))
