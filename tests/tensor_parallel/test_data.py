"""A batch of the first rank, on all ranks."""

import torch
import torch.distributed as dist

import varcomm
from tests.worlds import WORLDS, on_ranks
from varcomm.tensor_parallel.data import broadcast_data

SHAPES = {"plain": (2, 3), "scalar": (), "none": (0,), "hole": (3, 0, 5), "one": (1,)}
SHAPES["deep"] = (2, 1, 1, 3, 1, 1, 2)


def batch(dtype):
    generator = torch.Generator().manual_seed(6)
    made = {
        key: (torch.randn(shape, generator=generator) * 9).to(dtype)
        for key, shape in SHAPES.items()
    }
    turned = torch.randn(4, 3, 2, generator=generator).permute(2, 0, 1)
    return made | {"turned": (turned * 9).to(dtype), "unasked": torch.zeros(1)}


@on_ranks(*WORLDS)
def test_all_ranks_get_what_the_first_has(rank):
    """Elsewhere the data are not looked at: rank 1 has others under the same names."""
    keys = ["turned", *SHAPES]
    for dtype in (torch.int64, torch.float32, torch.bfloat16, torch.complex64):
        own = batch(dtype) if rank == 0 else {"plain": torch.zeros(9)} if rank == 1 else None
        got, expected = broadcast_data(keys, own, dtype), batch(dtype)
        assert list(got) == keys
        for key, value in got.items():
            assert (value.dtype, value.is_contiguous()) == (dtype, True)
            assert torch.equal(value, expected[key])


@on_ranks(3)
def test_results_are_tensors_of_their_own(rank):
    """In a group without rank 0, results do not share versions or memory with other tensors."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    x = torch.ones(2, requires_grad=True)
    own = {"a": x, "b": torch.ones(2)} if rank == 1 else None
    got = broadcast_data(["a", "b"], own, torch.float32, group)
    weight = torch.ones(2, requires_grad=True)
    product = weight * got["a"]
    got["b"].zero_()
    product.sum().backward()
    assert not got["a"].requires_grad
    assert all(value.eq(1).all() for value in (weight.grad, x, got["a"]))


@on_ranks(2)
def test_keys_of_any_kind(rank):
    data = {("a", 1): torch.ones(2), 3: torch.zeros(1), torch.int8: torch.full((1,), 5.0)}
    got = broadcast_data(list(data), data if rank == 0 else None, torch.float32)
    assert list(got) == list(data)
    assert all(torch.equal(got[key], data[key]) for key in data)


@on_ranks(3)
def test_one_message_of_data(rank):
    """The 16 floats, beside the agreement."""
    own = {"a": torch.zeros(5, 3), "b": torch.zeros(())} if rank == 0 else None
    with varcomm.trace() as calls:
        broadcast_data(["a", "b"], own, torch.float32)
    assert [(call.sent, call.received) for call in calls] == [(0, 64) if rank else (128, 0)]
