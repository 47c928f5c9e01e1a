"""Column- and row-parallel products against one process: values, derivatives, what travels."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

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
from varcomm import ArgumentError, DisagreementError
from varcomm.tensor_parallel import column_parallel_linear, row_parallel_linear
from varcomm.tensor_parallel.linear import column, overlap, row
from varcomm.transport.group import resolve

IN, OUT = 4, 5


def cases(ranks, pattern, group=None):
    """What each way of calling takes, as `compare` wants it."""
    sizes, sequence = split(pattern, ranks), split("uneven", ranks)
    # the sequence has empty parts where the features have none
    if pattern == "uneven":
        sequence = split("one empty", ranks)
    length, width = sum(sequence), sum(sizes)
    column = [
        (drawn(2, width, IN), Sharded(0, sizes)),
        (drawn(3, width), Sharded(0, sizes)),
    ]
    row = [(drawn(2, OUT, width), Sharded(1, sizes)), (drawn(3, OUT), REPLICATED)]
    parts = Sharded(0, sequence)
    replicated, sharded = (drawn(1, 2, 3, IN), REPLICATED), (drawn(1, length, 2, IN), parts)
    columns = (drawn(4, length, 2, width), Sharded(2, sizes))
    options = {"group": group}
    in_parts = options | {"sequence_sizes": sequence}

    def gathered(*operands):
        return column_parallel_linear(*operands, sizes, gather_output=True, **options)

    def given_whole(*operands):
        return row_parallel_linear(*operands, sizes, input_is_parallel=False, **options)

    return {
        "column": (
            lambda *operands: column_parallel_linear(*operands, **options),
            [replicated, *column],
            Sharded(2, sizes),
        ),
        "column, no bias": (
            lambda *operands: column_parallel_linear(*operands, **options),
            [replicated, column[0]],
            Sharded(2, sizes),
        ),
        "column, gathered output": (gathered, [replicated, *column], REPLICATED),
        "column of a sequence": (
            lambda *operands: column_parallel_linear(*operands, **in_parts),
            [sharded, *column],
            Sharded(2, sizes),
        ),
        "column of a sequence, kept": (
            lambda *operands: column_parallel_linear(*operands, save="gathered", **in_parts),
            [sharded, *column],
            Sharded(2, sizes),
        ),
        "row": (
            lambda *operands: row_parallel_linear(*operands, **options),
            [columns, *row],
            REPLICATED,
        ),
        "row, no bias": (
            lambda *operands: row_parallel_linear(*operands, **options),
            [columns, row[0]],
            REPLICATED,
        ),
        "row, given all": (given_whole, [(columns[0], REPLICATED), *row], REPLICATED),
        "row to a sequence": (
            lambda *operands: row_parallel_linear(*operands, **in_parts),
            [columns, *row],
            parts,
        ),
        "row to a sequence, no bias": (
            lambda *operands: row_parallel_linear(*operands, **in_parts),
            [columns, row[0]],
            parts,
        ),
    }


def run(rank, pattern):
    failures = []
    for name, (fn, inputs, output) in cases(torch.distributed.get_world_size(), pattern).items():
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


SHAPES = [(IN,), (3, IN), (0, IN), (2, 0, IN), (2, 1, 2, IN)]


def of_shapes(rank):
    sizes = split("uneven", 3)
    weight, failures = drawn(1, sum(sizes), IN), Failures()
    own = weight.split(list(sizes))[rank]
    for shape in SHAPES:
        x = drawn(2, *shape)
        strided = x.transpose(0, -1).contiguous().transpose(0, -1)
        y = column_parallel_linear(strided, own)
        z = row_parallel_linear(y, own.T)
        with failures.named(shape):
            want = functional.linear(x, weight)
            torch.testing.assert_close(y, want.split(list(sizes), -1)[rank])
            torch.testing.assert_close(z, functional.linear(want, weight.T))
    return failures


def test_inputs_of_any_rank(worlds):
    assert_none(worlds.run(3, of_shapes))


def forward_mode(rank, pattern):
    """The tangent of an output is the derivative along the tangents of all inputs."""
    failures = Failures()
    for name, (fn, inputs, output) in cases(3, pattern).items():
        tangents = [drawn(30 + i, *x.shape) for i, (x, _) in enumerate(inputs)]
        for which in (slice(None), slice(0, 1), slice(1, 2), slice(2, 3)):
            chosen = [t if i in range(3)[which] else 0 * t for i, t in enumerate(tangents)]
            expected = torch.func.jvp(
                functional.linear, tuple(x for x, _ in inputs), tuple(chosen)
            )[1]
            with forward_ad.dual_level():
                duals = [
                    forward_ad.make_dual(layout.cut(x, rank), layout.cut(t, rank).clone())
                    if i in range(3)[which]
                    else layout.cut(x, rank)
                    for i, ((x, layout), t) in enumerate(zip(inputs, tangents, strict=True))
                ]
                tangent = forward_ad.unpack_dual(fn(*duals)).tangent
            with failures.named(name, which):
                want = output.cut(expected, rank)
                got = torch.zeros_like(want) if tangent is None else tangent
                torch.testing.assert_close(got, want)
    return failures


@pytest.mark.parametrize("pattern", ["uneven", "one empty"])
def test_forward_mode(worlds, pattern):
    assert_none(worlds.run(3, forward_mode, pattern))


def sent(rank, ranks):
    """Elements that each way sends: forward, and backward."""
    sequence, sizes = split("uneven", ranks), split("uneven", ranks)
    length, told = sum(sequence), {}
    weight = torch.ones(sizes[rank], IN, requires_grad=True)
    across = torch.ones(OUT, sizes[rank], requires_grad=True)
    part = torch.ones(sequence[rank], IN, requires_grad=True)
    columns = torch.ones(length, sizes[rank], requires_grad=True)
    bias = torch.ones(OUT, requires_grad=True)
    ways = {
        "column": lambda: column_parallel_linear(part, weight, sequence_sizes=sequence),
        "column, kept": lambda: column_parallel_linear(
            part, weight, sequence_sizes=sequence, save="gathered"
        ),
        "column, frozen": lambda: column_parallel_linear(
            part, weight.detach(), sequence_sizes=sequence
        ),
        "column, no gradient of the input": lambda: column_parallel_linear(
            part.detach(), weight, sequence_sizes=sequence, save="gathered"
        ),
        "row": lambda: row_parallel_linear(columns, across, bias, sequence_sizes=sequence),
    }
    for name, way in ways.items():
        with varcomm.trace() as forward:
            y = way()
        with varcomm.trace() as backward:
            y.sum().backward()
        told[name] = [sum(call.received for call in calls) // 4 for calls in (forward, backward)]
    return told


@pytest.mark.parametrize("ranks", [2, 3])
def test_elements_that_travel_are_the_fewest_possible(worlds, ranks):
    sequence = split("uneven", ranks)
    for rank, told in enumerate(worlds.run(ranks, sent, ranks)):
        others = (sum(sequence) - sequence[rank]) * IN
        parts = (ranks - 1) * sequence[rank]
        assert told == {
            "column": [others, others + parts * IN],
            "column, kept": [others, parts * IN],
            "column, frozen": [others, parts * IN],
            "column, no gradient of the input": [others, 0],
            "row": [parts * OUT, (sum(sequence) - sequence[rank]) * OUT],
        }


def under_way(rank, way):
    sequence = split("even", 2)
    x, weight = torch.ones(2, IN, requires_grad=True), torch.ones(2, IN, requires_grad=True)
    columns, across = torch.ones(4, 2, requires_grad=True), torch.ones(OUT, 2, requires_grad=True)
    events, begun = [], overlap.begin

    def begin(operator, *args):
        pending = begun(operator, *args)
        events.append(f"start {operator.name}")
        wait = pending.wait
        pending.wait = lambda: (events.append(f"wait {operator.name}"), wait())[1]
        return pending

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name in ("aten::mm", "aten::addmm"):
                events.append("product")
            return func(*args, **(kwargs or {}))

    rooms = (column, overlap, row)
    for room in rooms:
        room.begin = begin
    try:
        with Products():
            if way == "column":
                y = column_parallel_linear(x, weight)
            elif way == "column of a sequence":
                y = column_parallel_linear(x, weight, sequence_sizes=sequence)
            else:
                y = row_parallel_linear(columns, across, sequence_sizes=sequence)
            events.append("backward")
            y.sum().backward()
    finally:
        for room in rooms:
            room.begin = begun
    return events


GATHER, REDUCE = "all_gather_v", "reduce_scatter_v"
EVENTS = {
    "column": [
        *["product", "backward"],
        *["product", "start replicated_sum", "product", "wait replicated_sum"],
    ],
    "column of a sequence": [
        *[f"start {GATHER}", "product", f"wait {GATHER}", "product", "product", "backward"],
        *[f"start {GATHER}", "product", f"wait {GATHER}"],
        *[f"start {REDUCE}", "product", f"wait {REDUCE}"],
    ],
    "row to a sequence": [
        *["product", f"start {REDUCE}", f"wait {REDUCE}", "backward"],
        *[f"start {GATHER}", "product", f"wait {GATHER}", "product", "product", "product"],
    ],
}


@pytest.mark.parametrize("way", EVENTS)
def test_products_are_computed_while_messages_travel(worlds, way):
    assert worlds.run(2, under_way, way) == [EVENTS[way]] * 2


def saved(rank):
    """What the graph keeps: pairs of how it is called and the shapes it holds on to."""
    sequence, kept = [2, 2], {}
    x, weight = torch.ones(2, IN, requires_grad=True), torch.ones(3, IN, requires_grad=True)
    frozen = weight.detach()
    calls = {
        "input": lambda: column_parallel_linear(x, weight, sequence_sizes=sequence),
        "gathered": lambda: column_parallel_linear(
            x, weight, sequence_sizes=sequence, save="gathered"
        ),
        "frozen": lambda: column_parallel_linear(x, frozen, sequence_sizes=sequence),
        "frozen row": lambda: row_parallel_linear(torch.ones(4, 3, requires_grad=True), frozen.T),
    }
    for name, call in calls.items():
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, shapes=shapes: shapes.append(tuple(t.shape)) or t, lambda t: t
        ):
            call()
        kept[name] = [shape for shape in shapes if shape != (0,)]
    return kept


def test_what_is_saved(worlds):
    expected = {
        "input": [(2, IN), (3, IN)],
        "gathered": [(2, IN), (4, IN), (3, IN)],
        "frozen": [(3, IN)],
        "frozen row": [(IN, 3)],
    }
    assert worlds.run(2, saved) == [expected] * 2


def accumulated(rank):
    """Two micro-batches in bf16, added up in fp32."""
    sizes = [1, 2]
    whole = drawn(1, 3, IN, dtype=torch.bfloat16)
    weight = whole.split(sizes)[rank].clone().requires_grad_()
    weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32)
    across = drawn(2, OUT, 3, dtype=torch.bfloat16)
    narrow = across.split(sizes, 1)[rank].clone().requires_grad_()
    narrow.main_grad = torch.zeros(narrow.shape, dtype=torch.float64)
    twin, twin_across = whole.double().requires_grad_(), across.double().requires_grad_()
    for seed in (3, 4):
        x = drawn(seed, 6, IN, dtype=torch.bfloat16)
        column_parallel_linear(x, weight).sum().backward()
        columns = drawn(seed, 6, 3, dtype=torch.bfloat16)
        row_parallel_linear(columns.split(sizes, 1)[rank], narrow).sum().backward()
        functional.linear(x.double(), twin).sum().backward()
        functional.linear(columns.double(), twin_across).sum().backward()
    torch.testing.assert_close(
        weight.main_grad, twin.grad.split(sizes)[rank].float(), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(
        narrow.main_grad, twin_across.grad.split(sizes, 1)[rank], rtol=1e-12, atol=1e-12
    )
    # as weight.grad does, it gets what backward() adds, and not what autograd.grad asks for
    kept = weight.main_grad.clone(), narrow.main_grad.clone()
    x = x.detach().requires_grad_()
    own = columns.split(sizes, 1)[rank].clone().requires_grad_()
    for y, inputs in (
        (column_parallel_linear(x, weight), [x, weight]),
        (row_parallel_linear(own, narrow), [own, narrow]),
    ):
        torch.autograd.grad(y.sum(), inputs[0], retain_graph=True)
        found = torch.autograd.grad(y.sum(), inputs[1], retain_graph=True)[0]
        recorded = torch.autograd.grad(y.sin().sum(), inputs[1], create_graph=True)[0]
        assert found.shape == inputs[1].shape
        assert recorded.requires_grad
        y.sum().backward(inputs=inputs[0], retain_graph=True)
        with pytest.raises(ArgumentError, match="added to it have no derivatives"):
            y.sum().backward(create_graph=True)
    assert torch.equal(kept[0], weight.main_grad)
    assert torch.equal(kept[1], narrow.main_grad)
    return weight.grad is None and narrow.grad is None


def test_gradients_are_added_to_main_grad(worlds):
    assert worlds.run(2, accumulated) == [True, True]


def autocast(rank):
    sizes = [1, 2]
    x, whole, bias = drawn(1, 2, IN).float(), drawn(2, 3, IN).float(), drawn(3, 3).float()
    weight = whole.split(sizes)[rank].clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = column_parallel_linear(x, weight, bias.split(sizes)[rank], sizes, gather_output=True)
        z = row_parallel_linear(y.split(sizes, -1)[rank], weight.T)
        want = functional.linear(x, whole, bias)
    z.sum().backward()
    assert y.dtype == z.dtype == torch.bfloat16
    torch.testing.assert_close(y, want)
    return weight.grad.dtype


def test_autocast(worlds):
    assert worlds.run(2, autocast) == [torch.float32] * 2


def autocast_leaves_alone(rank):
    """As torch's linear does, autocast casts neither fp64 nor complex numbers."""
    dtypes = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (torch.float64, torch.complex64):
            x, weight = torch.ones(2, IN, dtype=dtype), torch.ones(3, IN, dtype=dtype)
            want = functional.linear(x, weight)
            for y in (column_parallel_linear(x, weight), row_parallel_linear(x, weight / 2)):
                assert torch.equal(y, want)
                dtypes.append(y.dtype == want.dtype == dtype)
        with pytest.raises(ArgumentError, match="float64 on cpu, but weight is of torch"):
            column_parallel_linear(x.real.double(), weight.real)
    return dtypes


