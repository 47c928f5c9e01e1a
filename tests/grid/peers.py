"""Numbers of the cases that peers test on split tensors, by their files.

A case has a shape, the ranks along each dimension, a function of a field and of parameters, and the
shapes of these. The channels of PhysicsNeMo's cases, which do not matter by its own words, are 16
where a tensor stays below 8 MB, else 1.
"""

import itertools
from math import prod

import torch
from torch.nn import functional as F

from tests.grid.functions import attend


def at_most_four(partition):
    """Return a partition, or those of at most four ranks that are near it."""
    if prod(partition) <= 4:
        return [partition]
    split = [dim for dim, ranks in enumerate(partition) if ranks > 1]
    groups = [{dim: min(partition[dim], 4)} for dim in split]
    groups += [dict.fromkeys(pair, 2) for pair in itertools.combinations(split, 2)]
    return [tuple(group.get(dim, 1) for dim in range(len(partition))) for group in groups]


def each(value, dims):
    return [*value] if isinstance(value, tuple) else [value] * dims


def conv(shape, kernel, padding=0, stride=1, dilation=1, out=10, transposed=False):
    dims, channels = len(shape) - 2, shape[1]
    function = getattr(F, f"conv_transpose{dims}d" if transposed else f"conv{dims}d")
    how = {"stride": stride, "padding": padding, "dilation": dilation}
    ends = (channels, out) if transposed else (out, channels)
    return lambda x, w, b: function(x, w, b, **how), [(*ends, *each(kernel, dims)), (out,)]


def pool(kind, shape, kernel, padding=0, stride=None, dilation=1):
    function = getattr(F, f"{kind}_pool{len(shape) - 2}d")
    more = {"dilation": dilation} if kind == "max" else {}
    return lambda x: function(x, kernel, stride, padding, **more), []


# --- DistDL, https://github.com/distdl/distdl/tree/main/tests

# test_conv_feature.py, test_pooling.py: ranks, shape, kernel, padding, stride, dilation
WINDOWS = [
    ((1, 1, 2, 2), (1, 5, 10, 10), 3, 1, 1, 1),
    ((1, 1, 2, 2), (1, 5, 10, 10), 5, 2, 2, 1),
    ((1, 1, 2, 2), (1, 5, 5, 5), 3, 1, 2, 1),
    ((1, 1, 2, 2), (1, 5, 6, 10), 5, 2, 4, 1),
    ((1, 1, 2, 2), (1, 5, 10, 8), 5, 1, 1, 1),
    ((1, 1, 2, 2), (1, 5, 8, 8), 4, 1, 1, 1),
    ((1, 1, 2, 1, 2), (1, 3, 5, 5, 6), 5, 2, (2, 2, 1), 1),
    ((1, 1, 4), (1, 3, 15), 3, 1, 1, 1),
    ((1, 1, 2, 2), (1, 3, 10, 10), 5, 1, 1, 2),
    ((1, 1, 4, 4), (1, 3, 10, 10), 5, 2, 2, 1),
]
CONVOLVED = [
    ((1, 1, 3, 3, 2), (1, 5, 50, 50, 50), (5, 4, 3), (1, 1, 2), (3, 1, 2), (3, 3, 1)),
    ((1, 1, 2, 2), (1, 5, 20, 20), 7, 3, 2, 1),
    ((1, 1, 1, 1), (1, 3, 16, 16), 3, 1, 1, 1),
    # test_conv_1d.py, test_conv_3d.py
    ((1, 1, 3), (1, 5, 10), 3, 0, 1, 1),
    ((1, 1, 3, 2, 2), (1, 5, 10, 10, 10), 3, 0, 1, 1),
    # test_general_conv2d.py, without its split channels
    ((1, 1, 2, 3), (1, 5, 10, 10), 3, 0, 1, 1),
    # test_halo_exchange.py
    ((1, 1, 3, 3), (1, 1, 10, 7), 3, 0, 1, 1),
    ((1, 1, 3), (1, 1, 10), 2, 0, 2, 1),
]
POOLED = [
    ((1, 1, 3, 3, 2), (1, 5, 50, 50, 50), (5, 4, 3), (1, 1, 1), (3, 1, 2), (3, 3, 1)),
    ((1, 1, 1, 4), (10, 64, 150, 150), 7, 3, 2, 1),
    # test_halo_mixin.py
    ((1, 1, 4), (1, 1, 10), 2, 0, 2, 1),
]


def windows():
    for ranks, shape, *how in WINDOWS + CONVOLVED:
        yield shape, ranks, *conv(shape, *how)


def pools():
    for ranks, shape, *how in WINDOWS + POOLED:
        for kind in ("max", "avg"):
            if kind == "max" or how[-1] == 1:  # torch has no average of dilated windows
                yield shape, ranks, *pool(kind, shape, *how)


