"""Messages on Gloo: whatever becomes of who started them, the next ones arrive."""

import gc

import torch
import torch.distributed as dist

import varcomm
from varcomm.transport.gloo import _abandoned


def dropped(rank, elements):
    """Two of three ranks forget what they have started, the root of it does not."""
    sizes = [elements, 2 * elements, 0]
    mine = torch.full((sizes[rank],), float(rank))
    whole = torch.cat([torch.full((n,), float(r)) for r, n in enumerate(sizes)])
    for _ in range(3):
        handle = varcomm.gather_v(mine, sizes, dst=1, async_op=True)
        if rank == 1:
            assert torch.equal(handle.wait(), whole)
        del handle
        gc.collect()
        assert torch.equal(varcomm.all_gather_v(mine, sizes), whole)
    return len(_abandoned.get(dist.group.WORLD, []))


def test_what_nobody_waits_for_harms_nobody():
    with varcomm.Ranks(3, timeout=60) as ranks:
        for calls, elements in enumerate((10, 3_000_000), 1):
            # rank 2 sends nothing
            assert ranks.run(dropped, elements) == [3 * calls, 0, 0]


def among_user_messages(rank):
    """What users send each other, with no tag or with one, stays theirs."""
    mine, theirs = torch.full((4,), float(rank)), torch.zeros(4)
    works = [dist.irecv(theirs, 1 - rank), dist.isend(mine, 1 - rank)]
    whole = varcomm.gather_v(mine + 10, [4, 4])
    for work in works:
        work.wait()
    return theirs.tolist(), whole.tolist()


def test_messages_of_users_are_apart(worlds):
    whole = [10.0] * 4 + [11.0] * 4
    assert worlds.run(2, among_user_messages) == [([1.0] * 4, whole), ([0.0] * 4, [])]