def test_autocast_of_wide_numbers(worlds):
    assert worlds.run(2, autocast_leaves_alone) == [[True] * 4] * 2


def narrow_sums(rank, ranks):
    """Gradients of bf16 are summed in fp32 and rounded once, unless use_fp32 is False."""
    x = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.full((1, 1), 1.0 if rank == 0 else 2.0**-8, dtype=torch.bfloat16)
    sums = []
    for use_fp32 in (True, False):
        y = column_parallel_linear(x, weight, use_fp32=use_fp32)
        sums.append(torch.autograd.grad(y, x, torch.ones_like(y))[0].item())
        sums.append(row_parallel_linear(x, weight, use_fp32=use_fp32).item())
    return sums


def test_sums_of_narrow_floats(worlds):
    # 1 + 2^-8 rounds to 1 in bf16, so one after the other the small ones are lost
    exact, lost = 1.0 + 2 * 2.0**-8, 1.0
    assert worlds.run(3, narrow_sums, 3) == [[exact, exact, lost, lost]] * 3


X, W = torch.ones(2, 4), torch.ones(3, 4)
WRONG = {
    "shapes": (
        lambda: column_parallel_linear(X, W.T),
        r"x of shape \(2, 4\) and weight of shape \(4, 3\)",
    ),
    "shapes of row": (
        lambda: row_parallel_linear(X, W.T),
        r"x of shape \(2, 4\) and weight of shape \(4, 3\)",
    ),
    "scalar": (lambda: column_parallel_linear(torch.tensor(1.0), W), r"x of shape \(\)"),
    "bias": (
        lambda: column_parallel_linear(X, W, torch.ones(4)),
        r"bias must be \(3,\), one a row of this rank's weight; got shape \(4,\)",
    ),
    "dtype": (
        lambda: column_parallel_linear(X.double(), W),
        "x is of torch.float64 on cpu, but weight is of torch.float32",
    ),
    "dtype of the bias": (
        lambda: row_parallel_linear(X, W, torch.ones(3).double()),
        "but bias is of torch.float64",
    ),
    "integers": (
        lambda: column_parallel_linear(X.long(), W.long()),
        "x must be of floats; got torch.int64",
    ),
    "no tensor": (lambda: row_parallel_linear(X, None), "weight must be a torch.Tensor"),
    "sizes": (
        lambda: column_parallel_linear(X, W, None, [2, 2]),
        r"weight of shape \(3, 4\) has 3 rows, but sizes\[.\] is 2",
    ),
    "sizes of row": (
        lambda: row_parallel_linear(X, W, None, [2, 2]),
        r"weight of shape \(3, 4\) has 4 columns, but sizes\[.\] is 2",
    ),
    "sequence": (
        lambda: column_parallel_linear(X, W, sequence_sizes=[1, 1]),
        r"x has 2 rows, but sequence_sizes\[.\] is 1",
    ),
    "sequence of row": (
        lambda: row_parallel_linear(X, W, sequence_sizes=[1, 2]),
        "x has 2 rows, but sequence_sizes sum to 3",
    ),
    "no sequence": (
        lambda: column_parallel_linear(X[0], W, sequence_sizes=[1, 1]),
        r"x must be \(sequence, ..., in\); got shape \(4,\)",
    ),
    "save": (
        lambda: column_parallel_linear(X, W, sequence_sizes=[2, 2], save="all"),
        'save must be "input" or "gathered"; got \'all\'',
    ),
    "flag": (
        lambda: column_parallel_linear(X, W, gather_output=1),
        "gather_output must be True or False",
    ),
    "whole input": (
        lambda: row_parallel_linear(X, W, None, [4, 4], input_is_parallel=False),
        "has 4 rows along dim 1, but sizes sum to 8",
    ),
}