# test_upsampling.py: ranks, shape, and the lengths of the result at scales 1, 2 and 1.5
UPSAMPLED = [
    ((1, 1, 5), (3, 4, 17), ((17,), (34,), (24,))),
    ((1, 1, 3, 4), (3, 4, 13, 17), ((13, 17), (26, 34), (20, 24))),
    ((1, 1, 2, 3, 3), (3, 4, 7, 13, 17), ((7, 13, 17), (14, 26, 34), (11, 20, 24))),
]


def upsampling():
    for ranks, shape, lengths in UPSAMPLED:
        linear = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(shape) - 2]
        for scale, length in zip((1, 2, 1.5), lengths, strict=True):
            for mode, align in (("nearest", None), (linear, True), (linear, False)):
                for how in ({"size": length}, {"scale_factor": scale}):
                    how |= {"mode": mode, "align_corners": align}
                    yield shape, ranks, lambda x, how=how: F.interpolate(x, **how), []


# test_batchnorm.py: ranks without its split channels, shape, eps, momentum, affine, tracked
NORMALISED = [
    ((2, 1, 2), (4, 3, 10), 1e-5, 0.1, True, False),
    ((1, 1, 4), (4, 4, 10), 1e-3, 0.01, True, True),
    ((1, 1, 2), (7, 13, 11), 1e-5, 0.01, True, True),
    ((2, 1), (7, 13), 1e-5, 0.1, True, False),
    ((1, 1, 2, 2), (7, 13, 11, 3), 1e-5, 0.1, True, False),
    ((1, 1, 2), (7, 13, 11), 1e-5, 0.1, False, False),
    ((1, 1, 2), (7, 13, 11), 1e-5, 0.1, False, True),
]


def batch_norms():
    """Normalise in training, and then in evaluation, with running statistics if these are kept."""
    for ranks, shape, eps, momentum, affine, tracked in NORMALISED:

        def function(x, *of, how=(momentum, eps), tracked=tracked):
            running = [make(x.shape[1], dtype=x.dtype) for make in (torch.zeros, torch.ones)]
            running = running if tracked else [None, None]
            weight, bias = of or (None, None)
            trained = F.batch_norm(x, *running, weight, bias, True, *how)
            return trained + F.batch_norm(x.sin(), *running, weight, bias, not tracked, *how)

        yield shape, ranks, function, [(shape[1],)] * 2 * affine


# test_loss.py: ranks and shape
LOST = [
    ((4,), (11,)),
    ((1, 4), (7, 17)),
    ((2, 2), (7, 7)),
    ((1, 2, 4), (5, 7, 11)),
    ((2, 2, 2), (5, 7, 11)),
    ((1, 4, 2, 2), (9, 5, 7, 11)),
    ((2, 4, 2, 1), (9, 5, 7, 11)),
]
LOSSES = (
    "l1_loss mse_loss poisson_nll_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div"
)


def losses():
    for name in LOSSES.split():

        def function(x, name=name):
            shares, target = x.sigmoid(), x.detach().cos().square()
            loss, more = getattr(F, name), ["batchmean"] * (name == "kl_div")
            found = [loss(shares, target, reduction=r) for r in ("none", "mean", "sum", *more)]
            return sum(found[1:], found[0])

        for ranks, shape in LOST:
            yield shape, ranks, function, []


def others():
    yield (1, 12), (1, 4), F.linear, [(6, 12)]  # test_linear.py, without its split outputs
    for ranks in ((3, 1, 1), (1, 3, 1), (1, 1, 3)):  # test_padnd.py
        for sides in ((1, 2, 1, 2, 1, 2), (0, 0, 0, 2, 1, 0)):
            yield (3, 4, 5), ranks, lambda x, sides=sides: F.pad(x, sides), []


# --- PhysicsNeMo, https://github.com/NVIDIA/physicsnemo/tree/main/test/domain_parallel/ops

LARGE = 1 << 20  # elements


def image(*lengths, channels=16):
    return (2, channels if 2 * channels * prod(lengths) <= LARGE else 1, *lengths)


def on(dims, *split):
    """Return the ranks along each dimension: three along one, or two along each of two."""
    return tuple((1 if dim not in split else 3 if len(split) == 1 else 2) for dim in range(dims))


