"""How shards differ: sizes for a skew, and who sends how many rows to whom."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from varcomm.errors import ArgumentError

__all__ = ["checked_skew", "row_width", "shard_sizes", "shares", "to_bytes", "transfers"]

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def to_bytes(text: str) -> int:
    """Read a number of bytes.

    >>> to_bytes("768"), to_bytes("16K"), to_bytes("1M")
    (768, 16384, 1048576)
    """
    found = re.fullmatch(r"(\d{1,30})([KMG]?)", text.strip().upper())
    if found is None or int(found[1]) == 0:
        raise ArgumentError(f"{text!r} is no number of bytes: write 768, 16K, 1M or 1G.")
    number = int(found[1]) * _UNITS[found[2]]
    if number > (memory := _memory()):
        raise ArgumentError(f"{text!r} is more than the {memory / 2**30:.3g}G of this machine.")
    return number


def _memory() -> int:
    """Return the bytes of memory here, or a number that none has."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 2**50


def checked_skew(text: str) -> str:
    """Return a skew that there is."""
    weights = re.fullmatch(r"\d+(:\d+)+", text)
    if text in ("even", "empty") or (weights and any(map(int, text.split(":")))):
        return text
    raise ArgumentError(
        f"{text!r} is no skew: write even, empty (the first rank has nothing), or weights that "
        "ranks take in turn, such as 1:8."
    )


def row_width(nbytes: int) -> int:
    """Return how many numbers a row has: few where there are few bytes, so that shards differ."""
    return 64 if nbytes >= 16 * 2**10 else 8


def shares(total: int, weights: Sequence[int]) -> list[int]:
    """Split `total` in proportion to weights.

    >>> shares(10, [1, 2, 1]), shares(3, [0, 0])
    ([3, 5, 2], [2, 1])
    """
    if not any(weights):
        weights = [1] * len(weights)
    whole = sum(weights)
    cuts = [(total * sum(weights[: i + 1]) + whole // 2) // whole for i in range(len(weights))]
    return [end - start for start, end in zip([0, *cuts], cuts, strict=False)]


def shard_sizes(skew: str, rows: int, world: int) -> list[int]:
    """Return rows of each rank.

    >>> shard_sizes("1:8", 100, 3), shard_sizes("empty", 100, 3)
    ([10, 80, 10], [0, 50, 50])
    """
    if skew == "even":
        weights = [1] * world
    elif skew == "empty":
        weights = [int(rank > 0) for rank in range(world)]
    else:
        pattern = [int(weight) for weight in skew.split(":")]
        weights = [pattern[rank % len(pattern)] for rank in range(world)]
    return shares(rows, weights)


def transfers(sizes: Sequence[int], keep: bool) -> list[list[int]]:
    """Return rows that each rank sends to each, all in all those that it has.

    Rank j gets shares in proportion to the size of the rank after it, so that who has much is not
    who gets much. Without `keep`, none are for itself, where there is anybody else.

    >>> transfers([4, 8], True), transfers([4, 8], False)
    ([[3, 1], [5, 3]], [[0, 4], [8, 0]])
    """
    world = len(sizes)
    rows = []
    for rank in range(world):
        weights = [sizes[(peer + 1) % world] for peer in range(world)]
        if not keep and world > 1:
            weights[rank] = 0
            if not any(weights):
                weights = [int(peer != rank) for peer in range(world)]
        rows.append(shares(sizes[rank], weights))
    return rows
