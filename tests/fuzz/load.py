"""Many calls in a row: what a process holds must not grow, nor results drift.

Each job tells by how many bytes, files and threads it grew, and whether all went as it should.
"""

import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist

import varcomm
from tests.ops.primitives import PRIMITIVES, case
from varcomm import ExchangePlan

CASES = [
    (name, pattern, dim)
    for name in PRIMITIVES
    for pattern in ("off by one", "one empty")
    for dim in (0, 1)
]


def held():
    """Bytes of memory, files and threads of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads = len(os.listdir("/proc/self/task"))
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), threads


def collectives(rank, calls):
    """Make so many calls of all kinds; what they return must stay the same bit for bit."""
    ranks = dist.get_world_size()
    bound = [(c := case(name, pattern, ranks, dim), c.bind()) for name, pattern, dim in CASES]
    first, drifted = {}, 0

    def call(number):
        nonlocal drifted
        which = number % len(bound)
        made, op = bound[which]
        x = made.input(rank, torch.float64).requires_grad_()
        if number % 3 == 0 and made.has_async and CASES[which][0] != "shard_v":
            y = op(x, async_op=True).wait()
        else:
            y = op(x)
        y.sum().backward()
        found = torch.cat([y.detach().reshape(-1), x.grad.reshape(-1)])
        drifted += not torch.equal(first.setdefault(which, found), found)

    warm = 4 * len(bound)
    for number in range(warm):
        call(number)
    before = held()
    for number in range(calls):
        call(number)
    return [b - a for a, b in zip(before, held(), strict=True)], drifted == 0


def plans(rank, count):
    """Build plans, use them, drop them."""
    ranks = dist.get_world_size()
    sizes = [50 + 7 * other for other in range(ranks)]
    total = sum(sizes)

    def build(number):
        draws = torch.Generator().manual_seed(number + rank)
        needed = torch.randint(total, (40,), generator=draws).unique()
        plan = ExchangePlan.from_needed(needed, sizes)
        x = torch.rand(sizes[rank], 3, requires_grad=True)
        plan(x).sum().backward()

    for number in range(20):
        build(number)
    before = held()
    for number in range(count):
        build(number)
    return [b - a for a, b in zip(before, held(), strict=True)], True


def groups(rank, count):
    """Make groups, call on them, destroy them."""

    def use():
        group = dist.new_group()
        varcomm.all_gather_v(torch.zeros(1 + rank), [1 + r for r in range(3)], group=group)
        with varcomm.debug():
            varcomm.all_reduce(torch.zeros(2), group=group)
        dist.destroy_process_group(group)

    for _ in range(10):
        use()
    before = held()
    for _ in range(count):
        use()
    return [b - a for a, b in zip(before, held(), strict=True)], True


def refusals(rank, count):
    """Refuse that many calls on all ranks, each because of one of them."""
    sizes = [2, 2, 2]
    refused = 0

    def refuse(number):
        nonlocal refused
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
            refused += 1

    for number in range(40):
        refuse(number)
    before = held()
    for number in range(count):
        refuse(number)
    return [b - a for a, b in zip(before, held(), strict=True)], refused == 40 + count
