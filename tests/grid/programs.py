"""Random programs: functions of fields in a row, beside the same program on one process.

A program is drawn by its seed, with the lengths of its field, the rows of each rank and its lines.
A line is Python, so that a failing program can be read and run. A line that torch refuses, or whose
values are not finite or large, is drawn again: so any sequence of lines is a program.
"""

import random
import re
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import varcomm as vc
from tests.grid import functions
from tests.grid.comparing import FIRST_ONLY, ROWS_ONLY, apart, derivatives, lengths_of
from tests.transport.groups import ordered_group

RANKS = ((1,), (2,), (3,), (5,), (2, 2))
CLOSE = 1e-12  # in units of the largest expected value, which count as one if they are smaller
LARGEST = 30.0  # of the values of a line
LARGE = 1 << 17  # elements of a rank from which on convolutions overlap their messages
REFUSES = (RuntimeError, ValueError, IndexError, TypeError)  # torch, of sizes


# --- What lines call


def channels(x, count):
    """Return some channels of a field, which may repeat."""
    return x.index_select(1, torch.arange(count) % x.shape[1])


def fitted(y, x):
    """Return a field in the lengths of another, whose rows are on other ranks."""
    size = x.shape[2:]
    y = y if y.shape[2:] == size else F.interpolate(y, size=size)
    return y if y.shape[1] == x.shape[1] else channels(y, x.shape[1])


def tracked(norm, x, w, b, momentum):
    """Return a norm in training, and in evaluation with the statistics that it has moved."""
    mean, var = (torch.full((x.shape[1],), start, dtype=w.dtype) for start in (0.0, 1.0))
    y = functions.with_rows_last(norm(x, mean, var, w, b, True, momentum))
    z = functions.with_rows_last(F.batch_norm(x, mean, var, w, b, False))
    return y + 0.5 * z + (var * mean).view(-1, *[1] * (x.dim() - 2))


def tokens(function, x, *parameters):
    """Call a function of tokens by channels with a line of channels by rows."""
    out = function(x.transpose(1, 2), *parameters)
    return out.transpose(1, 2) if out.dim() == 3 else out


def of_the_sweep(name, x, *parameters):
    shape, function, _ = functions.FUNCTIONS[name]
    places = {functions.IMAGE: (4, 0), functions.LINE: (4, 0), functions.TOKENS: (8, 1)}
    count, turned = places[shape]
    x = channels(x, count)
    return tokens(function, x, *parameters) if turned else function(x, *parameters)


SPACE = {
    "torch": torch,
    "F": F,
    "channels": channels,
    "fitted": fitted,
    "tracked": tracked,
    "tokens": tokens,
    "sweep": of_the_sweep,
    "attention": functions.attention,
    "masked": functions.masked,
    "by_hand": functions.by_hand,
    "linear_attention": functions.linear_attention,
    "windows_of": functions.windows_of,
}


# --- Programs


