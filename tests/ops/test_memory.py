"""Copies, bytes on the wire, and memory formats of inputs."""

from itertools import product
from math import prod

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import varcomm
from tests.ops.comparing import Failures, twin_gradients
from tests.ops.primitives import PATTERNS, PRIMITIVES, Setting, case, random, setting
from tests.worlds import on_ranks

MOVE_WHOLE_ROWS = [name for name in PRIMITIVES if "ind" not in name and "needed" not in name]


FORMATS = (torch.contiguous_format, torch.channels_last, torch.contiguous_format)


@pytest.mark.parametrize("name", PRIMITIVES)
@on_ranks(3)
def test_memory_formats(rank, name):
    """Formats of memory that differ between ranks do not matter."""
    failures = Failures()
    for pattern, dim in product(("off by one", "one empty"), (0, 1, -1)):
        c = case(name, pattern, 3, dim, (2, 3, 4))
        inputs = [
            x if x is None else x.contiguous(memory_format=FORMATS[r]).requires_grad_()
            for r, x in enumerate(c.draw(torch.float64))
        ]
        x = torch.ones(1, dtype=torch.float64) if inputs[rank] is None else inputs[rank]
        y, results = c.bind()(x), c.reference(inputs)
        generator = torch.Generator().manual_seed(5)
        weights = [random(z.shape, z.dtype, generator) for z in results]
        want = twin_gradients(c, inputs, weights)[rank]
        y.backward(weights[rank].contiguous(memory_format=FORMATS[2 - rank]))
        with failures.named("differing formats", dim, pattern):
            torch.testing.assert_close(y, results[rank])
            if want is not None:
                torch.testing.assert_close(x.grad, want)
    return failures


class Written(TorchDispatchMode):
    """Count bytes that local operations write; making room and looking at it costs nothing."""

    ROOM = ("empty", "new_empty", "empty_like", "detach", "new_zeros")

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and not func.is_view and name not in self.ROOM:
            outputs = result if isinstance(result, tuple | list) else (result,)
            self.bytes += sum(y.nbytes for y in outputs if isinstance(y, torch.Tensor))
        return result


def allowed(name, s, rank, y, x):
    """Return the elements that a rank may write: at most one copy of its data, none for dim 0.

    Beside copies, what it keeps for itself must get to its place in the result, and terms must be
    summed.
    """
    other_dim, at_root = s.axis != 0, rank == s.root
    copied = {
        "all_gather_v": y.numel() * other_dim,
        "gather_v": y.numel() * other_dim,
        "scatter_v": x.numel() * (other_dim and at_root),
        "reduce_scatter_v": x.numel() * other_dim + s.ranks * y.numel(),
        "all_to_all_v": x.numel() * other_dim,
        "transpose_v": x.numel(),
        "shard_v": 0,
        "all_reduce": s.ranks * x.numel(),
        "reduce": x.numel() * (1 + at_root),  # the sum of a piece, and at the root all pieces
        "broadcast": x.numel() * at_root,
    }
    return copied[base(name)] + messages(name, s, to_itself=True)[rank][rank]


