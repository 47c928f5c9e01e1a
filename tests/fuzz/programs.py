"""Random programs: a sequence of collectives, against the same program in one process.

A local function between two collectives reshapes a rank's tensor to the input of the next one, so
that any sequence is a program. It is not linear, so that second derivatives are not zero.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.ops.comparing import LAYOUTS
from tests.ops.primitives import PRIMITIVES, Case, Setting
from tests.transforms.layers import on_graph
from tests.transport.groups import ordered_group
from varcomm.tensor_parallel import ColumnParallelLinear, RowParallelLinear

POOL = 4  # ranks of `make fuzz`; a program uses all or some of them
DTYPES = (torch.float64, torch.complex128)
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def for_each(strategy, count, number, call):
    """Call a function with `count` examples of a strategy, drawn by the seed `number`."""
    quiet = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    decorated = given(strategy)(lambda drawn: call(drawn))
    seed(number)(settings(max_examples=count, phases=(Phase.generate,), **quiet)(decorated))()


@dataclass(frozen=True)
class Step:
    """One collective, and how its input lies in memory."""

    name: str
    setting: Setting
    layout: str | None
    with_handle: bool

    @property
    def case(self):
        return (PRIMITIVES | LAYERS)[self.name](self.setting)


@dataclass(frozen=True)
class Program:
    """Steps of a group of some ranks of the pool, in the order of that group."""

    members: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    steps: tuple[Step, ...]


def parallel_linear(kind, s):
    """A column- or row-parallel layer: rows split as the setting says, features in other parts."""
    parts, is_column = (s.sizes[-1] + 1, *s.sizes[:-1]), kind is ColumnParallelLinear
    inputs, outputs = (2, sum(parts)) if is_column else (sum(parts), 2)
    draws = torch.Generator().manual_seed(outputs + 7 * inputs)
    weight = torch.randn(outputs, inputs, dtype=torch.float64, generator=draws)

    def bind(group=None):
        shards = {"sizes": parts, "sequence_sizes": s.sizes, "group": group}
        layer = kind(inputs, outputs, bias=False, dtype=torch.float64, **shards)
        layer.weight.data.copy_(weight.split(parts, 0 if is_column else 1)[dist.get_rank(group)])
        return layer

    def reference(xs):
        result = torch.cat(xs, 0 if is_column else 1) @ weight.T
        return list(result.split(parts, 1) if is_column else result.split(s.sizes))

    rows = [(rows, 2) for rows in s.sizes] if is_column else [(sum(s.sizes), n) for n in parts]
    return Case(tuple(rows), bind, reference, has_async=False)


LAYERS = {
    "graph_layer": partial(on_graph, layer=partial(pyg.GraphConv, 2, 2)),
    "column_linear": partial(parallel_linear, ColumnParallelLinear),
    "row_linear": partial(parallel_linear, RowParallelLinear),
}


@st.composite
def settings_of(draw, ranks):
    sizes = draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks))
    rest = tuple(draw(st.lists(st.integers(0, 2), max_size=2)))
    dim = draw(st.integers(-len(rest) - 1, len(rest)))
    return Setting(tuple(sizes), dim, rest, draw(st.integers(0, ranks - 1)))


@st.composite
def steps_of(draw, ranks, dtype):
    real = dtype == torch.float64
    name = draw(st.sampled_from(sorted(PRIMITIVES | (LAYERS if real else {}))))
    setting = draw(settings_of(ranks))
    if name == "transpose_v" and not setting.rest:
        setting = Setting(setting.sizes, 0, (2,), setting.root)
    layout = draw(st.sampled_from([None, *LAYOUTS]))
    return Step(name, setting, layout, draw(st.booleans()))


@st.composite
def drawn(draw, pool=POOL, most_steps=5):
    ranks = draw(st.integers(1, pool))
    members = tuple(draw(st.permutations(range(pool)))[:ranks])
    dtype = draw(st.sampled_from(DTYPES))
    steps = draw(st.lists(steps_of(ranks, dtype), min_size=1, max_size=most_steps))
    return Program(members, dtype, draw(st.integers(0, 2**16)), tuple(steps))


def bounded(x):
    """Return sines; of complex numbers those of both parts, because a complex sine has no bound."""
    return torch.complex(torch.sin(x.real), torch.sin(x.imag)) if x.is_complex() else torch.sin(x)


def fitted(x, shape, dtype):
    """Return a tensor of this shape from the numbers of `x`, repeated."""
    count = math.prod(shape)
    places = torch.arange(count)
    scale = 0.3 + 0.1 * (places % 5)
    flat = x.reshape(-1)
    if not flat.numel():  # the result still depends on `x`
        return scale.to(dtype).reshape(shape) + flat.sum()
    return (bounded(flat[(7 * places + 3) % flat.numel()]) * scale).reshape(shape)


def laid_out(x, layout):
    # Autograd of the first two has other numbers; torch's derivative of copy_ into an empty view
    # loses its input.
    if layout in ("expanded", "negative") or (layout == "strided" and not x.numel()):
        return x
    return LAYOUTS[layout](x) if layout else x


def inputs_of(program):
    draws = torch.Generator().manual_seed(program.seed)
    return [torch.randn(3, dtype=program.dtype, generator=draws) for _ in program.members]


def weights_of(program, outputs):
    draws = torch.Generator().manual_seed(program.seed + 1)
    return [torch.randn(y.shape, dtype=y.dtype, generator=draws) for y in outputs]


def outcome(xs, outputs, weights):
    """Outputs, first derivatives, and the derivatives of their squares, of all inputs."""
    loss = sum((w.conj() * bounded(y)).sum().real for w, y in zip(weights, outputs, strict=True))
    # an input may not reach any output or derivative
    loss = loss + 0 * sum(x.abs().square().sum() for x in xs)
    first = torch.autograd.grad(loss, xs, create_graph=True, materialize_grads=True)
    length = sum(g.abs().square().sum() for g in first)
    second = torch.autograd.grad(length, xs, allow_unused=True, materialize_grads=True)
    return [*(y.detach() for y in outputs), *(g.detach() for g in first), *second]


def alone(program):
    """Run a program in one process; return the expected result of each rank."""
    xs = [x.requires_grad_() for x in inputs_of(program)]
    values = xs
    for step in program.steps:
        case = step.case
        given = [
            None if shape is None else fitted(value, shape, program.dtype)
            for value, shape in zip(values, case.shapes, strict=True)
        ]
        values = case.reference(given)
    found = outcome(xs, values, weights_of(program, values))
    ranks = len(xs)
    return [[found[rank + part * ranks] for part in range(3)] for rank in range(ranks)]


def on_ranks(rank, program):
    """Run a program on its ranks; return the difference from one process, or ""."""
    group = ordered_group(list(program.members))
    if rank not in program.members:
        return ""
    place, value = dist.get_rank(group), inputs_of(program)[dist.get_rank(group)].requires_grad_()
    x = value
    for step in program.steps:
        case = step.case
        op, shape = case.bind(group), case.shapes[place]
        if shape is None:  # nothing is read here; earlier steps still need their backward
            value = op(fitted(value, (1,), program.dtype)) + 0 * value.sum()
            continue
        given = laid_out(fitted(value, shape, program.dtype), step.layout)
        handle = step.with_handle and case.has_async
        value = op(given, async_op=True).wait() if handle else op(given)
    wanted = alone(program)
    every = [torch.empty(()).new_zeros(found[0].shape, dtype=program.dtype) for found in wanted]
    weight = weights_of(program, every)[place]
    found = outcome([x], [value], [weight])
    for what, got, want in zip(("output", "first", "second"), found, wanted[place], strict=True):
        if got.shape != want.shape or not torch.allclose(got, want, **CLOSE):
            return f"{what} on rank {place}: {got} in place of {want}"
    return ""


def verdict(program, answers):
    """Return the differences of all ranks, or ""."""
    return "; ".join(text for text in answers if text)
