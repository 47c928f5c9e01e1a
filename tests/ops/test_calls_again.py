"""Calls repeated with other arguments, refused calls, and waits after a refusal."""

import gc
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

import varcomm
from varcomm import ArgumentError, DisagreementError, GroupError, all_gather_v


def unusual_dims(rank):
    x, dim = torch.full((2, 2), float(rank)), torch.tensor(0)
    first = all_gather_v(x, [2, 2, 2], dim).shape
    second = all_gather_v(x, [2, 2, 2], dim.fill_(1)).shape
    third = all_gather_v(x, [2, 2, 2], np.array(1)).shape
    return [tuple(shape) for shape in (first, second, third)]


def test_a_dim_that_changes_is_read_at_each_call(worlds):
    assert worlds.run(3, unusual_dims) == [[(6, 2), (2, 6), (2, 6)]] * 3


def unhashable(rank):
    x = torch.ones(2, 2)
    with varcomm.debug(timeout=20), pytest.raises(DisagreementError) as caught:
        all_gather_v(x, [2, 2, 2], [0] if rank == 1 else 0)
    return "rank 1" in str(caught.value), all_gather_v(x, [2, 2, 2]).shape[0]


def test_an_unhashable_dim_on_one_rank_is_an_error_on_all(worlds):
    assert worlds.run(3, unhashable) == [(True, 6)] * 3


def not_groups(rank):
    for group in (torch.ones(2), np.array([1, 2]), "world"):
        with pytest.raises(GroupError):
            varcomm.all_reduce(torch.ones(1), group=group)


def test_arrays_are_not_groups(worlds):
    worlds.run(1, not_groups)


def destroyed(rank):
    gc.disable()
    group = dist.new_group()
    all_gather_v(torch.ones(1), [1, 1, 1], group=group)
    seen = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    again = dist.new_group()
    all_gather_v(torch.ones(1), [1, 1, 1], group=again)
    gone = seen() is None
    gc.enable()
    return gone


def test_a_destroyed_group_is_freed_when_the_next_one_comes(worlds):
    assert worlds.run(3, destroyed) == [True] * 3


def waits(rank):
    x = torch.ones(1)
    handle = all_gather_v(x, [1, 1, 1], async_op=True)
    x += 1
    for _ in range(2):
        with pytest.raises(ArgumentError):
            handle.wait()


def test_a_refused_wait_is_refused_again(worlds):
    worlds.run(3, waits)
