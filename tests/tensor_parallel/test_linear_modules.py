"""ColumnParallelLinear and RowParallelLinear against torch.nn.Linear: what they compute and are."""

import copy
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call
from torch.nn import functional

import varcomm
from tests.ops.comparing import Failures, assert_none
from tests.tensor_parallel.twins import (
    PATTERNS,
    REPLICATED,
    WORLDS,
    Sharded,
    compare,
    drawn,
    split,
)
from varcomm import ArgumentError, DisagreementError, GroupError
from varcomm.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    shard_spec,
)
from varcomm.transport.group import resolve

IN, OUT = 4, 5
DOUBLE = torch.float64
KINDS = (ColumnParallelLinear, RowParallelLinear)


@dataclass(frozen=True)
class InBlocks(Sharded):
    """Each rank has a part of each block, one after the other."""

    blocks: tuple = ()

    def cut(self, whole, rank):
        blocks = whole.split([sum(block) for block in self.blocks], self.dim)
        pairs = zip(blocks, self.blocks, strict=True)
        return torch.cat([b.split(list(n), self.dim)[rank] for b, n in pairs], self.dim)


def bound_to(layer, *names, call=None):
    """The layer as a function of its input and parameters."""

    def fn(x, *values):
        given = dict(zip(names, values, strict=True))
        y = functional_call(layer, given, (x,), call or {})
        return y if isinstance(y, torch.Tensor) else y[0] + y[1]

    return fn


def cases(ranks, pattern, group=None):
    """Layers of all options, the wholes that they take, and how the output is sharded."""
    sizes, others = split(pattern, ranks), split("uneven", ranks)
    sequence = split("one empty" if pattern == "uneven" else "uneven", ranks)
    blocks = (sizes, others, sizes[::-1])
    width, fused, length = sum(sizes), sum(sum(block) for block in blocks), sum(sequence)
    both, alone, how = ("weight", "bias"), ("weight",), {"group": group, "dtype": DOUBLE}
    part, parts = Sharded(0, sequence), {"sequence_sizes": sequence}
    whole, of_parts = (drawn(1, 2, 3, IN), REPLICATED), (drawn(1, length, IN), part)
    first, last = Sharded(0, sizes), Sharded(2, sizes)
    weight, bias = (drawn(2, width, IN), first), (drawn(3, width), first)
    across, added = (drawn(2, OUT, width), Sharded(1, sizes)), (drawn(3, OUT), REPLICATED)
    wide, of_rank = (drawn(4, length, 2, width), REPLICATED), (drawn(4, length, 2, width), last)
    rows = InBlocks(0, blocks=blocks)
    of_blocks = [(drawn(5, fused, IN), rows), (drawn(6, fused), rows)]
    columns = [(drawn(5, OUT, fused), InBlocks(1, blocks=blocks)), added]
    stacked = drawn(7, 2, 3, fused)

    def column(*names, call=None, n=width, sizes=sizes, **options):
        layer = ColumnParallelLinear(IN, n, "bias" in names, sizes, **how, **options)
        return bound_to(layer, *names, call=call)

    def row(*names, call=None, n=width, sizes=sizes, **options):
        layer = RowParallelLinear(n, OUT, "bias" in names, sizes, **how, **options)
        return bound_to(layer, *names, call=call)

    parallel, kept = [whole, weight, bias], Sharded(1, sizes)
    return {
        "column": (column(*both), parallel, last),
        "column, no bias": (column(*alone), parallel[:2], last),
        "column, gathered": (column(*both, gather_output=True), parallel, REPLICATED),
        "column, gathered at call time": (
            column(*both, call={"gather_output": True}),
            parallel,
            REPLICATED,
        ),
        "column, not gathered at call time": (
            column(*both, gather_output=True, call={"gather_output": False}),
            parallel,
            last,
        ),
        "column, bias added outside": (column(*both, skip_bias_add=True), parallel, last),
        "column, bias added outside, gathered": (
            column(*both, skip_bias_add=True, gather_output=True),
            parallel,
            REPLICATED,
        ),
        "column of a sequence": (column(*both, **parts), [of_parts, weight, bias], kept),
        "column of a sequence, kept": (
            column(*both, save="gathered", **parts),
            [of_parts, weight, bias],
            kept,
        ),
        "column of a sequence given at call time": (
            column(*both, sequence_sizes=[1] * ranks, call=parts),
            [of_parts, weight, bias],
            kept,
        ),
        "column of a sequence, bias added outside": (
            column(*both, skip_bias_add=True, **parts),
            [of_parts, weight, bias],
            kept,
        ),
        "column of blocks": (
            column(*both, n=fused, sizes=blocks),
            [whole, *of_blocks],
            InBlocks(2, blocks=blocks),
        ),
        "column of blocks, gathered": (
            column(*both, n=fused, sizes=blocks, gather_output=True),
            [whole, *of_blocks],
            REPLICATED,
        ),
        "column of blocks, bias added outside, gathered": (
            column(*both, n=fused, sizes=blocks, gather_output=True, skip_bias_add=True),
            [whole, *of_blocks],
            REPLICATED,
        ),
        "row": (row(*both), [of_rank, across, added], REPLICATED),
        "row, no bias": (row(*alone), [of_rank, across], REPLICATED),
        "row, given all": (
            row(*both, input_is_parallel=False),
            [wide, across, added],
            REPLICATED,
        ),
        "row, bias added outside": (
            row(*both, skip_bias_add=True),
            [of_rank, across, added],
            REPLICATED,
        ),
        "row to a sequence": (row(*both, **parts), [of_rank, across, added], part),
        "row to a sequence given at call time": (
            row(*both, sequence_sizes=[1] * ranks, call=parts),
            [of_rank, across, added],
            part,
        ),
        "row to a sequence, bias added outside": (
            row(*both, skip_bias_add=True, **parts),
            [of_rank, across, added],
            part,
        ),
        "row of blocks": (
            row(*both, n=fused, sizes=blocks),
            [(stacked, InBlocks(2, blocks=blocks)), *columns],
            REPLICATED,
        ),
        "row of blocks, given all": (
            row(*both, n=fused, sizes=blocks, input_is_parallel=False),
            [(stacked, REPLICATED), *columns],
            REPLICATED,
        ),
    }