def convolutions():
    """test_convolution.py: it marks as failing what is not 3, stride 1, or 2, stride 2.

    Of transposed ones it marks all but 2, stride 2; and all gradients on two dimensions.
    """
    lengths = [(32,), (256,), (32, 32), (128, 128), (256, 256), (32, 32, 32), (64, 64, 64)]
    turned = [*lengths[:2], (32, 32), (64, 32), (512, 256), (64, 64), (512, 512), *lengths[-2:]]
    for transposed, chosen in ((False, lengths), (True, turned)):
        for sides, kernel, stride in itertools.product(chosen, (2, 3), (1, 2)):
            shape, dims = image(*sides), len(sides) + 2
            made = conv(shape, kernel, 0, stride, out=8, transposed=transposed)
            for split in ((2,), (2, 3))[: len(sides)]:
                yield shape, on(dims, *split), *made


def pooling():
    """test_pooling.py: it marks as failing strides other than the kernel."""
    for dims, short, long in ((1, 32, 256), (2, 32, 256), (3, 32, 128)):
        for side, kernel, stride in itertools.product((short, long), (2, 4), (2, 4)):
            shape = image(*[side] * dims)
            for split in ((dims + 1,), (dims, dims + 1))[: min(dims, 2)]:
                for kind in ("max", "avg"):
                    yield shape, on(dims + 2, *split), *pool(kind, shape, kernel, 0, stride)


def interpolation():
    """test_interpolation.py."""
    for more, height, scale in itertools.product(((32,), (32, 32)), (32, 256), (2, 3)):
        shape = image(height, *more)
        dims = len(shape)
        for split in ((2 if dims == 4 else 4,), (dims - 2, dims - 1)):
            yield shape, on(dims, *split), lambda x, s=scale: F.interpolate(x, scale_factor=s), []


def padding():
    """test_padding.py, and circular padding, which it has not."""
    for sides in ((2, 2, 2, 2), (1, 2, 3, 4)):
        for mode, split in itertools.product(
            ("constant", "reflect", "replicate", "circular"), ((2,), (2, 3))
        ):
            value = 1.234 if mode == "constant" else None

            def padded(x, sides=sides, mode=mode, value=value):
                return F.pad(x, sides, mode, value)

            yield image(128, 128), on(4, *split), padded, []
    for mode in ("reflect", "replicate", "circular"):

        def convolved(x, w, b, mode=mode):
            return F.conv2d(F.pad(x, (2, 2, 2, 2), mode), w, b)

        yield (2, 8, 256, 256), on(4, 2), convolved, [(8, 8, 3, 3), (8,)]


def normalisation():
    """test_normalization.py: it marks as failing a layer norm with weights."""
    yield (2, 16, 128), on(3, 2), lambda x: F.layer_norm(x, (128,)), []
    yield (2, 16, 128), on(3, 2), lambda x, w, b: F.layer_norm(x, (128,), w, b), [(128,), (128,)]
    for groups in (1, 4):
        for shape in ((2, 256, 16, 256), (2, 256, 64, 64)):  # of 256 x 256 rows
            yield shape, on(4, 2), lambda x, g=groups: F.group_norm(x, g), []
            affine = [(256,), (256,)]
            yield shape, on(4, 2), lambda x, w, b, g=groups: F.group_norm(x, g, w, b), affine
    # test_compile_ops.py and test_async_collective_gradients.py, eagerly
    yield (2, 8, 32, 32), on(4, 2), lambda x, w, b: F.group_norm(x, 4, w, b), [(8,), (8,)]
    yield (2, 4, 16), on(3, 2), lambda x, w, b: F.group_norm(x, 2, w, b), [(4,), (4,)]


def attention():
    """test_sdpa.py: causal attention it marks as failing; queries or keys alone are split too."""
    for batch, tokens, dim in itertools.product((1, 4), (256, 512), (32, 64)):
        for causal in (False, True):

            def attended(x, causal=causal):
                return attend(x, x.sin(), x.cos(), is_causal=causal)

            yield (batch, 8, tokens, dim), on(4, 2), attended, []
    for batch in (1, 2):
        keys, queries = (batch, 8, 256, 32), (batch, 8, 64, 32)
        yield keys, on(4, 2), lambda x, q: attend(q, x, x.sin()), [queries]
        yield keys, on(4, 2), lambda x, k, v: attend(x, k, v), [queries, queries]


def neighbourhoods(x, kernel):
    """Attend to the nearest `kernel` points along each of (samples, *points, heads, channels)."""
    dims = x.dim() - 3
    keys, values, queries = x.sin(), x.cos(), x[(..., *[None] * dims)]
    for dim in range(1, dims + 1):
        keys, values = (_windows(y, dim, kernel) for y in (keys, values))
    last = tuple(range(-dims, 0))
    scores = (queries * keys).sum(dims + 2, keepdim=True) * x.shape[-1] ** -0.5
    shares = (scores - scores.amax(last, keepdim=True)).exp()
    return (shares * values).sum(last) / shares.sum(last)


