"""Fields: losses and gradients, moves between ranks, and what is refused."""

import copy
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import varcomm as vc
from tests.worlds import on_ranks, refused_alike

SIZES = {1: [7], 2: [5, 2], 3: [4, 0, 3], 5: [2, 0, 1, 3, 1]}


def field_of(ranks, channels=3, columns=5):
    torch.manual_seed(0)
    whole = torch.randn(2, channels, 7, columns, dtype=torch.float64)
    grid = vc.grid.Grid((7, columns), sizes=[SIZES[ranks], None])
    return whole, grid, grid.scatter(whole)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")
        self.norm = nn.BatchNorm2d(4)
        self.down = nn.Conv2d(4, 4, 3, stride=2)
        self.up = nn.ConvTranspose2d(4, 2, 3, stride=2)

    def forward(self, x):
        h = F.relu(self.norm(self.first(x)), inplace=True)
        return self.up(self.down(h)) + h[:, :2]


def model():
    torch.manual_seed(1)
    return Network().double()


@pytest.mark.parametrize("ranks", [1, 3])
@on_ranks()
def test_training(rank, ranks):
    whole, _, x = field_of(ranks)
    alone, split = model(), model()
    target = torch.randn(2, 2, 7, 5, dtype=torch.float64)
    for network, data in ((alone, whole), (split, x)):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            F.mse_loss(network(data), target).backward()
            if network is split:
                vc.data_parallel.sum_gradients(network)
            optimizer.step()
    for name, expected in alone.state_dict().items():
        torch.testing.assert_close(split.state_dict()[name], expected, rtol=1e-11, atol=1e-12)


LOSSES = {
    "mean": lambda grid, x: grid.mean(x.square()),
    "weighted": lambda grid, x: grid.mean(x.square(), weights=torch.arange(1.0, 8)[:, None]),
    "masked": lambda grid, x: grid.mean(x.square(), mask=torch.arange(5) > 1),
    "sum": lambda grid, x: grid.sum(x.cos(), mask=torch.arange(7)[:, None] > 3),
    "torch": lambda grid, x: F.l1_loss(x, x.detach() * 2),
    "pooled": lambda grid, x: F.adaptive_avg_pool2d(x, 1).flatten(1).square().sum(),
    "classes": lambda grid, x: F.cross_entropy(x, x.argmax(1), label_smoothing=0.1),
    "weighted classes": lambda grid, x: F.cross_entropy(x, labels(x), CLASSES, ignore_index=1),
    "smoothed classes": lambda grid, x: F.cross_entropy(
        x, labels(x), label_smoothing=0.2, ignore_index=0
    ),
    "smoothed and weighted classes": lambda grid, x: F.cross_entropy(
        x, labels(x), CLASSES, label_smoothing=0.2, ignore_index=2
    ),
    "no label on a rank": lambda grid, x: F.cross_entropy(
        x, labels(x).masked_fill(torch.arange(7)[:, None] > 3, -100), label_smoothing=0.2
    ),
    "shares of classes": lambda grid, x: F.cross_entropy(
        x, x.detach().softmax(1), CLASSES, label_smoothing=0.2
    ),
    "of an ordinary value": lambda grid, x: grid.sum(F.softplus(WEIGHT)) + x.sum(),
}
WEIGHT, CLASSES = torch.ones((), dtype=torch.float64), torch.tensor([1.0, 2, 5]).double()


def labels(x):
    return (x > 0).sum(1).clamp_max(2)


class Whole:
    """The means of a grid on one process."""

    def mean(self, x, mask=None, weights=None):
        factor = mask if weights is None else weights
        factor = torch.ones(()) if factor is None else factor
        return (x * factor).sum() / (torch.ones_like(x) * factor).sum()

    def sum(self, x, mask=None):
        return (x if mask is None else x * mask).sum()


