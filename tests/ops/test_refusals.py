"""Wrong arguments: each is an error before anything moves, and the world is usable afterwards."""

import re
import warnings

import pytest
import torch
import torch.distributed as dist

import varcomm
from tests.ops.primitives import PRIMITIVES, case
from varcomm import ArgumentError, DisagreementError, GroupError, LaunchError, ShardSizes

F = torch.zeros  # (rows, 2) of floats fits sizes [2, 1] on rank 0 with two rows
SPARSE = torch.eye(3).to_sparse()


def bad_sizes(op, whole):
    """Yield calls with wrong `sizes` and `dim`; rank 0 of 2 makes them with two rows of [2, 1]."""
    x = F(3 if whole else 2, 2)
    for sizes in (
        [2],
        [2, 1, 0],
        ShardSizes([2, 1, 0]),
        [4, -1],
        [2, 1.0],
        [2, True],
        {2, 1},
        3,
        None,
    ):
        yield lambda sizes=sizes: op(x, sizes), "sizes must"
    for dim in (2, -3, 0.0, None):
        yield lambda dim=dim: op(x, [2, 1], dim), "dim"
    scalar = torch.tensor(1.0)
    yield lambda: op(scalar, [2, 1]), r"dim=0 is out of range .* \(\). A scalar has no rows: unsq"
    if whole:
        yield lambda: op(F(4, 2), [2, 1]), r"has 4 rows along dim 0, but sizes sum to 3 \(sizes"
        yield lambda: op(x, [2, 1], -1), "has 2 rows along dim 1, but sizes sum to 3"
    else:
        message = (
            r"has 3 rows along dim 0, but sizes\[0\] is 2 \(sizes \[2, 1\]\). Pass this rank's"
        )
        yield lambda: op(F(3, 2), [2, 1]), message
        yield lambda: op(x, [1, 1], 1), r"has 2 rows along dim 1, but sizes\[0\] is 1"


def bad_tensors(op, *rest):
    yield lambda: op(None, *rest), "tensor must be a torch.Tensor; got NoneType"
    yield lambda: op([1.0, 2.0], *rest), "tensor must be a torch.Tensor; got list"
    yield lambda: op(SPARSE, *rest), r"tensor must be dense; got torch.sparse_coo .* to_dense\(\)"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are deprecated
        quantized = torch._empty_affine_quantized([3], scale=1.0, dtype=torch.qint8)
    yield lambda: op(quantized, *rest), r"tensor must be dense; got .*qint8.* dequantize\(\)"


def bad_sums(op, *rest):
    message = "a sum of torch.bool is not defined. Convert: tensor.to"
    yield lambda: op(torch.ones(3, dtype=torch.bool), *rest), message


def bad_roots(op, x, *rest, word):
    for root in (2, -1, 1.0, None, True):
        message = rf"{word} must be a rank of the group, 0...1; got {re.escape(repr(root))}"
        yield lambda root=root: op(x, *rest, **{word: root}), message


def mistakes_of_all_gather_v():
    yield from bad_sizes(varcomm.all_gather_v, whole=False)
    yield from bad_tensors(varcomm.all_gather_v, [2, 1])


def mistakes_of_gather_v():
    yield from bad_sizes(varcomm.gather_v, whole=False)
    yield from bad_tensors(varcomm.gather_v, [2, 1])
    yield from bad_roots(varcomm.gather_v, F(2, 2), [2, 1], word="dst")


def mistakes_of_reduce_scatter_v():
    yield from bad_sizes(varcomm.reduce_scatter_v, whole=True)
    yield from bad_tensors(varcomm.reduce_scatter_v, [2, 1])
    yield from bad_sums(varcomm.reduce_scatter_v, [2, 1])


def mistakes_of_shard_v():
    yield from bad_sizes(varcomm.shard_v, whole=True)
    yield from bad_tensors(varcomm.shard_v, [2, 1])


def mistakes_of_all_reduce():
    yield from bad_tensors(varcomm.all_reduce)
    yield from bad_sums(varcomm.all_reduce)


def mistakes_of_reduce():
    yield from bad_tensors(varcomm.reduce)
    yield from bad_sums(varcomm.reduce)
    yield from bad_roots(varcomm.reduce, F(2, 2), word="dst")


def mistakes_of_broadcast():
    yield from bad_roots(varcomm.broadcast, F(2, 2), word="src")


def mistakes_of_scatter_v():
    yield from bad_roots(varcomm.scatter_v, F(3, 2), [2, 1], word="src")
    yield lambda: varcomm.scatter_v(F(3), [2]), "sizes must have one entry per rank, 2; got 1"
    yield lambda: varcomm.scatter_v(F(3), [4, -1]), "sizes must not be negative"
    yield lambda: varcomm.scatter_v(F(3), [2, "1"]), "entry 1 is '1' of type str"
    yield lambda: varcomm.scatter_v(F(3), 3), "sizes must be a list or tuple of ints"


