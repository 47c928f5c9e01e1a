"""What ranks tell each other when a plan is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from zlib import crc32

import torch

from varcomm.errors import GroupError
from varcomm.ops import packing
from varcomm.ops.digest import digest
from varcomm.transport.engine import Pending
from varcomm.transport.engines import peers_answer
from varcomm.transport.failure import explained
from varcomm.transport.group import Group

__all__ = ["digest_of", "exchanged_counts"]


def digest_of(index: torch.Tensor, numbers: Iterable[int]) -> int:
    """Return a digest of what a rank makes its part of a plan of."""
    return crc32(repr((digest(index), list(numbers))).encode())


def exchanged_counts(counts: Sequence[int], device: torch.device, group: Group) -> tuple[int, ...]:
    """Tell each rank one count, and return what each tells this one; collective."""
    if not peers_answer(group):
        raise GroupError(
            f"on {group}: in a simulated world no other rank says which rows it needs. Take the "
            "part of a graph that varcomm.simulate.partition gives, with its plan; or tell "
            "ExchangePlan.from_indices the sizes of all ranks."
        )
    ones = [1] * group.size
    mine = torch.tensor(counts, dtype=torch.int64, device=device)
    with explained("ExchangePlan", group):
        works, theirs = packing.exchange("ExchangePlan", group, mine, ones, ones)
        return tuple(Pending(works, lambda: theirs).wait().tolist())