@on_ranks(3)
def test_losses_count_once(rank):
    whole, grid, x = field_of(3)
    for name, loss in LOSSES.items():
        one = whole.clone().requires_grad_()
        expected = loss(Whole(), one)
        expected.backward()
        own = x.detach().requires_grad_()
        found = loss(grid, own)
        found.backward()
        assert abs(found.item() - expected.item()) < 1e-12, name
        torch.testing.assert_close(own.grad.gather(), one.grad, rtol=1e-12, atol=1e-12, msg=name)


@on_ranks(3)
def test_fields_know_one_process(rank):
    whole, grid, x = field_of(3)
    assert (x.shape, x.size(2), x.numel(), len(x), x.dim()) == (whole.shape, 7, 210, 2, 4)
    assert (x.dtype, x.device.type, x.ndim, x.is_floating_point()) == (whole.dtype, "cpu", 4, True)
    assert x.local.shape[2] == SIZES[3][rank] == len(grid.ranges[0])
    assert torch.equal(x.gather(), whole)
    there = x.gather(dst=1)
    assert torch.equal(there, whole) if rank == 1 else len(there[0, 0]) == 0
    assert float(x.sum()) == pytest.approx(whole.sum().item())
    assert bool((x > 9).any()) is False
    assert "7" in repr(x)
    assert torch.equal(copy.deepcopy(x).gather(), whole)
    x += 1
    x[:, 0] = 2.0
    whole += 1
    whole[:, 0] = 2.0
    assert torch.equal(x.gather(), whole)
    assert grid.max(x).item() == whole.max()


REFUSED = {
    "grid_sample": lambda x: F.grid_sample(x, torch.zeros(2, 4, 4, 2, dtype=x.dtype)),
    "max_pool2d_with_indices": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "sort along the split": lambda x: x.sort(dim=2),
    "median": lambda x: x.median(),
    "where with one argument": lambda x: torch.where(x > 0),
    "tolist": lambda x: x.tolist(),
    "not a valid value": lambda x: F.mse_loss(x, x * 2, reduction="max"),
    "roll without dims": lambda x: x.roll(1, ()),
    "fft_fftn of no dimension": lambda x: torch.fft.fftn(x, s=()),
    "needs a gradient": lambda x: x.requires_grad_().sum(1).backward(),
    "must have them all": lambda x: x + torch.ones(3, 1, dtype=x.dtype),
    "add with out=": lambda x: torch.add(x, 1, out=torch.empty(1)),
    "an index of tensors": lambda x: x[:, :, torch.tensor([0, 1])],
    "cannot be pickled": pickle.dumps,
    "operand behind the first": lambda x: F.conv2d(torch.ones(1, 3, 9, 9, dtype=x.dtype), x),
    "writing some rows": lambda x: x.__setitem__((slice(None), slice(None), 0), 0.0),
    "a slice with a negative step": lambda x: x[:, :, ::-1],
    "zero_ on rows that were fetched": lambda x: x.select(2, 0).zero_(),
    "mul_ on rows that were fetched": lambda x: x[:, :, -1][..., :2].mul_(0),
    "add_ on rows that were fetched": lambda x: x[:, 0, 0].T.add_(1),
    "embedding with max_norm": lambda x: F.embedding((x > 0).long(), torch.ones(2, 1), None, 1.0),
    "one_hot without num_classes": lambda x: F.one_hot((x > 0).long()),
    "a scale that keeps": lambda x: F.interpolate(x, scale_factor=1.1, mode="bicubic"),
    "a variance of torch.complex128": lambda x: torch.complex(x, x).var(),
    "with these arguments": lambda x: x.repeat_interleave(2, dim=3, output_size=10),
    "randn_like of a value": lambda x: torch.randn_like(x.mean()),
    "get grad of a value": lambda x: gradient_of_a_mean(x),
    "rows of several images": lambda x: torch.cat([x[:, 0].reshape(-1, 5)] * 2),
    "Pass dst= alone": lambda x: x.gather(0),
    "is torch's function": lambda x: x.gather(dim=1),
    "both dim and index": lambda x: x.gather(index=torch.zeros(2, 3, 7, 5).long()),
    "on one; field.gather": lambda x: x.gather(1, torch.zeros(2, 3, 7, 5).long(), dst=1),
    "3 ranks has no rank 3": lambda x: x.gather(dst=3),
    "has no rank -1": lambda x: x.gather(dst=-1),
    "has no rank 4": lambda x: vc.grid.Grid((7, 5)).scatter(None, src=4),
    "Call torch.nn.functional.batch_norm": lambda x: torch.batch_norm(
        x, torch.ones(3), torch.zeros(3), None, None, True, 0.1, 1e-5, False
    ),
    "Call torch.nn.functional.instance_norm": lambda x: torch.instance_norm(
        x, None, None, None, None, True, 0.1, 1e-5, False
    ),
    "Expected more than 1 spatial": lambda x: F.instance_norm(x[:, :, :1, :1]),
    "do not fit": lambda x: F.conv2d(x, torch.ones(1, 3, 9, 1, dtype=x.dtype)),
    "into an ordinary tensor": lambda x: torch.zeros(7, 5, dtype=x.dtype).add_(x[0, 0]),
    "no view, of a field": lambda x: of_a_row_before(x),
    "of a field that was written into": lambda x: of_a_row_of_a_view(x),
    "unsqueeze_ of a value": lambda x: x.mean().unsqueeze_(0),
    "set data of a value": lambda x: setattr(x.mean(), "data", torch.ones(())),
    "an index with two ellipses": lambda x: x[..., 0, ...],
    "without a gradient into": lambda x: torch.ones(x.shape).__setitem__(x > 0, 0.0),
}


