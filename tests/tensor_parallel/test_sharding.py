"""How parameters are sharded, marks that stay, and pieces of uneven sizes."""

from itertools import product

import torch

from tests.ops.comparing import Failures
from tests.tensor_parallel.twins import drawn
from tests.worlds import WORLDS, on_ranks
from varcomm.sharding import ShardSpec
from varcomm.tensor_parallel.mappings import split_tensor_along_last_dim, vocab_range
from varcomm.testing import gradgradcheck

BLOCKS = {
    1: [[[4]], [[3], [0], [2]]],
    2: [[[3, 0], [1, 2]], [[0, 4]]],
    3: [[[2, 2, 1]], [[2, 0, 1], [0, 0, 3], [1, 1, 1]], [[0, 5, 0], [1, 0, 0]]],
    5: [[[1, 1, 1, 1, 1]], [[0, 2, 0, 3, 1], [1, 0, 0, 0, 4]]],
}


@on_ranks(*WORLDS)
def test_shard_and_gather(rank, ranks):
    failures = Failures()
    for blocks, dim in product(BLOCKS[ranks], (0, 2)):
        spec = ShardSpec.of(blocks if len(blocks) > 1 else blocks[0], dim)
        shape = [2, 3, 2]
        shape[dim] = spec.total
        whole = drawn(1, *shape)
        own = spec.shard(whole)
        with failures.named(blocks, dim):
            parts = [whole.narrow(dim, a, b - a) for a, b in spec.ranges(rank)]
            assert [part.shape[dim] for part in parts] == [block[rank] for block in blocks]
            assert torch.equal(own, torch.cat(parts, dim))
            assert torch.equal(spec.gather(own), whole)
            last = spec.gather(own, dst=ranks - 1)
            assert torch.equal(last, whole if rank == ranks - 1 else whole.narrow(dim, 0, 0))
            gradgradcheck(lambda x, spec=spec: spec.gather(x) ** 2, own, fast_mode=True)
            own += 1  # a copy: the whole does not change with it
            assert torch.equal(whole, drawn(1, *shape))
    return failures


def test_parts_of_the_last_dimension():
    x = torch.arange(12).view(2, 6)
    a, b, c = split_tensor_along_last_dim(x, [1, 0, 5])
    assert (a.tolist(), b.shape, c.tolist()) == ([[0], [6]], (2, 0), x[:, 1:].tolist())
    assert c.data_ptr() == x[:, 1:].data_ptr()
    copied = split_tensor_along_last_dim(x, (1, 5), contiguous=True)[1]
    assert copied.is_contiguous()
    assert copied.data_ptr() != x[:, 1:].data_ptr()


def test_ranges_of_ids():
    assert [vocab_range([5, 0, 3], rank) for rank in range(3)] == [(0, 5), (5, 5), (5, 8)]
