"""Functions of fields send the rows that other ranks need, and no others."""

import random

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import varcomm as vc
from tests.grid.comparing import lengths_of
from tests.worlds import on_ranks

ROWS, COLUMNS = 13, 6
SIZES = [[4, 0, 9], [5, 4, 4], [1, 1, 11], [2, 11, 0]]
IMAGE = (2, 4, ROWS, COLUMNS)


def weights(*shape):
    return torch.linspace(0.5, 1, torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def conv(kernel, **how):
    return lambda x: F.conv2d(x, weights(2, 4 // how.get("groups", 1), kernel, 3), **how)


def transposed(kernel, **how):
    return lambda x: F.conv_transpose2d(x, weights(4, 3, kernel, 3), **how)


def resized(rows, mode, **how):
    return lambda x: F.interpolate(x, (rows, 7), mode=mode, **how)


# functions of one or several operands, which another function makes of the field
MOVED = {
    "conv2d": conv(3, padding=1),
    "conv2d of 1": conv(1),
    "conv2d without padding": conv(4),
    "conv2d of stride 2": conv(3, stride=2, padding=1),
    "conv2d of stride 4": conv(2, stride=4, padding=1),
    "conv2d dilated": conv(3, dilation=(3, 1), padding=(3, 1)),
    "conv2d dilated of stride 2": conv(2, dilation=(4, 1), stride=2),
    "conv2d large": conv(7, padding=3),
    "conv2d in groups": conv(3, groups=2),
    "conv2d same": conv(4, padding="same"),
    "circular": lambda x: F.pad(x, (0, 0, 2, 1), "circular"),
    "reflect": lambda x: F.pad(x, (0, 0, 2, 1), "reflect"),
    "replicate": lambda x: F.pad(x, (0, 0, 2, 1), "replicate"),
    "constant": lambda x: F.pad(x, (0, 0, 2, 1)),
    "conv_transpose2d of 2": transposed(2, stride=2),
    "conv_transpose2d of 3": transposed(3, stride=2, padding=1, output_padding=1),
    "conv_transpose2d of 5": transposed(5, padding=2),
    "conv_transpose2d of stride 4": transposed(2, stride=4),
    "conv_transpose2d dilated": transposed(2, dilation=(5, 1)),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "max_pool2d of 3": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max_pool2d ceil": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "max_pool2d dilated": lambda x: F.max_pool2d(x, (2, 1), 1, dilation=4),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "avg_pool2d ceil": lambda x: F.avg_pool2d(x, 2, 3, 1, ceil_mode=True),
    "lp_pool2d": lambda x: F.lp_pool2d(x, 2.0, 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (5, 2)),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (4, 2)),
    "unfold": lambda x: x.unfold(2, 3, 2),
    "F.unfold": lambda x: F.unfold(x, 3, padding=1),
    "fold": (lambda x: F.unfold(x, 3, padding=1), lambda x: F.fold(x, IMAGE[2:], 3, padding=1)),
    "nearest": resized(21, "nearest"),
    "nearest, fewer rows": resized(4, "nearest"),
    "nearest-exact": resized(5, "nearest-exact"),
    "bilinear": resized(21, "bilinear"),
    "bilinear, fewer rows": resized(4, "bilinear"),
    "bilinear aligned": resized(17, "bilinear", align_corners=True),
    "bicubic": resized(17, "bicubic"),
    "bicubic, fewer rows": resized(3, "bicubic"),
    "area": resized(5, "area"),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": (lambda x: x[:, :, :12], lambda x: F.pixel_unshuffle(x, 2)),
    "roll": lambda x: x.roll(3, 2),
    "roll back": lambda x: x.roll(-4, 2),
    "fftshift": lambda x: torch.fft.fftshift(x, 2),
    "flip": lambda x: x.flip(2),
    "slice": lambda x: x[:, :, 2:9],
    "slice with a step": lambda x: x[:, :, 1::3],
    "one row": lambda x: x[:, :, 5],
    "parts": lambda x: x.split(5, 2)[1],
    "differences": lambda x: x.diff(dim=2),
    "of two slices": lambda x: x[:, :, 3:] * x[:, :, :-3],
    "cat": lambda x: torch.cat([x, x], 2),
    "cat with a part": (lambda x: (x, x[:, :, 3:8]), lambda *both: torch.cat(both, 2)),
    "cat of channels in other sizes": (
        lambda x: (x, x.flip(2)[:, :, 1:].roll(1, 2), x),
        lambda x, other, _: torch.cat([x[:, :, 1:], other], 1),
    ),
    "sum in other sizes": (
        lambda x: (x, F.interpolate(F.max_pool2d(x, 2), x.shape[2:])),
        lambda x, other: x + other,
    ),
    "windows": (
        lambda x: F.pad(x, (0, 0, 0, 3)).transpose(1, 3),
        lambda x: x.unflatten(2, (4, 4)).transpose(1, 2),
    ),
    "linear": (lambda x: x.flatten(1).view(2, 4, -1).mT, lambda x: F.linear(x, weights(5, 4))),
    "of each element": lambda x: F.gelu(x) * x[:, :1] + 3,
    "along channels": lambda x: x.softmax(1) + x.sum(1, keepdim=True) + F.normalize(x, dim=1),
    "layer_norm of channels": lambda x: F.layer_norm(x.movedim(1, 3), (4,)),
    "batch_norm in evaluation": lambda x: F.batch_norm(x, weights(4), weights(4)),
    "keys that every rank has": (
        lambda x: x.flatten(2).mT,
        lambda x: F.scaled_dot_product_attention(x, weights(2, 5, 4), weights(2, 5, 4)),
    ),
}


def along(x):
    """Return the split dimension of a field, and the rows of each rank."""
    (split,) = x.grid_layout.splits
    return split.dim, split.sizes


def reads(function, operands, at, dim, out):
    """Return which entries along `out` of a result read which rows of an operand: each NaN."""
    found = []
    for row in range(operands[at].shape[dim]):
        changed = [x.clone() for x in operands]
        changed[at].select(dim, row).fill_(torch.nan)
        y = function(*changed).isnan()
        found.append(y.movedim(out, 0).flatten(1).any(1) if out is not None else y.any()[None])
    return torch.stack(found)


def owners(sizes):
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def rows_to(function, fields, y):
    """Return the bytes that each rank needs of each other one, [of, to]."""
    whole, ranks = [x.gather().detach() for x in fields], len(along(fields[0])[1])
    out, sizes = along(y) if y.grid_layout.splits else (None, None)
    found = torch.zeros(ranks, ranks, dtype=torch.int64)
    for at, x in enumerate(fields):
        dim, own = along(x)
        matrix, of = reads(function, whole, at, dim, out), owners(own)
        size = x.element_size() * x.numel() // x.shape[dim]
        for to in range(ranks):
            needed = matrix.any(1) if sizes is None else matrix[:, owners(sizes) == to].any(1)
            found[:, to] += torch.bincount(of[needed], minlength=ranks) * size
    return found.fill_diagonal_(0)


@pytest.mark.parametrize("name", MOVED)
@on_ranks(3)
def test_rows(rank, name):
    """Forward, a row goes to the ranks that need it; backward, its gradients come back."""
    *prepare, function = MOVED[name] if isinstance(MOVED[name], tuple) else (MOVED[name],)
    failed = []
    for sizes in SIZES:
        grid = vc.grid.Grid(IMAGE[2:], sizes=[sizes, None])
        x = grid.scatter(torch.arange(1.0, 2 * 4 * ROWS * COLUMNS + 1).double().view(IMAGE))
        made = prepare[0](x) if prepare else x
        error = differs(rank, function, made if isinstance(made, tuple) else (made,))
        failed += [f"{sizes}: {error}"] * bool(error)
    return failed


def differs(rank, function, made):
    """Return a line if this rank sends more or less than other ranks need."""
    fields = [x.detach().requires_grad_() for x in made]
    with vc.trace() as forward:
        y = function(*fields)
    with vc.trace() as backward:
        y.backward(torch.ones_like(y))
    needed = rows_to(function, fields, y.detach())
    found = forward.total.sent, backward.total.sent
    expected = int(needed[rank].sum()), int(needed[:, rank].sum())
    return "" if found == expected else f"sent {found}, needed {expected}"


def drawn(draw):
    """Return a function of an image whose numbers are drawn, and these."""
    kind = draw.choice(["conv", "transposed", "max", "avg", "resized", "adaptive", "roll", "diff"])
    kernel, stride, dilation = (draw.randint(1, 5) for _ in range(3))
    how = {"stride": (stride, 1), "padding": (draw.randint(0, 3), 1), "dilation": (dilation, 1)}
    side = min(how["padding"][0], kernel // 2)
    rows = draw.randint(2, 30)  # one is a mean
    mode = draw.choice(["nearest", "nearest-exact", "bilinear", "bicubic", "area"])
    function = {
        "conv": conv(kernel, **how),
        "transposed": transposed(kernel, **how),
        "max": lambda x: F.max_pool2d(x, (kernel, 1), (stride, 1), (side, 0), (dilation, 1)),
        "avg": lambda x: F.avg_pool2d(x, (kernel, 1), (stride, 1), (side, 0)),
        "resized": resized(rows, mode),
        "adaptive": lambda x: F.adaptive_avg_pool2d(x, (rows, 3)),
        "roll": lambda x: x.roll(rows, 2),
        "diff": lambda x: x.diff(dim=2),
    }[kind]
    return function, f"{kind} {kernel}, {how}, {rows} rows, {mode}"


@pytest.mark.slow
@on_ranks(2, 3, 5)
def test_rows_of_many_functions(rank, ranks):
    failed = []
    for seed in range(300):
        draw = random.Random(seed)
        function, numbers = drawn(draw)
        length = draw.randint(2, 24)
        whole = torch.arange(1.0, 2 * 4 * length * 3 + 1).double().view(2, 4, length, 3)
        try:
            function(whole)
        except RuntimeError:
            continue  # torch refuses these numbers
        sizes = lengths_of(draw, (length, 3), [0], [ranks])
        error = differs(rank, function, (vc.grid.Grid((length, 3), sizes=sizes).scatter(whole),))
        failed += [f"seed {seed}, {numbers}, {sizes[0]}: {error}"] * bool(error)
    return failed


# --- Statistics: values that a rank sends to each other one, forward and backward

POINTS = 2 * 4 * COLUMNS  # results over rows
WORD = 2  # values by which a sum of up to 1 KiB compares the calls of ranks
SUM = POINTS + WORD
STATISTICS = {
    "sum": (lambda x: x.sum(2), SUM, SUM),
    "sum of all": (lambda x: x.sum(), 1 + WORD, 1 + WORD),
    "mean": (lambda x: x.mean((0, 2, 3)), 4 + WORD, 4 + WORD),
    "any": (lambda x: (x > 3).any(2), SUM, 0),
    "norm": (lambda x: x.norm(dim=2), SUM, SUM),
    "prod": (lambda x: x.prod(2), POINTS, POINTS),
    "logsumexp": (lambda x: x.logsumexp(2), POINTS + SUM, SUM),
    "softmax": (lambda x: x.softmax(2), POINTS + SUM, SUM),
    "argmax": (lambda x: x.argmax(2), 2 * POINTS, 0),
    # the extremes, how many elements are equal to them on all ranks, and a sum with their gradient
    "amax": (lambda x: x.amax(2), POINTS + 2 * SUM, SUM),
    # the extremes, their places, and a sum with their gradient
    "max with indices": (lambda x: x.max(2).values, 2 * POINTS + SUM, SUM),
    # of each group the mean in two numbers, and the variance; and the share of this rank. Backward
    # of norms of channels sums two numbers of each group
    "var": (lambda x: x.var(2), 3 * POINTS + 1, 3 * POINTS + 1),
    "std of all": (lambda x: x.std(), 4, 4),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), 13, 8 + WORD),
    "instance_norm": (lambda x: F.instance_norm(x), 25, 16 + WORD),
    "group_norm": (lambda x: F.group_norm(x, 2), 13, 8 + WORD),
    "layer_norm": (lambda x: F.layer_norm(x, x.shape[1:]), 7, 7),
    "rms_norm": (lambda x: F.rms_norm(x, x.shape[1:]), 2 + WORD, 2 + WORD),
    "adaptive_avg_pool2d of 1": (lambda x: F.adaptive_avg_pool2d(x, 1), SUM, SUM),
    "einsum": (lambda x: torch.einsum("bchw,bdhw->bcd", x, x.sin()), 32 + WORD, 32 + WORD),
    "mse_loss": (lambda x: F.mse_loss(x, x.detach().sin()), 1 + WORD, 1 + WORD),
    "kl_div": (
        lambda x: F.kl_div(x, x.detach().cos(), reduction="batchmean"),
        1 + WORD,
        1 + WORD,
    ),
    "cross_entropy": (  # the sum, and the number of labels that count
        lambda x: F.cross_entropy(x, (x[:, 0].detach() > 300).long()),
        2 * (1 + WORD),
        1 + WORD,
    ),
}


def sent_by(function, sizes):
    """Return the bytes that this rank sends forward and backward."""
    grid = vc.grid.Grid(IMAGE[2:], sizes=[sizes, None])
    x = grid.scatter(torch.arange(1.0, 2 * 4 * ROWS * COLUMNS + 1).double().view(IMAGE))
    x = x.detach().requires_grad_()
    with vc.trace() as forward:
        y = function(x)
    with vc.trace() as backward:
        if y.requires_grad:
            y.backward(torch.ones_like(y))
    return forward.total.sent, backward.total.sent


@pytest.mark.parametrize("name", STATISTICS)
@on_ranks(3)
def test_statistics(rank, name):
    function, *values = STATISTICS[name]
    expected = tuple(n * 8 * 2 for n in values)
    found = {tuple(sizes): sent_by(function, sizes) for sizes in SIZES}
    return [f"{s}: sent {n}, needed {expected}" for s, n in found.items() if n != expected]


@on_ranks(3)
def test_cumulative_sums(rank):
    """A rank needs the sums of the ranks before it, and returns their gradients."""
    for sizes in SIZES:
        assert sent_by(lambda x: x.cumsum(2), sizes) == (POINTS * 8 * (2 - rank), POINTS * 8 * rank)


@on_ranks(3)
def test_attention(rank):
    """A rank needs all keys and values; if causal, those before its last query, if it has any."""
    row = 2 * 4 * COLUMNS * 8  # of keys, as of values
    for sizes in SIZES:
        ends = [sum(sizes[: r + 1]) for r in range(3)]
        others = [r for r in range(3) if r != rank]

        def attend(x, **how):
            return F.scaled_dot_product_attention(x, x.sin(), x.cos(), **how)

        own, rest = sizes[rank], ROWS - sizes[rank]
        assert sent_by(attend, sizes) == (2 * row * own * 2, 2 * row * rest)
        by_hand = sent_by(lambda x: (x.sin() @ x.mT).softmax(-1) @ x.cos(), sizes)
        assert by_hand == (2 * row * own * 2, 2 * row * rest)
        later = sum(sizes[r] > 0 for r in others if r > rank)
        before = (ends[rank] - own) * (own > 0)
        found = sent_by(lambda x: attend(x, is_causal=True), sizes)
        assert found == (2 * row * own * later, 2 * row * before)


@on_ranks(3)
def test_a_field_and_its_transpose(rank):
    """A rank needs its rows of the transpose, of which it has columns."""
    for sizes in SIZES:
        x = vc.grid.Grid((ROWS, ROWS), sizes=[sizes, None]).scatter(
            torch.arange(169.0).view(13, 13)
        )
        x = x.detach().requires_grad_()
        with vc.trace() as forward:
            y = x.sin() * x.mT
        with vc.trace() as backward:
            y.backward(torch.ones_like(y))
        own = sizes[rank] * (ROWS - sizes[rank]) * 4
        assert (forward.total.sent, backward.total.sent) == (own, own)
        torch.testing.assert_close(y.gather(), x.gather().sin() * x.gather().mT)


TRANSFORMS = {  # rows that are read and made, and bytes of a value before and behind
    "fft": (lambda x: torch.fft.fft(x, dim=2).abs(), ROWS, ROWS, 8, 16),
    "rfft": (lambda x: torch.fft.rfft(x, dim=2).abs(), ROWS, 7, 8, 16),
    "irfft": (lambda x: torch.fft.irfft(torch.complex(x, x), dim=2), ROWS, 24, 16, 8),
    "irfft of 6": (lambda x: torch.fft.irfft(torch.complex(x, x), 6, 2), 4, 6, 16, 8),
    "fft of 5 rows": (lambda x: torch.fft.fft(x, 5, 2).abs(), 5, 5, 8, 16),
    "fft2": (lambda x: torch.fft.fft2(x).abs(), ROWS, ROWS, 8, 16),
    "along columns": (lambda x: torch.fft.fft(x).abs(), 0, 0, 0, 0),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@on_ranks(3)
def test_transforms(rank, name):
    """Rows are exchanged for a part of the longest other dimension, and back."""
    function, read, made, before, behind = TRANSFORMS[name]
    columns, failed = vc.ShardSizes.balanced(COLUMNS, 3)[rank], []
    for sizes in SIZES:
        start, end = sum(sizes[:rank]), sum(sizes[: rank + 1])
        own = min(end, read) - min(start, read)
        ends = [min(at, read) * made // max(read, 1) for at in (start, end)]
        after = ends[1] - ends[0]
        values = (
            2
            * 4
            * torch.tensor(
                [
                    [own * (COLUMNS - columns), (made - after) * columns],
                    [(read - own) * columns, after * (COLUMNS - columns)],
                ]
            )
        )
        expected = tuple((values @ torch.tensor([before, behind])).tolist())
        if (found := sent_by(function, sizes)) != expected:
            failed.append(f"{sizes}: sent {found}, needed {expected}")
    return failed


# Columns travel with the rows that are read, of padding too, or with those of the result.
CORNERS = {
    "conv2d": (lambda x: F.conv2d(x, weights(1, 4, 3, 3)), "read"),
    "conv2d padded": (lambda x: F.conv2d(x, weights(1, 4, 3, 3), padding=(2, 1)), "padding"),
    "max_pool2d": (lambda x: F.max_pool2d(x, 4, 1), "read"),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), "read"),
    "bilinear, fewer rows": (lambda x: F.interpolate(x, (6, 4), mode="bilinear"), "result"),
    "area": (lambda x: F.interpolate(x, (5, 4), mode="area"), "result"),
}


@pytest.mark.parametrize("name", CORNERS)
@on_ranks(4)
def test_corners(rank, name):
    """On a mesh of two dimensions rows travel, and then columns, each as few as possible."""
    function, rows_of = CORNERS[name]
    mesh, sizes = init_device_mesh("cpu", (2, 2)), ([6, 7], [4, 2])
    x = vc.grid.Grid(IMAGE[2:], mesh, sizes).scatter(torch.arange(624.0).double().view(IMAGE))
    with vc.trace() as forward:
        y = function(x)
    places, needed = divmod(rank, 2), []
    for dim, own in zip((-2, -1), sizes, strict=True):
        matrix, of = reads(function, [x.gather()], 0, dim, dim), owners(own)
        to = owners(y.grid_layout.by_dim[dim].sizes)
        both = [[matrix[of == a][:, to == b].any(1).sum().item() for b in (0, 1)] for a in (0, 1)]
        needed.append(both)
    (i, j), (rows, columns) = places, needed
    height = y.local.shape[2]
    if rows_of != "result":
        height = rows[0][i] + rows[1][i] + 2 * (rows_of == "padding")
    elements = rows[i][1 - i] * sizes[1][j] + columns[j][1 - j] * height
    assert forward.total.sent == 2 * 4 * 8 * elements