@dataclass(frozen=True)
class Program:
    """Lines, the shapes of parameters, and a field with the rows of each rank."""

    seed: int
    ranks: tuple[int, ...]
    shape: tuple[int, ...] = ()
    sizes: tuple[tuple[int, ...] | None, ...] = ()
    parameters: tuple[tuple[int, ...], ...] = ()
    lines: tuple[tuple[str, str], ...] = ()
    kept: tuple[int, int] | None = None  # lines from one to behind another are computed again

    def __str__(self):
        lines = [f"{name} = {text}" for name, text in self.lines]
        shapes = ", ".join(f"p{at}: {s}" for at, s in enumerate(self.parameters))
        again = f", lines {self.kept[0]} to {self.kept[1]} checkpointed" if self.kept else ""
        head = f"seed {self.seed} on {self.ranks}: x0 {self.shape} in {self.sizes}{again}; {shapes}"
        return "\n    ".join([head, *lines])

    def run(self, x, *parameters, rounding=None):
        """Return the last value of the program, with the sums of all values that no line reads.

        With a generator as `rounding`, all values move to the next numbers of fp64.
        """
        given = {f"p{at}": value for at, value in enumerate(parameters)}
        values = {"x0": x}

        def through(first, last):
            for name, text in self.lines[first:last]:
                value = eval(text, SPACE | given | values)
                values[name] = value if rounding is None else moved(value, rounding)

        first, last = self.kept or (0, 0)
        through(0, first)
        if last > first:
            before, inputs = dict(values), [*values.values(), *parameters]

            def inside(*inputs):
                values.update(zip(before, inputs, strict=False))
                given.update(zip(given, inputs[len(before) :], strict=True))
                through(first, last)
                return tuple(values[name] for name, _ in self.lines[first:last])

            made = checkpoint(inside, *inputs, use_reentrant=False)
            given.update(zip(given, parameters, strict=True))
            values.update(before)
            values.update(zip((name for name, _ in self.lines[first:last]), made, strict=True))
        through(last, None)
        out = [*values.values()][-1]
        read = {name for _, text in self.lines for name in re.findall(r"\bx\d+\b", text)}
        for name in [*values][:-1]:
            out = out if name in read else out + 0.1 * values[name].sum()
        return out

    def numbers(self):
        """Return the field and the parameters."""
        draws = torch.Generator().manual_seed(self.seed)
        made = []
        for shape in (self.shape, *self.parameters):
            x = torch.randn(shape, dtype=torch.float64, generator=draws)
            made.append(x / prod(shape[1:]) ** 0.5 if made else x)
        return made


@dataclass
class Drawing:
    """A program that is drawn, with the values of its lines."""

    program: Program
    draw: random.Random
    values: dict = field(default_factory=dict)

    def __post_init__(self):
        self.values = {"x0": self.program.numbers()[0]}

    def parameter(self, *shape):
        """Return the name of a parameter, of an earlier one of the same shape at times."""
        known = [f"p{at}" for at, s in enumerate(self.program.parameters) if s == shape]
        if known and self.draw.random() < 0.4:
            return self.draw.choice(known)
        self.program = replace(self.program, parameters=(*self.program.parameters, shape))
        return f"p{len(self.program.parameters) - 1}"

    def several(self, count, *choices):
        return tuple(self.draw.choice(choices) for _ in range(count))

    def other(self, x):
        """Return an earlier value in the lengths of `x`, or a function of `x`."""
        dims = self.values[x].dim()
        names = [name for name, value in self.values.items() if value.dim() == dims and name != x]
        if names and self.draw.random() < 0.8:
            turned = ".transpose(2, 3)" if dims == 4 and self.draw.random() < 0.2 else ""
            return f"fitted({self.draw.choice(names)}{turned}, {x})"
        return f"{x}.cos()"

    def line(self, kinds, most):
        """Add a line that torch runs, or none."""
        name = self.draw.choice([*self.values][-3:] + [[*self.values][-1]] * 3)
        before = self.program
        text = self.draw.choice(kinds)(self, name, self.values[name])
        if text is not None:
            read = self.program.numbers()[1:]
            given = {f"p{at}": value for at, value in enumerate(read)}
            try:
                value = eval(text, SPACE | given | self.values)
                if value.dim() not in (3, 4, 5) or value.dtype != torch.float64:
                    text = f"{name} + 0.1 * ({text}).double().sum()"
                    value = eval(text, SPACE | given | self.values)
            except REFUSES:
                text = None
            else:
                fits = 0 < value.numel() <= most and value.isfinite().all()
                text = text if fits and value.abs().max() < LARGEST else None
        if text is None:
            self.program = before
            return
        new = f"x{len(self.values)}"
        self.values[new] = value.detach()
        self.program = replace(self.program, lines=(*self.program.lines, (new, text)))