def mistakes_of_all_to_all_v():
    op, x = varcomm.all_to_all_v, F(3, 2)
    yield from bad_tensors(op, [2, 1], [2, 1])
    yield lambda: op(x, [3], [2, 1]), "send_sizes must have one entry per rank, 2; got 1"
    yield lambda: op(x, [2, 1], [2, 1, 0]), "recv_sizes must have one entry per rank, 2; got 3"
    yield lambda: op(x, [4, -1], [4, 1]), "send_sizes must not be negative"
    yield lambda: op(x, [2, 1], [2, -1]), "recv_sizes must not be negative"
    yield lambda: op(x, [2, 1], [2, 1.5]), "recv_sizes must hold ints; .* 1.5 of type float"
    yield lambda: op(x, [2, 2], [2, 2]), "has 3 rows along dim 0, but send_sizes sum to 4"
    yield lambda: op(x, [2, 1], [2, 1], 5), "dim=5 is out of range"
    message = r"sends 2 rows to itself \(send_sizes\), but expects 1 from itself \(recv_sizes\)"
    yield lambda: op(x, [2, 1], [1, 1]), message


def mistakes_of_transpose_v():
    op, x = varcomm.transpose_v, F(2, 5)
    yield from bad_tensors(op, 1, [2, 3], 0, [2, 1])
    yield lambda: op(x, 1, [2, 2], 0, [2, 1]), "dim 1, but split_sizes sum to 4"
    yield lambda: op(x, 1, [2, 3], 0, [1, 1]), r"dim 0, but concat_sizes\[0\] is 1"
    yield lambda: op(x, 1, [2, 3], 0, [2]), "concat_sizes must have one entry per rank, 2; got 1"
    yield lambda: op(x, 1, [6, -1], 0, [2, 1]), "split_sizes must not be negative"
    yield lambda: op(x, 2, [2, 3], 0, [2, 1]), "dim=2 is out of range"
    message = r"split_dim=0 and concat_dim=-2 are the same dimension .*; use all_to_all_v"
    yield lambda: op(x, 0, [2, 0], -2, [2, 0]), message


MISTAKES = {
    name.removeprefix("mistakes_of_"): make
    for name, make in list(globals().items())
    if name.startswith("mistakes_of_")
}


def raise_on_rank_0(rank, name):
    """Rank 0 makes each mistake by itself, which moves nothing; then both communicate."""
    count = 0
    RIGHT[name](rank)
    if rank == 0:
        for call, message in MISTAKES[name]():
            with pytest.raises(ArgumentError, match=message) as caught:
                call()
            assert str(caught.value).startswith(f"{name} on rank 0 of 2: ")
            count += 1
    return count, varcomm.all_reduce(torch.tensor(1)).item()


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_on_one_rank(worlds, name):
    (count, total), other = worlds.run(2, raise_on_rank_0, name)
    assert count > 2
    assert total == 2
    assert other == (0, 2)


def raise_on_all_in_debug(rank, name):
    """Inside debug(), the rank that calls it rightly raises as well, and the same error."""
    calls = list(MISTAKES[name]())
    for call, message in (calls[0], calls[-1]):
        expected = f"^{name}: not called, since on rank 0: {name} on rank 0 of 2: .*{message}"
        with pytest.raises(DisagreementError, match=expected), varcomm.debug():
            call() if rank == 0 else RIGHT[name](rank)
    return varcomm.all_reduce(torch.tensor(1)).item()


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
}


@pytest.mark.parametrize("name", RIGHT)
def test_mistake_on_one_rank_is_an_error_on_all_in_debug(worlds, name):
    assert worlds.run(2, raise_on_all_in_debug, name) == [2, 2]


def mistakes_at_the_root(group_size):
    """Yield what ``scatter_v`` and ``broadcast`` refuse at their root, rank 1."""
    sizes = [2, 1, 0][:group_size]
    for wrong, message in (
        (None, "tensor must be a torch.Tensor; got NoneType"),
        (SPARSE, "tensor must be dense; got torch.sparse_coo"),
        (3.0, "tensor must be a torch.Tensor; got float"),
    ):
        yield lambda x: varcomm.broadcast(x, 1), wrong, message
        yield lambda x: varcomm.scatter_v(x, sizes, src=1), wrong, message
    yield lambda x: varcomm.scatter_v(x, sizes, src=1), F(4), "has 4 rows .* sizes sum to 3"
    yield lambda x: varcomm.scatter_v(x, sizes, src=1), torch.tensor(1.0), "A scalar has no rows"
    yield lambda x: varcomm.scatter_v(x, sizes, 1, 1), F(3), r"dim=1 is out of range .* \(3,\)"
    yield lambda x: varcomm.scatter_v(x, sizes, "rows", 1), F(3), "dim must be an int; got 'rows'"


