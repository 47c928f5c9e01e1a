"""Groups on which threads agree, while others use the group itself."""

import threading

import torch
import torch.distributed as dist

from varcomm import all_reduce
from varcomm.transport.agreement import share
from varcomm.transport.aside import aside
from varcomm.transport.group import resolve


def meanwhile(rank):
    """What ranks tell each other in a thread is not taken for what they sum meanwhile."""
    other, told = aside(resolve(None)), []
    thread = threading.Thread(
        target=lambda: [told.append(share("test", lambda: rank, other)) for _ in range(20)]
    )
    thread.start()
    totals = [all_reduce(torch.full((3,), float(rank))).tolist() for _ in range(20)]
    thread.join()
    again = aside(resolve(None)).process_group is other.process_group
    return told == [[0, 1, 2]] * 20, totals == [[3.0] * 3] * 20, again


def test_threads_beside_collectives(worlds):
    assert worlds.run(3, meanwhile) == [(True, True, True)] * 3


def parts(rank):
    """Two parts of the world at once, of which the others know nothing."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 4])]
    mine = next((group for group in groups if dist.get_rank(group) >= 0), None)
    if mine is None:
        return None
    other = aside(resolve(mine))
    return share("test", lambda: rank, other), other.rank


def test_parts_of_the_world(worlds):
    assert worlds.run(5, parts) == [([0, 1], 0), ([0, 1], 1), ([2, 4], 0), None, ([2, 4], 1)]
