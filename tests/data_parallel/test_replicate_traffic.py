"""What the sums cost: no byte more than a sum over ranks takes, and few messages."""

import pytest
import torch
from torch import nn

import varcomm
from varcomm.data_parallel import replicate

NUMBERS = 101 * 151 + 151 + 151 * 60 + 60


def cost(rank, dtype, bucket_bytes):
    model = nn.Sequential(nn.Linear(101, 151), nn.Tanh(), nn.Linear(151, 60)).to(dtype)
    with varcomm.trace() as made_equal:
        replicate(model, bucket_bytes=bucket_bytes)
    loss = model(torch.ones(1, 101, dtype=dtype)).sum()
    with varcomm.trace() as calls:
        loss.backward()
    names = [call.name for call in calls]
    assert sum(call.received for call in calls) == sum(call.sent for call in calls)
    received = sum(call.received for call in made_equal)
    return sum(call.sent for call in calls), names, received, len(made_equal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_bytes_are_those_of_a_sum(worlds, ranks, dtype):
    """The parameters, and for each of the four whether it was used; 2 (P - 1) / P of that."""
    width = dtype.itemsize
    bound = 2 * (ranks - 1) / ranks * (NUMBERS + 4) * width
    for rank, (sent, names, received, messages) in enumerate(
        worlds.run(ranks, cost, dtype, 25 * 2**20)
    ):
        # where the number does not divide, a rank has one value more or less to sum for the others
        assert abs(sent - bound) <= width * ranks
        assert names == (["reduce_scatter_v", "all_gather_v"] if ranks > 1 else ["all_reduce"])
        # rank 0 has nothing to receive
        assert (received, messages) == (NUMBERS * width if rank else 0, 1)


def test_small_buckets_take_one_round(worlds):
    """The last bias alone is small enough: its sum is one round, those of the weights are two."""
    ((_, names, _, messages), *_) = worlds.run(3, cost, torch.float32, 20_000)
    two = ["reduce_scatter_v", "all_gather_v"]
    # last bias; last weight; first bias; first weight: all are begun before any second round
    assert sorted(names) == sorted([*two, *two, "all_reduce", "all_reduce"])
    assert messages == 4
    assert names.index("all_gather_v") > max(i for i, n in enumerate(names) if n != "all_gather_v")
