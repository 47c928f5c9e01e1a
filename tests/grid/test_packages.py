"""Networks of other packages, unmodified, on a split field; skipped where a package is missing."""

import pytest
import torch

import varcomm as vc

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def autoencoder():
    diffusers = pytest.importorskip("diffusers")
    return diffusers.AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=4,
    )


def unet():
    diffusers = pytest.importorskip("diffusers")
    return diffusers.UNet2DModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )


def video():
    pytest.importorskip("diffusers")
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d

    return WanCausalConv3d(4, 6, 3, padding=1)


def fno():
    models = pytest.importorskip("neuralop.models")
    return models.FNO((6, 6), 1, 1, hidden_channels=8, n_layers=2, positional_embedding=None)


def uno():
    models = pytest.importorskip("neuralop.models")
    return models.UNO(
        1,
        1,
        hidden_channels=8,
        n_layers=3,
        uno_out_channels=[8, 8, 8],
        uno_n_modes=[[4, 4]] * 3,
        uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2, 2]],
        positional_embedding=None,
        channel_mlp_skip="linear",
    )


def fcn():
    segmentation = pytest.importorskip("torchvision.models.segmentation")
    return segmentation.fcn_resnet50(weights=None, weights_backbone=None, num_classes=3)


def resnet():
    return pytest.importorskip("timm").create_model("resnet10t", num_classes=3)


def convnext():
    timm = pytest.importorskip("timm")
    dims = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}
    return timm.create_model("convnext_atto", num_classes=5, **dims)


def sample(model, x):
    return model(x).sample


# how to make and call a model, the shape of its input, the rows of three ranks and their dimension
MODELS = {
    "decoder": (autoencoder, lambda m, z: m.decode(z).sample, (1, 4, 11, 8), [5, 2, 4], 2),
    "autoencoder": (autoencoder, sample, (1, 3, 22, 8), [9, 2, 11], 2),
    "U-Net": (unet, lambda m, x: m(x, 3).sample, (1, 3, 16, 8), [9, 2, 5], 2),
    "causal convolution": (video, torch.nn.Module.__call__, (1, 4, 3, 9, 5), [4, 0, 5], 3),
    "FNO": (fno, torch.nn.Module.__call__, (1, 1, 16, 12), [5, 4, 7], 2),
    "UNO": (uno, torch.nn.Module.__call__, (1, 1, 16, 12), [5, 4, 7], 2),
    "FCN": (fcn, lambda m, x: m(x)["out"], (1, 3, 40, 32), [9, 12, 19], 2),
    "ResNet": (resnet, torch.nn.Module.__call__, (2, 3, 40, 32), [9, 12, 19], 2),
    "ConvNeXt": (convnext, torch.nn.Module.__call__, (1, 3, 64, 32), [9, 36, 19], 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_networks(worlds, name):
    MODELS[name][0]()  # skips where the package is missing
    for failed in worlds.run(3, differences, name, timeout=300):
        assert failed == []


def differences(rank, name):
    """Return what differs from one process; Fourier networks are of single precision."""
    torch.set_num_threads(1)
    make, call, shape, rows, dim = MODELS[name]
    dtype, bound = (torch.float32, 1e-5) if name in ("FNO", "UNO") else (torch.float64, 1e-12)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = make().eval()
        models.append(model if dtype == torch.float32 else model.double())
    alone, split = models
    whole = torch.randn(shape, dtype=dtype, requires_grad=True)
    expected = call(alone, whole)
    expected.square().sum().backward()
    sizes = [rows if at == dim else None for at in range(2, len(shape))]
    x = vc.grid.Grid(shape[2:], sizes=sizes).scatter(whole.detach()).requires_grad_()
    out = call(split, x)
    out.square().sum().backward()
    vc.data_parallel.sum_gradients(split)
    pairs = {"output": (out, expected), "input": (x.grad, whole.grad)}
    for key, one in alone.named_parameters():
        if one.grad is not None and one.grad.abs().max() > 1e-9:
            pairs[key] = split.get_parameter(key).grad, one.grad
    apart = {}
    for key, (found, want) in pairs.items():
        found = found.gather() if isinstance(found, vc.grid.Field) else found
        apart[key] = float((found - want).abs().max() / want.abs().max())
    return [f"{key}: {value}" for key, value in apart.items() if not value < bound]