def of_a_row_before(x):
    y = x + 1
    row = y[:, :, 0]
    y.mul_(2)
    return row * row


def of_a_row_of_a_view(x):
    y = x + 1
    row = y.transpose(0, 1)[:, :, 0]  # whose source exists in this line alone
    y.mul_(2)
    return row * row


def gradient_of_a_mean(x):
    mean = x.requires_grad_().mean()
    mean.retain_grad()
    mean.backward()
    return mean.grad


@pytest.mark.parametrize("words", REFUSED)
@on_ranks(3)
def test_refusals(rank, words):
    _, _, x = field_of(3)
    refused_alike(vc.ArgumentError, lambda: REFUSED[words](x.detach()), words)


@on_ranks(3)
def test_gather_of_an_index_is_that_of_torch(rank):
    whole, _, x = field_of(3)
    index = whole.argsort(1)[:, :2]
    expected = whole.gather(1, index)
    for found in (
        x.gather(1, index),
        x.gather(dim=1, index=index),
        x.gather(-3, index=index, sparse_grad=False),
        torch.gather(x, 1, index),
    ):
        assert torch.equal(found.gather(), expected)
        assert torch.equal(found.gather(dst=0), expected if rank == 0 else expected[:, :, :0])


@on_ranks(3)
def test_a_softmax_in_another_dtype(rank):
    whole, _, x = field_of(3)
    for dim in (1, 2):
        for form in (
            lambda y, dim: torch.softmax(y, dim, torch.float32),
            lambda y, dim: y.log_softmax(dim, torch.float32),
            lambda y, dim: F.softmax(y, dim, dtype=torch.float32),
        ):
            expected, found = form(whole, dim), form(x, dim).gather()
            torch.testing.assert_close(found, expected)


@on_ranks(3)
def test_what_takes_a_part(rank):
    _, _, x = field_of(3)
    with pytest.raises(vc.ArgumentError, match=r"field\.local"):
        vc.all_reduce(x)


WRONG_GRIDS = {
    "sum to 6": ((7, 5), {"sizes": [[3, 3, 0], None]}),
    "an entry for each": ((7, 5), {"sizes": [[4, 3, 0]]}),
    "splits 1": ((7, 5), {"sizes": [[4, 3, 0], [5, 0, 0]]}),
    "shape": ((7, -1), {}),
}


@pytest.mark.parametrize("words", WRONG_GRIDS)
@on_ranks(3)
def test_wrong_grids(rank, words):
    shape, how = WRONG_GRIDS[words]
    refused_alike(vc.ArgumentError, lambda: vc.grid.Grid(shape, **how), words)


