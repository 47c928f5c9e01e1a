"""What is copied, what travels, and in which memory format results are."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import varcomm
from tests.ops.comparing import Failures, assert_none
from tests.ops.primitives import PATTERNS, PRIMITIVES, Setting, case, random, setting

IMAGES = [
    (torch.channels_last, (2, 3, 4)),
    (torch.channels_last_3d, (2, 3, 4, 2)),
]
MOVE_WHOLE_ROWS = [name for name in PRIMITIVES if "ind" not in name and "needed" not in name]
KEEP = [name for name in PRIMITIVES if name != "shard_v"]  # which gives a view


def check_kept(rank, name):
    failures = Failures()
    for memory_format, rest in IMAGES:
        for pattern in ("even", "one empty"):
            for dim in (0, 1, -1):
                s = setting(pattern, 3, dim, rest)
                c, root = PRIMITIVES[name](s), s.root
                inputs = [
                    x if x is None else x.contiguous(memory_format=memory_format)
                    for x in c.draw(torch.float64)
                ]
                decides = next(x for x in (inputs[rank], *inputs) if x is not None)
                y = c.bind()(inputs[rank])
                with failures.named(memory_format, pattern, dim):
                    # no rows, or one channel, are in both formats at once
                    at_root = rank == root or name not in ("gather_v", "reduce")
                    if at_root and not decides.is_contiguous():
                        assert y.is_contiguous(memory_format=memory_format), y.stride()
                    torch.testing.assert_close(y, c.reference(inputs)[rank])
    return failures


@pytest.mark.parametrize("name", KEEP)
def test_channels_last_is_kept(worlds, name):
    assert_none(worlds.run(3, check_kept, name))


FORMATS = (torch.contiguous_format, torch.channels_last, torch.contiguous_format)


def check_mixed(rank, name):
    """The formats differ between ranks, forward and backward; values must not."""
    failures = Failures()
    for dim in (0, 1, -1):
        for pattern in ("off by one", "one empty"):
            c = case(name, pattern, 3, dim, (2, 3, 4))
            inputs = [
                x if x is None else x.contiguous(memory_format=FORMATS[r]).requires_grad_()
                for r, x in enumerate(c.draw(torch.float64))
            ]
            x = torch.ones(1, dtype=torch.float64) if inputs[rank] is None else inputs[rank]
            y = c.bind()(x)
            results = c.reference(inputs)
            generator = torch.Generator().manual_seed(5)
            weights = [random(z.shape, z.dtype, generator) for z in results]
            weight = weights[rank].contiguous(memory_format=FORMATS[2 - rank])
            loss = sum((z * w).sum() for z, w in zip(results, weights, strict=True))
            with failures.named("value", dim, pattern):
                torch.testing.assert_close(y, results[rank])
            if x.requires_grad:
                (got,) = torch.autograd.grad(y, x, weight)
                (want,) = torch.autograd.grad(loss, x)
                with failures.named("gradient", dim, pattern):
                    torch.testing.assert_close(got, want)
            else:
                y.backward(weight)
    return failures


@pytest.mark.parametrize("name", PRIMITIVES)
def test_formats_that_differ_between_ranks(worlds, name):
    assert_none(worlds.run(3, check_mixed, name))


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
    """Tell how many elements a rank may write: at most one copy of its data, and none for dim 0.

    Beside copies, what it keeps for itself must get to its place in the result, and terms must be
    summed.
    """
    other_dim, at_root = s.axis != 0, rank == s.root
    kept = messages(name, s, to_itself=True)[rank][rank]
    return (
        kept
        + {
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
        }[name]
    )


def check_copies(rank, name):
    failures = Failures()
    for dim in (0, 1, -1):
        for sizes in ((700, 0, 1010), (500, 600, 500)):
            s = Setting(sizes, dim, (5, 4), root=2)
            c = PRIMITIVES[name](s)
            op, x = c.bind(), c.input(rank, torch.float32)
            with Written() as written:
                y = op(x)
            limit = 4 * allowed(name, s, rank, y, x)
            # the root's message of 1 KiB, written and read
            limit += 3 * 1024 * (name in ("scatter_v", "broadcast"))
            with failures.named(dim, sizes):
                assert written.bytes <= limit, f"{written.bytes} written, allowed {limit}"
    return failures


@pytest.mark.parametrize("name", MOVE_WHOLE_ROWS)
def test_copies(worlds, name):
    assert_none(worlds.run(3, check_copies, name))


def check_copies_of_exchange(rank):
    """An exchange picks rows, which is its one copy but for those that it keeps, along any dim."""
    failures = Failures()
    for dim in (0, 1, -1):
        s = Setting((70, 0, 101), dim, (5, 4))
        to_each = [len(index) * 5 * 4 for index in s.indices[rank]]
        c = PRIMITIVES["plan_from_indices"](s)
        op, x = c.bind(), c.input(rank, torch.float32)
        with Written() as written:
            op(x)
        with failures.named(dim):
            # what it keeps may be copied by the engine, out of sight
            assert 0 <= written.bytes - 4 * sum(to_each) <= 4 * to_each[rank]
    return failures


def test_exchange_picks_rows_once(worlds):
    assert_none(worlds.run(3, check_copies_of_exchange))


def messages(name, s, to_itself=False):
    """Elements from i to j that no algorithm can do without; for sums, if each rank sums alone."""
    ranks, row = range(s.ranks), 1
    for n in s.rest:
        row *= n
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
    }.get(name, lambda i, j: len(indices[i][j]))
    if name == "transpose_v":  # one of the other dimensions is split in its place
        row //= s.rest[s.axis - 1]
    return [[rule(i, j) * row * (i != j or to_itself) for j in ranks] for i in ranks]


def check_bytes(rank, name, ranks):
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
            sent, received = (sum(m[rank]) * dtype.itemsize, column(m, rank) * dtype.itemsize)
            with failures.named(pattern, dtype):
                assert total(forward) == (sent, received), forward
                assert total(backward) == (received, sent), backward
                assert len(forward) == len(backward) == (name != "shard_v")
    return failures


def column(matrix, j):
    return sum(row[j] for row in matrix)


def total(calls):
    return sum(call.sent for call in calls), sum(call.received for call in calls)


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PRIMITIVES)
def test_bytes_on_the_wire(worlds, name, ranks):
    assert_none(worlds.run(ranks, check_bytes, name, ranks))


def bytes_of_large(rank):
    x = torch.ones(30 * 1024, dtype=torch.bfloat16)
    answers = []
    for op in (varcomm.all_reduce, lambda x: varcomm.reduce(x, dst=1)):
        with varcomm.trace() as calls:
            op(x)
        answers.append(total(calls))
    return answers


def test_large_sums_go_by_pieces(worlds):
    size, ranks = 2 * 30 * 1024, 5
    for rank, (all_reduced, reduced) in enumerate(worlds.run(ranks, bytes_of_large)):
        assert all_reduced == (2 * (ranks - 1) * size // ranks,) * 2
        piece = size // ranks
        if rank == 1:
            assert reduced == (size - piece, 2 * (size - piece))
        else:
            assert reduced == (size, size - piece)
