"""Wrong arguments: each is an error before anything moves, and the world is usable afterwards."""

import gc
import re
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

import varcomm
from tests.ops.primitives import PRIMITIVES, case
from tests.worlds import on_ranks
from varcomm import ArgumentError, DisagreementError, GroupError, LaunchError, ShardSizes

F = torch.zeros  # (rows, 2) of floats match sizes [2, 1] on rank 0 with two rows
SPARSE = torch.eye(3).to_sparse()
NONE = torch.tensor([], dtype=torch.int64)

# right calls; rank 0 of 2 has two rows, rank 1 one row
RIGHT = {
    "all_gather_v": lambda rank, **how: varcomm.all_gather_v(F(2 - rank, 2), [2, 1], **how),
    "gather_v": lambda rank, **how: varcomm.gather_v(F(2 - rank, 2), [2, 1], **how),
    "scatter_v": lambda rank, **how: varcomm.scatter_v(F(3), [2, 1], **how),
    "reduce_scatter_v": lambda rank, **how: varcomm.reduce_scatter_v(F(3, 2), [2, 1], **how),
    "all_to_all_v": lambda rank, **how: varcomm.all_to_all_v(
        F(3, 2), *[[2, 1] if rank == 0 else [1, 2]] * 2, **how
    ),
    "shard_v": lambda rank, **how: varcomm.shard_v(F(3, 2), [2, 1], **how),
    "transpose_v": lambda rank, **how: varcomm.transpose_v(
        F(2 - rank, 5), 1, [2, 3], 0, [2, 1], **how
    ),
    "all_reduce": lambda rank, **how: varcomm.all_reduce(F(3), **how),
    "reduce": lambda rank, **how: varcomm.reduce(F(3), **how),
    "broadcast": lambda rank, **how: varcomm.broadcast(F(3), **how),
    "indexed_all_to_all_v": lambda rank, **how: varcomm.indexed_all_to_all_v(
        F(2), [NONE, NONE], [[0, 0]] * 2, **how
    ),
}
SUMMING = ("all_reduce", "reduce", "reduce_scatter_v")
ROOTED = {"gather_v": "dst", "reduce": "dst", "scatter_v": "src", "broadcast": "src"}


def mistakes(name):
    """Yield calls that are wrong on rank 0 of 2, with a part of their messages."""
    op = getattr(varcomm, name)
    rest = {
        "all_to_all_v": ([2, 1], [2, 1]),
        "transpose_v": (1, [2, 3], 0, [2, 1]),
        **dict.fromkeys(("all_reduce", "reduce", "broadcast"), ()),
    }.get(name, ([2, 1],))
    if name in ROOTED:
        x = F(3, 2) if name == "scatter_v" else F(2, 2)
        for root in (2, -1, 1.0, None, True):
            message = f"{ROOTED[name]} must be a rank of the group, 0...1; got {root!r}"
            yield lambda root=root: op(x, *rest, **{ROOTED[name]: root}), re.escape(message)
    if name not in ("scatter_v", "broadcast"):  # their root is checked on all ranks, below
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are deprecated
            quantized = torch._empty_affine_quantized([3], scale=1.0, dtype=torch.qint8)
        for wrong, message in (
            (None, "tensor must be a torch.Tensor; got NoneType"),
            ([1.0, 2.0], "tensor must be a torch.Tensor; got list"),
            (SPARSE, r"tensor must be dense; got .*torch.sparse_coo.* to_dense\(\)"),
            (quantized, r"tensor must be dense; got .*qint8.* dequantize\(\)"),
        ):
            yield lambda wrong=wrong: op(wrong, *rest), message
    if name in SUMMING:
        ones = torch.ones(3)
        yield lambda: op(ones.bool(), *rest), "a sum of torch.bool is not defined. Convert: tensor"
        for dtype in (torch.uint16, torch.uint32, torch.uint64):
            yield lambda dtype=dtype: op(ones.to(dtype), *rest), f"torch cannot add {dtype}"
        eighth = ones.to(torch.float8_e5m2)
        yield lambda: op(eighth, *rest, use_fp32=False), r"add torch\.float8_e5m2.*use_fp32=True"
    if name in ("all_gather_v", "gather_v", "reduce_scatter_v", "shard_v", "scatter_v"):
        whole = name not in ("all_gather_v", "gather_v")
        x = F(3 if whole else 2, 2)
        unasked = [None] if whole else []  # without sizes a gather asks the ranks
        for sizes in ([2], ShardSizes([2, 1, 0]), [4, -1], [2, 1.0], [2, True], {2, 1}, *unasked):
            yield lambda sizes=sizes: op(x, sizes), "sizes must"
        if name == "scatter_v":
            return
        for dim in (2, -3, 0.0, None, [0]):
            yield lambda dim=dim: op(x, [2, 1], dim), "dim"
        yield lambda: op(torch.tensor(1.0), [2, 1]), r"dim=0 is out of range .* \(\). A scalar has"
        if whole:
            yield lambda: op(F(4, 2), [2, 1]), r"has 4 rows along dim 0, but sizes sum to 3 \(sizes"
            yield lambda: op(x, [2, 1], -1), "has 2 rows along dim 1, but sizes sum to 3"
        else:
            yield lambda: op(F(3, 2), [2, 1]), r"has 3 rows along dim 0, but sizes\[0\] is 2 \(size"
            yield lambda: op(x, [1, 1], 1), r"has 2 rows along dim 1, but sizes\[0\] is 1"
    if name == "all_to_all_v":
        x = F(3, 2)
        yield lambda: op(x, [3], [2, 1]), "send_sizes must have one entry per rank, 2; got 1"
        yield lambda: op(x, [2, 1], [2, 1, 0]), "recv_sizes must have one entry per rank, 2; got 3"
        yield lambda: op(x, [4, -1], [4, 1]), "send_sizes must hold ints from 0 on"
        yield lambda: op(x, [2, 1], [2, 1.5]), "recv_sizes must hold ints .* 1.5 of type float"
        yield lambda: op(x, [2, 2], [2, 2]), "has 3 rows along dim 0, but send_sizes sum to 4"
        yield lambda: op(x, [2, 1], [2, 1], 5), "dim=5 is out of range"
        yield lambda: op(x, [2, 1], [1, 1]), r"sends 2 rows to itself \(send_sizes\), but expects 1"
    if name == "transpose_v":
        x = F(2, 5)
        yield lambda: op(x, 1, [2, 2], 0, [2, 1]), "dim 1, but split_sizes sum to 4"
        yield lambda: op(x, 1, [2, 3], 0, [1, 1]), r"dim 0, but concat_sizes\[0\] is 1"
        yield lambda: op(x, 1, [2, 3], 0, [2]), "concat_sizes must have one entry per rank, 2"
        yield lambda: op(x, 1, [6, -1], 0, [2, 1]), "split_sizes must hold ints from 0 on"
        yield lambda: op(x, 2, [2, 3], 0, [2, 1]), "dim=2 is out of range"
        yield lambda: op(x, 0, [2, 0], -2, [2, 0]), "are the same dimension .*; use all_to_all_v"


