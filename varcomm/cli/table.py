"""Aligned columns of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["aligned", "line"]


def line(cells: Iterable[str], widths: Iterable[int]) -> str:
    """Join cells into one line; a negative width aligns its cell to the left."""
    sides = zip(cells, widths, strict=True)
    return "  ".join(
        c.ljust(-width) if width < 0 else c.rjust(width) for c, width in sides
    ).rstrip()


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return rows as lines of aligned columns, of which the first `left` ones align to the left.

    >>> aligned([["a", "b", "c"], ["long", "b", "300"]], left=2)
    ['a     b    c', 'long  b  300']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [line(row, [-w if i < left else w for i, w in enumerate(widths)]) for row in rows]