def refused(rank, name):
    call, text = WRONG[name]
    with pytest.raises(ArgumentError, match=text):
        call()
    return varcomm.all_reduce(torch.ones(1)).item()


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(worlds, name):
    assert worlds.run(2, refused, name) == [2.0, 2.0]


def wrong_main_grad(rank):
    for value, text in ((torch.zeros(3), r"got \(3,\)"), (1, "got 1")):
        weight = torch.ones(3, 4, requires_grad=True)
        weight.main_grad = value
        with pytest.raises(ArgumentError, match=text):
            column_parallel_linear(X, weight)
        column_parallel_linear(X, weight.detach())
    computed = 2 * torch.ones(3, 4, requires_grad=True)
    computed.main_grad = torch.zeros(3, 4)
    with pytest.raises(ArgumentError, match="main_grad is for parameters"):
        row_parallel_linear(X, computed)
    return resolve(None).rank


def test_wrong_main_grad(worlds):
    assert worlds.run(2, wrong_main_grad) == [0, 1]


def disagreeing(rank):
    sequence = [[1, 1], [2, 1]][rank]
    with pytest.raises(DisagreementError, match="disagree on sizes"), varcomm.debug():
        column_parallel_linear(torch.ones(1, 4), W, sequence_sizes=sequence)
    with pytest.raises(DisagreementError, match="not called, since on rank 1"), varcomm.debug():
        row_parallel_linear(X, W if rank == 0 else W.T)
    return True


def test_ranks_that_disagree(worlds):
    assert worlds.run(2, disagreeing) == [True, True]
