"""Functions of fields, each with the shape of its input; rows are written as N and columns as M."""

import copy
import math

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import varcomm as vc

N, M = "rows", "columns"
IMAGE = (2, 4, N, M)
LINE = (2, 4, N)
BOX = (1, 2, N, 4, M)
TOKENS = (2, N, 8)


def conv(dims, **how):
    groups, kernel = how.pop("groups", 1), how.pop("kernel", 3)
    kernels = kernel if isinstance(kernel, tuple) else (kernel,) * dims
    shapes = [(6, (4 if dims < 3 else 2) // groups, *kernels), (6,)]
    return lambda x, w, b: getattr(F, f"conv{dims}d")(x, w, b, groups=groups, **how), shapes


def transposed(dims, **how):
    groups, kernel = how.pop("groups", 1), how.pop("kernel", 3)
    channels = 4 if dims < 3 else 2
    shapes = [(channels, 3, *(kernel,) * dims), (3 * groups,)]
    function = getattr(F, f"conv_transpose{dims}d")
    return lambda x, w, b: function(x, w, b, groups=groups, **how), shapes


def padded(mode, sides, **how):
    function, shapes = conv(2, **how)
    return lambda x, w, b: function(F.pad(x, sides, mode), w, b), shapes


def norm(name, *shapes, **how):
    return lambda x, *p: getattr(F, name)(x, *p, **how), list(shapes)


def only(function):
    return function, []


def with_rows_last(x):
    """Let a gradient lie in memory with the rows last: torch's batch norm is else wrong for one.

    A value that every rank has takes no hook, because each rank has a part of its gradient.
    """
    is_whole = isinstance(x, vc.grid.Field) and not x.grid_layout.splits
    if x.requires_grad and not is_whole:
        x.register_hook(lambda g: g.contiguous())
    return x


def batch_norm(x, w, b):
    mean, var = torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype)
    out = with_rows_last(F.batch_norm(x, mean, var, w, b, True, 0.3))
    return out * var.view(-1, *[1] * (x.dim() - 2)) + mean.view(-1, *[1] * (x.dim() - 2))


def attend(*args, **how):
    with sdpa_kernel(SDPBackend.MATH):  # which alone has second derivatives
        return F.scaled_dot_product_attention(*args, **how)


def attention(x, w, causal=False):
    q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in F.linear(x, w).chunk(3, -1))
    return attend(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


def masked(x, w):
    """Attend to the three tokens before, with one head of keys for two of queries."""
    q, k, v = F.linear(x, w).split([8, 4, 4], -1)
    q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (q, k, v))
    place = torch.arange(x.shape[1])
    mask = (place[:, None] >= place) & (place[:, None] - place < 3)
    out = attend(q, k, v, mask, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


def to_other_tokens(x, w):
    q, k, v = F.linear(x, w).chunk(3, -1)
    return attend(q, k[:, ::2], v[:, ::2], is_causal=True)


def by_hand(x, w):
    q, k, v = F.linear(x, w).chunk(3, -1)
    return (q @ k.transpose(1, 2) / math.sqrt(8)).softmax(-1) @ v


def of_pixels(x, w):
    """Attend from all pixels to all, and to those before: the tokens of a rank have gaps."""
    q, k, v = F.linear(x.flatten(2).transpose(1, 2), w).chunk(3, -1)
    return attend(q, k, v) + attend(q, k, v, is_causal=True)


def linear_attention(x, w):
    q, k, v = F.linear(x, w).chunk(3, -1)
    return q @ (k.softmax(1).transpose(1, 2) @ v)


def next_of(labels):
    return F.pad(labels, (0, 1), value=0)[:, 1:]


def windows_of(x, w):
    """Attention in windows of 2 x 2, shifted by one, as Swin's."""
    n, c, rows, columns = x.shape
    x = F.pad(x, (0, columns % 2, 0, rows % 2)).roll((-1, -1), (2, 3)).permute(0, 2, 3, 1)
    high, wide = x.shape[1] // 2, x.shape[2] // 2
    parts = x.view(n, high, 2, wide, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
    q, k, v = (F.linear(parts, w)).chunk(3, -1)
    out = attend(q, k, v).view(n, high, wide, 2, 2, c)
    out = out.permute(0, 1, 3, 2, 4, 5).reshape(n, 2 * high, 2 * wide, c)
    return out.roll((1, 1), (1, 2))[:, :rows, :columns].permute(0, 3, 1, 2)


def fourier(x, w):
    modes = torch.fft.rfft2(x)
    return torch.fft.irfft2(modes * w.view(1, -1, 1, 1), s=x.shape[-2:])


def called(name, *args):
    """Call a function of torch by its name in ``varcomm.grid.functions()``."""
    places = [(torch, name), (F, name), (torch.Tensor, name), (torch.Tensor, f"__{name}__")]
    return getattr(*next(place for place in places if hasattr(*place)))(*args)


def all_of(words, given=lambda x: (x.sigmoid() * 0.8 + 0.1,)):
    """Add up what each function returns for some arguments, with weights that differ."""

    def function(x):
        found = [called(word, *given(x)) for word in words.split()]
        return sum(value.to(x.dtype) * (0.1 * at + 0.3) for at, value in enumerate(found))

    return lambda x: function(x) + x.square(), []


def in_place(words, *args):
    """As :func:`all_of`, of functions that change their first argument."""
    return all_of(words, lambda x: ((x.sigmoid() * 0.8 + 0.1).clone(), *args))


def two(x):
    return x, x[:, :1].sigmoid() + 0.5


def booleans(x):
    return x > 0, x[:, :1] < 1


def written(x):
    y = x.clone()
    y[:, 0] = x[:, 1].cos()
    y[:, 2:] = 2.0
    return torch.empty_like(x).copy_(y * x)


def rewritten(x):
    """Write into a field and views of it; each derivative passes through all of them."""
    y = (x * x).neg_()
    part = y[:, :2].transpose(2, 3)
    y[:, 1:].mul_(x[:, :1])
    part.add_(x.mean())
    y[:, 3] = 0.5
    return F.leaky_relu(y, 0.2, inplace=True)


def with_operators(x):
    y, mask = x.clone(), (x > 0) | (x < -1)
    y += x[:, :1]
    y -= 1
    y *= x
    y /= 2
    y **= 2
    mask &= True & (x < 1)
    mask |= False | (x > 2)
    y = y + (2 // (x.detach().abs() + 1)) + 5 % (x.detach().abs() + 1) + 1.2**x + (2 - x) + (1 + x)
    y = y + 2 / (x.abs() + 1) + 2 * x + (x.detach() // 0.3) + (x % 0.7) + 1.0 * (True ^ mask)
    return torch.where(~mask, y, y.clone().__idiv__(2.0).cos())


def made(x):
    zeros = x.new_empty(1).zero_() + x.new_zeros(1) + x.new_ones(1) + x.new_full((1,), 2.0)
    zeros = zeros + x.new_tensor([1.0]) + torch.empty_like(x).fill_(1.0) + torch.zeros_like(x)
    shapes = x.size(0) + x.numel() + x.nelement() + len(x) + 0 * len(f"{x}{x!r}")
    assert torch.can_cast(x.dtype, torch.result_type(x, 1))
    return x * zeros + torch.ones_like(x) * shapes + torch.full_like(x, 0.5)


def drawn(x):
    """Numbers that each rank draws for itself, of which only the layout is compared."""
    u, y = x.sigmoid(), torch.zeros_like(x)
    drawn = torch.rand_like(x) + torch.randn_like(x) + torch.randint_like(x, 9) + u.bernoulli()
    drawn = drawn + y.clone().normal_() + y.clone().uniform_() + y.clone().bernoulli_()
    return x + (drawn * 0).detach()


def dropped(x):
    out = torch.dropout_(x.clone(), 0.0, True) + F.alpha_dropout(x, 0.0) + F.dropout(x, 1.0)
    out = (
        out
        + F.dropout1d(x.sum(2), 0.0).unsqueeze(2)
        + F.dropout2d(x, 0.0)
        + torch.feature_dropout(x, 0.0, True)
    )
    return out + F.dropout3d(x.unsqueeze(2), 0.0).squeeze(2) + F.rrelu(x)


def converted(x):
    y = x.detach()
    numbers = y.float() + y.half() + y.bfloat16() + y.int() + y.long() + y.bool() + y.cpu()
    numbers = numbers + y.to(torch.float32) + y.type(torch.float32) + y.type_as(y.float())
    return numbers.double() * x * copy.deepcopy(y) * (x * 1).detach()


def differentiated(x):
    y = x.detach().requires_grad_()
    y.pow(3).sum().backward()
    return torch.autograd.grad(y.pow(3).sum(), y)[0] * y.grad * x.square()


def numbers_of_fft(words):
    def function(x):
        return sum(called_fft(word, x).abs().square().sum() for word in words.split())

    return function, []


def called_fft(word, x):
    of_half = word in ("hfft", "irfft", "irfft2", "irfftn")
    dims = {"dim": (2, 3)} if word[-1] in "2n" else {"dim": 2}
    return getattr(torch.fft, word)(torch.complex(x, x.sin()) if of_half else x, **dims)


def losses(x):
    u, target = x.sigmoid() * 0.8 + 0.1, x.detach()[:, :1].sigmoid().expand_as(x)
    labels = (x.detach() > 0).sum(1).clamp_max(3)
    return (
        F.binary_cross_entropy(u, target)
        + F.binary_cross_entropy_with_logits(x, target)
        + F.cross_entropy(x, labels)
        + F.nll_loss(x.log_softmax(1), labels)
        + F.gaussian_nll_loss(x, target, u)
        + F.poisson_nll_loss(x, target)
        + F.kl_div(x, target)
        + F.soft_margin_loss(x, target.sign())
        + F.huber_loss(x, target, delta=0.5)
        + F.l1_loss(x, target)
    )


def heads(x, w, o):
    """Attention of ``torch.nn.MultiheadAttention``, with tokens along the first dimension."""
    x = x.transpose(0, 1)
    of = F.multi_head_attention_forward
    out, shown = of(x, x, x, 8, 2, w, None, None, None, False, 0.0, o, None)
    return out.transpose(0, 1) + shown.square().sum(-1, keepdim=True)


SMOOTH = (
    "absolute neg negative positive sqrt rsqrt reciprocal exp2 expm1 log log2 log10 log1p tan asin "
    "acos atan sinh cosh asinh atanh sigmoid logit erf erfc erfinv lgamma digamma sinc deg2rad "
    "rad2deg gelu silu mish softplus softsign logsigmoid tanhshrink clone contiguous resolve_conj "
    "resolve_neg conj real"
)
IN_PIECES = (
    "relu6 elu selu celu leaky_relu hardswish hardtanh hardshrink softshrink frac "
    "nan_to_num sign sgn floor ceil trunc signbit isnan isinf isfinite angle logical_not"
)
OF_TWO = (
    "subtract multiply divide true_divide atan2 maximum minimum fmax fmin hypot "
    "eq ne lt le gt ge isclose remainder fmod clamp_min clamp_max"
)
OF_BOOLEANS = "logical_and logical_or logical_xor and or xor bitwise_and bitwise_or bitwise_xor"
IN_PLACE = (
    "neg_ abs_ exp_ sqrt_ rsqrt_ sigmoid_ tanh_ square_ floor_ round_ relu_ celu_ selu_ elu_ "
    "leaky_relu_ hardtanh_ nan_to_num_"
)


def of_no_dimension(x):
    """Reduce over all dimensions, which torch takes for none that are named."""
    numbers = [x.sum(()), x.mean([]), x.amax(()), x.amin([]), x.norm(dim=()), x.nansum([])]
    numbers += [torch.linalg.vector_norm(x, p, ()) for p in (0, 1, 3, math.inf)]
    y = x.detach()  # torch 2.13 has infinite gradients of variances over no dimension
    numbers += [*torch.var_mean(y, ()), *torch.std_mean(y, dim=[]), x.count_nonzero(())]
    kept = x.sum((), True) + y.std(axis=(), keepdims=True) + x.logsumexp([], True)
    each = (x > 0).any(()) * 2.0 + (x > 1).all([])
    return x * sum(numbers) + x.mean((), True) * kept + F.normalize(x, dim=()) * each


FUNCTIONS = {
    "smooth": (IMAGE, *all_of(SMOOTH)),
    "in pieces": (IMAGE, *all_of(IN_PIECES, lambda x: (x * 3,))),
    "of two": (IMAGE, *all_of(OF_TWO, two)),
    # torch's second derivative divides by the first argument, and cancels where it is small
    "copysign": (IMAGE, *all_of("copysign", lambda x: (x.sigmoid() + 0.1, x[:, :1]))),
    "of booleans": (IMAGE, *all_of(OF_BOOLEANS, booleans)),
    "not": (IMAGE, *all_of("bitwise_not invert", lambda x: (x > 0,))),
    "of one row": (IMAGE, *all_of("acosh", lambda x: (x[:, :, :1].abs() + 1.2,))),
    "of powers": (IMAGE, *all_of("xlogy pow", lambda x: (x[:, :1].abs() + 0.5, x * x + 1))),
    "of three": (
        IMAGE,
        *all_of("lerp addcmul addcdiv", lambda x: (x, x[:, :1].cos() + 2, x.square() + 1)),
    ),
    "of limits": (IMAGE, *all_of("clamp clip threshold", lambda x: (x, -0.5, 0.7))),
    "masked": (IMAGE, *all_of("masked_fill masked_fill_", lambda x: (x.clone(), x < 0, 2.0))),
    "in place": (IMAGE, *in_place(IN_PLACE)),
    "in place with a number": (
        IMAGE,
        *in_place("add_ sub_ mul_ div_ pow_ clamp_min_ clamp_max_ remainder_", 1.5),
    ),
    "in place with limits": (IMAGE, *in_place("clamp_ threshold_", 0.3, 0.7)),
    "in place with two": (
        IMAGE,
        *all_of("addcmul_ addcdiv_ lerp_", lambda x: (x.clone(), x[:, :1] * x, x.square() + 1)),
    ),
    "operators": (IMAGE, *only(with_operators)),
    "complex": (
        IMAGE,
        *only(
            lambda x: (
                torch.complex(x.cosh(), x.sin()).angle()
                + torch.imag(torch.polar(x.abs() + 1, x)) * x
            )
        ),
    ),
    "written": (IMAGE, *only(written)),
    "rewritten": (IMAGE, *only(rewritten)),
    "rounded": (IMAGE, *only(lambda x: (x * x).round_())),
    "made": (IMAGE, *only(made)),
    "drawn": (IMAGE, *only(drawn)),
    "dropped": (IMAGE, *only(dropped)),
    "converted": (IMAGE, *only(converted)),
    "differentiated": (IMAGE, *only(differentiated)),
    "losses": (IMAGE, *only(losses)),
    "heads": (TOKENS, heads, [(24, 8), (8, 8)]),
    "transforms": (IMAGE, *numbers_of_fft("ifft rfft irfft hfft ihfft")),
    "transforms of two": (
        IMAGE,
        *numbers_of_fft("fft2 ifft2 irfft2 fftn ifftn rfftn irfftn"),
    ),
    "ifftshift": (IMAGE, *only(lambda x: torch.fft.ifftshift(x, dim=(2, 3)) * x)),
    "diff": (
        IMAGE,
        *only(
            lambda x: (
                x.diff(dim=2).square().sum(2) + x.diff(2, -1, x[..., :1]).sum((2, 3), True)[..., 0]
            )
        ),
    ),
    "products": (
        TOKENS,
        lambda x, w: (
            torch.mm(x[0], w)
            + torch.bmm(x, w.expand(2, 8, 8))
            + torch.addmm(x[1], x[0], w, beta=0.5)
            + torch.baddbmm(x, x, w.expand(2, 8, 8), alpha=2)
            + torch.addbmm(x[0], x, w.expand(2, 8, 8))
            + torch.mv(x[0], w[0])[:, None]
            + w.__rmatmul__(x)
        ),
        [(8, 8)],
    ),
    "dimensions": (
        IMAGE,
        *only(
            lambda x: (
                x[0, 0].t()[None, None]
                + x.mT.adjoint().mT
                + x.movedim(1, 3).moveaxis(3, 1).swapaxes(2, 3)
                + x.unsqueeze(0).squeeze(0).view_as(x).swapdims(3, 2)
            )
        ),
    ),
    "parts": (
        IMAGE,
        *only(
            lambda x: (
                x.narrow(1, 1, 2).tile(1, 2, 1, 1) * torch.concat(x.split_with_sizes([1, 3], 1), 1)
                + torch.concatenate(x.tensor_split(3, 1), 1).reshape_as(x)
                + x[0].unbind(0)[1]
                + sum(row for row in x)
                + x[:1].broadcast_to(x.shape)
                + x.index_select(1, torch.tensor([3, 3, 0, 1]))
                + F.channel_shuffle(x, 2)
            )
        ),
    ),
    "cross": (
        (2, 3, N, M),
        *only(lambda x: torch.linalg.cross(x, x.sin(), dim=1) * torch.cross(x, x.cos(), 1)),
    ),
    "turned": (IMAGE, *only(lambda x: x[0, 0].flipud() * x[0, 0] + x[0, 0].fliplr())),
    "extremes and places": (
        IMAGE,
        *only(
            lambda x: (
                x.amin(2)
                + x.aminmax(dim=2).max
                + x.argmax(2)
                + x.argmin(2) * x.sum(2)
                + (x > 0).any(2)
                + (x > 0).all(2)
                + (x > 0).count_nonzero(2)
                + x.nansum(2)
                + torch.std_mean(x, (1, 2))[0].unsqueeze(1)
                + torch.var_mean(x, 2)[1]
                + torch.linalg.vector_norm(x, 3, 2)
            )
        ),
    ),
    "along channels": (
        IMAGE,
        *only(
            lambda x: (
                x.nanmedian(1, True).values
                + x.kthvalue(2, 1, True).values
                + x.topk(2, 1).values.sum(1, True)
                + x.sort(1).values
                + x.argsort(1)
                + x.cummax(1).values
                + x.cummin(1).values
                + x.cumprod(1)
                + F.glu(x, 1).repeat(1, 2, 1, 1)
            )
        ),
    ),
    "ids": (
        IMAGE,
        lambda x, w: (
            F.embedding((x > 0).long()[:, 0], w) * F.one_hot((x > 0).long()[:, 1], 2).to(x.dtype)
        ).movedim(-1, 1),
        [(2, 2)],
    ),
    "hardsigmoid": (IMAGE, *only(lambda x: F.hardsigmoid(x) * 2)),
    "divided": (
        IMAGE,
        *all_of(
            "floor_divide floordiv floor_divide_ heaviside",
            lambda x: (x.detach() * 3, x.new_ones(1)),
        ),
    ),
    "prelu": (IMAGE, lambda x, w: F.prelu(x, w), [(4,)]),
    "rms_norm": (TOKENS, lambda x, w: F.rms_norm(x, (8,), w) + F.rms_norm(x, x.shape[1:]), [(8,)]),
    "pools of a line": (
        LINE,
        *only(
            lambda x: (
                F.avg_pool1d(x, 3, 2, 1).sum(2)
                + F.lp_pool1d(x.abs() + 1, 2.0, 2).sum(2)
                + F.adaptive_avg_pool1d(x, 3).square().sum(2)
                + F.adaptive_max_pool1d(x, 2).square().sum(2)
            )
        ),
    ),
    "pools of a box": (
        BOX,
        *only(
            lambda x: (
                F.max_pool3d(x, (2, 1, 2), 2).sum((2, 3, 4))
                + F.lp_pool3d(x.abs() + 1, 2.0, 2).sum((2, 3, 4))
                + F.adaptive_avg_pool3d(x, (3, 2, 2)).square().sum((2, 3, 4))
                + F.adaptive_max_pool3d(x, (2, 2, 3)).square().sum((2, 3, 4))
            )
        ),
    ),
    "conv1d": (LINE, *conv(1, padding=1)),
    "conv1d of stride 3": (LINE, *conv(1, kernel=4, stride=3, padding=2)),
    "conv2d": (IMAGE, *conv(2, padding=1)),
    "conv2d without padding": (IMAGE, *conv(2)),
    "conv2d of 1": (IMAGE, *conv(2, kernel=1)),
    "conv2d of stride 2": (IMAGE, *conv(2, stride=2, padding=1)),
    "conv2d of stride 4": (IMAGE, *conv(2, kernel=2, stride=4, padding=1)),
    "conv2d dilated": (IMAGE, *conv(2, padding=3, dilation=3, groups=2)),
    "conv2d large": (IMAGE, *conv(2, kernel=6, padding=5)),
    "conv2d same": (IMAGE, *conv(2, kernel=4, padding="same", dilation=2)),
    "conv2d uneven": (IMAGE, *conv(2, kernel=(2, 5), stride=(2, 1), padding=(0, 2))),
    "conv3d": (BOX, *conv(3, padding=1, stride=(2, 1, 1))),
    "conv_transpose1d": (LINE, *transposed(1, stride=2)),
    "conv_transpose2d": (IMAGE, *transposed(2, stride=2, padding=1, output_padding=1)),
    "conv_transpose2d of 4": (IMAGE, *transposed(2, kernel=4, stride=2, padding=1, groups=2)),
    "conv_transpose2d of stride 4": (IMAGE, *transposed(2, kernel=2, stride=4)),
    "conv_transpose2d dilated": (IMAGE, *transposed(2, padding=2, dilation=2)),
    "conv_transpose3d": (BOX, *transposed(3, stride=2, kernel=2)),
    "circular": (IMAGE, *padded("circular", (1, 1, 1, 1))),
    "reflect": (IMAGE, *padded("reflect", (1, 2, 1, 0), stride=2)),
    "replicate": (IMAGE, *padded("replicate", (2, 1, 3, 2))),
    "constant": (IMAGE, *padded("constant", (0, 1, 2, 1), stride=2)),
    "crop": (IMAGE, *only(lambda x: F.pad(x, (1, 0, 1, -1)) * 2)),
    "max_pool2d": (IMAGE, *only(lambda x: F.max_pool2d(x, 2))),
    "max_pool2d padded": (IMAGE, *only(lambda x: F.max_pool2d(x, 3, 2, 1))),
    "max_pool2d ceil": (IMAGE, *only(lambda x: F.max_pool2d(x, 3, 2, 1, 1, ceil_mode=True))),
    "max_pool2d dilated": (IMAGE, *only(lambda x: F.max_pool2d(x, 3, 1, 1, 2))),
    "max_pool1d": (LINE, *only(lambda x: F.max_pool1d(x, 2, 3))),
    "avg_pool2d": (IMAGE, *only(lambda x: F.avg_pool2d(x, 3, 2, 1))),
    "avg_pool2d ceil": (IMAGE, *only(lambda x: F.avg_pool2d(x, 2, 3, 1, ceil_mode=True))),
    "avg_pool2d inside": (
        IMAGE,
        *only(lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)),
    ),
    "avg_pool2d divided": (IMAGE, *only(lambda x: F.avg_pool2d(x, 2, divisor_override=3))),
    "avg_pool3d": (BOX, *only(lambda x: F.avg_pool3d(x, (1, 2, 2), ceil_mode=True))),
    "lp_pool2d": (IMAGE, *only(lambda x: F.lp_pool2d(x.abs() + 1, 3.0, 2))),
    "lp_pool2d of the largest": (IMAGE, *only(lambda x: F.lp_pool2d(x, math.inf, 2))),
    "adaptive_avg_pool2d": (IMAGE, *only(lambda x: F.adaptive_avg_pool2d(x, (4, 3)))),
    "adaptive_max_pool2d": (IMAGE, *only(lambda x: F.adaptive_max_pool2d(x, (3, 2)))),
    "global pool": (IMAGE, *only(lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1) ** 2)),
    "unfold": (IMAGE, *only(lambda x: x.unfold(2, 3, 2))),
    "nearest": (IMAGE, *only(lambda x: F.interpolate(x, scale_factor=2.0))),
    "nearest-exact": (IMAGE, *only(lambda x: F.interpolate(x, size=(9, 5), mode="nearest-exact"))),
    "bilinear": (IMAGE, *only(lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"))),
    "bilinear aligned": (
        IMAGE,
        *only(lambda x: F.interpolate(x, size=(13, 9), mode="bilinear", align_corners=True)),
    ),
    "bicubic": (IMAGE, *only(lambda x: F.interpolate(x, size=(7, 11), mode="bicubic"))),
    "trilinear": (BOX, *only(lambda x: F.interpolate(x, scale_factor=2.0, mode="trilinear"))),
    "area": (IMAGE, *only(lambda x: F.interpolate(x, size=(5, 4), mode="area"))),
    "linear of a line": (LINE, *only(lambda x: F.interpolate(x, size=5, mode="linear"))),
    "pixel_shuffle": (IMAGE, *only(lambda x: F.pixel_shuffle(x, 2))),
    "pixel_unshuffle": (
        IMAGE,
        *only(lambda x: F.pixel_unshuffle(F.interpolate(x, scale_factor=2), 2)),
    ),
    "batch_norm": (IMAGE, batch_norm, [(4,), (4,)]),
    "instance_norm": (IMAGE, *only(lambda x: with_rows_last(F.instance_norm(x)))),
    "group_norm": (IMAGE, lambda x, w, b: F.group_norm(x, 2, w, b), [(4,), (4,)]),
    "layer_norm": (TOKENS, lambda x, w, b: F.layer_norm(x, (8,), w, b), [(8,), (8,)]),
    "layer_norm of all": (IMAGE, *only(lambda x: F.layer_norm(x, x.shape[1:]))),
    "local_response_norm": (IMAGE, *only(lambda x: F.local_response_norm(x, 2))),
    "skip": (IMAGE, *only(lambda x: torch.cat([x, F.avg_pool2d(x, 3, 1, 1)], 1) * x[:, :1])),
    "skip of other sizes": (
        IMAGE,
        *only(lambda x: F.interpolate(F.max_pool2d(x, 2, ceil_mode=True), size=x.shape[2:]) + x),
    ),
    "rows": (IMAGE, *only(lambda x: x[:, :, 1:] - x[..., :-1, :])),
    "every second row": (IMAGE, *only(lambda x: x[:, 1:, ::2] * x[:, :3, ::2, :1])),
    "flip": (IMAGE, *only(lambda x: x.flip(2, 3) * x)),
    "roll": (IMAGE, *only(lambda x: x.roll((2, -1), (2, 3)) * x + x.roll(-3, 2))),
    "cumsum": (IMAGE, *only(lambda x: x.cumsum(2).square() + x.cumsum(-1))),
    "softmax": (IMAGE, *only(lambda x: x.softmax(2) + x.log_softmax(3))),
    "joined rows": (IMAGE, *only(lambda x: torch.cat([x, x[:, :, :2].sin(), x.cos()], 2))),
    "row of a class": (TOKENS, lambda x, c: torch.cat([c.expand(2, 1, 8), x], 1) ** 2, [(1, 1, 8)]),
    "positions": (TOKENS, lambda x, p: x * p[:, : x.shape[1]].cos(), [(1, 40, 8)]),
    "sums": (IMAGE, *only(lambda x: x - x.mean((2, 3), keepdim=True) * x.var(2, keepdim=True))),
    "of no dimension": (IMAGE, *only(of_no_dimension)),
    "extremes": (IMAGE, *only(lambda x: x * x.amax(2, keepdim=True) + x.min(2, True).values)),
    "std": (IMAGE, *only(lambda x: (x / x.std()).logsumexp(2))),
    "norms": (IMAGE, *only(lambda x: x / x.norm(dim=2, keepdim=True) + F.normalize(x, dim=1))),
    "einsum": (IMAGE, lambda x, w: torch.einsum("bchw,cd->bdhw", x, w), [(4, 3)]),
    "einsum of rows": (IMAGE, *only(lambda x: torch.einsum("bchw,bdhw->bcd", x, x.sin()))),
    "mixer": (TOKENS, lambda x, w: (w[:, : x.shape[1]] @ x).tanh(), [(5, 40)]),
    "flat linear": (TOKENS, lambda x, w: F.linear(x.reshape(-1, 8), w).view(2, -1, 3), [(3, 8)]),
    "tokens of an image": (
        IMAGE,
        lambda x, w: (
            F.linear(x.flatten(2).transpose(1, 2), w)
            .transpose(1, 2)
            .unflatten(2, (x.shape[2], x.shape[3]))
        ),
        [(4, 4)],
    ),
    "attention": (TOKENS, attention, [(24, 8)]),
    "causal attention": (TOKENS, lambda x, w: attention(x, w, True), [(24, 8)]),
    "masked attention": (TOKENS, masked, [(16, 8)]),
    "attention to other tokens": (TOKENS, to_other_tokens, [(24, 8)]),
    "attention by hand": (TOKENS, by_hand, [(24, 8)]),
    "attention of pixels": (IMAGE, of_pixels, [(12, 4)]),
    "linear attention": (TOKENS, linear_attention, [(24, 8)]),
    "windows": (IMAGE, windows_of, [(12, 4)]),
    "fourier": (IMAGE, fourier, [(4,)]),
    "fft": (LINE, *only(lambda x: torch.fft.fft(x, dim=2).abs().square())),
    "fftshift": (IMAGE, *only(lambda x: torch.fft.fftshift(x, dim=(2, 3)) * x)),
    "fold": (IMAGE, *only(lambda x: F.fold(F.unfold(x, 3, 1, 1, 2), x.shape[2:], 3, 1, 1, 2))),
    "loss": (IMAGE, *only(lambda x: F.mse_loss(x, x.sin()) + F.smooth_l1_loss(x, x * 2))),
    "classes of tokens": (
        TOKENS,
        *only(lambda x: F.cross_entropy(x.reshape(-1, 8), next_of(x.argmax(-1)).reshape(-1))),
    ),
    "picked": (
        TOKENS,
        *only(lambda x: x.log_softmax(-1).gather(-1, x.argmax(-1, True).sub(3).abs())),
    ),
    "where": (IMAGE, *only(lambda x: torch.where(x > 0, x, x.exp()) * torch.ones(x.shape[-1]))),
    "split channels": (IMAGE, *only(lambda x: torch.stack(x.chunk(2, 1)).prod(0))),
    "split rows": (IMAGE, *only(lambda x: sum(p.sum(2) ** 2 for p in x.split(2, 2)))),
    "same length": (IMAGE, *only(lambda x: F.interpolate(x, scale_factor=1.05, mode="bilinear"))),
    "one length": (
        IMAGE,
        *only(lambda x: F.interpolate(x, scale_factor=(2, 1.1), mode="bilinear")),
    ),
    "nearest of a scale": (IMAGE, *only(lambda x: F.interpolate(x, scale_factor=1.3))),
    "bytes": (
        IMAGE,
        *only(lambda x: (x.gt(0).byte().any(2, True) + 255) * x + (x > 0).byte().all(dim=())),
    ),
    "ties": (IMAGE, *only(lambda x: x.round().amax(2) * x.sum(2) + (x > 0).double().max(2)[0])),
    "ties at the index": (IMAGE, *only(lambda x: x.round().mul(x).relu().max(2).values)),
    "root of zero": (IMAGE, *only(lambda x: (x * 0).norm(dim=2) + x.mul(0).std(2) + x.sum(2))),
    "axis": (IMAGE, *only(lambda x: torch.cat([x, x.sin()], axis=1).sum(axis=2, keepdims=True))),
    "medians": (IMAGE, *only(lambda x: x.median(1, True)[0] + x)),
    "weighted loss": (IMAGE, *only(lambda x: F.mse_loss(x, x.sin(), weight=x.detach().abs()))),
    "one row": (IMAGE, *only(lambda x: x[:, :, 0] * x[:, :, -1] + x.select(2, 0))),
    "repeated": (IMAGE, *only(lambda x: x.repeat_interleave(2, 2) + x.repeat(1, 1, 1, 1).sum())),
}
