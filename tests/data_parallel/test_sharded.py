"""Training on shards is training in one process."""

import pytest
import torch

from tests.data_parallel.sharded_cases import (
    OPTIMIZERS,
    Net,
    assert_equal,
    groups_of,
    loss_of,
    sharded,
    twins,
)
from tests.worlds import WORLDS

KINDS = ("balanced", "whole-parameters", "explicit")


def trained(rank, ranks, kind, optimizer, bucket_bytes, overlap):
    """Twelve steps of two micro-batches; of every second, only the last backward sends sums."""
    model, twin = twins(Net)
    if rank:  # rank 0 decides
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    own = sharded(model, kind, ranks, optimizer, bucket_bytes=bucket_bytes, overlap_forward=overlap)
    one = OPTIMIZERS[optimizer](groups_of(twin))
    for step in range(12):
        if step % 2:
            with own.no_sync():
                loss_of(model, step, rank, 0).backward()
        else:
            loss_of(model, step, rank, 0).backward()
        loss_of(model, step, rank, 1).backward()
        for part in range(2):
            (sum(loss_of(twin, step, r, part) for r in range(ranks)) / ranks).backward()
        if step % 3 == 0:
            norm = own.clip_grad_norm_(0.5)
            of_one = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            torch.testing.assert_close(norm, of_one, rtol=1e-10, atol=0)
        own.step()
        own.zero_grad()
        one.step()
        one.zero_grad()
    own.wait()
    assert_equal(model, twin, 1e-10)
    return [p.detach().clone() for p in model.parameters()], len(own.pieces)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", WORLDS)
def test_steps_are_those_of_one_process(worlds, ranks, kind):
    for optimizer in OPTIMIZERS:
        results = worlds.run(ranks, trained, ranks, kind, optimizer, 300, optimizer == "SGD")
        for values, _ in results:
            assert all(map(torch.equal, values, results[0][0]))  # bit for bit
        if kind == "explicit" and ranks > 1:
            assert results[0][1] == 0
