"""Attention of some heads, and heads sharded over ranks, against plain products on one process."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.nn import functional

from tests.tensor_parallel.twins import (
    BOUND,
    REPLICATED,
    SPLITS,
    Sharded,
    compare_all,
    drawn,
    split,
)
from tests.worlds import group_of_one, on_ranks
from varcomm import ShardSizes
from varcomm.sharding import shard_spec
from varcomm.tensor_parallel.attention import ParallelAttention, attention


def plain(query, key, value, causal=True):
    """Head by head and place by place, as the definition has it."""
    each = query.shape[-2] // max(key.shape[-2], 1)
    scale, rows = query.shape[-1] ** -0.5, []
    for place in range(len(query)):
        seen = place + 1 if causal else len(key)
        heads = []
        for head in range(query.shape[-2]):
            keys, values = key[:seen, ..., head // each, :], value[:seen, ..., head // each, :]
            scores = (query[place, ..., head, :] * keys).sum(-1) * scale
            heads.append((scores.softmax(0).unsqueeze(-1) * values).sum(0))
        rows.append(torch.stack(heads, -2))
    return torch.stack(rows)


SHAPES = [  # one head; groups; one head of keys for all; no batch; one place
    ((3, 2, 1, 2), (3, 2, 1, 2), (3, 2, 1, 2)),
    ((3, 1, 4, 2), (3, 1, 2, 2), (3, 1, 2, 1)),
    ((2, 1, 2, 3, 1), (2, 1, 2, 1, 1), (2, 1, 2, 1, 2)),
    ((3, 2, 1), (3, 2, 1), (3, 2, 1)),
    ((1, 2, 2), (1, 1, 2), (1, 1, 2)),
]


def derivatives(fn, operands, orders):
    """Gradients of a number, of the sum of their squares, and so on; one list an order."""
    total, found = fn(*operands).sin().sum(), []
    for _ in range(orders):
        found.append(torch.autograd.grad(total, operands, create_graph=True))
        total = sum((g**2).sum() for g in found[-1])
    return found


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shapes", SHAPES)
def test_values_and_derivatives(shapes, causal):
    operands = [drawn(i, *shape).requires_grad_() for i, shape in enumerate(shapes)]
    out = attention(*operands, causal)
    torch.testing.assert_close(out, plain(*operands, causal), **BOUND)
    simple = torch.autograd.grad(out.sin().sum(), operands)
    got = derivatives(lambda *x: attention(*x, causal), operands, 3)
    expected = derivatives(lambda *x: plain(*x, causal), operands, 3)
    torch.testing.assert_close(simple, expected[0], **BOUND)
    torch.testing.assert_close(got[:2], expected[:2], **BOUND)
    torch.testing.assert_close(got[2], expected[2], rtol=1e-8, atol=1e-8)


def test_forward_mode():
    operands = [drawn(i, 3, n, 2) for i, n in enumerate((4, 2, 2))]
    tangents = [drawn(5 + i, *x.shape) for i, x in enumerate(operands)]
    for which in ((0, 1, 2), (0,), (1,), (2,)):
        chosen = tuple(t if i in which else 0 * t for i, t in enumerate(tangents))
        _, want = torch.func.jvp(plain, tuple(operands), chosen)
        with forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(x, t) if i in which else x
                for i, (x, t) in enumerate(zip(operands, chosen, strict=True))
            ]
            tangent = forward_ad.unpack_dual(attention(*duals)).tangent
        torch.testing.assert_close(tangent, want, **BOUND)


def test_nothing_to_attend_to_is_ordinary():
    for shape in ((3, 2, 0, 4), (3, 0, 2, 4), (0, 2, 2, 4), (3, 2, 2, 0)):
        operands = [torch.ones(shape, requires_grad=True) for _ in range(3)]
        out = attention(*operands)
        gradients = torch.autograd.grad(out.sum(), operands, create_graph=True)
        assert out.shape == shape
        assert all(g.shape == shape and g.requires_grad for g in gradients)


def test_a_plain_backward_keeps_no_products():
    """Nothing of S x S is kept for backward, and nothing twice."""
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    operands = [torch.ones(64, 1, 2, 4, requires_grad=True) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        attention(*operands)
    one = 64 * 2 * 4 * 4
    assert sum(kept.values()) <= 4 * one + 64 * 2 * 8  # operands, result, and a number a row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_floats(dtype):
    operands = [drawn(i, 4, 2, n, 8, dtype=dtype).requires_grad_() for i, n in enumerate((4, 2, 2))]
    wide = [x.detach().double().requires_grad_() for x in operands]
    want = torch.autograd.grad(plain(*wide).sin().sum(), wide)
    error = 8 * torch.finfo(dtype).eps
    for create_graph in (False, True):
        out = attention(*operands)
        gradients = torch.autograd.grad(out.sin().sum(), operands, create_graph=create_graph)
        torch.testing.assert_close(out.double(), plain(*wide), rtol=error, atol=error)
        for got, expected in zip(gradients, want, strict=True):
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), expected, rtol=error, atol=error)
    with forward_ad.dual_level():
        assert attention(*operands).dtype == dtype


HIDDEN, WIDTH, EACH = 4, 2, 2  # features, those of a head, queries a key


def turned(x):
    """Rotate each head by an angle that depends on its place in the whole sequence."""
    angle = torch.arange(len(x), dtype=x.dtype).view(-1, *[1] * (x.dim() - 2))
    first, second = x.unbind(-1)
    return torch.stack(
        [first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1
    )


def whole(x, of_queries, of_keys, of_values, across, *biases):
    """The same layer in one process."""
    bias = biases or (None,) * 4
    query, key, value = (
        functional.linear(x, weight, b).unflatten(-1, (-1, WIDTH))
        for weight, b in zip((of_queries, of_keys, of_values), bias, strict=False)
    )
    read = plain(turned(query), turned(key), value)
    return functional.linear(read.flatten(-2), across, bias[3])


def cases(ranks, pattern):
    found = {}
    sizes, sequence = split(pattern, ranks), split("uneven", ranks)
    if pattern == "uneven":
        sequence = split("one empty", ranks)
    of_keys = ShardSizes(n * WIDTH for n in sizes)
    of_queries = ShardSizes(n * EACH for n in of_keys)
    weights = [
        (drawn(1, of_queries.total, HIDDEN), Sharded(0, of_queries)),
        (drawn(2, of_keys.total, HIDDEN), Sharded(0, of_keys)),
        (drawn(3, of_keys.total, HIDDEN), Sharded(0, of_keys)),
        (drawn(4, HIDDEN, of_queries.total), Sharded(1, of_queries)),
    ]
    biases = [(drawn(5 + i, len(w)), Sharded(0, way.sizes)) for i, (w, way) in enumerate(weights)]
    biases[3] = (biases[3][0], REPLICATED)
    for name, in_parts in (("replicated", False), ("a sequence in parts", True)):
        heads, parts = (EACH * sizes.total, sizes.total), sequence if in_parts else None
        options = {"bias": True, "sequence_sizes": parts, "dtype": torch.float64}
        layer = ParallelAttention(HIDDEN, *heads, WIDTH, sizes, **options)

        def fn(x, q, k, v, across, of_q, of_k, of_v, of_out, layer=layer):
            given = {
                "qkv.weight": torch.cat([q, k, v]),
                "qkv.bias": torch.cat([of_q, of_k, of_v]),
                "out.weight": across,
                "out.bias": of_out,
            }
            return torch.func.functional_call(layer, given, (x, turned))

        layout = Sharded(0, sequence) if in_parts else REPLICATED
        x = drawn(9, sequence.total, 2, HIDDEN) if in_parts else drawn(9, 3, HIDDEN)
        found[name] = fn, whole, [(x, layout), *weights, *biases], layout
    return found


@pytest.mark.parametrize(("ranks", "pattern"), SPLITS)
@on_ranks()
def test_as_in_one_process(rank, pattern):
    return compare_all(cases(torch.distributed.get_world_size(), pattern))


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "sizes"),
    [
        pytest.param(4, 14, None, [4, 4, 3, 3], marks=pytest.mark.slow),
        (3, 5, None, [2, 2, 1]),
        (3, 2, None, [1, 1, 0]),
        (3, 10, 5, [2, 2, 1]),
    ],
)
@on_ranks()
def test_any_number_of_heads_and_ranks(rank, heads, kv_heads, sizes):
    """Weights depend on the seed alone, and so does the result; heads follow their group."""
    x, groups = drawn(1, 5, 2, heads * WIDTH), kv_heads or heads
    alone, layer = layers_of(heads, kv_heads)
    each, own = heads // groups * WIDTH, ShardSizes(sizes).range(rank)
    keys = [(heads + n * groups + own.start) * WIDTH for n in (0, 1)]
    out = [(own.start * each, own.stop * each)]
    assert list(layer.sizes) == sizes
    assert shard_spec(layer.out.weight).ranges(rank) == out
    starts = [(start, start + len(own) * WIDTH) for start in keys]
    assert shard_spec(layer.qkv.weight).ranges(rank) == [*out, *starts]
    torch.testing.assert_close(layer(x), alone(x), **BOUND)


def layers_of(heads, kv_heads, **options):
    """A layer of one process, and the same on ranks."""
    layers = []
    for group in (group_of_one(), None):
        torch.manual_seed(3)
        sizes = heads * WIDTH, heads, kv_heads
        layers.append(ParallelAttention(*sizes, group=group, dtype=torch.float64, **options))
    return layers


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "sizes"),
    [
        (3, 4, 2, [[1, 1, 2], [1, 0, 1], [2, 2, 0]]),
        pytest.param(4, 6, 1, [[2, 2, 1, 1], [1, 0, 0, 0], [6, 0, 0, 0]], marks=pytest.mark.slow),
        pytest.param(
            5, 4, 2, [[1, 1, 0, 1, 1], [1, 0, 0, 1, 0], [2, 2, 0, 0, 0]], marks=pytest.mark.slow
        ),
    ],
)
@on_ranks()
def test_ranks_that_read_one_head_of_keys(rank, heads, kv_heads, sizes):
    """Outputs and gradients are those of one process."""
    idle, found = layers_of(heads, kv_heads, replicate_kv=False)[1], []
    alone, layer = layers_of(heads, kv_heads)
    for each in (alone, layer):
        x = drawn(1, 5, 2, heads * WIDTH).requires_grad_()
        y = each(x)
        (y * drawn(2, *y.shape)).sum().backward()
        gradients = [shard_spec(p).gather(p.grad) for p in (each.qkv.weight, each.out.weight)]
        found.append([y.detach(), x.grad, *gradients])
    assert [[*layer.heads.queries], [*layer.sizes], [*idle.heads.queries]] == sizes
    torch.testing.assert_close(*found, **BOUND)
