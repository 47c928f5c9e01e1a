"""Many calls in a row: memory, files and threads of a process must not grow, nor results drift.

Each job returns the growth in bytes, files and threads, and whether all calls were right.
"""

import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist

import varcomm
from tests.ops.primitives import PRIMITIVES, case
from varcomm import ExchangePlan

PATTERNS = ("off by one", "one empty")


def held():
    """Bytes of memory, files and threads of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads = len(os.listdir("/proc/self/task"))
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), threads


def growth(call, first, count):
    """Return the growth over `count` calls, after `first` calls."""
    for number in range(first):
        call(number)
    before = held()
    for number in range(count):
        call(number)
    return [b - a for a, b in zip(before, held(), strict=True)]


def collectives(rank, count):
    """Calls of all kinds; each returns the same bits every time."""
    ranks = dist.get_world_size()
    made = [(n, case(n, p, ranks, dim)) for n in PRIMITIVES for p in PATTERNS for dim in (0, 1)]
    bound = [(name, each, each.bind()) for name, each in made]
    first, drifted = {}, []

    def call(number):
        which = number % len(bound)
        name, each, op = bound[which]
        x = each.input(rank, torch.float64).requires_grad_()
        is_async = number % 3 == 0 and each.has_async
        y = op(x, async_op=True).wait() if is_async else op(x)
        y.sum().backward()
        found = torch.cat([y.detach().reshape(-1), x.grad.reshape(-1)])
        if not torch.equal(first.setdefault(which, found), found):
            drifted.append(name)

    return growth(call, 4 * len(bound), count), not drifted


def plans(rank, count):
    """Plans that are built, used and dropped."""
    sizes = [50 + 7 * other for other in range(dist.get_world_size())]

    def build(number):
        draws = torch.Generator().manual_seed(number + rank)
        needed = torch.randint(sum(sizes), (40,), generator=draws).unique()
        plan = ExchangePlan.from_needed(needed, sizes)
        x = torch.rand(sizes[rank], 3, requires_grad=True)
        plan(x).sum().backward()

    return growth(build, 20, count), True


def groups(rank, count):
    """Groups that are made, used and destroyed."""

    def use(number):
        group = dist.new_group()
        varcomm.all_gather_v(torch.zeros(1 + rank), [1 + r for r in range(3)], group=group)
        with varcomm.debug():
            varcomm.all_reduce(torch.zeros(2), group=group)
        dist.destroy_process_group(group)

    return growth(use, 10, count), True


def refusals(rank, count):
    """Calls that are refused on all ranks because of one of them."""
    sizes, refused = [2, 2, 2], []

    def refuse(number):
        wrong = rank == number // 4 % 3
        rows = torch.zeros(2 + wrong, 3)
        other = torch.zeros(2, dtype=torch.float64 if wrong else torch.float32)
        calls = (
            lambda: varcomm.all_gather_v(rows, sizes),
            lambda: varcomm.all_reduce(other, async_op=True),
            lambda: varcomm.reduce_scatter_v(torch.zeros(6), sizes, dim=int(wrong)),
            lambda: ExchangePlan.from_needed(torch.tensor([9 * wrong]), [3, 3, 3]),
        )
        try:
            with varcomm.debug():
                calls[number % 4]()
        except varcomm.VarcommError:
            refused.append(number)

    return growth(refuse, 40, count), len(refused) == 40 + count


MEGABYTE = 1 << 20
# Job, calls of a long run, and bytes by which the memory of a rank may grow then.
JOBS = {
    "collectives": (collectives, 10_000, 4 * MEGABYTE),
    "plans": (plans, 500, 2 * MEGABYTE),
    "groups": (groups, 200, 4 * MEGABYTE),
    "refusals": (refusals, 1000, 2 * MEGABYTE),
}