@on_ranks(3)
def test_copies(rank):
    failures = Failures()
    for name in MOVE_WHOLE_ROWS:
        for dim, sizes in product((0, 1, -1), ((700, 0, 1010), (500, 600, 500))):
            if name == "transpose_v":  # whose inputs grow with the square
                sizes = tuple(rows // 10 for rows in sizes)
            s = Setting(sizes, dim, (5, 4), root=2)
            c = PRIMITIVES[name](s)
            op, x = c.bind(), c.input(rank, torch.float32)
            with Written() as written:
                y = op(x)
            limit = 4 * allowed(name, s, rank, y, x)
            # the root's message of 1 KiB, written and read
            limit += 3 * 1024 * (name in ("scatter_v", "broadcast"))
            with failures.named(name, dim, sizes):
                assert written.bytes <= limit, f"{written.bytes} written, allowed {limit}"
    for dim in (0, 1, -1):  # an exchange picks rows, which is its one copy
        s = Setting((70, 0, 101), dim, (5, 4))
        to_each = [len(index) * 5 * 4 for index in s.indices[rank]]
        c = PRIMITIVES["plan_from_indices"](s)
        op, x = c.bind(), c.input(rank, torch.float32)
        with Written() as written:
            op(x)
        with failures.named("plan", dim):
            # the rows that it keeps may be copied by the engine, out of sight
            assert 0 <= written.bytes - 4 * sum(to_each) <= 4 * to_each[rank]
    return failures


def base(name):
    return name.removesuffix("_like")


def messages(name, s, to_itself=False):
    """Elements from i to j that no algorithm can do without; for sums, if each rank sums alone."""
    ranks, row = range(s.ranks), prod(s.rest)
    n, whole = s.sizes, sum(s.sizes)
    indices = s.needed_indices if "needed" in name else s.indices
    rule = {
        "all_gather_v": lambda i, j: n[i],
        "gather_v": lambda i, j: n[i] * (j == s.root),
        "scatter_v": lambda i, j: n[j] * (i == s.root),
        "reduce_scatter_v": lambda i, j: n[j],
        "all_to_all_v": lambda i, j: s.counts[i][j],
        "transpose_v": lambda i, j: n[i] * n[::-1][j],
        "shard_v": lambda i, j: 0,
        "all_reduce": lambda i, j: whole,
        "reduce": lambda i, j: whole * (j == s.root),
        "broadcast": lambda i, j: whole * (i == s.root),
        "adjoint_from_indices": lambda i, j: len(indices[j][i]),
        "adjoint_from_needed": lambda i, j: len(indices[j][i]),
    }.get(base(name), lambda i, j: len(indices[i][j]))
    if name == "transpose_v":  # one of the other dimensions is split in its place
        row //= s.rest[s.axis - 1]
    return [[rule(i, j) * row * (i != j or to_itself) for j in ranks] for i in ranks]


def total(calls):
    return sum(call.sent for call in calls), sum(call.received for call in calls)


@pytest.mark.parametrize("name", PRIMITIVES)
@on_ranks(3, pytest.param(2, marks=pytest.mark.slow))
def test_bytes_on_the_wire(rank, name, ranks):
    failures = Failures()
    for pattern in PATTERNS:
        for dtype in (torch.float64, torch.bfloat16):
            c = case(name, pattern, ranks, 1)
            op, x = c.bind(), c.input(rank, dtype).requires_grad_()
            with varcomm.trace() as forward:
                y = op(x)
            with varcomm.trace() as backward:
                y.sum().backward()
            m = messages(name, setting(pattern, ranks, 1))
            sent = sum(m[rank]) * dtype.itemsize
            received = sum(row[rank] for row in m) * dtype.itemsize
            if name == "all_reduce":  # beside its values: two numbers, or 16 flags
                carried = (ranks - 1) * (16 if dtype == torch.float64 else 32)
                sent, received = sent + carried, received + carried
            with failures.named(pattern, dtype):
                assert total(forward) == (sent, received), forward
                assert total(backward) == (received, sent), backward
                assert len(forward) == len(backward) == (name != "shard_v")
    return failures


@on_ranks(3)
def test_large_sums_go_by_pieces(rank):
    x = torch.ones(30 * 1024, dtype=torch.bfloat16)
    size, piece, at_root = x.nbytes, x.nbytes // 3, rank == 1
    of_reduce = (size - piece, 2 * (size - piece)) if at_root else (size, size - piece)
    for op, expected in (
        (varcomm.all_reduce, (4 * piece, 4 * piece)),
        (lambda x: varcomm.reduce(x, dst=1), of_reduce),
    ):
        with varcomm.trace() as calls:
            op(x)
        assert total(calls) == expected