def run(rank, pattern):
    failures = []
    for name, (fn, inputs, output) in cases(dist.get_world_size(), pattern).items():
        found = compare(fn, functional.linear, inputs, output)
        failures += [f"{name}: {text}" for text in found]
    return failures


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_values_and_derivatives(worlds, pattern, ranks):
    assert_none(worlds.run(ranks, run, pattern))


def in_groups(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    failures = []
    for name, (fn, inputs, output) in cases(2, "uneven", mesh["tensor"]).items():
        found = compare(fn, functional.linear, inputs, output, group=mesh["tensor"])
        failures += [f"{name}: {text}" for text in found]
    return failures


def test_one_dimension_of_a_mesh(worlds):
    assert_none(worlds.run(4, in_groups))


def trained(rank):
    """Steps of an optimizer: parameters and their ``.grad`` are those of one process."""
    torch.manual_seed(0)
    up, down = nn.Linear(IN, 6, dtype=DOUBLE), nn.Linear(6, IN, dtype=DOUBLE)
    layers = [
        ColumnParallelLinear.from_linear(up, sizes=[4, 0, 2], sequence_sizes=[1, 3, 0]),
        RowParallelLinear.from_linear(
            down, sizes=[4, 0, 2], sequence_sizes=[1, 3, 0], skip_bias_add=True
        ),
    ]
    one = torch.optim.Adam([*up.parameters(), *down.parameters()], lr=0.1)
    many = torch.optim.Adam([p for layer in layers for p in layer.parameters()], lr=0.1)
    x = drawn(1, 4, IN)
    for _ in range(3):
        one.zero_grad()
        many.zero_grad()
        (down(up(x).tanh()) ** 2).sum().backward()
        y, bias = layers[1](layers[0](x.split([1, 3, 0])[rank]).tanh())
        total = gather_from_sequence_parallel_region(
            y + bias, tensor_parallel_output_grad=False, sizes=[1, 3, 0]
        )
        (total**2).sum().backward()
        one.step()
        many.step()
    failures = Failures()
    for layer, linear in zip(layers, (up, down), strict=True):
        for name, param in layer.named_parameters():
            whole, spec = getattr(linear, name), shard_spec(param)
            for which, value in (("value", whole.detach()), ("gradient", whole.grad)):
                own = param.detach() if which == "value" else param.grad
                with failures.named(type(layer).__name__, name, which):
                    torch.testing.assert_close(own, value if spec is None else spec.shard(value))
    return failures


def test_training_is_that_of_one_process(worlds):
    assert_none(worlds.run(3, trained))


SIZES = {
    ColumnParallelLinear: {1: [7], 2: [2, 5], 3: [3, 0, 4], 4: [1, 0, 0, 6]},
    RowParallelLinear: {1: [6], 2: [6, 0], 3: [1, 2, 3], 4: [0, 2, 3, 1]},
}


def there_and_back(rank, kind):
    failures, ranks = Failures(), dist.get_world_size()
    for bias, frozen, blocks in ((True, True, False), (False, False, False), (True, False, True)):
        torch.manual_seed(1)
        linear = nn.Linear(6, 7, bias, dtype=torch.bfloat16).train(not frozen)
        linear.weight.requires_grad_(not frozen)
        before = copy.deepcopy(linear)
        sizes = SIZES[kind][ranks]
        if blocks:  # as q, k and v have other sizes
            sizes = [[min(n, 1) for n in sizes], [n - min(n, 1) for n in sizes]]
        layer = kind.from_linear(linear, sizes=sizes)
        with torch.no_grad():
            for param in linear.parameters():
                param.add_(1)  # shares no memory
        back = layer.to_linear()
        with failures.named(bias, frozen, blocks):
            assert type(back) is nn.Linear
            assert back.training == layer.training == before.training
            assert (layer.bias is None) == (back.bias is None) == (not bias)
            for name, param in before.named_parameters():
                own, again = getattr(layer, name), getattr(back, name)
                assert own.requires_grad == again.requires_grad == param.requires_grad
                assert torch.equal(again, param)
                spec = shard_spec(own)
                assert torch.equal(own, param if spec is None else spec.shard(param))
            sharded = ["weight", "bias"] if kind is ColumnParallelLinear else ["weight"]
            marked = [n for n, p in layer.named_parameters() if shard_spec(p) is layer.spec]
            assert marked == [n for n in sharded if getattr(layer, n) is not None]
    return failures


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_from_linear_to_linear(worlds, kind, ranks):
    assert_none(worlds.run(ranks, there_and_back, kind))


def whole_of(rank, kind, same_seed):
    """The whole weight and bias as they are drawn, gathered."""
    torch.manual_seed(7 if same_seed or rank == 0 else rank)
    first = kind(300, 70, init=lambda t, g: t.normal_(generator=g))
    second = kind(70, 300, dtype=torch.bfloat16)
    found = [layer.to_linear() for layer in (first, second)]
    return [p.detach() for linear in found for p in linear.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_initial_weights_do_not_depend_on_the_ranks(worlds, kind):
    expected = worlds.run(1, whole_of, kind, True)[0]
    answers = [a for n in WORLDS[1:] for a in worlds.run(n, whole_of, kind, True)]
    answers += worlds.run(3, whole_of, kind, False)
    assert len(answers) == 12
    for found in answers:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    weight, bias, narrow, other = (tensor.double() for tensor in expected)
    assert abs(weight.std() - 1) < 0.02
    assert narrow.abs().max() == pytest.approx(70**-0.5, rel=0.01)
    assert bias.abs().max() <= 300**-0.5
    assert not torch.equal(narrow[:, 0], other)


def tied(rank):
    """A head that has no weight of its own, and one that is lent another."""
    sizes, twin = [3, 2], drawn(1, 5, IN)
    table = nn.Parameter(twin.split(sizes)[rank].clone())
    head = ColumnParallelLinear(IN, 5, False, sizes, allocate_weight=False, gather_output=True)
    with_bias = ColumnParallelLinear(IN, 5, sizes=sizes, allocate_weight=False)
    down = RowParallelLinear(5, IN, False, sizes, dtype=DOUBLE)
    x = drawn(2, 3, IN)
    y = head(x, table)
    torch.testing.assert_close(y, x @ twin.T)
    y.sum().backward()
    torch.testing.assert_close(table.grad, x.sum(0).expand(sizes[rank], IN))
    z = down(drawn(3, 3, 5).split(sizes, 1)[rank], table.detach().T)
    torch.testing.assert_close(z, drawn(3, 3, 5) @ twin)
    for call, text in (
        (lambda: head(x), "ColumnParallelLinear on rank . of 2: made with allocate_weight=False"),
        (lambda: head(x, twin), r"has 5 rows, but sizes\[.\] is"),
        (lambda: down(x, twin.T[:, :IN]), r"has 4 columns, but sizes\[.\] is"),
    ):
        with pytest.raises(ArgumentError, match=text):
            call()
    with pytest.raises(ArgumentError, match=r"refused on rank 0 of 2 .*has no weight of its own"):
        head.to_linear()
    names = [list(layer.state_dict()) for layer in (head, with_bias)]
    return names, head.weight is None, with_bias.bias.shape[0]


def test_weights_that_are_lent(worlds):
    assert worlds.run(2, tied) == [([[], ["bias"]], True, 3), ([[], ["bias"]], True, 2)]


def bias_outside(rank):
    """What is returned beside the output."""
    x, told = torch.ones(2, IN), []
    for options in ({}, {"gather_output": True}):
        y, bias = ColumnParallelLinear(IN, 5, sizes=[3, 2], skip_bias_add=True, **options)(x)
        told.append((y.shape[-1], bias.shape[0]))
    part = x.split([1, 1])[rank][:, :2]
    for options in ({}, {"sequence_sizes": [1, 1]}):
        layer = RowParallelLinear(IN, 5, skip_bias_add=True, **options)
        y, bias = layer(x[:, :2])
        (y * 0 + bias).sum().backward()
        told.append((len(y), layer.bias.grad.tolist()))
    none = [
        ColumnParallelLinear(IN, 5, False, skip_bias_add=True)(x)[1],
        RowParallelLinear(IN, 5, False, sequence_sizes=[1, 1], skip_bias_add=True)(x[:, :2])[1],
    ]
    return told, none, part.shape[0]


def test_bias_that_the_caller_adds(worlds):
    for rank, (told, none, _) in enumerate(worlds.run(2, bias_outside)):
        # of a sequence, each rank adds it to one row; else all ranks to the same two
        assert told == [(3 - rank, 3 - rank), (5, 5), (2, [2.0] * 5), (1, [2.0] * 5)]
        assert none == [None, None]


def marks(rank):
    failures = Failures()
    for kind in KINDS:
        model = nn.Sequential(kind(6, 7, sizes=SIZES[kind][2] if kind is KINDS[0] else [6, 0]))
        layer = model[0]
        state = layer.state_dict()
        loaded, assigned, empty = (copy.deepcopy(model) for _ in range(3))
        others = {f"0.{name}": torch.full_like(p, 2) for name, p in state.items()}
        loaded.load_state_dict(others)
        assigned.load_state_dict(others, assign=True)
        empty = empty.to("meta").to_empty(device="cpu")
        wide = copy.deepcopy(model).to(DOUBLE)
        from_meta = nn.Sequential(kind(6, 7, sizes=layer.spec.sizes, device="meta"))
        on_meta = from_meta[0].weight.is_meta
        from_meta.load_state_dict(others, assign=True)
        for name, copied in {
            "copied": copy.deepcopy(model),
            "loaded": loaded,
            "assigned": assigned,
            "empty": empty,
            "wide": wide,
            "from meta": from_meta,
        }.items():
            with failures.named(kind.__name__, name):
                specs = [(n, shard_spec(p)) for n, p in copied[0].named_parameters()]
                expected = [(n, shard_spec(p)) for n, p in layer.named_parameters()]
                assert specs == expected
                assert specs[0][1] is copied[0].spec
                assert copied[0].group == layer.group
                assert copied[0].weight is not layer.weight
        with failures.named(kind.__name__, "values"):
            assert on_meta
            assert wide[0].weight.dtype == DOUBLE
            assert torch.equal(loaded[0].weight, torch.full_like(layer.weight, 2))
            assert torch.equal(from_meta[0].weight, loaded[0].weight)
            assert copy.deepcopy(model)[0].weight.tolist() == layer.weight.tolist()
            with pytest.raises(GroupError, match="tied to the ranks of its group"):
                pickle.dumps(layer)
    return failures


def test_marks_stay_with_parameters(worlds):
    assert_none(worlds.run(2, marks))


def told(rank):
    layers = [
        ColumnParallelLinear(IN, 5, sizes=np.array([3, 2]), sequence_sizes=np.array([1, 1])),
        ColumnParallelLinear(
            IN, 6, False, [[1, 2], [3, 0]], True, device="meta", save="gathered", use_fp32=False
        ),
        RowParallelLinear(IN, 5, input_is_parallel=False, skip_bias_add=True),
    ]
    meta = layers[1].weight
    return [str(layer) for layer in layers], meta.is_meta and shard_spec(meta) is layers[1].spec


def test_repr(worlds):
    expected = [
        "ColumnParallelLinear(in_features=4, out_features=5, bias=True, sizes=[3, 2], "
        "sequence_sizes=[1, 1])",
        "ColumnParallelLinear(in_features=4, out_features=6, bias=False, sizes=[[1, 2], [3, 0]], "
        "gather_output=True, save='gathered', use_fp32=False)",
        "RowParallelLinear(in_features=4, out_features=5, bias=True, sizes=[2, 2], "
        "input_is_parallel=False, skip_bias_add=True)",
    ]
    assert worlds.run(2, told) == [(expected, True)] * 2


def kept_apart(rank):
    """Sizes are taken as they are at the time, whatever becomes of the list."""
    sequence, x = [1, 1], torch.ones(1, IN)
    layer = ColumnParallelLinear(IN, 5, sequence_sizes=sequence)
    sequence[0] = 3
    return len(layer(x))


def test_lists_are_not_kept(worlds):
    assert worlds.run(2, kept_apart) == [2, 2]


# What is wrong on the second rank alone.
WRONG = {
    "flag": ((IN, 5), {"bias": 1}, "bias must be True or False; got 1"),
    "features": ((IN, 5.5), {}, "out_features must be an integer of at least 0; got 5.5"),
    "negative": ((-1, 5), {}, "in_features must be an integer of at least 0; got -1"),
    "sum": ((6, 7), {"sizes": [3, 5]}, r"sizes \[3, 5\] sum to 8, but (out|in)_features is"),
    "sum of blocks": ((6, 7), {"sizes": [[3, 0], [5, 0]]}, "sum to 8, but (out|in)_features is"),
    "ranks": ((6, 7), {"sizes": [3, 4, 0]}, "sizes must have one entry a rank, 2; got 3"),
    "sequence": ((6, 7), {"sequence_sizes": [3]}, "sequence_sizes must have one entry a rank"),
    "init": ((6, 7), {"init": 3}, "init must be a function of a tensor and a generator; got 3"),
    "dtype": ((6, 7), {"dtype": torch.int64}, "dtype must be one of floats; got torch.int64"),
    "device": ((6, 7), {"device": "gpu"}, "gpu"),
    "group flag": ((6, 7), {"skip_bias_add": "no"}, "skip_bias_add must be True or False"),
}


def refused(rank, kind, name):
    args, options, text = WRONG[name]
    if rank == 0:
        args, options = (6, 7), {}
    with pytest.raises(ArgumentError, match=f"^{kind.__name__}: refused on rank 1 of 2: .*{text}"):
        kind(*args, **options)
    return varcomm.all_reduce(torch.ones(1)).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_on_one_rank_is_refused_on_all(worlds, kind, name):
    assert worlds.run(2, refused, kind, name) == [2.0, 2.0]


def refused_otherwise(rank):
    """What only one kind has, and calls of `from_linear`."""
    torch.manual_seed(0)
    linear, text = nn.Linear(6, 7), []
    calls = [
        lambda: ColumnParallelLinear(6, 7, save="all" if rank else "input"),
        lambda: ColumnParallelLinear(6, 7, gather_output=None if rank else False),
        lambda: RowParallelLinear(6, 7, input_is_parallel=2 if rank else True),
        lambda: ColumnParallelLinear.from_linear(nn.Identity() if rank else linear),
        lambda: RowParallelLinear.from_linear(linear, sizes=[3, 4] if rank else [3, 3]),
    ]
    for call in calls:
        try:
            call()
        except ArgumentError as error:
            text.append(str(error).split("refused on rank 1 of 2: ")[1])
    return text


def test_other_options_wrong_on_one_rank(worlds):
    expected = [
        'save must be "input" or "gathered"; got \'all\'.',
        "gather_output must be True or False; got None.",
        "input_is_parallel must be True or False; got 2.",
        "linear must be a torch.nn.Linear; got Identity.",
        "sizes [3, 4] sum to 7, but in_features is 6.",
    ]
    assert worlds.run(2, refused_otherwise) == [expected] * 2


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def not_plain(rank):
    """Linears that do more than a Linear does."""
    hooked = nn.Linear(6, 7)
    hooked.register_forward_pre_hook(lambda module, given: given)
    told = []
    for linear in (nn.utils.parametrizations.weight_norm(nn.Linear(6, 7)), hooked, Doubled(6, 7)):
        with pytest.raises(ArgumentError) as caught:
            ColumnParallelLinear.from_linear(linear if rank == 1 else nn.Linear(6, 7))
        told.append(str(caught.value).split("refused on rank 1 of 2: ")[1])
    return told


def test_what_would_be_lost_is_refused(worlds):
    lost = "which would be lost. Remove that, and give it to the parallel layer."
    expected = [
        f"linear, of class ParametrizedLinear, has a parametrization, {lost}",
        f"linear, of class Linear, has hooks, {lost}",
        f"linear, of class Doubled, has a forward of its own, {lost}",
    ]
    assert worlds.run(2, not_plain) == [expected] * 2


# Arguments that are right on each rank, and not the same.
DIFFERING = {
    "in_features": ((8, 7), {}),
    "out_features": ((6, 9), {}),
    "sizes": ((6, 7), {"sizes": "other"}),
    "sequence_sizes": ((6, 7), {"sequence_sizes": [1, 2]}),
    "dtype": ((6, 7), {"dtype": DOUBLE}),
    "bias": ((6, 7), {"bias": False}),
    "skip_bias_add": ((6, 7), {"skip_bias_add": True}),
    "use_fp32": ((6, 7), {"use_fp32": False}),
    "allocate_weight": ((6, 7), {"allocate_weight": False}),
    "an init": ((6, 7), {"init": torch.Tensor.uniform_}),
}


def differing(rank, kind, name):
    args, options = DIFFERING[name]
    if options.get("sizes"):
        options = {"sizes": SIZES[kind][2]}
    if rank == 0:
        args, options = (6, 7), {}
    text = f"{kind.__name__}: ranks disagree on {name}: rank 0 has"
    with pytest.raises(DisagreementError, match=text):
        kind(*args, **options)
    return varcomm.all_reduce(torch.ones(1)).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DIFFERING)
def test_arguments_that_differ(worlds, kind, name):
    assert worlds.run(2, differing, kind, name) == [2.0, 2.0]


def differing_otherwise(rank):
    torch.manual_seed(0)
    linear = nn.Linear(6, 7)
    other = copy.deepcopy(linear)
    with torch.no_grad():
        other.weight[0, 0] += rank
    frozen = copy.deepcopy(linear)
    frozen.bias.requires_grad_(rank == 0)
    # one with a bias on the second rank alone, which the first does not name
    bias = nn.Linear(6, 7, bias=rank == 1)
    with torch.no_grad():
        bias.weight.copy_(linear.weight)
    calls = [
        lambda: ColumnParallelLinear(6, 7, save=["input", "gathered"][rank]),
        lambda: ColumnParallelLinear(6, 7, gather_output=rank == 0),
        lambda: RowParallelLinear(6, 7, input_is_parallel=rank == 0),
        lambda: KINDS[rank](6, 7),
        lambda: RowParallelLinear.from_linear(other),
        lambda: ColumnParallelLinear.from_linear(frozen),
        lambda: ColumnParallelLinear.from_linear(bias),
        lambda: ColumnParallelLinear.from_linear(linear, gather_output=rank == 0),
    ]
    text = []
    for call in calls:
        with pytest.raises(DisagreementError, match="disagree on") as caught:
            call()
        text.append(str(caught.value).split(" rank 0 has")[0])
    # a dtype that is given on one rank and torch's default on the other is the same
    same = ColumnParallelLinear(6, 7, dtype=[None, torch.float32][rank])
    return text, same.weight.dtype


def test_options_and_weights_that_differ(worlds):
    column, row = "ColumnParallelLinear", "RowParallelLinear"
    expected = [
        f"{column}: ranks disagree on save:",
        f"{column}: ranks disagree on gather_output:",
        f"{row}: ranks disagree on input_is_parallel:",
        "ranks disagree on operation:",
        f"{row}.from_linear: ranks disagree on weight:",
        f"{column}.from_linear: ranks disagree on bias:",
        f"{column}.from_linear: ranks disagree on bias:",
        f"{column}: ranks disagree on gather_output:",
    ]
    assert worlds.run(2, differing_otherwise) == [(expected, torch.float32)] * 2


def wrong_calls(rank):
    sizes = [[1, 2], [1, 0]]
    column = ColumnParallelLinear(IN, 4, sizes=sizes, gather_output=True)
    row = RowParallelLinear(4, OUT, sizes=sizes, input_is_parallel=False)
    lent = RowParallelLinear(4, OUT, allocate_weight=False)
    calls = [
        (lambda: column(torch.ones(2, IN), gather_output=1), "gather_output must be True or False"),
        (lambda: column(torch.ones(2, 3)), r"x of shape \(2, 3\) and weight of shape"),
        (lambda: column(torch.ones(2, IN), sequence_sizes=[1]), "sequence_sizes must have one ent"),
        (lambda: row(torch.ones(2, 3)), r"must have all 4 inputs in its last .* shape \(2, 3\)"),
        (lambda: row(torch.tensor(1.0)), r"must have all 4 inputs in its last .* shape \(\)"),
        (lambda: row([1.0]), "RowParallelLinear on rank . of 2: x must be a torch.Tensor"),
        (lambda: lent(torch.ones(2, 2)), "needs a weight in each call"),
    ]
    for call, text in calls:
        with pytest.raises(ArgumentError, match=text):
            call()
    # inside debug(), all ranks learn what is wrong on one
    x, weight = torch.ones(2, 2), torch.ones(OUT, 2)
    with varcomm.debug(), pytest.raises(DisagreementError, match="not called, since on rank 1"):
        lent(x, None if rank else weight)
    with varcomm.debug(), pytest.raises(DisagreementError, match="not called, since on rank 1"):
        row(torch.ones(2, 4 - rank))
    return (lent(x, weight) - lent.bias).round().tolist()


def test_wrong_calls(worlds):
    assert worlds.run(2, wrong_calls) == [[[4.0] * OUT] * 2] * 2


def first_members(rank):
    """The group's first rank draws, which is not the world's."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    torch.manual_seed(rank)
    layer = ColumnParallelLinear(IN, OUT, group=group)
    torch.manual_seed(1)
    return layer.to_linear().weight.tolist(), resolve(layer.group.process_group).rank


def test_group_without_rank_0(worlds):
    none, first, second = worlds.run(3, first_members)
    assert none is None
    assert (first[0], first[1], second[1]) == (second[0], 0, 1)
