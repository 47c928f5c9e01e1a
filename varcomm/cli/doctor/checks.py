"""What each rank of an engine does to see whether a primitive works: the dot test."""

from __future__ import annotations

from collections.abc import Callable

import torch

import varcomm as vc
from varcomm.testing import dot_test

__all__ = ["CHECKS", "check"]

Tensor = torch.Tensor
Check = Callable[[int, int, torch.device], None]

_DTYPES = (
    *(torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
)


def check(rank: int, name: str, ranks: int, device: str) -> str | None:
    """Make a check, and return what is wrong, if anything is; collective."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    try:
        CHECKS[name](rank, ranks, torch.device(device))
    except AssertionError as error:  # on all ranks alike
        return str(error)
    return None


def _sizes(ranks: int) -> vc.ShardSizes:
    """Return shards of 3, 1, 3, ... rows."""
    return vc.ShardSizes([1 if rank % 2 else 3 for rank in range(ranks)])


def _primitive(
    rows: Callable[[int, int], int], apply: Callable[[int, int, Tensor], Tensor]
) -> Check:
    """Return the dot test of what `apply` does to so many rows of 4 columns."""

    def test(rank: int, ranks: int, device: torch.device) -> None:
        x = torch.randn(rows(rank, ranks), 4, dtype=torch.float64).to(device)
        dot_test(lambda x: apply(rank, ranks, x), x)

    return test


def _own(rank: int, ranks: int) -> int:
    return _sizes(ranks)[rank]


def _all(rank: int, ranks: int) -> int:
    return _sizes(ranks).total


def _to_others(rank: int, ranks: int, x: Tensor) -> Tensor:
    """Send as many rows to rank r as r's shard has, so that each gets as many from everyone."""
    sizes = _sizes(ranks)
    return vc.all_to_all_v(x, sizes, [sizes[rank]] * ranks)


def _last_rows(rank: int, ranks: int, x: Tensor) -> Tensor:
    """Send the last row to each rank."""
    sizes = _sizes(ranks)
    last = torch.tensor([sizes[rank] - 1], device=x.device)
    return vc.indexed_all_to_all_v(x, [last] * ranks, [[1] * ranks] * ranks)


def _needed_rows(rank: int, ranks: int, x: Tensor) -> Tensor:
    """Fetch the first row of each rank."""
    sizes = _sizes(ranks)
    needed = torch.tensor(sizes.offsets[:ranks], device=x.device)
    return vc.ExchangePlan.from_needed(needed, sizes)(x)


def _moves_every_dtype(rank: int, ranks: int, device: torch.device) -> None:
    """Gather rows of each dtype, and compare them with what was sent."""
    sizes, wrong = _sizes(ranks), []
    for dtype in _DTYPES:
        sent = torch.arange(sizes.total) % 2
        whole = sent.to(device, dtype)
        mine = sizes.range(rank)
        got = vc.all_gather_v(whole[mine.start : mine.stop], sizes)
        if not torch.equal(got, whole):
            wrong.append(str(dtype).removeprefix("torch."))
    # all ranks receive the same, and so all come to the same verdict
    assert not wrong, f"arrives altered: {', '.join(wrong)}"


# By the name of the primitive: what all ranks do at once. Each is linear in its input.
CHECKS: dict[str, Check] = {
    "all_gather_v": _primitive(_own, lambda r, p, x: vc.all_gather_v(x, _sizes(p))),
    "gather_v": _primitive(_own, lambda r, p, x: vc.gather_v(x, _sizes(p))),
    "scatter_v": _primitive(_all, lambda r, p, x: vc.scatter_v(x, _sizes(p))),
    "reduce_scatter_v": _primitive(_all, lambda r, p, x: vc.reduce_scatter_v(x, _sizes(p))),
    "all_to_all_v": _primitive(_all, _to_others),
    "shard_v": _primitive(_all, lambda r, p, x: vc.shard_v(x, _sizes(p))),
    "transpose_v": _primitive(
        _own, lambda r, p, x: vc.transpose_v(x, 1, vc.ShardSizes.balanced(4, p), 0, _sizes(p))
    ),
    "broadcast": _primitive(_all, lambda r, p, x: vc.broadcast(x)),
    "reduce": _primitive(_all, lambda r, p, x: vc.reduce(x)),
    "all_reduce": _primitive(_all, lambda r, p, x: vc.all_reduce(x)),
    "indexed_all_to_all_v": _primitive(_own, _last_rows),
    "ExchangePlan": _primitive(_own, _needed_rows),
    "every dtype": _moves_every_dtype,
}
