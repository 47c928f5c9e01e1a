"""Ranks for what is compiled."""

import pytest
import torch

from varcomm.testing import Ranks


@pytest.fixture(scope="package")
def compiling():
    """Ranks of their own: the compiler stays in a process."""
    pools = {size: Ranks(size, timeout=120) for size in (1, 2, 3)}
    yield lambda size, fn, *args: pools[size].run(_on_one_thread, fn, *args)
    for pool in pools.values():
        pool.close()


def _on_one_thread(rank, fn, *args):
    torch.set_num_threads(1)
    torch.manual_seed(100 + rank)
    torch._dynamo.reset()
    return fn(rank, *args)