@on_ranks(3)
def test_grids_that_differ(rank):
    refused_alike(vc.DisagreementError, lambda: vc.grid.Grid((7 + rank, 5)), "disagree")


@on_ranks(3)
def test_channels_are_dropped_alike(rank):
    _, _, x = field_of(3, channels=64)
    torch.manual_seed(rank)
    out = F.dropout2d(x.abs() + 1, 0.5)
    kept = out.gather() != 0
    assert torch.equal(kept.any((2, 3)), kept.all((2, 3)))
    assert 0 < kept.sum() < kept.numel()


@on_ranks(3)
def test_values_that_every_rank_has_drop_alike(rank):
    _, _, x = field_of(3, channels=64)
    torch.manual_seed(rank)  # dropout of a split field leaves generators apart
    dropped = F.dropout(x.mean((2, 3)), 0.5)
    assert torch.equal(dropped.local, vc.broadcast(dropped.local))
    assert 0 < (dropped.local == 0).sum() < dropped.numel()


DRAWS = {
    "randn_like": torch.randn_like,
    "dropout": lambda x: F.dropout(torch.ones_like(x), 0.5),
    "dropout in place": lambda x: F.dropout(torch.ones_like(x), 0.5, inplace=True),
    "normal_": lambda x: x.clone().normal_(),
    "generator": lambda x: x.clone().uniform_(generator=torch.Generator().manual_seed(1)),
    "attention": lambda x: F.scaled_dot_product_attention(
        torch.zeros_like(x), torch.zeros_like(x), torch.ones_like(x), dropout_p=0.5
    ),
}


@on_ranks(3)
def test_ranks_with_one_seed_draw_other_numbers(rank):
    grid = vc.grid.Grid((7, 5), sizes=[[3, 1, 3], None])
    x = grid.field(torch.zeros(2, 8, len(grid.ranges[0]), 5))
    for name, draw in DRAWS.items():
        torch.manual_seed(0)
        drawn = draw(x).gather()
        assert not torch.equal(drawn[:, :, :3], drawn[:, :, 4:]), name
        steps = torch.randint(1000, (4,))
        assert torch.equal(steps, vc.broadcast(steps)), name
        torch.manual_seed(0)
        assert torch.equal(drawn, draw(x).gather()), name


@on_ranks(3)
def test_leaves_made_like_a_field(rank):
    _, _, x = field_of(3)
    for like in (torch.zeros_like, lambda x, **how: torch.full_like(x, 2.0, **how)):
        leaf = like(x, requires_grad=True)
        assert leaf.is_leaf
        (leaf * x).sum().backward()
        assert torch.equal(leaf.grad.gather(), x.gather())
    value = torch.zeros_like(x.sum(), requires_grad=True)
    assert value.is_leaf


def low_waves(x):
    waves, out = torch.fft.rfft2(x), torch.zeros(2, 3, 7, 3, dtype=torch.complex128)
    out[:, :, :3, :2] = waves[:, :, :3, :2]  # as Fourier networks keep them
    out[:, :, -3:, :2] = waves[:, :, -3:, :2]
    return torch.fft.irfft2(out, s=x.shape[-2:])


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.float64)


def into(out, written, *_):
    return out


WRITTEN = {
    "slices": low_waves,
    "a view": lambda x: into(out := zeros(2, 2, 3, 7, 5), out[:, 0].__setitem__(..., x)),
    "a flat view": lambda x: into(out := zeros(210), out.view(x.shape).__setitem__(..., x)),
    "an earlier view": lambda x: into((out := zeros(*x.shape))[:, 0], out.__setitem__(..., x)),
    "copy_": lambda x: into(out := zeros(2, 3, 7, 5), out[:, 1].copy_(x[:, 0])),
    "add_": lambda x: into(out := zeros(2, 3, 7, 5), out.add_(x)),
    "index_copy_": lambda x: into(
        out := zeros(2, 5, 7, 5), out.index_copy_(1, torch.tensor([0, 2, 4]), x)
    ),
    "a loss": lambda x: into(out := zeros(2), out.__setitem__(0, x.mean())),
    "a sum of losses": lambda x: into(out := zeros(), out.add_(x.sum())),
}