def _windows(x, dim, kernel):
    """Return the nearest rows of each row, as a further dimension; at the ends, those of others."""
    found = x.unfold(dim, kernel, 1).movedim(dim, -1)
    shape, side = found.shape[:-1], kernel // 2
    found = F.pad(found.flatten(1, -2), (side, side), "replicate")
    return found.unflatten(1, shape[1:]).movedim(-1, dim)


def neighbourhood_attention():
    """test_natten.py, written with functions of torch."""
    for kernel in (3, 5):
        for points, split in (
            ((32,), 1), ((64,), 1), ((16, 16), 1), ((32, 16), 1), ((16, 16), 2), ((16, 32), 2),
            ((8, 8, 8), 1), ((16, 8, 8), 1), ((8, 8, 8), 2), ((8, 16, 8), 2), ((8, 8, 8), 3),
            ((8, 8, 16), 3),
        ):  # fmt: skip
            shape = (1, *points, 4, 32 if len(points) < 3 else 4)
            yield shape, on(len(shape), split), lambda x, k=kernel: neighbourhoods(x, k), []


def selection():
    """test_select.py, test_index.py, test_unbind.py, test_cross.py, test_unary_ops.py."""
    cube, ids = (128, 128, 128), torch.arange(256) * 37 % 128
    yield cube, on(3, 2), lambda x: x.select(1, 2), []
    yield cube, on(3, 2), lambda x: x.index_select(1, ids), []
    yield (32, 32, 32), on(3, 2), lambda x: x.index_select(1, ids[:8] % 32), []
    mask = torch.tensor([False, True, False, True])
    for key in (3, slice(10, 50), (slice(None), slice(1, 3)), (slice(None), mask), (..., 0)):
        yield (291, 4), on(2, 0), lambda x, key=key: x[key], []
    yield (19, 3, 4), on(3, 0), lambda x: x.unbind(1)[1], []
    for shape in ((19, 3), (9, 3), (13, 3)):  # of 3 rows on each of 3 ranks
        yield shape, on(2, 0), lambda x: torch.linalg.cross(x, x.sin()), []
        yield shape, on(2, 0), lambda x: torch.cross(x, x.sin()) + x.cross(x.cos(), dim=-1), []
        yield shape, on(2, 0), lambda x, axis: torch.linalg.cross(x, axis), [(1, 3)]
        yield shape, on(2, 0), lambda x, y: torch.linalg.cross(x, y), [shape]
    yield (3, 4, 3), on(3, 1), lambda x, y: torch.cross(y, x), [(1, 4, 3)]
    for at in range(-4, 4):
        yield (100, 30, 100), on(3, 1), lambda x, at=at: x.unsqueeze(at), []
        yield (100, 14, 22, 100), on(4, 1, 2), lambda x, at=at: x.unsqueeze(at), []


def views():
    """test_view_ops.py, and what test_compile_ops.py compiles."""
    merged = (4, 128, 8, 4)
    for split, shape, new in (
        (1, merged, (4, 128, 32)),
        (1, (4, 128, 32), merged),
        (1, (4, 128, 8), (4, -1)),
        (1, merged, (4, -1, 32)),
        (0, merged, (4, 128, 32)),
        (1, (4, 64, 8, 4), (4, 64, 32)),
        (0, (6,), (2, 3, 1)),
    ):
        yield shape, on(len(shape), split), lambda x, new=new: x.view(new), []
        yield shape, on(len(shape), split), lambda x, new=new: torch.reshape(x, new), []
    yield (2, 64, 8, 4), on(4, 1), lambda x: x.reshape(2, 64, -1).view(2, 64, 8, 4), []


def reductions():
    """test_reductions.py of the folder above."""
    for name, dim in itertools.product(("sum", "mean", "amax", "amin"), (None, 0, (0, 1))):
        how = {} if dim is None else {"dim": dim}
        yield (2, 128, 2), on(3, 1), lambda x, n=name, how=how: getattr(x, n)(**how), []
    yield (4, 64, 16), on(3, 1), lambda x: x.mean(dim=1), []

    def consecutive(x):
        target = x.cos()
        mask = target > 0
        return (torch.sum(mask * (x - target) ** 2.0, (1,)) / torch.sum(mask)).mean()

    yield (2, 400, 5), on(3, 1), consecutive, []


TABLES = {
    "DistDL": (windows, pools, upsampling, batch_norms, losses, others),
    "PhysicsNeMo": (
        convolutions,
        pooling,
        interpolation,
        padding,
        normalisation,
        attention,
        neighbourhood_attention,
        selection,
        views,
        reductions,
    ),
}
CASES = {
    f"{peer} {table.__name__.replace('_', ' ')}": [
        (shape, near, *how) for shape, ranks, *how in table() for near in at_most_four(ranks)
    ]
    for peer, tables in TABLES.items()
    for table in tables
}
