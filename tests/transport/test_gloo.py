"""Messages on Gloo: after abandoned ones, and beside those of users, the next ones arrive."""

import gc

import torch
import torch.distributed as dist

import varcomm


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


def test_calls_that_no_rank_waits_for(worlds):
    for elements in (10, 3_000_000):
        worlds.run(3, dropped, elements)


def among_user_messages(rank):
    """Messages between users, with no tag or with one, stay theirs."""
    mine, theirs, works = torch.full((4,), float(rank)), torch.zeros(4), []
    if rank < 2:
        works = [dist.irecv(theirs, 1 - rank), dist.isend(mine, 1 - rank)]
    whole = varcomm.gather_v(mine + 10, [4, 4, 4])
    for work in works:
        work.wait()
    return theirs.tolist(), whole.tolist()


def test_messages_of_users_are_apart(worlds):
    whole = [10.0] * 4 + [11.0] * 4 + [12.0] * 4
    assert worlds.run(3, among_user_messages)[:2] == [([1.0] * 4, whole), ([0.0] * 4, [])]