def convolution(d, x, v):
    dims, c = v.dim() - 2, v.shape[1]
    stride, dilation = d.several(dims, 1, 1, 1, 2, 3), d.several(dims, 1, 1, 1, 2)
    groups = d.draw.choice([n for n in (1, 1, 2, 3, c) if c % n == 0])
    known = [
        (f"p{at}", s)
        for at, s in enumerate(d.program.parameters)
        if len(s) == dims + 2 and s[1] * groups == c
    ]
    if known and d.draw.random() < 0.5:  # the same weight at another resolution
        weight, shape = d.draw.choice(known)
    else:
        kernel = d.several(dims, 1, 2, 3, 3, 4, 5)
        shape = (groups * d.draw.randint(1, 3), c // groups, *kernel)
        weight = d.parameter(*shape)
    bias = d.parameter(shape[0]) if d.draw.random() < 0.7 else None
    padding = repr(d.several(dims, 0, 1, 1, 2, 3))
    if d.draw.random() < 0.2:
        padding = "'same'" if max(stride) == 1 else "'valid'"
    if d.draw.random() < 0.2:
        sides = d.several(2 * dims, 0, 1, 1, 2, 3)
        mode = d.draw.choice(("circular", "reflect", "replicate", "constant"))
        x = f"F.pad({x}, {sides}, {mode!r})"
    how = f"{stride}, {padding}, {dilation}, {groups}"
    return f"F.conv{dims}d({x}, {weight}, {bias}, {how})"


def transposed_convolution(d, x, v):
    dims, c = v.dim() - 2, v.shape[1]
    stride, dilation = d.several(dims, 1, 2, 2, 3), d.several(dims, 1, 1, 2)
    groups = d.draw.choice([n for n in (1, 1, 2, c) if c % n == 0])
    weight = d.parameter(c, d.draw.randint(1, 3), *d.several(dims, 1, 2, 3, 4))
    bias = d.parameter(d.program.parameters[int(weight[1:])][1] * groups)
    padding, more = d.several(dims, 0, 0, 1, 2), d.several(dims, 0, 0, 1)
    how = f"{stride}, {padding}, {more}, {groups}, {dilation}"
    return f"F.conv_transpose{dims}d({x}, {weight}, {bias}, {how})"


def pool(d, x, v):
    dims = v.dim() - 2
    kernel, stride = d.several(dims, 1, 2, 2, 3), d.several(dims, 1, 2, 2, 3)
    padding = tuple(d.draw.randint(0, k // 2) for k in kernel)
    ceil = d.draw.random() < 0.4
    kind = d.draw.choice(("max", "max", "avg", "avg", "lp", "adaptive"))
    if kind == "lp":
        power = d.draw.choice((2.0, 3.0))
        return f"F.lp_pool{dims}d({x}.sigmoid(), {power}, {kernel}, {stride}, {ceil})"
    if kind == "adaptive":
        of, size = d.draw.choice(("avg", "max")), d.several(dims, 1, 2, 3, 5, None)
        return f"F.adaptive_{of}_pool{dims}d({x}, {size})"
    if kind == "max":
        dilation = d.several(dims, 1, 1, 2)
        return f"F.max_pool{dims}d({x}, {kernel}, {stride}, {padding}, {dilation}, {ceil})"
    more = "" if dims == 1 else f", {d.draw.choice((None, None, 3))}"
    counted = d.draw.random() < 0.5
    return f"F.avg_pool{dims}d({x}, {kernel}, {stride}, {padding}, {ceil}, {counted}{more})"


MODES = {1: ("linear",), 2: ("bilinear", "bicubic"), 3: ("trilinear",)}


def interpolation(d, x, v):
    dims = v.dim() - 2
    mode = d.draw.choice(("nearest", "nearest-exact", "area", *MODES[dims] * 2))
    size = f"size={d.several(dims, 1, 2, 3, 5, 8, 11)}"
    if d.draw.random() < 0.5:
        scales = d.several(dims, 0.5, 0.7, 1.5, 2.0, 3.0)
        if any(int(n * scale) == n for n, scale in zip(v.shape[2:], scales, strict=True)):
            return None  # refused in some modes
        size = f"scale_factor={scales}"
    aligned = f", align_corners={d.draw.random() < 0.5}" if mode in MODES[dims] else ""
    return f"F.interpolate({x}, {size}, mode={mode!r}{aligned})"


def norm(d, x, v):
    c = v.shape[1]
    w, b = d.parameter(c), d.parameter(c)
    kind, momentum = d.draw.randrange(7), d.draw.choice((0.1, 0.3, 1.0))
    if kind == 0:
        return f"tracked(F.batch_norm, {x}, {w}, {b}, {momentum})"
    if kind == 1:
        return f"tracked(F.instance_norm, {x}, {w}, {b}, {momentum})"
    if kind == 2:
        groups = d.draw.choice([n for n in (1, 2, 3, c) if c % n == 0])
        return f"F.group_norm({x}, {groups}, {w}, {b})"
    if kind == 3:
        first = d.draw.randint(1, v.dim() - 1)
        return f"F.layer_norm({x}, {x}.shape[{first}:])"
    if kind == 4:
        return f"F.layer_norm({x}.movedim(1, -1), ({c},), {w}, {b}).movedim(-1, 1)"
    if kind == 5:
        return f"F.local_response_norm({x}, {d.draw.randint(1, 3)})"
    return f"F.rms_norm({x}, {x}.shape[{d.draw.randint(1, v.dim() - 1)}:], eps=0.01)"


POINTS = (
    "F.gelu({x})", "F.silu({x})", "F.softplus({x})", "{x}.sin()", "{x}.tanh() * {x}", "F.elu({x})",
    "F.relu({x})", "F.leaky_relu({x}, 0.2)", "{x}.clamp(-0.5, 1.0)", "{x}.square() * 0.3",
    "torch.where({x} > 0, {x}, {x}.exp())", "{x}.abs() + {x}",
    "{x}.masked_fill({x} > 1, 0.5)", "F.dropout({x}, 0.0)", "F.hardtanh({x}) + {x}",
)  # fmt: skip


def point(d, x, v):
    return d.draw.choice(POINTS).format(x=x)


def scaled(d, x, v):
    """Multiply by or add a parameter that is whole on every rank: of channels, rows or columns."""
    shape = [1] * v.dim()
    for at in d.draw.sample(range(1, v.dim()), d.draw.randint(1, 2)):
        shape[at] = v.shape[at]
    shape = shape[d.draw.randint(0, 1) :]
    return f"{x} {d.draw.choice('*+-')} {d.parameter(*shape)}"


def joined(d, x, v):
    y, dim = d.other(x), d.draw.randint(1, v.dim() - 1)
    kind = d.draw.randrange(6)
    if kind == 0:
        return f"torch.cat([{y}, {x}, {y}.sin()], {dim})"
    if kind == 1:
        return f"torch.stack([{y}, {x}], {dim}).prod({dim})"
    if kind == 2:
        return f"torch.maximum({y}, {x})"
    if kind == 3:
        return f"torch.where({y} > {x}, {x}, {y} * {x})"
    if kind == 4:
        return f"{y} * {x} + {y}"
    return f"torch.cat([{x}, {y}], {dim})"


def rows(d, x, v):
    """Select, move or repeat rows, columns or channels."""
    dim = d.draw.randint(1, v.dim() - 1)
    n, draw = v.shape[dim], d.draw
    lead = ":, " * dim
    kind = draw.randrange(14)
    if kind == 0:
        first = draw.randint(0, n // 2)
        return f"{x}[{lead}{first}:{draw.randint(first, n)}:{draw.randint(1, 3)}]"
    if kind == 1:
        return f"{x}[{lead}{-draw.randint(1, n)}:]"
    if kind == 2:
        return f"{x} * {x}[{lead}{draw.randint(-n, n - 1)}].unsqueeze({dim})"
    if kind == 3:
        return f"{x}.roll({draw.randint(-n - 2, n + 2)}, {dim})"
    if kind == 4:
        dims = draw.sample(range(1, v.dim()), 2)
        return f"{x}.roll(({draw.randint(-3, 3)}, {draw.randint(-n, n)}), {tuple(dims)})"
    if kind == 5:
        return f"{x}.flip({dim}) * {x}"
    if kind == 6:
        sides = d.several(2 * (v.dim() - 2), -1, 0, 0, 1, 2, 4)
        return f"F.pad({x}, {sides}, value={draw.choice((0.0, 0.0, 0.7))})"
    if kind == 7:
        sides = d.several(2 * (v.dim() - 2), 0, 1, 2)
        return f"F.pad({x}, {sides}, {draw.choice(('circular', 'reflect', 'replicate'))!r})"
    if kind == 8:
        return f"{x}.diff(dim={dim})"
    if kind == 9:
        return f"{x}.narrow({dim}, {n // 3}, {draw.randint(0, n - n // 3)})"
    if kind == 10:
        return f"torch.cat({x}.chunk({draw.randint(1, 3)}, {dim})[::-1], {dim})"
    if kind == 11:
        return f"{x}.repeat_interleave(2, {dim})"
    if kind == 12:
        return f"torch.cat([{x}[{lead}1:], {x}[{lead}:1]], {dim})"
    return f"sum(p.sum({dim}, True) * 0.1 for p in {x}.split(2, {dim})) * {x}"


REDUCTIONS = (
    "{x}.mean({d}, True)", "{x}.sum({d}, True) * 0.1", "{x}.var({d}, keepdim=True)",
    "{x}.std({d}, keepdim=True)", "{x}.norm(dim={d}, keepdim=True)", "{x}.amax({d}, True)",
    "{x}.amin({d}, True)", "{x}.logsumexp({d}, True)", "({x} > 0).sum({d}, True)",
    "torch.linalg.vector_norm({x}, 3, {d}, True)", "torch.std_mean({x}, {d}, keepdim=True)[1]",
)  # fmt: skip
ALONG = (
    "{x}.softmax({d})", "{x}.log_softmax({d}) * 0.3", "{x}.cumsum({d}) * 0.3",
    "{x}.max({d}, True).values * {x}", "{x}.min({d}, True)[0] + {x}", "F.normalize({x}, dim={d})",
    "{x}.prod({d}, True) + {x}", "{x} * {x}.argmax({d}, True)", "{x}.median(1, True)[0] - {x}",
    "F.glu(torch.cat([{x}, {x}.sin()], 1), 1)",
)  # fmt: skip


def reduced(d, x, v):
    if d.draw.random() < 0.4:
        return d.draw.choice(ALONG).format(x=x, d=d.draw.randint(1, v.dim() - 1))
    dims = tuple(d.draw.sample(range(v.dim()), d.draw.randint(1, 3)))
    of = d.draw.choice(REDUCTIONS).format(x=x, d=dims)
    return f"{x} {d.draw.choice('*+-')} {of}"


def fewer(d, x, v):
    """Drop a dimension, or take a function of all elements."""
    if v.dim() == 3 or d.draw.random() < 0.3:
        y = d.other(x)
        return d.draw.choice(
            (
                f"F.mse_loss({x}, {y})",
                f"F.smooth_l1_loss({x}, {y}, beta=0.5)",
                f"F.cross_entropy({x}, ({y} > 0).sum(1).clamp_max({v.shape[1] - 1}))",
                f"F.binary_cross_entropy_with_logits({x}, {y}.detach().sigmoid())",
                f"F.kl_div({x}.log_softmax(1), {y}.detach().softmax(1))",
                f"F.huber_loss({x}, {y}, 'sum', delta=0.3)",
                f"{x}.var() + {x}.norm() + {y}.mean()",
                f"{x}.abs().amax() * {y}.sum((0, 2))",
            )
        )
    of = d.draw.choice(("mean", "amax", "sum", "logsumexp"))
    dim = d.draw.randint(2, v.dim() - 1)
    row = d.draw.randrange(v.shape[dim])
    return d.draw.choice((f"{x}.{of}({dim})", f"{x}.select({dim}, {row})"))


def more(d, x, v):
    """Add a dimension, by the product of each row with a parameter."""
    if v.dim() == 5:
        return None
    n = d.draw.randint(2, 5)
    return f"{x}.unsqueeze(-1) * {d.parameter(n)}"


def product(d, x, v):
    c, letters = v.shape[1], "hwz"[: v.dim() - 2]
    kind = d.draw.randrange(6)
    if kind == 0:
        w = d.parameter(c, d.draw.randint(1, 4))
        return f"torch.einsum('bc{letters},cd->bd{letters}', {x}, {w})"
    if kind == 1:
        gate = f"torch.einsum('bc{letters},bd{letters}->bcd', {x}, {d.other(x)})"
        return f"{x} * {gate}.tanh().sum(2).view(-1, {c}, {'1, ' * (v.dim() - 2)})"
    if kind == 2:
        return f"F.linear({x}.movedim(1, -1), {d.parameter(3, c)}, {d.parameter(3)}).movedim(-1, 1)"
    if kind == 3:
        n = v.shape[-1]
        return f"F.linear({x}, {d.parameter(d.draw.randint(1, 5), n)})"
    if kind == 4:
        n = v.shape[2]
        mixed = "".join("o" if letter == "h" else letter for letter in letters)
        w = d.parameter(n, d.draw.randint(1, 5))
        return f"torch.einsum('bc{letters},ho->bc{mixed}', {x}, {w})"
    return f"({x} @ {d.parameter(v.shape[-1], d.draw.randint(1, 4))}).tanh()"


def transform(d, x, v):
    dim = d.draw.randint(2, v.dim() - 1)
    kind = d.draw.randrange(4)
    if kind == 0:
        return f"torch.fft.irfft(torch.fft.rfft({x}, dim={dim}), {v.shape[dim]}, dim={dim}) * {x}"
    if kind == 1:
        return f"torch.fft.fft({x}, dim={dim}, norm='ortho').abs().square()"
    if kind == 2 and v.dim() == 4:
        w = d.parameter(v.shape[1])
        return f"torch.fft.irfft2(torch.fft.rfft2({x}) * {w}.view(1, -1, 1, 1), s={x}.shape[2:])"
    return f"torch.fft.fftshift({x}, dim={dim}) * {x}"


def attended(d, x, v):
    if v.dim() != 3:
        return None
    c = v.shape[1]
    kind = d.draw.randrange(5)
    if kind == 0:
        return f"tokens(masked, {x}, {d.parameter(16, c)})"
    of = ("attention", "by_hand", "linear_attention", "attention")[kind - 1]
    causal = ", True" if kind == 4 else ""
    return f"tokens({of}, {x}, {d.parameter(24, c)}{causal})"


def shuffled(d, x, v):
    if v.dim() != 4:
        return None
    c, (h, w) = v.shape[1], v.shape[2:]
    return d.draw.choice(
        (
            f"F.pixel_shuffle(channels({x}, 4), 2)",
            f"F.pixel_unshuffle(F.pad({x}, (1, {1 + w % 2}, 1, {1 + h % 2})), 2)",
            f"F.channel_shuffle({x}, {2 if c % 2 == 0 else 1})",
            f"{x}.unflatten(1, (1, {c})).flatten(0, 1).view({x}.shape)",
            f"{x}.unfold(2, {d.draw.randint(1, 3)}, {d.draw.randint(1, 3)}).sum(-1)",
            f"{x}.permute(0, 2, 3, 1).contiguous().softmax(-1).permute(0, 3, 1, 2)",
            f"{x}.transpose(1, 2).reshape({v.shape[0]}, -1, {c}, {w}).transpose(1, 2)",
        )
    )


def turned(d, x, v):
    """Call a function with rows in place of columns."""
    if v.dim() != 4:
        return None
    name = "turned"
    d.values[name] = v.transpose(2, 3)
    text = d.draw.choice((convolution, pool, norm, rows, reduced))(d, name, d.values.pop(name))
    there = None if text is None else text.replace(name, f"{x}.transpose(2, 3)")
    return there and f"({there}).transpose(2, 3)"


def swept(d, x, v):
    """Call a function of the sweep."""
    dims = {4: functions.IMAGE, 3: d.draw.choice((functions.LINE, functions.TOKENS))}
    if v.dim() not in dims or v.shape[0] != 2:
        return None
    names = [
        name
        for name, (shape, *_) in functions.FUNCTIONS.items()
        if shape == dims[v.dim()]
        and name not in (*FIRST_ONLY, *ROWS_ONLY, "windows", "attention of pixels", "drawn")
    ]
    name = d.draw.choice(names)
    made = ", ".join([x, *(d.parameter(*shape) for shape in functions.FUNCTIONS[name][2])])
    return f"sweep({name!r}, {made})"


KINDS = (
    convolution, convolution, convolution, transposed_convolution, transposed_convolution, pool,
    pool, interpolation, interpolation, norm, norm, point, point, scaled, joined, joined, rows,
    rows, reduced, reduced, fewer, more, product, transform, attended, attended, shuffled, turned,
    swept, swept, swept,
)  # fmt: skip
KINDS_OF_LARGE = (convolution, convolution, convolution, pool, norm, point, scaled, joined)


def drawn_by(seed, ranks, large=False):
    """Return the program of a seed on so many ranks along each split dimension."""
    draw = random.Random(f"{seed} {ranks} {large}")
    dims = 2 if large else draw.choice((1, 2, 2, 2, 2, 2, 3))
    if len(ranks) == 2:
        dims = max(dims, 2)
    lengths = [draw.randint(1, 14), draw.randint(1, 9), draw.randint(2, 4)][:dims]
    batch, channel = draw.choice((1, 2, 2, 2)), draw.randint(1, 4)
    if large:
        batch, channel = 1, draw.randint(1, 2)
        lengths = [draw.randint(24, 90), 0]
        lengths[1] = -(-LARGE * prod(ranks) * 5 // (4 * channel * lengths[0]))
    lead = len(ranks) == 1 and dims > 1 and draw.random() < 0.4
    split = [1] if lead else [*range(len(ranks))]
    sizes = lengths_of(draw, lengths, split, ranks)
    if large and draw.random() < 0.7:  # outputs that need own rows alone, on all ranks
        for dim, n in zip(split, ranks, strict=True):
            each = lengths[dim] // n
            sizes[dim] = [each] * (n - 1) + [lengths[dim] - each * (n - 1)]
    sizes = tuple(None if own is None else tuple(own) for own in sizes)
    made = Drawing(Program(seed, ranks, (batch, channel, *lengths), sizes), draw)
    count = draw.randint(1, 3) if large else draw.randint(2, 6)
    most = 3 * LARGE * prod(ranks) if large else 4000
    for _ in range(8 * count):
        made.line(KINDS_OF_LARGE if large else KINDS, most)
        if len(made.program.lines) == count:
            break
    if draw.random() < 0.25:
        ends = sorted(draw.sample(range(len(made.program.lines) + 1), 2))
        return replace(made.program, kept=tuple(ends))
    return made.program


# --- Comparison


def leaves(*tensors):
    return [t.clone().requires_grad_() for t in tensors]


def pushed_forward(program, x, parameters, into):
    """Return the derivative along the cosines of all numbers; None if torch has none."""
    tangents = [t.cos() for t in (x, *parameters)]
    with forward_ad.dual_level():
        x, *parameters = map(forward_ad.make_dual, (x, *parameters), tangents)
        out = replace(program, kept=None).run(into(x), *parameters)
        out = out.gather() if isinstance(out, vc.grid.Field) else out
        tangent = forward_ad.unpack_dual(out).tangent
    return torch.zeros_like(out) if tangent is None else tangent


def moved(x, draws):
    signs = torch.randint(-1, 2, x.shape, generator=draws)
    return x * (1 + signs.to(x.dtype) * torch.finfo(x.dtype).eps)


def expected_of(program, rounding=None):
    """Return the results of one process; None in place of a forward derivative that torch lacks."""
    x, *made = program.numbers()
    if rounding is not None:
        x, made = moved(x, rounding), [moved(p, rounding) for p in made]
    function = partial(program.run, rounding=rounding)
    found = derivatives(function, *leaves(x), leaves(*made), lambda g: g)
    try:
        return [*found, pushed_forward(program, x, made, lambda x: x)]
    except (NotImplementedError, RuntimeError):
        return [*found, None]


def found_of(program, grid, forward):
    x, *made = program.numbers()
    own = x[(..., *[slice(part.start, part.stop) for part in grid.ranges])]
    groups = grid.grid_layout.groups

    def total(g):
        for group in groups:
            g = vc.all_reduce(g, group=group.process_group)
        return g

    found = derivatives(program.run, grid.field(*leaves(own)), leaves(*made), total)
    return [*found, pushed_forward(program, own, made, grid.field) if forward else None]


def problem(program, grid):
    """Return how a program differs from one process, or is refused; or ""."""
    try:
        expected = expected_of(program)
    except (*REFUSES, NameError):
        return ""  # torch refuses it, after a line has been left out
    try:
        found = found_of(program, grid, expected[-1] is not None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    worst = distances(found, expected)
    if max(worst) < (CLOSE if prod(program.shape) < LARGE else 10 * CLOSE):
        return ""
    rounded = expected_of(program, torch.Generator().manual_seed(1))
    noise = distances(rounded, expected)
    if max(worst) < 100 * max(noise):
        return ""
    text = ", ".join(f"{a:.1e} ({b:.1e})" for a, b in zip(worst, noise, strict=True))
    return f"differs: {text} (by rounding)"


def distances(found, expected):
    pairs = zip(found, expected, strict=True)
    return [apart(a, b) for a, b in pairs if b is not None]


def shrunk(program, fails):
    """Return the program with as few lines as still fail."""
    smaller = True
    while smaller:
        smaller = False
        candidates = [replace(program, kept=None)] if program.kept else []
        for at in reversed(range(len(program.lines))):
            lines = program.lines
            candidates.append(replace(program, kept=None, lines=lines[:at] + lines[at + 1 :]))
            if lines[at][1] in (names := ["x0", *(name for name, _ in lines[:at])]):
                continue
            for name in names:
                changed = (*lines[:at], (lines[at][0], name), *lines[at + 1 :])
                candidates.append(replace(program, kept=None, lines=changed))
        for candidate in candidates:
            if fails(candidate):
                program, smaller = candidate, True
                break
    return program


def on_ranks(rank, program):
    """Return the problem of a program, with as few lines as have it; or ""."""
    count = prod(program.ranks)
    group = None if count == dist.get_world_size() else ordered_group([*range(count)])
    if rank >= count:
        return ""
    mesh = init_device_mesh("cpu", program.ranks) if len(program.ranks) == 2 else group
    grid = vc.grid.Grid(program.shape[2:], mesh, program.sizes)
    text = problem(program, grid)
    if text:  # now, because other ranks may wait for this one
        print(f"rank {rank}: {text}\n  of {program}", file=sys.stderr, flush=True)

    def fails(smaller):
        kinds = [None] * count
        kind = problem(smaller, grid).split(":")[0]
        dist.all_gather_object(kinds, kind, group)
        return kinds == [text.split(":")[0] or "none"] * count

    if not fails(program):
        return text and f"{text}\n  on this rank, of {program}"
    small = shrunk(program, fails)
    return f"{small}\n    {problem(small, grid)}\n  of {program}"


def drawn(pool):
    """Programs on some or all ranks of a pool."""
    ranks = [ranks for ranks in (*RANKS, (4,)) if prod(ranks) <= pool]
    large = st.sampled_from([False] * 29 + [True])
    return st.builds(drawn_by, st.integers(0, 2**32), st.sampled_from(ranks), large)


def verdict(program, answers):
    """Return the problem that the first rank has, or ""."""
    return next(filter(None, answers), "")


def rough(program):
    """Return by how much autocast of bf16 is farther from fp64 than on one process, or ""."""
    x, *made = program.numbers()
    grid = vc.grid.Grid(program.shape[2:], sizes=program.sizes)
    own = x[(..., *[slice(part.start, part.stop) for part in grid.ranges])]
    exact = program.run(x, *made)
    numbers = [t.float() for t in (x, own, *made)]
    with torch.autocast("cpu", torch.bfloat16):
        try:
            one = program.run(numbers[0], *numbers[2:])
        except REFUSES:
            return ""  # torch has no kernel of these dtypes
        found = program.run(grid.field(numbers[1]), *numbers[2:])
    if found.dtype != one.dtype:
        return f"{found.dtype} in place of {one.dtype}: {program}"
    errors = [apart(value.double(), exact) for value in (found, one)]
    return "" if errors[0] < 4 * errors[1] + 0.05 else f"{errors}: {program}"