@pytest.mark.parametrize("name", [name for name in RIGHT if name != "indexed_all_to_all_v"])
@on_ranks(2)
def test_mistake_on_one_rank(rank, name):
    """Rank 0 makes each mistake by itself, which moves nothing; in debug() all ranks raise."""
    RIGHT[name](rank)
    calls = list(mistakes(name))
    for call, message in calls if rank == 0 else ():
        with pytest.raises(ArgumentError, match=message) as caught:
            call()
        assert str(caught.value).startswith(f"{name} on rank 0 of 2: ")
    for call, message in calls[:1] + calls[-1:]:
        expected = f"^{name}: not called, since on rank 0: {name} on rank 0 of 2: .*{message}"
        with pytest.raises(DisagreementError, match=expected), varcomm.debug():
            call() if rank == 0 else RIGHT[name](rank)
    assert len(calls) > 2
    assert varcomm.all_reduce(torch.tensor(1)).item() == 2


def mistakes_at_the_root():
    """Yield calls that ``scatter_v`` and ``broadcast`` refuse at their root, rank 1."""
    sizes = [2, 1, 0]
    for wrong, message in (
        (None, "tensor must be a torch.Tensor; got NoneType"),
        (SPARSE, "tensor must be dense; got .*torch.sparse_coo"),
        (3.0, "tensor must be a torch.Tensor; got float"),
    ):
        yield lambda x: varcomm.broadcast(x, 1), wrong, message
        yield lambda x: varcomm.scatter_v(x, sizes, src=1), wrong, message
    yield lambda x: varcomm.scatter_v(x, sizes, src=1), F(4), "has 4 rows .* sizes sum to 3"
    yield lambda x: varcomm.scatter_v(x, sizes, src=1), torch.tensor(1.0), "A scalar has no rows"
    yield lambda x: varcomm.scatter_v(x, sizes, 1, 1), F(3), r"dim=1 is out of range .* \(3,\)"
    yield lambda x: varcomm.scatter_v(x, sizes, "rows", 1), F(3), "dim must be an int; got 'rows'"


