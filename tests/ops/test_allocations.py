"""What an operation makes room for: its result, and one buffer for what is packed or summed."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import varcomm
from tests.ops.comparing import Failures, assert_none
from tests.ops.primitives import PRIMITIVES, Setting

SLACK = 8 * 1024  # bytes of what is empty, of one number, or told by the root
MOVE_WHOLE_ROWS = [name for name in PRIMITIVES if "ind" not in name and "needed" not in name]


class Allocated(TorchDispatchMode):
    """Sum the bytes of storages that appear."""

    def __init__(self, *known):
        super().__init__()
        self.storages = []
        # the storages themselves, so that none gets the place of another that is gone
        self._seen = {x.untyped_storage().data_ptr(): x for x in known}

    @property
    def bytes(self):
        return sum(self.storages)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for y in result if isinstance(result, tuple | list) else (result,):
            if isinstance(y, torch.Tensor) and y.untyped_storage().nbytes():
                place = y.untyped_storage().data_ptr()
                if place not in self._seen:
                    self._seen[place] = y
                    self.storages.append(y.untyped_storage().nbytes())
        return result


def test_allocated_sees_storages():
    x = torch.zeros(100)
    with Allocated(x) as allocated:
        x[1:].view(-1).add_(1)
        assert allocated.bytes == 0
        y = x.clone()
        y.t()
        assert allocated.bytes == 400
        torch.empty(3, dtype=torch.float64)
        assert allocated.bytes == 424


def allowed(name, s, rank, y, x):
    """Elements beside the result: what is packed (or unpacked) for dim != 0, and what is summed."""
    other_dim, at_root, whole = s.axis != 0, rank == s.root, sum(s.sizes) * 20
    return {
        "all_gather_v": y.numel() * other_dim,
        "gather_v": y.numel() * other_dim,
        "scatter_v": x.numel() * (other_dim and at_root),
        "reduce_scatter_v": x.numel() * other_dim + s.ranks * y.numel(),
        "all_to_all_v": x.numel() * other_dim,
        "transpose_v": x.numel(),
        "shard_v": 0,
        # each rank sums a piece of the parts that it gets, and gets the pieces of the others
        "all_reduce": whole + 2 * (whole // s.ranks),
        "reduce": (whole + 2 * (whole // s.ranks)),
        "broadcast": 0,
    }[name]


def check(rank, name, dtype):
    failures = Failures()
    for dim in (0, 1, -1):
        for sizes in ((700, 0, 1010), (500, 600, 500)):
            s = Setting(sizes, dim, (5, 4), root=2)
            c = PRIMITIVES[name](s)
            op, x = c.bind(), c.input(rank, dtype)
            with Allocated(x) as allocated:
                y = op(x)
            limit = (y.numel() + allowed(name, s, rank, y, x)) * dtype.itemsize + SLACK
            with failures.named(dim, sizes):
                assert allocated.bytes <= limit, f"{allocated.bytes} allocated, allowed {limit}"
                assert allocated.bytes >= y.nbytes * (name != "shard_v")
    return failures


@pytest.mark.parametrize("name", MOVE_WHOLE_ROWS)
def test_allocations(worlds, name):
    assert_none(worlds.run(3, check, name, torch.float32))


def narrow(rank):
    x = torch.ones(3 * 2_000_000, dtype=torch.bfloat16)
    with Allocated(x) as allocated:
        varcomm.reduce_scatter_v(x, [2_000_000] * 3)
    return sorted(allocated.storages)


def test_sums_in_fp32_make_room_for_a_block(worlds):
    for *blocks, result, received in worlds.run(3, narrow):
        assert (result, received) == (4_000_000, 12_000_000)
        assert max(blocks) == 2**20  # one after the other
