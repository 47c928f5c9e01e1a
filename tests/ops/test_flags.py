"""Flags are bools: what torch.distributed takes at their place must not pass for one."""

import pytest
import torch
import torch.distributed as dist

import varcomm
from varcomm import ArgumentError, ExchangePlan

X = torch.ones(2)
NONE = torch.tensor([], dtype=torch.int64)
FLAGGED = {
    "use_fp32": {
        "all_reduce": lambda flag: varcomm.all_reduce(X, flag),
        "reduce": lambda flag: varcomm.reduce(X, 0, flag),
        "broadcast": lambda flag: varcomm.broadcast(X, 0, flag),
        "all_gather_v": lambda flag: varcomm.all_gather_v(X, [2, 2], 0, flag),
        "reduce_scatter_v": lambda flag: varcomm.reduce_scatter_v(X, [1, 1], 0, flag),
        "indexed_all_to_all_v": lambda flag: varcomm.indexed_all_to_all_v(
            X, [NONE, NONE], [[0, 0]] * 2, flag
        ),
        "exchange": lambda flag: empty_plan()(X, 0, flag),
        "exchange_adjoint": lambda flag: empty_plan().adjoint(torch.ones(0), 0, flag),
    },
    "async_op": {
        "all_reduce": lambda flag: varcomm.all_reduce(X, async_op=flag),
        "reduce": lambda flag: varcomm.reduce(X, async_op=flag),
        "broadcast": lambda flag: varcomm.broadcast(X, async_op=flag),
        "all_gather_v": lambda flag: varcomm.all_gather_v(X, [2, 2], async_op=flag),
        "gather_v": lambda flag: varcomm.gather_v(X, [2, 2], async_op=flag),
        "scatter_v": lambda flag: varcomm.scatter_v(X, [1, 1], async_op=flag),
        "reduce_scatter_v": lambda flag: varcomm.reduce_scatter_v(X, [1, 1], async_op=flag),
        "all_to_all_v": lambda flag: varcomm.all_to_all_v(X, [1, 1], [1, 1], async_op=flag),
        "transpose_v": lambda flag: varcomm.transpose_v(
            torch.ones(2, 1), 0, [1, 1], 1, [1, 1], async_op=flag
        ),
        "shard_v": lambda flag: varcomm.shard_v(X, [1, 1], async_op=flag),
        "indexed_all_to_all_v": lambda flag: varcomm.indexed_all_to_all_v(
            X, [NONE, NONE], [[0, 0]] * 2, async_op=flag
        ),
    },
}
CASES = [(flag, name) for flag, calls in FLAGGED.items() for name in calls]


def empty_plan():
    return ExchangePlan.from_indices([NONE, NONE], 2)


def told(call, value):
    with pytest.raises(ArgumentError) as caught:
        call(value)
    return str(caught.value)


def not_bools(rank, flag, name):
    call = FLAGGED[flag][name]
    values = (dist.group.WORLD, dist.ReduceOp.MAX, 1, "yes", None)
    messages = [told(call, value) for value in values]
    for value in (True, False):
        call(value)
    return messages


@pytest.mark.parametrize(("flag", "name"), CASES)
def test_flags_must_be_bools(worlds, flag, name):
    for rank, messages in enumerate(worlds.run(2, not_bools, flag, name)):
        start = f"{name} on rank {rank} of 2: {flag} must be True or False; got "
        assert all(message.startswith(start) for message in messages)
        assert messages[0].endswith("Pass a group as group=...")
        assert "varcomm sums; for others there is torch.distributed.all_reduce." in messages[1]
        assert [message.removeprefix(start) for message in messages[2:]] == [
            "1.",
            "'yes'.",
            "None.",
        ]
