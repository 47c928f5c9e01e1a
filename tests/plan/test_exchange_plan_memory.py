"""What an exchange allocates: its packed rows and its result, there and back, and nothing else."""

import pytest
import torch

import varcomm
from tests.ops.comparing import Failures, assert_none
from tests.plan.allocations import allocated

ROWS, RANKS = 3000, 3
PACKAGING = 1024  # bytes below which tokens and counts are


def ring(rank):
    """Each rank sends a third of its rows to the next, a few of them also to the one after."""
    rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(rank))[: ROWS // 3]
    indices = [torch.zeros(0, dtype=torch.int64)] * RANKS
    indices[(rank + 1) % RANKS] = rows.sort().values
    indices[(rank + 2) % RANKS] = rows[: ROWS // 20].sort().values
    return varcomm.ExchangePlan.from_indices(indices, ROWS)


def check_allocations(rank, dtype, width, sum_by):
    """Compare the large pieces of memory with packed, received and summed rows.

    `sum_by`: the integers for each row that torch's sum over bags takes.
    """
    failures = Failures()
    plan = ring(rank)
    sent, received = sum(plan.send_counts), sum(plan.recv_counts)
    row = width * dtype.itemsize
    for dim in (0, 1):
        shape = (ROWS, width) if dim == 0 else (width, ROWS)
        x = torch.ones(shape, dtype=dtype).requires_grad_()
        there, back = [sent * row, received * row], [sent * row, ROWS * row]
        back += [4 * (ROWS + 1)] * sum_by
        # gradients come as the results do: rows are outermost in memory
        gradient = torch.ones(received, width, dtype=dtype).movedim(0, dim)
        y = plan(x, dim)
        torch.autograd.grad(y, x, gradient, retain_graph=True)  # which plans the sum
        runs = {
            "forward": (there, lambda: plan(x, dim)),  # noqa: B023
            "start and wait": (there, lambda: plan.start(x, dim).wait()),  # noqa: B023
            "backward": (back, lambda: torch.autograd.grad(y, x, gradient)),  # noqa: B023
        }
        for name, (expected, run) in runs.items():
            pieces = allocated(run, PACKAGING)
            with failures.named(name, dim):
                assert pieces == sorted(expected), f"{pieces}, not {sorted(expected)}"
    return failures


@pytest.mark.parametrize(
    ("dtype", "width", "sum_by"),
    [(torch.float32, 32, 2), (torch.float16, 32, 2), (torch.float64, 5, 0), (torch.float32, 1, 0)],
)
def test_exchange_allocates_packed_rows_and_its_result(worlds, dtype, width, sum_by):
    assert_none(worlds.run(RANKS, check_allocations, dtype, width, sum_by))