def raise_of_root(rank, size):
    for call, wrong, message in mistakes_at_the_root(size):
        for right in (None, F(3)):
            where = "" if rank == 1 else "refused by its root, rank 1: "
            with pytest.raises(ArgumentError, match=f"^{where}.* on rank 1 of {size}: .*{message}"):
                call(wrong if rank == 1 else right)
    return varcomm.all_reduce(torch.tensor(1)).item()


@pytest.mark.parametrize("size", [2, 3])
def test_mistake_at_the_root_is_an_error_on_every_rank(worlds, size):
    assert worlds.run(size, raise_of_root, size) == [size] * size


def sizes_unlike_the_root(rank):
    varcomm.scatter_v(F(3) if rank == 0 else None, [2, 1] if rank == 0 else [1, 2])


def test_sizes_that_are_not_those_of_the_root():
    """The rank that differs raises, which ends the others: they are in the exchange already."""
    message = r"scatter_v on rank 1 of 2: sizes \[1, 2\] are not those of the root, rank 0"
    with pytest.raises(LaunchError, match=message) as caught:
        varcomm.launch(sizes_unlike_the_root, 2, timeout=60)
    assert isinstance(caught.value.__cause__, DisagreementError)


def on_meta(rank, name):
    c = case(name, "off by one", 2)  # the root is rank 1
    op, x = c.bind(), c.input(rank, torch.float32)
    message = "the tensor is on meta, but this group has an engine for cpu and cuda only"
    error = GroupError if "from" not in name else ArgumentError
    if "from" in name:
        message = "the tensor is on meta, the plan on cpu. Move one of them: plan.to"
    if name == "indexed_all_to_all_v":
        error, message = ArgumentError, "the tensor is on meta, indices are on cpu"
    with pytest.raises(error, match=f"rank {rank} of 2: {message}"):
        op(x.to("meta"))
    return varcomm.all_reduce(torch.tensor(1)).item()


@pytest.mark.parametrize("name", [name for name in PRIMITIVES if name != "shard_v"])
def test_tensor_on_a_device_that_the_group_does_not_serve(worlds, name):
    assert worlds.run(2, on_meta, name) == [2, 2]


def integers(rank, name):
    """Integers have no gradient, and that is no error: beside tensors that do, they just move."""
    c = case(name, "off by one", 2)
    inputs = c.draw(torch.int64)
    x = torch.ones(1, requires_grad=True) if inputs[rank] is None else inputs[rank]
    y = c.bind()(x)
    return torch.equal(y, c.reference(inputs)[rank]), y.dtype == torch.int64, y.requires_grad


@pytest.mark.parametrize("name", PRIMITIVES)
def test_integers_have_no_gradient(worlds, name):
    assert worlds.run(2, integers, name) == [(True, True, False)] * 2


def scalars(rank):
    """Whole tensors may be scalars: they have no rows to split, and need none."""
    answers = []
    for op in (
        varcomm.all_reduce,
        lambda x: varcomm.reduce(x, dst=1),
        lambda x: varcomm.broadcast(x, src=1),
    ):
        x = torch.tensor(rank + 1.0, requires_grad=True)
        y = op(x)
        y.backward()
        answers.append((y.item(), x.grad.item()))
    return answers


def test_scalars(worlds):
    assert worlds.run(2, scalars) == [
        [(3.0, 2.0), (0.0, 1.0), (2.0, 0.0)],
        [(3.0, 2.0), (3.0, 1.0), (2.0, 2.0)],
    ]


# --- flags: torch.distributed has a group or a ReduceOp at some of their positions

NONE = torch.tensor([], dtype=torch.int64)
FLAGGED = {
    **RIGHT,
    "indexed_all_to_all_v": lambda rank, **flag: varcomm.indexed_all_to_all_v(
        F(2), [NONE, NONE], [[0, 0]] * 2, **flag
    ),
}
SUMS = ("all_reduce", "reduce", "broadcast", "all_gather_v", "reduce_scatter_v")
FLAGS = [("async_op", name) for name in FLAGGED]
FLAGS += [("use_fp32", name) for name in (*SUMS, "indexed_all_to_all_v")]


def not_bools(rank):
    for flag, name in FLAGS:
        call = FLAGGED[name]
        for value in (True, False):  # right calls before: equal values are not taken for bools
            result = call(rank, **{flag: value})
            if flag == "async_op" and value:
                result.wait()
        for value in (dist.group.WORLD, dist.ReduceOp.MAX, 1, 0.0, "yes", None):
            with pytest.raises(ArgumentError) as caught:
                call(rank, **{flag: value})
            assert str(caught.value).startswith(f"{name} on rank {rank} of 2: {flag} must be True")
    return varcomm.all_reduce(torch.tensor(1)).item()


def test_flags_must_be_bools(worlds):
    assert worlds.run(2, not_bools) == [2, 2]
