"""Every mapping, forward and backward, is what its convention says."""

import pytest
import torch

import varcomm.tensor_parallel as tp
from tests.tensor_parallel.twins import REPLICATED, SPLITS, Sharded, compare_all, drawn, split
from tests.worlds import on_ranks
from varcomm import ShardSizes


# A partial value is a shard of a stack along a new dimension, over which the twin sums.
def cases(ranks, pattern):
    sizes, others = split(pattern, ranks), split("uneven", ranks)
    ones = Sharded(0, (1,) * ranks)
    stack = drawn(2, ranks, sum(sizes), sum(others))
    first, last, same = Sharded(0, sizes), Sharded(1, others), REPLICATED
    whole = drawn(3, sum(sizes), sum(others))
    chunks = Sharded(0, ShardSizes.balanced(whole.numel(), ranks))
    scale = torch.arange(1.0, ranks + 1, dtype=torch.float64)
    mine, each = scale[torch.distributed.get_rank()], scale.view(-1, 1, 1)

    def plain(mapping, before, after, *args):
        twin = (lambda x: x * 1) if after is not chunks else (lambda x: x.reshape(-1) * 1)
        return lambda x: mapping(x, *args), twin, [(whole, before)], after

    def used(mapping, before, *args):
        """Each rank uses the result in its own way."""
        return lambda x: mine * mapping(x, *args)[None], lambda x: each * x, [(whole, before)], ones

    def summed(mapping, after, *args):
        return lambda x: mapping(x[0], *args), lambda x: x.sum(0), [(stack, ones)], after

    gather, parts = tp.gather_from_tensor_model_parallel_region, ([*sizes], [*others])
    in_sequence = tp.gather_from_sequence_parallel_region
    to_parts = tp.reduce_scatter_to_sequence_parallel_region
    to_columns = tp.reduce_scatter_last_dim_to_tensor_parallel_region
    use = tp.all_gather_last_dim_from_tensor_parallel_region
    return {
        "copy": used(tp.copy_to_tensor_model_parallel_region, same),
        "reduce": summed(tp.reduce_from_tensor_model_parallel_region, same),
        "scatter": plain(tp.scatter_to_tensor_model_parallel_region, same, last, others),
        "gather": plain(gather, last, same, others),
        "gather rows": plain(gather, first, same, sizes, 0),
        "scatter sequence": plain(tp.scatter_to_sequence_parallel_region, same, first, sizes),
        "gather sequence, identical": plain(in_sequence, first, same, False, sizes),
        "gather sequence": used(in_sequence, first, True, sizes),
        "reduce-scatter sequence": summed(to_parts, first, sizes),
        "gather last": used(use, last, others),
        "reduce-scatter last": summed(to_columns, last, others),
        "sequence to hidden": plain(tp.all_to_all_sp2hp, first, last, *parts),
        "chunks": plain(tp.split_tensor_into_1d_equal_chunks, same, chunks),
        "hidden to sequence": plain(tp.all_to_all_hp2sp, last, first, *parts),
    }


@pytest.mark.parametrize(("ranks", "pattern"), SPLITS)
@on_ranks()
def test_values_and_derivatives(rank, pattern):
    ranks = torch.distributed.get_world_size()
    asked = tp.gather_from_tensor_model_parallel_region(torch.ones(rank + 1))
    assert len(asked) == ranks * (ranks + 1) // 2
    for x in (torch.tensor(3.0), torch.ones(0), drawn(2, 7, 1, 2)):
        piece = tp.split_tensor_into_1d_equal_chunks(x)
        assert piece.untyped_storage().nbytes() <= 8 * max(len(piece), 1)
        assert torch.equal(tp.gather_split_1d_tensor(piece, x.numel()).view(x.shape), x)
        assert torch.equal(tp.gather_split_1d_tensor(piece).view(x.shape), x)
    return compare_all(cases(ranks, pattern))


@on_ranks(2)
def test_nothing_is_written_into_nor_lost(rank):
    a = torch.tensor([1.0], requires_grad=True)
    b = torch.tensor([2.0], requires_grad=True)
    copy = tp.copy_to_tensor_model_parallel_region
    (copy(a) + copy(b)).backward()
    x = torch.tensor([0.5], requires_grad=True)
    tp.reduce_from_tensor_model_parallel_region(x.exp()).backward()
    # the gradient of a sum is one number seen from many places: what is summed must be returned
    y = torch.ones(3, 2, requires_grad=True)
    copy(y.T).sum().backward()
    assert (a.grad.item(), b.grad.item()) == (2.0, 2.0)
    assert x.grad.item() == pytest.approx(torch.tensor(0.5).exp().item())
    assert y.grad.eq(2).all()
