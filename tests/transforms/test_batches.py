"""Batches of vmap: what travels, and what ranks must have alike."""

import re

import pytest
import torch
from torch.func import grad, hessian, jacfwd, vmap

import varcomm
from varcomm.tensor_parallel import column_parallel_linear
from varcomm.tensor_parallel.cross_entropy import (
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)
from varcomm.tensor_parallel.embedding import vocab_parallel_embedding

SIZES = [2, 1]


def scalars(rank):
    """Of entries without a dimension, and of images."""
    batch = torch.arange(4.0) + rank
    sums = vmap(varcomm.all_reduce)(batch)
    root = vmap(lambda x: varcomm.broadcast(x, src=1))(batch)
    images = torch.arange(96.0).view(2, 2, 2, 3, 4).transpose(2, 4) + rank
    images = torch.stack([x.contiguous(memory_format=torch.channels_last) for x in images])
    both = vmap(lambda x: varcomm.all_gather_v(x, [2, 2]))(images)
    sent = vmap(lambda x: varcomm.broadcast(x))(images)
    return sums, root, both, sent, images


def test_scalars_and_images(worlds):
    results = worlds.run(2, scalars)
    whole = torch.cat([images for *_, images in results], dim=1)
    for sums, root, both, sent, _ in results:
        assert sums.tolist() == [1.0, 3.0, 5.0, 7.0]
        assert root.tolist() == [1.0, 2.0, 3.0, 4.0]
        assert torch.equal(both, whole)
        assert torch.equal(sent, results[0][4])


def nested(rank):
    x = torch.arange(12.0).view(2, 3, 2)[..., : SIZES[rank]] + 10 * rank
    with varcomm.trace() as t:
        y = vmap(vmap(lambda x: varcomm.all_gather_v(x, SIZES)), in_dims=1)(x)
    return x, y, t.total.calls


def test_batches_of_batches_are_one_call(worlds):
    results = worlds.run(2, nested)
    whole = torch.cat([x for x, *_ in results], dim=-1)
    for _, y, calls in results:
        assert torch.equal(y, whole.transpose(0, 1))
        assert calls == 1


def uneven(rank):
    """Each rank has as many directions as elements."""
    told = []
    x = torch.ones(SIZES[rank])

    def loss(x):
        return varcomm.all_gather_v(x, SIZES).pow(3).sum()

    calls = (
        lambda: jacfwd(loss)(x),
        lambda: hessian(loss)(x),
        lambda: vmap(lambda x: varcomm.all_gather_v(x, SIZES, async_op=True).wait())(
            torch.ones(2 + rank, SIZES[rank])
        ),
    )
    for call in calls:
        with pytest.raises(varcomm.DisagreementError) as caught:
            call()
        told.append(str(caught.value))
    return told


def test_batches_that_differ_between_ranks(worlds):
    for told in worlds.run(2, uneven):
        for text in told:
            assert re.match(r"\w+: ranks disagree on the size of the batch of vmap: rank 0", text)
            assert "take torch.func.jvp or vjp of as many directions on all" in text


def without_batch(rank):
    """One rank does not batch; and where only the root's tensor is transformed."""
    x = torch.ones(3, SIZES[rank])

    def gather(x):
        return varcomm.all_gather_v(x, SIZES)

    given, call = (x[0], gather) if rank == 0 else (x, vmap(gather))
    with pytest.raises(varcomm.DisagreementError) as debugged, varcomm.debug():
        call(given)
    told = []
    for given in (None, torch.ones(2)):
        with pytest.raises(varcomm.DisagreementError) as caught:
            vmap(lambda x, given=given: varcomm.broadcast(x if rank == 0 else given))(x)
        told.append(str(caught.value))
    with pytest.raises(varcomm.DisagreementError) as caught:
        grad(lambda x: varcomm.scatter_v(x if rank == 0 else None, [1, 1]).sum())(torch.ones(2))
    return str(debugged.value), *told, str(caught.value)


def test_ranks_that_transform_differently(worlds):
    for debugged, *told in worlds.run(2, without_batch):
        assert "ranks disagree on" in debugged
        for text in told:
            assert re.match(r"(broadcast|scatter_v) on 2 ranks: transforms of torch.func", text)


def constant_of_the_root(rank):
    """What no transform reaches needs nothing of the others."""
    constant = torch.tensor([2.0, 3.0]) if rank == 1 else None
    return vmap(lambda x: x * varcomm.broadcast(constant, src=1))(torch.ones(3, 2))


def test_constants_of_the_root(worlds):
    assert [y.tolist() for y in worlds.run(2, constant_of_the_root)] == [[[2.0, 3.0]] * 3] * 2


def refused(rank):
    x, weight = torch.ones(3, 2, 4), torch.ones(3, 5, 4)
    target = torch.zeros(3, 2, dtype=torch.int64)

    def head(weight):
        return linear_cross_entropy(x[0], weight, target[0], [5, 5]).sum()

    calls = {
        "no rule for a batch of weights": lambda: vmap(
            lambda w: column_parallel_linear(x[0], w, sizes=[5, 5])
        )(weight),
        "Targets are looked at": lambda: vmap(
            lambda z, y: vocab_parallel_cross_entropy(z, y, [4, 4])
        )(x, target),
        "a batch of what all tokens share": lambda: vmap(head)(weight),
        "no rule for sums over tokens": lambda: vmap(
            lambda h: grad(lambda w: linear_cross_entropy(h, w, target[0], [5, 5]).sum())(weight[0])
        )(x),
    }
    for text, call in calls.items():
        with pytest.raises(varcomm.ArgumentError, match=text):
            call()
    return varcomm.all_reduce(torch.ones(1)).item()


def test_batches_without_a_rule(worlds):
    assert worlds.run(2, refused) == [2.0, 2.0]


def of_tables(rank):
    """A batch of tables, each rank with its rows of them."""
    tables = torch.arange(24.0, dtype=torch.float64).view(2, 4, 3)
    own, ids = tables[:, 2 * rank : 2 * rank + 2], torch.tensor([3, 0, 3])

    def loss(own):
        y = vocab_parallel_embedding(ids, own, [2, 2])
        return (y**3).sum()

    got = vmap(grad(loss))(own)
    whole = vmap(grad(lambda table: (table[ids] ** 3).sum()))(tables)
    return float((got - whole[:, 2 * rank : 2 * rank + 2]).abs().max())


def test_batches_of_tables(worlds):
    assert worlds.run(2, of_tables) == [0.0, 0.0]
