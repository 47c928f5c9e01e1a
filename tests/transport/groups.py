"""A group whose ranks keep the caller's order, for each supported version of torch."""

import inspect
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d


def ordered_group(ranks):
    """Create a group of the given world ranks in their order."""
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        return dist.new_group(ranks, sort_ranks=False)
    # new_group of torch 2.11 has no such argument and always sorts
    with mock.patch.object(distributed_c10d, "sorted", list, create=True):
        return dist.new_group(ranks)