@pytest.mark.parametrize("name", WRITTEN)
@on_ranks(3)
def test_an_ordinary_tensor_that_a_field_is_written_into(rank, name):
    whole, grid, x = field_of(3)
    weights = [torch.ones(3, 1, 1, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    one, split = (WRITTEN[name](y * w).square() for y, w in zip((whole, x), weights, strict=True))
    assert type(split) is torch.Tensor
    torch.testing.assert_close(split, one, rtol=1e-12, atol=1e-12)
    alone = partial(split.sum().backward, retain_graph=True)
    refused_alike(vc.ArgumentError, alone, "once per rank")
    one.mean().backward()
    grid.mean(split).backward()
    torch.testing.assert_close(vc.all_reduce(weights[1].grad), weights[0].grad, rtol=1e-12, atol=0)


@on_ranks(3)
def test_losses_add_up_in_an_ordinary_tensor(rank):
    whole, _, x = field_of(3)
    leaves = [whole.clone().requires_grad_(), x.detach().requires_grad_()]
    for leaf in leaves:
        loss = zeros()
        loss += leaf.square().mean()
        loss += leaf.cos().sum()
        loss.backward()
    torch.testing.assert_close(leaves[1].grad.gather(), leaves[0].grad, rtol=1e-12, atol=1e-12)


@on_ranks(3)
def test_dimensions_that_a_field_lacks(rank):
    whole, _, x = field_of(3)
    far = x.dim()
    for call in (
        lambda x: x.sum(far),
        lambda x: x.softmax(-far - 1),
        lambda x: x.max(far),
        lambda x: x.argmin(far),
        lambda x: x.var(far),
        lambda x: x.roll(1, far),
        lambda x: x.select(far, 0),
        lambda x: x.flatten(0, far),
        lambda x: x.cumsum(far),
        lambda x: torch.stack([x, x], far + 1),
        lambda x: torch.fft.fft(x, dim=far),
    ):
        with pytest.raises(IndexError, match="Dimension out of range"):
            call(x)
    one, first = x[:1, :1], whole[:1, :1]
    assert torch.equal(one.argmax(keepdim=True).gather(), first.argmax(keepdim=True))
    vector = torch.randn(whole.shape[-1], dtype=whole.dtype)
    torch.testing.assert_close(F.linear(x, vector).gather(), F.linear(whole, vector))
    torch.testing.assert_close(F.linear(vector, x[0, 0]).gather(), F.linear(vector, whole[0, 0]))
    for found, expected in zip((x > 0).max(2), (whole > 0).max(2), strict=True):
        assert torch.equal(found.gather(), expected)


@on_ranks(3)
def test_copies_of_parameters_are_parameters(rank):
    _, _, x = field_of(3)
    module = nn.Module()
    module.weight = nn.Parameter(x)
    found = copy.deepcopy(module)
    (found.weight * x).sum().backward()
    assert next(found.parameters()) is found.weight
    assert torch.equal(found.weight.grad.gather(), x.gather())
    assert not isinstance(copy.deepcopy(x), nn.Parameter)


@on_ranks(3)
def test_indices_of_other_classes(rank):
    whole, _, x = field_of(3)
    for index in (
        np.array([2]),
        np.array([2, 1]),
        (2, 1),
        range(2),
        np.int64(2),
        [True, False, True],
    ):
        assert torch.equal(x[:, index].gather(), whole[:, index])
    assert torch.equal(torch.norm(x, 2, 1).gather(), torch.norm(whole, 2, 1))
    refused_alike(vc.ArgumentError, lambda: x[True], "True or False")
    refused_alike(vc.ArgumentError, lambda: x[:, 1.5], "class float")


@on_ranks(3)
def test_hooks_get_split_gradients(rank):
    whole, _, x = field_of(3)
    grads = []
    for leaf in (x.detach(), whole.clone()):
        leaf.requires_grad_()
        middle = leaf * 1
        middle.mul_(1)
        middle.register_hook(lambda g: g / g.norm())
        middle.pow(3).sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[0].gather(), grads[1], rtol=1e-12, atol=1e-12)


@on_ranks(3)
def test_checkpointing_and_autocast(rank):
    whole, _, x = field_of(3)
    network = model()
    own = x.detach().requires_grad_()
    out = torch.utils.checkpoint.checkpoint(network, own, use_reentrant=False)
    out.square().mean().backward()
    one = whole.clone().requires_grad_()
    model()(one).square().mean().backward()
    torch.testing.assert_close(own.grad.gather(), one.grad, rtol=1e-11, atol=1e-12)
    with torch.autocast("cpu", torch.bfloat16):
        low = model().float()(x.float())
        expected = model().float()(whole.float())
    assert low.dtype == expected.dtype
    torch.testing.assert_close(low.gather(), expected, rtol=0.1, atol=0.1)


@on_ranks(3)
def test_in_place_activations_of_a_rank_without_rows(rank):
    whole = torch.linspace(-2, 2, 40, dtype=torch.float64).view(1, 2, 5, 4).requires_grad_()
    grid = vc.grid.Grid((5, 4), sizes=[[3, 0, 2], None])
    own = grid.scatter(whole.detach()).requires_grad_()
    for x in (whole, own):
        F.silu(x * 2, inplace=True).square().mean().backward()
    torch.testing.assert_close(own.grad.gather(), whole.grad, rtol=1e-12, atol=1e-12)


@on_ranks(3)
def test_running_statistics_of_samples_on_ranks(rank):
    torch.manual_seed(0)
    whole, found = torch.randn(9, 2, 4, dtype=torch.float64), []
    x = vc.grid.Grid((9, 2, 4), sizes=[[5, 0, 4], None, None]).scatter(whole)
    for data in (whole, x):
        found.append((torch.zeros(2, dtype=x.dtype), torch.ones(2, dtype=x.dtype)))
        F.instance_norm(data, *found[-1])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


@on_ranks(3)
def test_norms_in_forward_mode_over_backward(rank):
    def gradient(x, **how):
        y = F.group_norm(x, 2) + F.batch_norm(x, None, None, training=True)
        return torch.autograd.grad(y.sin().square().sum(), x, **how)[0]

    torch.manual_seed(0)
    whole = torch.randn(2, 4, 6, 8, dtype=torch.float64).requires_grad_()
    product = (gradient(whole, create_graph=True) * whole.detach().cos()).sum()
    (expected,) = torch.autograd.grad(product, whole)
    grid = vc.grid.Grid((6, 8), sizes=[[4, 0, 2], None])
    with forward_ad.dual_level():
        own = whole.detach()[:, :, grid.ranges[0].start : grid.ranges[0].stop]
        x = forward_ad.make_dual(own.clone().requires_grad_(), own.cos())
        found = gradient(grid.field(x)).gather()
        tangent = forward_ad.unpack_dual(found).tangent
    torch.testing.assert_close(tangent, expected, rtol=1e-11, atol=1e-12)


@on_ranks(3)
def test_writes_into_reshaped_rows_of_a_rank_with_one(rank):
    """A reshape is a view, or a copy, on all ranks as on one process."""
    turns = {
        "copy": lambda x: x.mT.reshape(-1),
        "view": lambda x: x.reshape(-1),
        "copy of some": lambda x: x[:, 1:].reshape(-1),
        "view of turned": lambda x: x.T.reshape(4, 5, 1),
        "copy in order": lambda x: x.T.contiguous(),
        "in order": lambda x: x.contiguous(),
    }
    for name, turned in turns.items():
        whole = torch.arange(20.0).view(5, 4)
        x = vc.grid.Grid((5, 4), sizes=[[1, 3, 1], None]).scatter(whole)
        for data in (whole, x):
            turned(data).zero_()
        assert torch.equal(x.gather(), whole), name


@on_ranks(3)
def test_second_derivatives_of_writes_through_views(rank):
    """Also of a rank without rows, whose views have no elements."""
    torch.manual_seed(0)
    whole, vector = torch.randn(5, 4).double(), torch.randn(4).double().requires_grad_()
    x = vc.grid.Grid((5, 4), sizes=[[2, 0, 3], None]).scatter(whole)

    def first(x, view):
        y = x.clone().requires_grad_() * 1
        view(y)[:, 1] = vector[1] * x[:, 0]
        return torch.autograd.grad(y.sin().sum(), vector, create_graph=True)[0]

    views = (
        torch.Tensor.contiguous, torch.positive, torch.Tensor.double, lambda y: y.reshape(5, 4),
        lambda y: y.to(torch.float64), lambda y: F.dropout(y, 0.5, training=False),
    )  # fmt: skip
    for view in views:
        found, expected = vc.all_reduce(first(x, view)), first(whole, view)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        (twice,) = torch.autograd.grad(found.square().sum() / 3, vector)
        (of_one,) = torch.autograd.grad(expected.square().sum(), vector)
        torch.testing.assert_close(vc.all_reduce(twice), of_one, rtol=1e-12, atol=1e-12)


NORMS = {
    "batch": lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    "evaluation": lambda x, w, b: F.batch_norm(
        x, 100 * torch.arange(1, 7).to(x.dtype), x.new_ones(6), w, b
    ),
    "instance": lambda x, w, b: F.instance_norm(x, None, None, w, b),
    "group": lambda x, w, b: F.group_norm(x, 3, w, b),
    "layer": lambda x, w, b: F.layer_norm(x, x.shape[1:]) * w.sum(),
    "deviation": lambda x, w, b: x / x.std((0, 2, 3), keepdim=True) * w.sum(),
}


@on_ranks(3)
def test_norms_of_large_means_have_the_error_of_torch(rank):
    torch.manual_seed(0)
    whole = torch.randn(2, 6, 17, 5) + 100 * torch.arange(1.0, 7).view(-1, 1, 1)
    weights, grid = [torch.rand(6) + 0.5, torch.randn(6)], vc.grid.Grid((17, 5))
    own = grid.field(whole[:, :, grid.ranges[0].start : grid.ranges[0].stop].clone())
    for name, function in NORMS.items():
        exact, alone, found = (
            gradients(function, x, [w.to(x.dtype) for w in weights])
            for x in (whole.double(), whole, own)
        )
        found = [found[0].gather(), found[1].gather(), *map(vc.all_reduce, found[2:])]
        for of, one, other in zip(exact, alone, found, strict=True):
            limit = torch.maximum((one - of).abs().max(), of.abs().max() * 1e-6)
            assert (other - of).abs().max() <= limit, name


def gradients(function, x, weights):
    leaves = [leaf.detach().requires_grad_() for leaf in (x, *weights)]
    out = function(*leaves)
    numbers = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape).sin()
    given = torch.autograd.grad((out * numbers).sum(), leaves, allow_unused=True)
    pairs = zip(given, leaves, strict=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for g, x in pairs)]


@on_ranks(3)
def test_reshapes_without_elements(rank):
    def empty(shape, *sizes):
        grid = vc.grid.Grid(shape, sizes=sizes)
        return grid.field(torch.zeros([len(part) for part in grid.ranges]))

    assert empty((1, 0), None, [0, 0, 0]).reshape(-1).shape == (0,)
    assert empty((2, 0, 3), None, None, [1, 0, 2]).reshape(0, 3).shape == (0, 3)
    with pytest.raises(vc.ArgumentError, match="without elements"):
        empty((3, 1, 0, 1), [1, 0, 2], None, None, None).reshape(2, 0, 1)


@on_ranks(3)
def test_rows_that_narrow_selects(rank):
    whole, _, x = field_of(3)
    for dim, start, length in ((2, 1, 3), (2, -2, 2), (-2, -3, 2), (3, -2, 2), (2, 7, 0)):
        part = x.narrow(dim, start, length).gather()
        assert torch.equal(part, whole.narrow(dim, start, length))
    for dim, start, length in ((2, 5, 3), (2, -8, 2), (3, 5, 2)):
        with pytest.raises((IndexError, RuntimeError)):
            x.narrow(dim, start, length)
