"""Ranks for what is compiled."""

import pytest
import torch

from varcomm.testing import Ranks


@pytest.fixture(scope="package")
def compiling():
    """Ranks of their own: the compiler stays in a process."""
    pools = {}

    def run(size, fn, *args):
        if size not in pools:
            pools[size] = Ranks(size, timeout=120)
        return pools[size].run(_on_one_thread, fn, *args)

    yield run
    for pool in pools.values():
        pool.close()


def _on_one_thread(rank, fn, *args):
    torch.set_num_threads(1)
    torch.manual_seed(100 + rank)
    torch._dynamo.reset()
    return fn(rank, *args)