@on_ranks(3)
def test_mistake_at_the_root_is_an_error_on_every_rank(rank):
    for call, wrong, message in mistakes_at_the_root():
        for right in (None, F(3)):
            where = "" if rank == 1 else "refused by its root, rank 1: "
            with pytest.raises(ArgumentError, match=f"^{where}.* on rank 1 of 3: .*{message}"):
                call(wrong if rank == 1 else right)
    assert varcomm.all_reduce(torch.tensor(1)).item() == 3


def sizes_unlike_the_root(rank):
    varcomm.scatter_v(F(3) if rank == 0 else None, [2, 1] if rank == 0 else [1, 2])


def transforms_unlike_the_root(rank):
    with varcomm.debug():  # ranks compare the call outside the transform
        torch.func.grad(lambda x: varcomm.broadcast(x if rank == 0 else None).sum())(F(2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (sizes_unlike_the_root, r"sizes \[1, 2\] are not those of the root, rank 0"),
        pytest.param(
            transforms_unlike_the_root,
            "transforms of torch.func reach the tensor of the root, ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_calls_unlike_that_of_the_root(call, message):
    """The rank that differs raises, which ends the others: they are in the exchange already."""
    said = f"_v on rank 1 of 2: {message}|cast on .*: {message}"
    with pytest.raises(LaunchError, match=said) as e:
        varcomm.launch(call, 2, timeout=60)
    assert isinstance(e.value.__cause__, DisagreementError)


@on_ranks(2)
def test_devices_flags_and_groups(rank):
    """Refuse tensors on other devices, flags that are no bools, groups that are none."""
    for name in [name for name in PRIMITIVES if name != "shard_v"]:
        c = case(name, "off by one", 2)  # the root is rank 1
        op, x = c.bind(), c.input(rank, torch.float32)
        kind, message = GroupError, "the tensor is on meta, but this group has an engine for cpu"
        if "from" in name:
            kind, message = ArgumentError, "the tensor is on meta, the plan on cpu. Move one of"
        if name == "indexed_all_to_all_v":
            kind, message = ArgumentError, "the tensor is on meta, indices are on cpu"
        with pytest.raises(kind, match=f"rank {rank} of 2: {message}"):
            op(x.to("meta"))
    use_fp32 = ("all_gather_v", "broadcast", "indexed_all_to_all_v", *SUMMING)
    asynchronous = [name for name in RIGHT if name != "shard_v"]
    for flag, names in (("async_op", asynchronous), ("use_fp32", use_fp32)):
        for name in names:
            for value in (True, False):  # right calls before: equal values are not taken for bools
                result = RIGHT[name](rank, **{flag: value})
                if flag == "async_op" and value:
                    result.wait()
            for value in (dist.group.WORLD, dist.ReduceOp.MAX, 1, 0.0, "yes", None):
                with pytest.raises(ArgumentError) as caught:
                    RIGHT[name](rank, **{flag: value})
                start = f"{name} on rank {rank} of 2: {flag} must be True"
                assert str(caught.value).startswith(start)
    packed = torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(ArgumentError, match=r"view\(torch.uint8\) of float4"):
        varcomm.all_gather_v(packed, [2, 2])
    for group in (torch.ones(2), np.array([1, 2]), "world"):
        with pytest.raises(GroupError):
            varcomm.all_reduce(torch.ones(1), group=group)
    assert varcomm.all_reduce(torch.tensor(1)).item() == 2


@on_ranks(3)
def test_calls_with_other_dims(rank):
    """Kept operators: a dim that changes is read at each call, an unhashable dim is refused."""
    x, dim = torch.full((2, 2), float(rank)), torch.tensor(0)
    shapes = [varcomm.all_gather_v(x, [2, 2, 2], d).shape for d in (dim, dim + 1, np.array(1))]
    with varcomm.debug(timeout=20), pytest.raises(DisagreementError) as caught:
        varcomm.all_gather_v(x, [2, 2, 2], [0] if rank == 1 else 0)
    assert list(map(tuple, shapes)) == [(6, 2), (2, 6), (2, 6)]
    assert "rank 1" in str(caught.value)


@on_ranks(3)
def test_a_destroyed_group_is_freed_when_the_next_one_comes(rank):
    gc.disable()
    group = dist.new_group()
    varcomm.all_gather_v(torch.ones(1), [1, 1, 1], group=group)
    field = varcomm.grid.Grid((6, 2), group).field(torch.ones(1, 1, 2, 2))
    torch.nn.functional.conv2d(field, torch.ones(1, 1, 3, 1), padding=(1, 0))
    seen = weakref.ref(group)
    dist.destroy_process_group(group)
    del group, field
    again = dist.new_group()
    varcomm.all_gather_v(torch.ones(1), [1, 1, 1], group=again)
    gone = seen() is None
    gc.enable()
    assert gone
